"""The shell around the core: runs effects, owns tasks, calls no gRPC."""
