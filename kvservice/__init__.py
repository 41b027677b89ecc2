"""The kvservice daemon: owns, moves and tiers KV-cache blocks."""
