"""What the connectors of every engine share."""
