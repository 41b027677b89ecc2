"""Engine connectors on top of kvclient."""
