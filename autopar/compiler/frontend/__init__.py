"""From a step to its trace, with regions of `jax.checkpoint` and scans over layers ready to be cut."""
