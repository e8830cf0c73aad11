"""The bytes that a device holds at the worst moment of a local program, as XLA allocates it."""
