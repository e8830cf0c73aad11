"""From a step over the full batch to a step over microbatches with equal results."""
