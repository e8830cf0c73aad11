"""The intra-operator pass, module by module."""
