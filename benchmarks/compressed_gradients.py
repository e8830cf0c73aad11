"""Train a GPT with its gradients sent in fewer bits: how far its losses go from those without, and the bytes of it.

    python -m benchmarks.compressed_gradients --steps 200 --json compressed_gradients.json

A text of a random Markov chain, a new batch in every step, AdamW; data parallel, planned for eight V100s with slow
links between them, run on eight virtual CPU devices. Bytes are those that a device sends in a step, as planned, and as
compiled for CPUs, where XLA adds up bfloat16 in float32. Fails if a loss is off by more than 1e-3 of itself, or if what
is compiled sends other bytes than were planned.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import autopar
from autopar.hardware.collectives import wire_bytes
from autopar.hardware.machine import Link, Machine
from benchmarks.models.gpt import gpt
from benchmarks.models.model import Model, train_step

DTYPES = ("float32", "bfloat16", "float8_e4m3fn")
"""The first is that of the gradients."""
MOST = 1e-3
"""The share of itself by which a loss may be off."""
_SMALL = gpt(layers=2, width=128, heads=4, vocabulary=256, length=32, batch=32)
_SLOW = Link(latency_s=1e-6, bandwidth=1e9, ramp_bytes=0.0)
_HOST = replace(Machine.named("p3.16xlarge"), devices_per_host=1, domain=1, inter=_SLOW)
_METHOD = autopar.Megatron(data=8)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The figures of a type of gradients; bytes are those of one device and step."""

    dtype: str
    losses: tuple[float, ...]
    planned_bytes: float
    compiled_bytes: float
    as_planned: bool


def texts(model: Model, steps: int, seed: int = 0) -> Iterable[dict[str, jax.Array]]:
    """Yield a batch for every step, of a chain in which a few tokens are likely behind each."""
    rng = np.random.default_rng(seed)
    rows, length = model.batch["tokens"].shape
    behind = np.cumsum(rng.dirichlet(np.full(model.batch["tokens"].limit, 0.05), model.batch["tokens"].limit), axis=1)
    for _ in range(steps):
        text = np.zeros((rows, length + 1), np.int32)
        text[:, 0] = rng.integers(0, len(behind), rows)
        for place in range(length):
            above = rng.random(rows)[:, None] > behind[text[:, place]]
            text[:, place + 1] = np.minimum(above.sum(1), len(behind) - 1)
        yield {"tokens": jnp.asarray(text[:, :-1]), "targets": jnp.asarray(text[:, 1:])}


def trained(model: Model, dtype: str, steps: int) -> Row:
    """Return the losses of a model whose gradients are sent in a type, and their bytes."""
    step = train_step(
        model, mark_gradients=lambda grads: grads if dtype == DTYPES[0] else autopar.compress_gradients(grads, dtype)
    )
    state = model.create_state()
    cluster = autopar.Cluster(num_devices=8, machine=_HOST)
    found = autopar.parallelize(step, method=_METHOD, cluster=cluster).trace(state, model.create_batch()).plan()
    run, losses = found.lower().compile(), list[float]()
    for batch in texts(model, steps):
        state, metrics = run(state, batch)
        losses.append(float(metrics["loss"]))
    check = found.verify().collectives
    return Row(
        dtype=dtype,
        losses=tuple(losses),
        planned_bytes=sum(c.times * wire_bytes(c.kind, c.group_size, c.nbytes) for c in found.plan.planned_collectives),
        compiled_bytes=sum(wire_bytes(k.kind, k.group_size, k.compiled_bytes) for k in check.kinds),
        as_planned=bool(check),
    )


def off(row: Row, exact: Row) -> float:
    """Return the largest difference of a loss from the exact one, relative to it."""
    return max(abs(mine - other) / other for mine, other in zip(row.losses, exact.losses, strict=True))


def table_of(rows: Sequence[Row], model: Model) -> Table:
    """Return a line for each type."""
    first, last = rows[0].losses[0], rows[0].losses[-1]
    title = f"{model.num_parameters} parameters, {len(rows[0].losses)} steps, loss {first:.4g} to {last:.4g}"
    table = Table("gradients", "planned MB", "share", "compiled MB", "largest difference of a loss", title=title)
    for row in rows:
        share = row.planned_bytes / rows[0].planned_bytes
        megabytes = f"{row.planned_bytes / 1e6:.4f}", f"{share:.3f}", f"{row.compiled_bytes / 1e6:.4f}"
        table.add_row(row.dtype, *megabytes, f"{off(row, rows[0]):.1e}")
    return table


def holds(rows: Sequence[Row]) -> Mapping[str, bool]:
    """Return for each type whether its losses are near enough, and its bytes the planned ones."""
    return {row.dtype: off(row, rows[0]) <= MOST and row.as_planned for row in rows}


def main() -> None:
    """Train with every type, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    rows = [trained(_SMALL, dtype, options.steps) for dtype in DTYPES]
    Console(width=120).print(table_of(rows, _SMALL))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    if not all(holds(rows).values()):
        raise SystemExit(f"Not within {MOST}, or not as planned: {holds(rows)}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
