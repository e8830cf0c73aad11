"""Minimise a sum of costs of nodes and edges under linear limits; knows nothing of JAX."""
