"""Namespace of the protocol's versions."""
