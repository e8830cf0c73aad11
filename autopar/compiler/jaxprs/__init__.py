"""Read, compare and rewrite jaxprs; the one gate to what JAX does not promise."""
