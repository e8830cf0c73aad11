"""TODO solver."""
