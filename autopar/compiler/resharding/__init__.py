"""TODO resharding."""
