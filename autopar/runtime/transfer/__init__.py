"""Move values between meshes: which tiles, and by which channel."""
