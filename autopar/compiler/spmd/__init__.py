"""The work of one device: the local program of a plan, its collectives, and the `shard_map` that runs it."""
