"""Generated messages and service stubs of the kv.v1 protocol."""
