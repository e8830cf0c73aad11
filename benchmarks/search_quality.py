"""Hold `Auto()` against its own restrictions and against plans by hand, all simulated: freedom must not cost time.

    python -m benchmarks.search_quality --models mlp gpt --clusters "1x dgx-h100" --json search_quality.json
    python -m benchmarks.search_quality --models mlp lstm --clusters random:0 random:1 random:2
    python -m benchmarks.search_quality --models gpt --clusters random:101 random:102 --before search_quality.json
    python -m benchmarks.search_quality --models gpt:2.6B --clusters "1x p3.16xlarge"
    python -m benchmarks.search_quality --models gpt mlp --clusters "1x dgx-h100" --memory 0.4

Every model is planned for every cluster by `Auto()` and by every method below; a row keeps what each step is simulated
to take. A family and a size, as `gpt:15B`, are a model of `benchmarks.models.sizes`. It fails where `Auto()` takes more
than 1.001 of the time of a restriction or of a plan by hand. A method that cannot be (degrees that do not divide, more
stages than the model has, what does not fit) has no time. A search that loses the best plan may lose it with every
restriction, too: `--before` holds each method against the rows of an earlier run by the same costs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rich.console import Console
from rich.table import Table

import autopar
from autopar.compiler.memory.estimate import bytes_with_headroom
from autopar.errors import AutoparError
from autopar.hardware.machine import Link, Machine
from autopar.methods import Method
from benchmarks.models import LARGE, MODELS
from benchmarks.models.model import Model
from benchmarks.models.sizes import FAMILIES
from benchmarks.models.workload import Workload

CLUSTERS = (
    "cpu:8",
    "1x p3.16xlarge",
    "dgx-h100:1",
    "1x dgx-h100",
    "dgx-a100-80:16",
    "gb200-nvl72:16",
    "tpu-v5p:64",
)
"""A machine with a number of devices, hosts of it, or `random` with a seed: a machine that nobody has."""
RANDOM = "random"
FREE = "Auto()"
METHODS: Mapping[str, Method] = {
    FREE: autopar.Auto(),
    "one stage": autopar.Auto(num_stages=1),
    "one stage, 1 microbatch": autopar.Auto(num_stages=1, num_microbatches=1),
    "2 stages": autopar.Auto(num_stages=2),
    "3 stages": autopar.Auto(num_stages=3),
    "4 stages": autopar.Auto(num_stages=4),
    "8 stages": autopar.Auto(num_stages=8),
    "1 microbatch": autopar.Auto(num_microbatches=1),
    "4 microbatches": autopar.Auto(num_microbatches=4),
    "8 microbatches": autopar.Auto(num_microbatches=8),
    "16 microbatches": autopar.Auto(num_microbatches=16),
    "32 microbatches": autopar.Auto(num_microbatches=32),
    "2 stages, 4 microbatches": autopar.Auto(num_stages=2, num_microbatches=4),
    "1f1b": autopar.Auto(schedule="1f1b"),
    "gpipe": autopar.Auto(schedule="gpipe"),
    "interleaved": autopar.Auto(schedule="interleaved"),
    "eager-1f1b": autopar.Auto(schedule="eager-1f1b"),
    "zero-bubble": autopar.Auto(schedule="zero-bubble"),
    "all recomputed": autopar.Auto(remat=True),
    "nothing recomputed": autopar.Auto(remat=False),
    "little memory": autopar.Auto(memory="moderate"),
    "DataParallel()": autopar.DataParallel(),
    "Zero(stage=3)": autopar.Zero(stage=3),
    "Megatron()": autopar.Megatron(),
    "Megatron(tensor=2)": autopar.Megatron(tensor=2),
    "Megatron(pipeline=2)": autopar.Megatron(pipeline=2, num_microbatches=4),
    "PipelineParallel": autopar.PipelineParallel(num_stages=2, num_microbatches=4),
}
ALLOWED = 1.001


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model on a cluster: milliseconds of a step by method; `ratio` is that of `Auto()` to the best of the others."""

    model: str
    cluster: str
    step_ms: Mapping[str, float]
    refused: Mapping[str, str]
    plan: str
    gap: float | None
    cpu_s: float
    ratio: float
    best: str


