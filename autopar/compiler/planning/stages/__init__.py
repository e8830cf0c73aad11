"""Make stages of layers: cost ranges of them on submeshes, and choose the layouts of every stage as a whole."""
