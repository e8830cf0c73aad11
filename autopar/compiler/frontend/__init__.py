"""TODO frontend."""
