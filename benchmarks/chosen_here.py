"""Run the plan that `Auto()` chooses for eight virtual devices of this CPU beside plans that are simpler.

    python -m benchmarks.chosen_here --json chosen_here.json
    python -m benchmarks.chosen_here --models gpt vit --rounds 30

Of every model one stage, data parallelism and two stages take steps in turn with what is chosen, in one process; who
begins a round changes from one to the next. A ratio is the median over rounds of the time of the chosen plan over that
of the fastest other; it should be 1.1 at most. A plan that is the chosen one is not run twice: its ratio is 1. What is
tested is the model of the runtime's own time, of calls, threads and copies: no plan is made for devices such as these.

On a machine that is busy with other work, plans with more threads get more of its cores. CPU milliseconds of a step, of
all threads together, do not depend on that, and stand beside: they are what a step takes where all cores are its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
# With as many threads as devices, collectives of different groups at once wait for a device that has no thread left.
os.environ.setdefault("PJRT_NPROC", "32")

import jax
from rich.console import Console
from rich.table import Table

import autopar
from autopar.errors import AutoparError
from autopar.methods import Method
from benchmarks.models import MODELS
from benchmarks.models.model import Model
from benchmarks.overhead import describe_machine, median_interval
from benchmarks.planned_case import summary

NUM_DEVICES = 8
ALLOWED = 1.1
CHOSEN = "Auto()"
METHODS: Mapping[str, Method] = {
    CHOSEN: autopar.Auto(),
    "one stage": autopar.Auto(num_stages=1),
    "data parallel": autopar.DataParallel(),
    "two stages": autopar.Auto(num_stages=2),
}
_SETTLING = 2
"""Rounds before those that count."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model: milliseconds of a step by method, median of all rounds, and the same as the simulator has it."""

    model: str
    plan: str
    measured_ms: Mapping[str, float]
    cpu_ms: Mapping[str, float]
    """The same of CPU time, of all threads."""
    simulated_ms: Mapping[str, float]
    refused: Mapping[str, str]
    best: str
    """The fastest of the others; it may be the same plan."""
    ratio: float
    interval: tuple[float, float]
    """95 % of the median of ratios."""
    cpu_ratio: float
    """Ratio of CPU time, medians of the chosen plan and of the other that takes least."""


