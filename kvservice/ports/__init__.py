"""Interfaces between the pure core and the world, with their value types."""
