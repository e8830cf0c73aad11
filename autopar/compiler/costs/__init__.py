"""What the work of a device and the collectives of a mesh cost, in seconds."""