def main(argv: Sequence[str] | None = None) -> None:
    """Plan and run; exits with 1 where the chosen plan is behind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS), metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every row")
    args = parser.parse_args(argv)
    rows: list[Row] = []
    for name in args.models:
        rows.append(measured(MODELS[name](), args.rounds))
        print(line(rows[-1]), flush=True)
        jax.clear_caches()
        if args.json is not None:
            data = {"machine": describe_machine(), "rounds": args.rounds, "rows": [asdict(row) for row in rows]}
            args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    Console(width=150).print(table_of(rows))
    behind = [row for row in rows if row.ratio > ALLOWED]
    if behind:
        worst = max(behind, key=lambda row: row.ratio)
        sys.exit(
            f"Behind in {len(behind)} of {len(rows)} models: {worst.model} takes {worst.ratio:.2f} of {worst.best}."
        )


def measured(model: Model, rounds: int) -> Row:
    """Plan by every method, and take steps in turn."""
    plans: dict[str, autopar.Planned] = {}
    refused: dict[str, str] = {}
    steps: dict[str, Any] = {}
    for name, method in METHODS.items():
        step = autopar.parallelize(model.step, method=method, donate_argnums=(0,), devices=jax.devices()[:NUM_DEVICES])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                plans[name] = step.trace(model.abstract_state, model.abstract_batch).plan()
        except AutoparError as error:
            refused[name] = f"{type(error).__name__}: {error}"
        else:
            steps[name] = step
    same = {name: _is_same(plans[name].plan, plans[CHOSEN].plan) for name in plans}
    run = {name: step for name, step in steps.items() if name == CHOSEN or not same[name]}
    seconds, cpu_seconds = in_turn(model, run, rounds)
    medians, cpu_ms = (
        {name: 1e3 * statistics.median(each[name if name in run else CHOSEN]) for name in plans}
        for each in (seconds, cpu_seconds)
    )
    best = min(medians.keys() - {CHOSEN}, key=medians.__getitem__, default="")
    ratio, interval = 1.0, (1.0, 1.0)
    if best in run:
        ratios = [chosen / other for chosen, other in zip(seconds[CHOSEN], seconds[best], strict=True)]
        ratio, interval = median_interval(ratios)
    return Row(
        model=model.name,
        plan=summary(plans[CHOSEN].plan),
        measured_ms=medians,
        cpu_ms=cpu_ms,
        simulated_ms={name: 1e3 * planned.simulate().step_time_s for name, planned in plans.items()},
        refused=refused,
        best=best,
        ratio=ratio,
        interval=interval,
        cpu_ratio=cpu_ms[CHOSEN] / min((cpu_ms[name] for name in plans if name != CHOSEN), default=cpu_ms[CHOSEN]),
    )


def in_turn(model: Model, steps: Mapping[str, Any], rounds: int) -> tuple[dict[str, list[float]], ...]:
    """Seconds of each step of each, until its new state is ready, and its CPU seconds."""
    batch = model.create_batch()
    states = {name: model.create_state() for name in steps}
    seconds, cpu_seconds = ({name: list[float]() for name in steps} for _ in range(2))
    names = list(steps)
    for number in range(_SETTLING + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            began_s, cpu_began_s = time.perf_counter(), time.process_time()
            states[name], metrics = steps[name](states[name], batch)
            jax.block_until_ready((states[name], metrics))
            if number >= _SETTLING:
                seconds[name].append(time.perf_counter() - began_s)
                cpu_seconds[name].append(time.process_time() - cpu_began_s)
    return seconds, cpu_seconds


def line(row: Row) -> str:
    """Return a row as one line of text."""
    low, high = row.interval
    times = ", ".join(f"{name} {cell}" for name, cell in _cells(row).items())
    ratios = f"{row.ratio:.3f} [{low:.3f}, {high:.3f}] of {row.best}, CPU {row.cpu_ratio:.3f}"
    return f"{row.model:16} {ratios}; {row.plan}; ms: {times}"


def table_of(rows: Sequence[Row]) -> Table:
    """Return the rows as a table."""
    table = Table(
        *("model", "chosen", "ms", "others, ms", "of the best", "95 %", "CPU"),
        title="Steps here, ms; in brackets CPU time, and as simulated",
    )
    for row in rows:
        cells = _cells(row)
        others = ", ".join(f"{name} {cell}" for name, cell in cells.items() if name != CHOSEN)
        low, high = row.interval
        table.add_row(
            row.model,
            row.plan,
            cells[CHOSEN],
            others,
            f"{row.ratio:.3f}",
            f"{low:.3f} - {high:.3f}",
            f"{row.cpu_ratio:.3f}",
        )
    return table


def _cells(row: Row) -> dict[str, str]:
    return {
        name: f"{ms:.1f} ({row.cpu_ms[name]:.1f}, {row.simulated_ms[name]:.1f})" for name, ms in row.measured_ms.items()
    }


def _is_same(one: autopar.Plan, other: autopar.Plan) -> bool:
    """True if the same is done: they may have been found by different methods."""
    return _decisions(one) == _decisions(other)


def _decisions(plan: autopar.Plan) -> tuple[object, ...]:
    whole = (plan.stages, plan.cuts, plan.num_microbatches, plan.schedule, dict(plan.input_specs))
    meshes = [(mesh.devices, mesh.shape, mesh.sharding and dict(mesh.sharding.layouts)) for mesh in plan.meshes]
    one_mesh = plan.sharding and (dict(plan.sharding.layouts), plan.sharding.recomputed_layers)
    return (*whole, meshes, one_mesh)


if __name__ == "__main__":
    main()
