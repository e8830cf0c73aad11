"""TODO microbatch."""
