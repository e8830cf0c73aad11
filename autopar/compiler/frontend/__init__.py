"""Turn a step into its trace, with regions of `jax.checkpoint` and scans over layers ready to be cut."""
