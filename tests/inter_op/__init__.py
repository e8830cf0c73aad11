"""The inter-operator pass, module by module."""
