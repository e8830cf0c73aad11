"""Two processes of unequal speed: what planned shares of the microbatches gain over even ones, and what was promised.

    python -m benchmarks.unequal_processes --json unequal.json

One process of a Ray cluster has a core of its own, the other may use a part of the time of another core (`--quota`):
beside other work on that core its part would be larger the more threads it has. `autopar calibrate` measures both
places, at the same time, as they work; the two machines that it writes are the cluster, given to `autopar.init`. `Auto`
divides the microbatches of a step between the two (lanes), and its plan runs in turns with the same plan with even
shares: step by step, in one run.

The promise is the simulated time of even shares over that of the planned ones; passed is a run whose measured ratio,
the median of the pairs, is at least 0.9 of that. Needs Linux, two cores with little else to do, and control groups
that this user may write.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("RAY_worker_niceness", "0")

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import autopar
from autopar.errors import GenericFiguresWarning
from autopar.hardware.machine import Link
from benchmarks.places import Place, calibrated, control_group, seconds_in_turns, session_at

ROWS, LENGTH, WIDTH, DEPTH, MICROBATCHES = 48, 32, 512, 96, 12
BETWEEN = Link(latency_s=1e-3, bandwidth=5e8, ramp_bytes=0.0)
"""The link between two processes on one machine: an estimate. A step sends 2 MB, and computes for a second or two."""
ENOUGH = 0.9
"""Share of the gain that the figures promise which has to be there."""


def train_step(weight: Any, batch: Any) -> tuple[Any, jax.Array]:
    """One step of a perceptron whose layers share their weight."""

    def loss_fn(weight: Any) -> jax.Array:
        h = batch["x"]
        for _ in range(DEPTH):
            h = jnp.tanh(h @ weight)
        return jnp.mean((h - batch["y"]) ** 2)

    loss, gradient = jax.value_and_grad(loss_fn)(weight)
    return weight - 0.1 * gradient, loss


def arguments() -> tuple[Any, dict[str, Any]]:
    """The first weight, and a batch."""
    draw = np.random.default_rng(0)
    batch = {name: draw.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32) for name in "xy"}
    return jnp.asarray(draw.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5, jnp.float32), batch


def compare(quota: float, pairs: int, cores: tuple[int, int]) -> dict[str, Any]:
    """Return the shares, and the gain of planned over even ones as promised and as measured."""
    with tempfile.TemporaryDirectory(prefix="autopar-unequal-") as folder, control_group(quota) as group:
        places = {"whole": Place(core=cores[0]), "part": Place(core=cores[1], group=group)}
        machines = calibrated(places, Path(folder))
        with session_at(places, machines, BETWEEN):
            method = autopar.Auto(num_microbatches=MICROBATCHES, layers=1)
            planned = autopar.parallelize(train_step, method=method).trace(*arguments()).plan()
            plan = planned.plan
            if not plan.shares:
                raise RuntimeError(f"no lanes were planned, but {plan.choice()}")
            stages = tuple(replace(stage, microbatches=MICROBATCHES // 2) for stage in plan.stages)
            even = replace(plan, stages=stages, certificate=None)
            runs = {
                name: autopar.parallelize(train_step, method=each) for name, each in (("planned", plan), ("even", even))
            }
            promised = {name: run.trace(*arguments()).plan().simulate().step_time_s for name, run in runs.items()}
            seconds = seconds_in_turns(runs, arguments(), pairs)
    rates = [each.machine.peak_flops["float32"] for each in machines.values()]
    gains = [even_s / planned_s for even_s, planned_s in zip(seconds["even"], seconds["planned"], strict=True)]
    return {
        "shares": plan.shares,
        "rates": rates,
        "promised": promised["even"] / promised["planned"],
        "measured": statistics.median(gains),
        "simulated_s": promised,
        "measured_s": {name: statistics.median(each) for name, each in seconds.items()},
        "pairs": gains,
    }


def main() -> int:
    """Print what came of it; 1 if less than nine tenths of the promise was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quota", type=float, default=0.5, help="of a core for the slower process")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--cores", type=int, nargs=2, default=(0, 1), metavar=("FAST", "SLOW"))
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    warnings.simplefilter("ignore", GenericFiguresWarning)
    found = compare(options.quota, options.pairs, tuple(options.cores))
    share = found["measured"] / found["promised"]
    lanes = " + ".join(map(str, found["shares"]))
    Console().print(
        f"{found['rates'][0] / found['rates'][1]:.2f} times the rate; shares {lanes} of {MICROBATCHES}. Even ones take "
        f"{found['measured']:.3f} times as long, promised {found['promised']:.3f}: {share:.2f} of the promise.\n"
        f"simulated {found['simulated_s']}\nmeasured {found['measured_s']}",
        soft_wrap=True,
    )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(share < ENOUGH)


if __name__ == "__main__":
    sys.exit(main())
