"""One file per wire; none imports another."""
