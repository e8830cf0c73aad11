"""TODO costs."""
