"""KV-cache transfer and tiering service."""

__version__ = "0.1.0"
