"""Compare pipeline schedules on one model: the same degrees of parallelism by hand, simulated.

    python -m benchmarks.schedules --model llama-3-405b --cluster dgx-h100 --gpus 512 --degrees 4x8x16 --json FILE

Degrees are data x tensor x pipeline. Every replica has one example in a microbatch, so that there are as many
microbatches as can be.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

import autopar
from autopar.errors import AutoparError
from benchmarks.models.sizes import FAMILIES
from benchmarks.models.workload import Workload

COMPARED = (
    ("1f1b", 1),
    ("eager-1f1b", 1),
    ("zero-bubble", 1),
    ("zero-bubble-h2", 1),
    ("interleaved", 2),
    ("interleaved", 4),
    ("interleaved-zero-bubble", 2),
    ("zero-bubble-v", 2),
    ("dualpipe-v", 2),
)
"""Schedules and their numbers of stages on a mesh."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A schedule with so many stages on a mesh; figures are None where there is no such plan."""

    model: str
    gpus: int
    degrees: str
    num_microbatches: int
    schedule: str
    virtual_stages: int
    step_time_s: float | None
    peak_gib: float | None
    fits: bool
    message: str


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate, and show the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3-405b", help="of the GPTs of the weak scaling")
    parser.add_argument("--cluster", default="dgx-h100")
    parser.add_argument("--gpus", type=int, default=512)
    parser.add_argument("--degrees", nargs="+", default=["4x8x16"], metavar="DxTxP")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every row")
    args = parser.parse_args(argv)
    workload = FAMILIES["gpt"].maker(args.model)()
    cluster = autopar.Cluster.parse(args.cluster).with_devices(args.gpus)
    step = autopar.parallelize(workload.step, donate_argnums=(0,), cluster=cluster)
    traced = step.trace(workload.abstract_state, workload.abstract_batch)
    rows: list[Row] = []
    for degrees in args.degrees:
        for schedule, virtual_stages in COMPARED:
            rows.append(simulated(workload, traced, cluster, degrees, schedule, virtual_stages))
            if args.json is not None:
                args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    Console(width=140).print(table_of(rows))


def simulated(
    workload: Workload,
    traced: autopar.Traced,
    cluster: autopar.Cluster,
    degrees: str,
    schedule: str,
    virtual_stages: int,
) -> Row:
    """One plan by hand; a plan that cannot be made is a row as well."""
    data, tensor, pipeline = (int(degree) for degree in degrees.split("x"))
    count = workload.batch_size // data
    report, message = None, ""
    try:
        method = autopar.Megatron(
            data=data,
            tensor=tensor,
            pipeline=pipeline,
            num_microbatches=count,
            schedule=schedule,
            virtual_stages=virtual_stages,
            zero=int(data > 1),
        )
        report = traced.plan(method).simulate(cluster)
    except AutoparError as error:
        message = f"{type(error).__name__}: {error}"
    return Row(
        model=workload.name,
        gpus=cluster.num_devices,
        degrees=degrees,
        num_microbatches=count,
        schedule=schedule,
        virtual_stages=virtual_stages,
        step_time_s=None if report is None else report.step_time_s,
        peak_gib=None if report is None else report.peak_bytes / 2**30,
        fits=report is not None and report.fits,
        message=message,
    )


def table_of(rows: Sequence[Row]) -> Table:
    """One line for each row."""
    table = Table(title=f"{rows[0].model} on {rows[0].gpus} GPUs")
    for column in (
        "data x tensor x pipeline",
        "microbatches",
        "schedule",
        "stages on a mesh",
        "s/step",
        "peak GiB",
        "",
    ):
        table.add_column(column, justify="left" if column in ("schedule", "") else "right")
    for row in rows:
        figures = (row.step_time_s, row.peak_gib)
        shown = ("-" if figure is None else f"{figure:.4g}" for figure in figures)
        note = row.message or ("" if row.fits else "out of memory")
        table.add_row(row.degrees, str(row.num_microbatches), row.schedule, str(row.virtual_stages), *shown, note)
    return table


if __name__ == "__main__":
    main()
