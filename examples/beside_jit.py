"""Train by `jax.jit` and by autopar, side by side: every example here ends with it."""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

if "XLA_FLAGS" not in os.environ:  # This only adds devices to the CPU; accelerators are used where there are any.
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import autopar

Transform = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Transforms a train step: `jax.jit` or its like, or `autopar.parallelize`."""


def compare(
    train: Callable[[Transform, int], list[float]], jit: Transform, *, steps: int, argv: Sequence[str] | None = None
) -> float:
    """Train twice from the same start and print the losses; return their largest difference, as a share of the loss.

    `train(transform, steps)` makes its state anew, transforms its step and returns the loss of every step.
    """
    parser = argparse.ArgumentParser(description="Train by jax.jit and by autopar, and print both losses.")
    parser.add_argument("--steps", type=int, default=steps)
    steps = parser.parse_args(argv).steps
    plain = train(jit, steps)
    start = time.perf_counter()
    planned = train(autopar.parallelize, steps)
    seconds = time.perf_counter() - start
    print(f"{'step':>4}  {'jit':>10}  {'autopar':>10}")
    for number in sorted({0, steps // 2, steps - 1}):
        print(f"{number:>4}  {plain[number]:>10.5f}  {planned[number]:>10.5f}")
    largest = max(abs(a - b) / abs(a) for a, b in zip(plain, planned, strict=True))
    print(f"largest difference of a loss: {largest:.1e} of it; planned, compiled and trained in {seconds:.0f} s")
    return largest
