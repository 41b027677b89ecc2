"""Pure state of the service: no I/O, no clock, no thread; standard library and numpy."""
