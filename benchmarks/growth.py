"""Call steps many times, at many shapes, and see that nothing grows that should not.

    python -m benchmarks.growth [--shapes 100] [--calls 10000] [--json FILE]

A pipeline of two stages is called in turn with batches of so many sizes, and compiled once for each. At ten points on
the way a row says what the process holds: live arrays, threads, open files, resident memory. After the last compilation
only memory may move, by what the allocator keeps. At the end the compiled steps are dropped, one and then all.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import autopar

ROWS = 10


@dataclass(frozen=True, kw_only=True)
class Held:
    """What the process holds after so many calls."""

    calls: int
    compiled: int
    arrays: int
    threads: int
    files: int
    resident_mb: float


def train_step(weights: Any, batch: Any) -> Any:
    """One step of two layers."""

    def loss_fn(weights: Any) -> jax.Array:
        h = batch
        for weight in weights:
            h = jnp.tanh(h @ weight)
        return jnp.mean(h**2)

    loss, gradients = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


def held(calls: int, step: autopar.Step) -> Held:
    """Return what the process holds now, after a collection."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(
        calls=calls,
        compiled=len(step.all_compiled()),
        arrays=len(jax.live_arrays()),
        threads=threading.active_count(),
        files=len(os.listdir("/proc/self/fd")),
        resident_mb=pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
    )


def grow(num_shapes: int, num_calls: int) -> tuple[autopar.Step, list[Held]]:
    """Call a pipeline with batches of so many sizes in turn; the step, and what was held on the way."""
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
    step = autopar.parallelize(train_step, method=method, devices=jax.devices()[:2], donate_argnums=0)
    weights: Any = [jnp.eye(4), jnp.eye(4)]
    rows: list[Held] = []
    points = {num_shapes + (num_calls - num_shapes) * n // (ROWS - 1) for n in range(ROWS)}
    for number in range(num_calls):
        weights, _ = step(weights, jnp.ones((2 * (number % num_shapes + 1), 4)))
        if number + 1 in points:
            jax.block_until_ready(weights)
            rows.append(held(number + 1, step))
    return step, rows


def main(argv: Sequence[str] | None = None) -> None:
    """Print the rows; the exit status is 1 if arrays, threads, files or compiled steps grew."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", type=int, default=100)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    begin = time.monotonic()
    step, rows = grow(options.shapes, options.calls)
    step.clear_cache(step.all_compiled()[0])
    rows.append(held(options.calls, step))
    step.clear_cache()
    rows.append(held(options.calls, step))
    for row in rows:
        print(row, flush=True)
    print(f"{time.monotonic() - begin:.0f} s")
    if options.json:
        report = {"jax": jax.__version__, "shapes": options.shapes, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if len({(row.compiled, row.arrays, row.threads, row.files) for row in rows[:-2]}) > 1:
        raise SystemExit(1)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    main()
