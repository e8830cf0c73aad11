"""Two processes with a slow link between them: what more microbatches in flight bring back of what the link costs.

    python -m benchmarks.slow_link --json slow_link.json

Each process of a Ray cluster has a core of its own, measured by `autopar calibrate`. Values that one sends to the other
arrive `--delay` seconds after they were made and sent; later ones do not wait for earlier ones, as over a long line.
`Auto(kinds=("pipeline",))` is told of that link and chooses how far the first stage runs ahead. Its plan takes steps
in turns with the same plan by 1F1B, with the delay and without:

    recovered = (1F1B - chosen, with the delay) / (1F1B with the delay - 1F1B without)

Passed is a run in which the median over the rounds is at least 0.8. Needs Linux and two cores with little else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
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
from autopar import session
from autopar.errors import GenericFiguresWarning
from autopar.hardware.machine import Link
from benchmarks.places import Place, calibrated, seconds_in_turns, session_at

ROWS, LENGTH, WIDTH, DEPTH, MICROBATCHES = 32, 32, 512, 64, 16
BANDWIDTH = 5e8
"""Bytes per second of two processes on one machine: an estimate. A microbatch sends 0.1 MB."""
ENOUGH = 0.8
"""Share of what the link costs a step by 1F1B that has to be won back."""


def train_step(weights: Any, batch: Any) -> tuple[Any, jax.Array]:
    """One step of a perceptron."""

    def loss_fn(weights: Any) -> jax.Array:
        h = batch["x"]
        for weight in weights:
            h = jnp.tanh(h @ weight)
        return jnp.mean((h - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, weights, gradients), loss


def arguments() -> tuple[Any, dict[str, Any]]:
    """The first weights, and a batch."""
    draw = np.random.default_rng(0)
    batch = {name: draw.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32) for name in "xy"}
    weights = [jnp.asarray(draw.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5, jnp.float32) for _ in range(DEPTH)]
    return weights, batch


def send_late(host: Any, delay_s: float) -> None:
    """Let all that this process sends set off so much later; runs in a process of the cluster."""
    from autopar.runtime.transfer.jax_transfer import TransferServer

    server: Any = TransferServer
    server.delay_s = delay_s
    if hasattr(server, "poster_at_once"):
        return
    server.poster_at_once = server.poster

    def poster(self: Any, process: int, parcels: Sequence[Any]) -> Callable[[int, Sequence[Any]], None]:
        post = server.poster_at_once(self, process, parcels)

        def later(tag: int, arrays: Sequence[Any]) -> None:
            jax.block_until_ready(arrays)
            time.sleep(server.delay_s)
            post(tag, arrays)

        return lambda tag, arrays: threading.Thread(target=later, args=(tag, arrays)).start()

    server.poster = poster


def compare(delay_s: float, rounds: int, cores: tuple[int, int]) -> dict[str, Any]:
    """Return the chosen schedule, the seconds of all three, and what is recovered."""
    link = Link(latency_s=delay_s, bandwidth=BANDWIDTH, ramp_bytes=0.0)
    places = {"first": Place(core=cores[0]), "second": Place(core=cores[1])}
    delays_s = {"chosen": delay_s, "1f1b": delay_s, "1f1b, no delay": 0.0}
    with tempfile.TemporaryDirectory(prefix="autopar-slow-link-") as folder:
        machines = calibrated(places, Path(folder))
        with session_at(places, machines, link):
            everywhere = session.ray_session().run_everywhere
            everywhere(send_late, 0.0)
            method = autopar.Auto(num_microbatches=MICROBATCHES, kinds=("pipeline",))
            plan = autopar.parallelize(train_step, method=method).trace(*arguments()).plan().plan
            if plan.num_stages != 2:
                raise RuntimeError(f"two stages were expected, and {plan.choice()} was planned")
            usual = replace(plan, schedule="1f1b", certificate=None)
            runs = {
                name: autopar.parallelize(train_step, method=usual if "1f1b" in name else plan) for name in delays_s
            }
            simulated = {name: run.trace(*arguments()).plan().simulate().step_time_s for name, run in runs.items()}
            seconds = seconds_in_turns(runs, arguments(), rounds, lambda name: everywhere(send_late, delays_s[name]))
    each = zip(seconds["chosen"], seconds["1f1b"], seconds["1f1b, no delay"], strict=True)
    recovered = [(slow_s - chosen_s) / (slow_s - fast_s) for chosen_s, slow_s, fast_s in each]
    return {
        "schedule": plan.schedule,
        "delay_s": delay_s,
        "simulated_s": {name: simulated[name] for name in ("chosen", "1f1b")},
        "measured_s": {name: statistics.median(times) for name, times in seconds.items()},
        "recovered": statistics.median(recovered),
        "rounds": recovered,
    }


def main() -> int:
    """Print what came of it; 1 if less than four fifths were recovered."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds; a microbatch takes about as long")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--cores", type=int, nargs=2, default=(0, 1), metavar=("FIRST", "SECOND"))
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    warnings.simplefilter("ignore", GenericFiguresWarning)
    found = compare(options.delay, options.rounds, tuple(options.cores))
    times = ", ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in found["measured_s"].items())
    Console().print(
        f"{found['schedule']} was chosen. Milliseconds of a step: {times}; simulated "
        f"{', '.join(f'{name} {1e3 * seconds:.0f}' for name, seconds in found['simulated_s'].items())}. "
        f"{100 * found['recovered']:.0f} % of what the link costs is recovered.",
        soft_wrap=True,
    )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(found["recovered"] < ENOUGH)


if __name__ == "__main__":
    sys.exit(main())
