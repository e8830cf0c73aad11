"""Measure how long the stage search takes, over layers and devices: a table, with the proven gap.

    python -m benchmarks.stage_search_time
    python -m benchmarks.stage_search_time --layers 48 --devices 64 --schedule zero-bubble --memory-gib 40

Costs are those of a transformer by formula: equal layers between an embedding and a head that is as slow as two of
them, collectives that are slower across hosts, and for each submesh three choices that keep or recompute activations.
Seconds are of the wall clock and include asking for all costs; `cpu` is the processor time, which tells more where
other processes run as well.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.table import Table

from autopar.compiler.inter_op.search import StageSearch, search_stages
from autopar.compiler.inter_op.stage_costs import StageCost, StageCosts, Timing, TransferTime
from autopar.compiler.inter_op.submeshes import Submesh, submesh_choices
from autopar.errors import MemoryTooSmall
from autopar.ir.schedules import DEFAULT_SCHEDULE, SCHEDULES

SIZES = ((48, 64, 8), (48, 64, 16), (128, 1024, 8), (128, 10240, 8))  # layers, devices, devices per host
GIB = 2.0**30
LAYER_S, BYTES_PER_S, SLOW_BYTES_PER_S = 0.2, 300e9, 40e9  # a layer on one device; inside and across hosts
ACTIVATION_BYTES, STATE_BYTES, BOUNDARY_BYTES = 8e9, 24e9, 0.4e9  # of a layer and microbatch


@dataclass(frozen=True, kw_only=True)
class Case:
    layers: int
    devices: int
    per_host: int
    schedule: str
    microbatches: int
    memory_gib: float
    time_limit_s: float | None


def model(num_layers: int) -> tuple[StageCosts, TransferTime]:
    """The costs of ranges of layers; the first one is light and the last one heavy."""
    weights = [0.3, *(1.0 for _ in range(num_layers - 2)), 2.0]
    before = [sum(weights[:n]) for n in range(num_layers + 1)]

    @cache
    def stage_costs(start: int, stop: int, submesh: Submesh) -> Sequence[StageCost]:
        layers, n = before[stop] - before[start], submesh.num_devices
        speed = SLOW_BYTES_PER_S if submesh.num_hosts > 1 else BYTES_PER_S
        shared_s = layers * BOUNDARY_BYTES * (n - 1) / n / speed
        forward_s = layers * LAYER_S / n + shared_s
        common = {
            "forward_s": forward_s,
            "weight_s": layers * LAYER_S / n,
            "state_bytes": layers * STATE_BYTES / n,
            "temporary_bytes": 1e9,
            "update_s": layers * STATE_BYTES / n / speed,
        }
        whole = layers * ACTIVATION_BYTES / n
        boundary = (stop - start) * BOUNDARY_BYTES / n
        return (
            StageCost(backward_s=2 * forward_s, activation_bytes=whole, choice="keep", **common),
            StageCost(backward_s=2.5 * forward_s, activation_bytes=whole / 3, choice="some", **common),
            StageCost(backward_s=3 * forward_s, activation_bytes=boundary, choice="recompute", **common),
        )

    def transfer_s(cut: int, source: Submesh, target: Submesh) -> float:
        return 2 * BOUNDARY_BYTES / min(source.num_devices, target.num_devices) / SLOW_BYTES_PER_S

    return stage_costs, transfer_s


def search(case: Case) -> tuple[StageSearch, int]:
    """The result and the number of submeshes."""
    stage_costs, transfer_s = model(case.layers)
    submeshes = submesh_choices(case.devices, case.per_host)
    schedule = SCHEDULES[case.schedule]
    result = search_stages(
        case.layers,
        case.devices,
        submeshes,
        stage_costs,
        transfer_s,
        timing=Timing(schedule=schedule, num_microbatches=case.microbatches, virtual_stages=schedule.virtual_stages[0]),
        memory_bytes=case.memory_gib * GIB,
        time_limit_s=case.time_limit_s,
    )
    return result, len(submeshes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--devices", type=int)
    parser.add_argument("--devices-per-host", type=int, default=8)
    parser.add_argument("--schedule", choices=[*SCHEDULES, "all"], default=DEFAULT_SCHEDULE)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--memory-gib", type=float, nargs="+", default=[40, 141])
    parser.add_argument("--time-limit-s", type=float)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args()
    one = (options.layers or 48, options.devices or 64, options.devices_per_host)
    sizes = (one,) if options.layers or options.devices else SIZES
    schedules = SCHEDULES if options.schedule == "all" else (options.schedule,)
    columns = (
        "layers",
        "devices",
        "submeshes",
        "schedule",
        "microbatches",
        "GiB",
        "seconds",
        "cpu",
        "labels",
        "stages",
        "step s",
        "gap",
    )
    rows: list[list[str]] = []
    for layers, devices, per_host in sizes:
        for schedule in schedules:
            for microbatches in options.microbatches:
                for memory_gib in options.memory_gib:
                    case = Case(
                        layers=layers,
                        devices=devices,
                        per_host=per_host,
                        schedule=schedule,
                        microbatches=microbatches,
                        memory_gib=memory_gib,
                        time_limit_s=options.time_limit_s,
                    )
                    rows.append(row(case))
    table = Table()
    for column in columns:
        table.add_column(column, justify="right")
    for cells in rows:
        table.add_row(*cells)
    Console(width=130).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps([dict(zip(columns, cells, strict=True)) for cells in rows], indent=1) + "\n")


def row(case: Case) -> list[str]:
    began, began_cpu = time.perf_counter(), time.process_time()
    cells = [str(case.layers), str(case.devices)]
    settings = [case.schedule, str(case.microbatches), f"{case.memory_gib:g}"]
    try:
        result, count = search(case)
    except MemoryTooSmall:
        return [*cells, "", *settings, *taken(began, began_cpu), "", "does not fit", "", ""]
    figures = [str(result.num_explored), str(len(result.best.stages)), f"{result.step_time_s:.4g}", f"{result.gap:.1e}"]
    return [*cells, str(count), *settings, *taken(began, began_cpu), *figures]


def taken(began: float, began_cpu: float) -> list[str]:
    return [f"{time.perf_counter() - began:.2f}", f"{time.process_time() - began_cpu:.2f}"]


if __name__ == "__main__":
    main()
