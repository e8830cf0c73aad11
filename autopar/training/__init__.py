"""The loop around a step: states, batches and checkpoints where the step wants them."""
