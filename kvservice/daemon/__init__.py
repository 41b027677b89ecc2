"""Builds the daemon from parts: configuration, wiring, start and stop."""
