"""What differs in substance between the two flavours: sockets, locks, threads."""
