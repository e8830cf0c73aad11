"""Call steps many times, at many shapes, and train long with restarts: nothing grows that should not.

    python -m benchmarks.growth [--shapes 100] [--calls 10000] [--json FILE]

A pipeline of two stages is called in turn with batches of so many sizes, and compiled once for each. At ten points on
the way a row says what the process holds: live arrays, threads, open files, resident memory. After the last compilation
only memory may move, by what the allocator keeps. At the end the compiled steps are dropped, one and then all.

Then as many steps are trained by two threads that share a pipeline, half each, with loaders that fail now and then. One
trains by `autopar.fit`, and starts again from its last checkpoint when its loader failed, and after every tenth; the
other calls the step. Both states must be those of a plain `jax.jit` of all steps, up to rounding in 64 bits.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar

ROWS = 10
TOLERANCE = 1e-9
"""For sums in another order, of steps in 64 bits that run towards a minimum."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """The objects and the memory that the process holds after so many calls."""

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


class StorageDown(Exception):
    """The error that a loader raises now and then."""


class Loader:
    """Batches by the number of their step; reading one fails for a while, once in about so many."""

    def __init__(self, seed: int, fails_every: int) -> None:
        self._seed = seed
        self._rng = np.random.default_rng(seed)
        self._fails_every = fails_every
        self.failures = 0

    def batch(self, number: int) -> np.ndarray[Any, Any]:
        """The batch of a step."""
        return np.random.default_rng((self._seed, number)).normal(size=(4, 4))

    def __call__(self, number: int) -> np.ndarray[Any, Any]:
        """The same. Raises `StorageDown`."""
        if self._rng.integers(self._fails_every) == 0:
            self.failures += 1
            raise StorageDown("the storage does not answer")
        return self.batch(number)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The outcome of trainings: restarts, the largest difference from plain `jax.jit`, and what was held on the way."""

    steps: int
    restarts: int
    difference: float
    rows: list[Held]


def train(num_steps: int) -> Trained:
    """Train in two threads that share a pipeline: one starts again and again, the other one calls the step alone."""
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
    step = autopar.parallelize(train_step, method=method, devices=jax.devices()[:2])
    each = num_steps // 2
    points = [each * n // ROWS for n in range(1, ROWS + 1)]
    loaders = [Loader(seed, max(each // ROWS, 1)) for seed in range(2)]
    both, starts, rows = threading.Barrier(2), list[int](), list[Held]()

    def restarting(folder: str) -> Any:
        for point in points:
            state = None
            while state is None:
                starts.append(point)
                options = {"checkpoint_dir": folder, "checkpoint_every": max(each // (2 * ROWS), 1)}
                with suppress(StorageDown):
                    state, _ = autopar.fit(step, first_weights(), loaders[0], num_steps=point, **options)
            both.wait()
            rows.append(held(2 * point, step))
            both.wait()
        return state

    def calling() -> Any:
        state, number = first_weights(), 0
        for point in points:
            while number < point:
                with suppress(StorageDown):
                    state, _ = step(state, loaders[1](number))
                    number += 1
            both.wait()
            both.wait()
        return state

    def guarded(work: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return work(*arguments)
        except BaseException:
            both.abort()  # or the other one would wait for ever
            raise

    with ThreadPoolExecutor(2) as pool, tempfile.TemporaryDirectory() as folder:
        running = [pool.submit(guarded, restarting, folder), pool.submit(guarded, calling)]
        states = [each.result() for each in running]
    plain, differences = jax.jit(train_step), list[float]()
    for loader, state in zip(loaders, states, strict=True):
        expected: Any = first_weights()
        for number in range(each):
            expected, _ = plain(expected, loader.batch(number))
        differences += [float(np.abs(np.asarray(a) - b).max()) for a, b in zip(state, expected, strict=True)]
    return Trained(steps=num_steps, restarts=len(starts) - 1, difference=max(differences), rows=rows)


def first_weights() -> list[np.ndarray[Any, Any]]:
    """The same at every start."""
    return [np.random.default_rng(n).normal(size=(4, 4)) for n in range(2)]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the rows; the exit status is 1 if something grew, or a state is not that of `jax.jit`."""
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
    trained = train(options.calls)
    for row in trained.rows:
        print(row, flush=True)
    print(f"{trained.steps} steps, {trained.restarts} restarts, {trained.difference:.1e} from jax.jit at most")
    print(f"{time.monotonic() - begin:.0f} s")
    if options.json:
        report = {"jax": jax.__version__, "shapes": options.shapes, "rows": [asdict(row) for row in rows]}
        report["trained"] = asdict(trained)
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if not (is_flat(rows[:-2]) and is_flat(trained.rows) and trained.difference < TOLERANCE):
        raise SystemExit(1)


def is_flat(rows: Sequence[Held]) -> bool:
    """Return True if the second half of the rows holds no more than the first of anything but memory."""
    held_by_row = [(row.compiled, row.arrays, row.threads, row.files) for row in rows]
    early, late = held_by_row[: len(rows) // 2], held_by_row[len(rows) // 2 :]
    return all(max(after) <= max(before) for before, after in zip(zip(*early), zip(*late)))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_enable_x64", True)
    main()
