"""The costs of a device's work and of a mesh's collectives, in seconds."""
