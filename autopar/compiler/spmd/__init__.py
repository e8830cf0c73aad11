"""TODO spmd."""