def main(argv: Sequence[str] | None = None) -> None:
    """Plan and simulate; exits with 1 where `Auto()` is behind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", type=_known, default=tuple(_models()), metavar="MODEL")
    parser.add_argument("--clusters", nargs="+", default=CLUSTERS, metavar="CLUSTER")
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=tuple(METHODS), metavar="METHOD")
    parser.add_argument("--memory", type=float, metavar="SHARE", help="memory of a device, of what Auto() would take")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every row")
    parser.add_argument(
        "--before", type=Path, metavar="FILE", help="rows by the same costs that none may be slower than"
    )
    args = parser.parse_args(argv)
    for cluster in args.clusters:
        cluster_of(cluster)  # a name that there is not is refused before hours of planning
    before = [] if args.before is None else _rows_before(args.before, args.models, args.clusters)
    rows: list[Row] = []
    for cluster in args.clusters:
        for model in args.models:
            rows.append(measured(model, cluster, [FREE, *(name for name in args.methods if name != FREE)], args.memory))
            print(line(rows[-1]), flush=True)
            if args.json is not None:
                args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    Console(width=160).print(table_of(rows))
    behind = [f"Auto() takes {row.ratio:.3f} of {row.best}: {line(row)}" for row in rows if row.ratio > ALLOWED]
    behind += slower(rows, before)
    if behind:
        sys.exit("\n".join(behind))


def _rows_before(path: Path, models: Sequence[str], clusters: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of an earlier run; exits where one that is asked for is not among them."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    there = {(row["model"], row["cluster"]) for row in rows}
    missing = [f"{model} on {cluster}" for cluster in clusters for model in models if (model, cluster) not in there]
    if missing:
        sys.exit(
            f"{path} has no row of {', '.join(missing)}, to hold what is found against. Ask for models and clusters "
            "that it has, or write such rows with --json by the search before."
        )
    return rows


def _models() -> dict[str, Model]:
    small = {name: make() for name, make in MODELS.items()}
    return small | {f"{name}-large": MODELS[name](**LARGE[name]) for name in ("mlp", "gpt")}


def _known(name: str) -> str:
    """Return the name of a model that there is; raise `ArgumentTypeError` for others."""
    family, _, size = name.partition(":")
    if name in _models() or (family in FAMILIES and size in FAMILIES[family].models):
        return name
    sizes = ", ".join(f"{family}:{size}" for family, each in FAMILIES.items() for size in each.models)
    raise argparse.ArgumentTypeError(f"{name} is no model; give one of {', '.join(_models())}, {sizes}")


def _model_of(name: str) -> Model | Workload:
    family, _, size = name.partition(":")
    return FAMILIES[family].maker(size)() if size else _models()[name]


def cluster_of(name: str) -> autopar.Cluster:
    """Return the cluster: `machine:devices`, `random:seed`, or what `Cluster.parse` reads."""
    machine, _, devices = name.partition(":")
    if machine == RANDOM:
        return random_cluster(int(devices))
    if not devices:
        return autopar.Cluster.parse(name)
    return autopar.Cluster(num_devices=int(devices), kind=machine)


def random_cluster(seed: int) -> autopar.Cluster:
    """Return one to four hosts of one to eight devices: rate, links and what it costs to start lie far apart."""
    draw = random.Random(seed)
    per_host = draw.choice((1, 2, 4, 8))
    hosts = draw.choice((1, 2) if per_host == 8 else (2, 4))

    def link(slowest: float, fastest: float) -> Link:
        return Link(
            latency_s=10 ** draw.uniform(-6, -4.5), bandwidth=10 ** draw.uniform(slowest, fastest), ramp_bytes=0
        )

    base, rate = Machine.named("p3.16xlarge"), 10 ** draw.uniform(9, 14)
    machine = replace(
        base,
        name=f"{RANDOM} {seed}",
        devices_per_host=per_host,
        domain=per_host,
        intra=link(9, 11.5),
        inter=link(7, 9),
        peak_flops=dict.fromkeys(base.peak_flops, rate),
        dispatch_s=10 ** draw.uniform(-7, -4),
        kernel_s=10 ** draw.uniform(-7, -5),
        sources={},
    )
    return autopar.Cluster(num_devices=hosts * per_host, machine=machine)


def measured(model: str, cluster_name: str, methods: Sequence[str], memory: float | None = None) -> Row:
    """Plan a model for a cluster by every method, and simulate the plans; `memory` is as for the command."""
    made, cluster = _model_of(model), cluster_of(cluster_name)
    given = {"batch_statistics": made.batch_statistics} if isinstance(made, Workload) else {}
    step = autopar.parallelize(made.step, cluster=cluster, donate_argnums=(0,))
    traced = step.trace(made.abstract_state, made.abstract_batch)
    limit_bytes = float("inf")
    if memory is not None:
        limit_bytes = memory * traced.plan(replace(METHODS[FREE], **given)).simulate(cluster).peak_bytes
    step_ms: dict[str, float] = {}
    refused: dict[str, str] = {}
    words, gap, cpu_s = "", None, 0.0
    for name in methods:
        began_s = time.process_time()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                method = _within(replace(METHODS[name], **given), limit_bytes)
                planned = traced.plan(method)
                took_s = time.process_time() - began_s
                report = planned.simulate(cluster)
        except AutoparError as error:
            refused[name] = f"{type(error).__name__}: {error}"
            continue
        if not report.fits or report.peak_bytes > limit_bytes:
            refused[name] = "does not fit"
            continue
        step_ms[name] = 1e3 * report.step_time_s
        if name == FREE:
            plan, cpu_s = planned.plan, took_s
            gap = None if plan.certificate is None else plan.certificate.gap
            words = f"{plan.num_stages} x {plan.num_microbatches} {plan.schedule} on {plan.num_devices}"
    others = {name: ms for name, ms in step_ms.items() if name != FREE}
    best = min(others, key=others.__getitem__, default="")
    ratio = step_ms[FREE] / others[best] if FREE in step_ms and best else (float("inf") if best else 1.0)
    return Row(
        model=model,
        cluster=cluster_name,
        step_ms=step_ms,
        refused=refused,
        plan=words,
        gap=gap,
        cpu_s=cpu_s,
        ratio=ratio,
        best=best,
    )


def _within(method: Method, limit_bytes: float) -> Method:
    """Return a search with a budget that leaves its plan so many bytes of a device; others are only held to them."""
    if not isinstance(method, autopar.Auto) or method.memory != autopar.Auto().memory or math.isinf(limit_bytes):
        return method
    return replace(method, memory=bytes_with_headroom(limit_bytes))


def slower(rows: Sequence[Row], before: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what takes longer than in the rows of an earlier run, or has no plan any more."""
    known = {(row["model"], row["cluster"], name): ms for row in before for name, ms in row["step_ms"].items()}
    found: list[str] = []
    for row in rows:
        for name in (*row.step_ms, *row.refused):
            was, now = known.get((row.model, row.cluster, name)), row.step_ms.get(name)
            if was is not None and (now is None or now > ALLOWED * was):
                took = "has no plan" if now is None else f"takes {now:.4g} ms"
                found.append(f"{row.model} on {row.cluster} by {name} {took}, {was:.4g} ms before")
    return found


def line(row: Row) -> str:
    """Return a row as one line of text."""
    free = f"{row.step_ms[FREE]:.4g} ms" if FREE in row.step_ms else "no plan"
    return (
        f"{row.cluster:16} {row.model:16} {free:>10}, {row.ratio:.4f} of {row.best}; {row.plan}; {row.cpu_s:.1f} CPU "
        f"s; {len(row.step_ms)} planned, {len(row.refused)} refused"
    )


def table_of(rows: Sequence[Row]) -> Table:
    """Return the rows as a table."""
    table = Table("cluster", "model", "ms", "of the best other", "which", "plan", "gap", "CPU s")
    for row in rows:
        free = f"{row.step_ms[FREE]:.4g}" if FREE in row.step_ms else "-"
        gap = "-" if row.gap is None else f"{100 * row.gap:.2g} %"
        table.add_row(row.cluster, row.model, free, f"{row.ratio:.4f}", row.best, row.plan, gap, f"{row.cpu_s:.1f}")
    return table


if __name__ == "__main__":
    main()
