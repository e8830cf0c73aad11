"""Questions about a plan: why, how long, and whether a compiler made what was planned."""
