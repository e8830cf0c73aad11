"""TODO memory."""
