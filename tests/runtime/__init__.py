"""The runtime, module by module."""
