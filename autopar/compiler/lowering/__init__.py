"""TODO lowering."""
