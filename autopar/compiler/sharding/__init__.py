"""TODO sharding."""
