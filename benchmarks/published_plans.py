"""Hold `Auto()` against plans that were published: in the same simulator it must never be behind.

    python -m benchmarks.published_plans --json published_plans.json
    python -m benchmarks.published_plans --rows "GPT-22B" "GPT-175B"
    python -m benchmarks.published_plans --measurements measured_steps.csv --rows alpa-e2e

Every step is planned by the degrees or by the layouts that its source gives, and by `Auto()`, for the same devices;
both are simulated. A ratio is the time by hand over that of `Auto()`, at least 1 where it is not behind. A file of
measured steps of JAX programs (`accuracy_steps`) has plans as well: its rows come instead. A plan by hand that does not
fit into the memory of the devices is no plan; where none fits, there is no ratio. `Auto()` leaves a tenth of the memory
free: where the plan by hand does not, the search may use as much as it does, which the note says. It fails where a
ratio is below 0.999.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rich.console import Console
from rich.table import Table

import autopar
from autopar.errors import AutoparError
from autopar.hardware.machine import Machine
from autopar.method_fields import MEMORY_LEVELS
from autopar.methods import Method
from benchmarks.accuracy_cases import Unusable
from benchmarks.accuracy_rows import read_measurements
from benchmarks.accuracy_steps import method_of, step_case_of, workload_of
from benchmarks.planned_case import summary
from benchmarks.published_degrees import Published, published

ALLOWED = 0.999


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A plan in words, its seconds and the bytes of the fullest device; without seconds, why there are none."""

    plan: str
    step_s: float | None
    peak_bytes: int
    cpu_s: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published plan beside the one that is searched; `ratio` is None where none by hand fits."""

    name: str
    source: str
    note: str
    devices: str
    hand: Simulated
    searched: Simulated
    ratio: float | None


def main(argv: Sequence[str] | None = None) -> None:
    """Plan and simulate; exits with 1 where `Auto()` is behind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", nargs="+", default=[""], metavar="NAME", help="those whose names begin so")
    parser.add_argument("--full", action="store_true", help="as many replicas as were published")
    parser.add_argument("--measurements", type=Path, metavar="FILE", help="plan the rows of this file instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every row")
    parser.add_argument("--list", action="store_true", help="say what there is, and plan nothing")
    args = parser.parse_args(argv)
    everything = published(full=args.full) if args.measurements is None else recorded(args.measurements)
    chosen = [each for each in everything if each.name.startswith(tuple(args.rows))]
    if args.list:
        print("\n".join(f"{each.name}: {each.source}" for each in chosen))
        return
    rows: list[Row] = []
    for each in chosen:
        rows.append(compared(each))
        print(line(rows[-1]), flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    Console(width=170).print(table_of(rows))
    ratios = [row.ratio for row in rows if row.ratio is not None]
    print(f"{len(ratios)} of {len(rows)} fit by hand; geometric mean {mean_of(ratios):.3f}")
    behind = [ratio for ratio in ratios if ratio < ALLOWED]
    if behind:
        sys.exit(f"Auto() is behind in {len(behind)} of {len(ratios)} rows: {min(behind):.3f} at worst.")


def recorded(path: Path) -> Iterator[Published]:
    """Yield the rows of a file of measured steps that say their plan, on several devices; equal plans once."""
    seen = set[object]()
    for row in read_measurements(path).rows:
        try:
            case = step_case_of(row)
        except Unusable:
            continue
        key = (case.model, case.layout, case.machine.name)
        if case.devices == 1 or key in seen:
            continue
        seen.add(key)
        yield Published(
            name=row["id"],
            source=row["url"],
            workload=partial(workload_of, case.model),
            machine=case.machine.name,
            devices=case.devices,
            methods=(method_of(workload_of(case.model), case.layout),),
            note="layouts searched" if case.layout.searched else "",
        )


def compared(each: Published) -> Row:
    """Plan one by hand and by the search, and simulate."""
    workload, cluster = each.workload(), each.cluster
    step = autopar.parallelize(workload.step, donate_argnums=(0,), cluster=cluster)
    traced = step.trace(workload.abstract_state, workload.abstract_batch)
    hands = [simulated(traced, cluster, method) for method in each.methods]
    fastest = min(hands, key=lambda hand: math.inf if hand.step_s is None else hand.step_s)
    memory = memory_beside(fastest, cluster.machine)
    searched = simulated(traced, cluster, autopar.Auto(batch_statistics=workload.batch_statistics, memory=memory))
    ratio = None
    if fastest.step_s is not None:
        ratio = 0.0 if searched.step_s is None else fastest.step_s / searched.step_s
    return Row(
        name=each.name,
        source=each.source,
        note="; ".join(filter(None, [each.note, "" if isinstance(memory, str) else "as much memory as by hand"])),
        devices=f"{each.devices} of {each.machine}",
        hand=fastest,
        searched=searched,
        ratio=ratio,
    )


def memory_beside(hand: Simulated, machine: Machine) -> str | int:
    """Return what `Auto` may use beside a plan by hand: what it leaves itself by default, or as much as that plan."""
    usual = "adaptive"
    is_enough = hand.step_s is None or hand.peak_bytes <= MEMORY_LEVELS[usual] * machine.memory_bytes
    return usual if is_enough else hand.peak_bytes


def simulated(traced: autopar.Traced, cluster: autopar.Cluster, method: Method) -> Simulated:
    """One plan; what is refused or does not fit has no seconds."""
    began_s = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            planned = traced.plan(method)
            report = planned.simulate(cluster)
    except AutoparError as error:
        return Simulated(
            plan=f"{type(error).__name__}: {error}",
            step_s=None,
            peak_bytes=0,
            cpu_s=time.process_time() - began_s,
        )
    words = summary(planned.plan)
    return Simulated(
        plan=words if report.fits else f"does not fit: {words}",
        step_s=report.step_time_s if report.fits else None,
        peak_bytes=report.peak_bytes,
        cpu_s=time.process_time() - began_s,
    )


def mean_of(ratios: Sequence[float]) -> float:
    """Return the geometric mean; not a number for none, 0 where a ratio is."""
    if not ratios:
        return math.nan
    return math.prod(ratio ** (1 / len(ratios)) for ratio in ratios)


def line(row: Row) -> str:
    """Return a row as one line of text."""
    ratio = "no ratio" if row.ratio is None else f"{row.ratio:.4f}"
    return (
        f"{row.name}, {row.devices}: {ratio}; by hand {_seconds(row.hand)} ({row.hand.plan}), searched "
        f"{_seconds(row.searched)} ({row.searched.plan}) in {row.searched.cpu_s:.1f} CPU s"
    )


def table_of(rows: Sequence[Row]) -> Table:
    """Return the rows as a table."""
    table = Table("step", "source", "devices", "by hand", "searched", "ratio", "by hand", "searched", "CPU s", "note")
    for row in rows:
        table.add_row(
            row.name,
            row.source,
            row.devices,
            _seconds(row.hand),
            _seconds(row.searched),
            "-" if row.ratio is None else f"{row.ratio:.3f}",
            row.hand.plan,
            row.searched.plan,
            f"{row.searched.cpu_s:.0f}",
            row.note,
        )
    return table


def _seconds(found: Simulated) -> str:
    return "-" if found.step_s is None else f"{found.step_s:.4g} s, {found.peak_bytes / 2**30:.1f} GiB"


if __name__ == "__main__":
    main()
