"""TODO transfer."""
