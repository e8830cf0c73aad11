"""TODO ir."""
