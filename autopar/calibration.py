"""Measure the devices at hand, and write their machine as a file that `Cluster.load` reads.

devices  ->  measurements  ->  Machine, and a table of what was measured against what its formulas say
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from autopar.calibration_fit import fit_link, fit_rates, predicted_s
from autopar.cluster import Cluster
from autopar.errors import InvalidArgument
from autopar.machine import Machine
from autopar.measurements import Effort, Measurement, Series, series_of

_UNITS = ((1, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What may follow `autopar calibrate`."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the machine to FILE, for autopar.Cluster.load")
    parser.add_argument("--quick", action="store_true", help="few sizes and short loops: seconds, and larger errors")


def run(arguments: argparse.Namespace) -> int:
    """Measure, fit, print, and write."""
    if arguments.json is not None and not arguments.json.parent.is_dir():
        raise InvalidArgument(
            f"There is no directory {arguments.json.parent} to write {arguments.json.name} to. Make it, or name a file "
            "in another."
        )
    console = Console()
    devices = jax.local_devices()

    def shown(series: Sequence[Series]) -> Any:
        return track(series, description="measuring", console=Console(stderr=True), transient=True)

    measured = measure(devices, quick=arguments.quick, shown=shown)
    machine = fit_machine(devices, measured)
    console.print(table_of(machine, measured), summary_of(machine, measured))
    if arguments.json is not None:
        machine.save(arguments.json)
        console.print(f'autopar.Cluster.load("{arguments.json}") is one host of it.', soft_wrap=True)
    return 0


def measure(
    devices: Sequence[Any],
    *,
    quick: bool = False,
    shown: Callable[[Sequence[Series]], Sequence[Series]] = lambda series: series,
) -> list[Measurement]:
    """Measure devices of one process and one kind; `shown` may tell the user about each series as it comes."""
    Cluster.from_devices(devices)  # of one kind, and there
    effort = Effort.of(quick=quick)
    return [each for one in shown(series_of(devices, effort, quick=quick)) for each in one.measure(effort)]


def fit_machine(devices: Sequence[Any], measured: Sequence[Measurement]) -> Machine:
    """The machine that these devices are a host of; what was not measured is the library's for their kind, if any."""
    kind = Cluster.from_devices(devices).kind
    known = _known(kind)
    rates = fit_rates(measured)
    exchanged = [each for each in measured if each.what not in ("product", "memory")]
    base = Machine.named("cpu") if known is None else known
    intra = fit_link(exchanged) if exchanged else base.intra
    peaks, shares = _peaks(base if known is not None and kind != "cpu" else None, rates.matmul_flops)
    here = f"measured on {len(devices)} x {kind} with jax {jax.__version__}"
    not_measured = f"not measured: as {base.name}"
    return Machine(
        name=f"measured-{kind.lower().replace(' ', '-')}",
        devices_per_host=len(devices),
        kind=kind.lower(),
        memory_bytes=_memory_bytes(devices, base),
        memory_bandwidth=rates.memory_bandwidth,
        peak_flops=peaks,
        matmul_share=shares,
        matmul_half_flops=rates.matmul_half_flops,
        kernel_s=rates.kernel_s,
        intra=intra,
        inter=base.inter,
        domain=max(len(devices), base.domain if known is not None and kind != "cpu" else 1),
        overlap=base.overlap,
        sources={
            **dict.fromkeys(("memory_bandwidth", "matmul_share", "matmul_half_flops", "kernel_s"), here),
            "memory_bytes": "told by the device or the operating system",
            "peak_flops": not_measured if peaks.keys() & base.peak_flops.keys() and kind != "cpu" else here,
            "intra": here if exchanged else not_measured,
            **dict.fromkeys(("inter", "domain", "overlap"), not_measured),
        },
    )


def _known(kind: str) -> Machine | None:
    try:
        return Machine.of_kind(kind)
    except InvalidArgument:
        return None


def _peaks(known: Machine | None, rates: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Peaks on paper where they are known and not exceeded, and the share of them that was reached."""
    peaks, shares = (dict(known.peak_flops), dict(known.matmul_share)) if known else ({}, {})
    for dtype, rate in rates.items():
        word = known.computed_in(dtype) if known else dtype
        if word in peaks and word != dtype and dtype in rates and word in rates:
            continue  # measured by its own name
        peaks[word] = max(rate, peaks.get(word, 0.0))
        shares[word] = rate / peaks[word]
    return peaks, shares


def _memory_bytes(devices: Sequence[Any], base: Machine) -> float:
    """What one device has: the host's memory is shared by its virtual devices."""
    told = devices[0].memory_stats()
    if told and told.get("bytes_limit"):
        return float(told["bytes_limit"])
    if devices[0].platform == "cpu" and hasattr(os, "sysconf"):
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices))
    return base.memory_bytes


# --- what the user sees -----------------------------------------------------------------------------------------


def table_of(machine: Machine, measured: Sequence[Measurement]) -> Table:
    """Every measurement against what the machine's formulas say."""
    title = f"{machine.name}: measured against fitted"
    table = Table("what", "type", "devices", "bytes", "measured", "fitted", "error", title=title, box=box.SIMPLE_HEAD)
    table.columns[0].no_wrap, table.columns[0].min_width = True, len("collective-permute")
    for column in table.columns[2:]:
        column.justify = "right"
    for each in measured:
        fitted = predicted_s(machine, each)
        error = f"{100 * (fitted / each.seconds - 1):+.0f} %"
        cells = each.what, each.dtype, str(each.group_size), _amount(each.nbytes, "B")
        table.add_row(*cells, _seconds(each.seconds), _seconds(fitted), error)
    return table


def summary_of(machine: Machine, measured: Sequence[Measurement]) -> Table:
    """The fitted figures, and how far the formulas are from the measurements they were fitted to."""
    table = Table("figure", "value", "median error", title=f"{machine.name}: figures", box=box.SIMPLE_HEAD)
    exchanged = {each.what for each in measured} - {"product", "memory"}
    memory = _usual_error(machine, measured, {"memory"})
    table.add_row("memory bandwidth", _amount(machine.memory_bandwidth, "B/s"), memory)
    table.add_row("kernel", _seconds(machine.kernel_s), memory)
    for dtype in dict.fromkeys(each.dtype for each in measured if each.what == "product"):
        rate = _amount(machine.matmul_flops(dtype), "FLOP/s")
        some = [each for each in measured if each.dtype == dtype]
        table.add_row(f"products of {dtype}", rate, _usual_error(machine, some, {"product"}))
    table.add_row("half of it at", _amount(machine.matmul_half_flops, "FLOP"), "")
    if exchanged:
        error = _usual_error(machine, measured, exchanged)
        table.add_row("link bandwidth", _amount(machine.intra.bandwidth, "B/s"), error)
        table.add_row("link latency", _seconds(machine.intra.latency_s), error)
        table.add_row("link ramp", _amount(machine.intra.ramp_bytes, "B"), error)
    return table


def _usual_error(machine: Machine, measured: Sequence[Measurement], what: set[str]) -> str:
    errors = [abs(predicted_s(machine, each) / each.seconds - 1) for each in measured if each.what in what]
    return f"{100 * statistics.median(errors):.0f} %"


def _seconds(seconds: float) -> str:
    size, unit = next((pair for pair in _UNITS if seconds >= pair[0]), _UNITS[-1])
    return f"{seconds / size:.3g} {unit}"


def _amount(number: float, unit: str) -> str:
    size, prefix = next((pair for pair in _PREFIXES if number >= pair[0]), (1.0, ""))
    return f"{number / size:.3g} {prefix}{unit}"
