"""Plan a model with more and more of one thing: more of it must make no plan slower.

    python -m benchmarks.freedom --models mlp gpt --machine dgx-h100 --json freedom.json
    python -m benchmarks.freedom --models convnet --what memory links

A ladder is a row of plans, each of which may use all that those before it may: more devices of a host, more memory of
each device, faster links between them, more effort, more kinds of parallelism. A plan that is simulated to take more
than 1.001 of one before it breaks the promise of its ladder: what was found with less was still there, and the search
did not find it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rich.console import Console
from rich.table import Table

import autopar
from autopar.aot import Traced
from autopar.compiler.memory.estimate import bytes_with_headroom
from autopar.errors import AutoparError
from autopar.hardware.machine import Link, Machine
from autopar.methods import Method
from benchmarks.models import MODELS

ALLOWED = 1.001
SHARES = (0.3, 0.4, 0.5, 0.65, 0.8, 1.0)
"""Memory limits, of the bytes that `Auto()` takes where it may take all."""
TIMES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Speeds of links beside the machine's."""
KINDS = ("data", "zero", "tensor", "pipeline")


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A plan of a ladder: a cluster and a method, by the name of what there is more of."""

    name: str
    cluster: autopar.Cluster
    method: Method


@dataclass(frozen=True, kw_only=True)
class Row:
    """A rung, planned: milliseconds of a step, or why there is none; `ratio` is to the best rung before it."""

    model: str
    what: str
    rung: str
    step_ms: float | None
    refused: str
    ratio: float | None
    plan: str
    cpu_s: float


def main(argv: Sequence[str] | None = None) -> None:
    """Plan and simulate; exits with 1 where more of something makes a plan slower."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS), metavar="MODEL")
    parser.add_argument("--machine", default="dgx-h100", help="whose host has the devices")
    parser.add_argument("--what", nargs="+", choices=tuple(LADDERS), default=tuple(LADDERS), metavar="WHAT")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every ladder")
    args = parser.parse_args(argv)
    machine = Machine.named(args.machine)
    rows: list[Row] = []
    for model in args.models:
        for what in args.what:
            rows += climbed(model, what, machine)
            if args.json is not None:
                args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    Console(width=160).print(table_of(rows))
    if broken := [line(row) for row in rows if slower(row)]:
        sys.exit("more of something makes a plan slower:\n" + "\n".join(broken))


def climbed(model: str, what: str, machine: Machine) -> list[Row]:
    """Plan every rung of a ladder; a rung that has no plan has no time, and is slower where one before it has."""
    made, best_ms = MODELS[model](), None
    rows: list[Row] = []
    for rung in LADDERS[what](lambda cluster: _traced(model, cluster), machine):
        began_s = time.process_time()
        step_ms, refused, words = None, "", ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                planned = _traced(model, rung.cluster).plan(rung.method)
                report = planned.simulate(rung.cluster)
            plan = planned.plan
            words = f"{plan.num_stages} x {plan.num_microbatches} {plan.schedule} on {plan.num_devices}"
            step_ms = 1e3 * report.step_time_s
        except AutoparError as error:
            refused = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        ratio = None if best_ms is None else float("inf") if step_ms is None else step_ms / best_ms
        if step_ms is not None:
            best_ms = step_ms if best_ms is None else min(best_ms, step_ms)
        rows.append(
            Row(
                model=made.name,
                what=what,
                rung=rung.name,
                step_ms=step_ms,
                refused=refused,
                ratio=ratio,
                plan=words,
                cpu_s=time.process_time() - began_s,
            )
        )
        print(line(rows[-1]), flush=True)
    return rows


def slower(row: Row) -> bool:
    """True where a rung below was faster."""
    return row.ratio is not None and row.ratio > ALLOWED


def _traced(model: str, cluster: autopar.Cluster) -> Traced:
    made = MODELS[model]()
    step = autopar.parallelize(made.step, cluster=cluster, donate_argnums=(0,))
    return step.trace(made.abstract_state, made.abstract_batch)


Tracer = Callable[[autopar.Cluster], Traced]


def _all_of(machine: Machine) -> autopar.Cluster:
    return autopar.Cluster(num_devices=min(8, machine.devices_per_host), machine=machine)


def _devices(_: Tracer, machine: Machine) -> Iterator[Rung]:
    for count in range(1, _all_of(machine).num_devices + 1):
        yield Rung(name=f"{count}", cluster=autopar.Cluster(num_devices=count, machine=machine), method=autopar.Auto())


def _memory(trace: Tracer, machine: Machine) -> Iterator[Rung]:
    cluster = _all_of(machine)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        all_bytes = trace(cluster).plan(autopar.Auto()).simulate(cluster).peak_bytes
    for share in SHARES:
        method = autopar.Auto(memory=bytes_with_headroom(share * all_bytes))
        yield Rung(name=f"{share:.2f} of what it takes", cluster=cluster, method=method)
    yield Rung(name="all", cluster=cluster, method=autopar.Auto())


def _links(_: Tracer, machine: Machine) -> Iterator[Rung]:
    for times in TIMES:
        faster = replace(
            machine, name=f"{machine.name}, links x {times:g}", intra=_faster(machine.intra, times), sources={}
        )
        yield Rung(name=f"links x {times:g}", cluster=_all_of(faster), method=autopar.Auto())


def _faster(link: Link, times: float) -> Link:
    def each(figures: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
        return tuple((devices, times * bandwidth) for devices, bandwidth in figures)

    return replace(
        link,
        bandwidth=times * link.bandwidth,
        group_bandwidths=each(link.group_bandwidths),
        exchange_bandwidths=each(link.exchange_bandwidths),
    )


def _efforts(_: Tracer, machine: Machine) -> Iterator[Rung]:
    for effort in ("fast", "normal", "thorough"):
        yield Rung(name=effort, cluster=_all_of(machine), method=autopar.Auto(effort=effort))


def _kinds(_: Tracer, machine: Machine) -> Iterator[Rung]:
    for count in range(1, len(KINDS) + 1):
        yield Rung(name="+".join(KINDS[:count]), cluster=_all_of(machine), method=autopar.Auto(kinds=KINDS[:count]))
    yield Rung(name="all", cluster=_all_of(machine), method=autopar.Auto())


LADDERS: Mapping[str, Callable[[Tracer, Machine], Iterator[Rung]]] = {
    "devices": _devices,
    "memory": _memory,
    "links": _links,
    "effort": _efforts,
    "kinds": _kinds,
}
"""The ladders, by the thing that there is more and more of."""


def line(row: Row) -> str:
    """Return a row as one line of text."""
    took = row.refused if row.step_ms is None else f"{row.step_ms:.4g} ms"
    beside = "" if row.ratio is None else f", {row.ratio:.4f} of the best with less"
    return f"{row.model:16} {row.what:8} {row.rung:24} {took}{beside}; {row.plan}; {row.cpu_s:.1f} CPU s"


def table_of(rows: Sequence[Row]) -> Table:
    """Return the rows as a table."""
    table = Table("model", "more of", "what there is", "ms", "of the best with less", "plan", "CPU s")
    for row in rows:
        took = "-" if row.step_ms is None else f"{row.step_ms:.4g}"
        ratio = "-" if row.ratio is None else f"{row.ratio:.4f}"
        table.add_row(row.model, row.what, row.rung, took, ratio, row.plan, f"{row.cpu_s:.1f}")
    return table


if __name__ == "__main__":
    main()
