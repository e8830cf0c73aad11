"""Turn a step over the full batch into a step over microbatches with equal results."""
