"""Plan M6's models of 1T and 10T parameters on paper, for the V100s that they were trained on, measure by measure.

    python -m benchmarks.very_large --json very_large.json
    python -m benchmarks.very_large --model "M6 10T" --measure "and activations on the hosts"

Every row is a plan by hand with one measure more than the row above it, or with another division of the same devices.
Nothing is run: arguments are shapes, devices the figures of a machine. Parameters and gradients are in 16 bits; the
model of 1T parameters has Adam with a master copy in 32 bits, that of 10T a factored second moment, as Adafactor's.
Bytes are those of the fullest device at its fullest moment, by what they are; a host has eight devices. `cpu` is the
processor time of tracing, planning, lowering and simulating.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import autopar
from autopar.simulation import SimulationReport
from benchmarks.models.m6 import SIZES, Adam, Factored, Size, abstract_step

CPU_TARGET_S = 120.0
_OPTIMIZERS = {"M6 1T": Adam(), "M6 10T": Factored()}


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A way to plan a model: how the devices are divided, what is computed again, and what is on the hosts."""

    name: str
    experts: bool = True
    tensor: int = 1
    pipeline: int = 1
    remat: bool = True
    offload: str | tuple[str, ...] = "off"
    is_target: bool = False

    def method(self, size: Size) -> autopar.PipelineParallel:
        """Return the plan by hand, with a stage for every layer."""
        each = size.num_devices // self.pipeline
        shape, axes = ((each,), ("data",)) if self.tensor == 1 else ((each // self.tensor, self.tensor), None)
        inner = None if self.tensor == 1 else "model"
        like_parameters = r"^state\.(0|1\.(master|mu|nu))\..*"
        specs = {
            like_parameters + "experts_up": P("data", None, inner),
            like_parameters + "experts_down": P("data", inner),
            "experts_": P("data"),
        }
        return autopar.PipelineParallel(
            num_stages=self.pipeline,
            virtual_stages=size.layers // self.pipeline,
            schedule="interleaved",
            mesh_shape=shape,
            axis_names=axes,
            specs=specs if self.experts else {},
            remat=self.remat,
            offload=self.offload,
        )


MEASURES = (
    Measure(name="examples divided", experts=False, remat=False),
    Measure(name="and experts", remat=False),
    Measure(name="and layers computed again"),
    Measure(name="and the optimizer's state on the hosts", offload="optimizer"),
    Measure(name="and parameters, gradients on the hosts", offload="parameters"),
    Measure(name="and activations on the hosts", offload=("parameters", "activations"), is_target=True),
    Measure(name="the same, nothing computed again", remat=False, offload=("parameters", "activations")),
    Measure(name="the same, 4 devices to a part of an expert", offload=("parameters", "activations"), tensor=4),
    Measure(name="the same, 8 stages", offload=("parameters", "activations"), pipeline=8),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The figures of a model under a measure, in GB (10^9 bytes) and seconds."""

    model: str
    measure: str
    devices: int
    parameters: float
    cluster: str
    by_category_gb: dict[str, float]
    device_gb: float
    of_device_gb: float
    host_gb: float
    of_host_gb: float
    fits: bool
    step_time_s: float
    cpu_s: float


def main() -> None:
    """Plan, show the rows, and end with an error if a target does not fit or takes too long to plan."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=[size.name for size in SIZES], help="one model only")
    parser.add_argument("--measure", choices=[each.name for each in MEASURES], help="one measure only")
    parser.add_argument("--cluster", default="p3dn.24xlarge", help="a machine; one host for every eight devices")
    parser.add_argument("--layers", type=int, help="so many layers in place of all")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows: list[Row] = []
    missed: list[str] = []
    for size in (size for size in SIZES if options.model in (None, size.name)):
        size = size if options.layers is None else replace(size, layers=options.layers)
        for measure in (each for each in MEASURES if options.measure in (None, each.name)):
            row = planned(size, measure, options.cluster)
            rows.append(row)
            if measure.is_target and not (row.fits and row.cpu_s <= CPU_TARGET_S):
                missed.append(f"{row.model}, {row.measure}")
            if options.json is not None:
                options.json.write_text(json.dumps([asdict(each) for each in rows], indent=1) + "\n")
    console = Console()
    for table in tables(rows):
        console.print(table)
    if missed:
        raise SystemExit(f"These do not fit, or took over {CPU_TARGET_S:g} s to plan: {'; '.join(missed)}.")


def planned(size: Size, measure: Measure, cluster: str) -> Row:
    """Plan and simulate a step."""
    start_s = time.process_time()
    machines = autopar.Cluster.parse(f"{size.num_devices // 8}x {cluster}")
    step, state, batch = abstract_step(size, _OPTIMIZERS[size.name])
    traced = autopar.parallelize(step, cluster=machines, donate_argnums=0).trace(state, batch)
    report = traced.plan(measure.method(size)).simulate()
    return Row(
        model=size.name,
        measure=measure.name,
        devices=size.num_devices,
        parameters=float(size.num_parameters),
        cluster=str(machines),
        by_category_gb=_by_category(report),
        device_gb=report.peak_bytes / 1e9,
        of_device_gb=report.memory_limit_bytes / 1e9,
        host_gb=report.all_on_host_bytes / 1e9,
        of_host_gb=machines.machine.host_memory_bytes / 1e9,
        fits=report.fits,
        step_time_s=report.step_time_s,
        cpu_s=time.process_time() - start_s,
    )


def _by_category(report: SimulationReport) -> dict[str, float]:
    totals: Counter[str] = Counter()
    for part in report.memory:
        totals[part.category] += part.nbytes
    return {category: round(nbytes / 1e9, 3) for category, nbytes in totals.most_common()}


def tables(rows: list[Row]) -> Iterator[Table]:
    """Yield a table for every model."""
    for model in dict.fromkeys(row.model for row in rows):
        mine = [row for row in rows if row.model == model]
        first = mine[0]
        title = f"{model}: {first.parameters:.3g} parameters of experts on {first.devices} devices, {first.cluster}"
        table = Table(
            "plan", "GB of a device", "most of it", "GB of a host", "fits", "s per step", "cpu s", title=title
        )
        for row in mine:
            most = ", ".join(f"{name} {size:.3g}" for name, size in list(row.by_category_gb.items())[:4])
            table.add_row(
                row.measure,
                f"{row.device_gb:.3g} of {row.of_device_gb:.3g}",
                most,
                f"{row.host_gb:.3g} of {row.of_host_gb:.3g}",
                "yes" if row.fits else "no",
                f"{row.step_time_s:.3g}",
                f"{row.cpu_s:.0f}",
            )
        yield table


if __name__ == "__main__":
    main()
