"""The hardware as values: machines with their figures, clusters of them, and how figures are measured."""
