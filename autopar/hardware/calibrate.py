"""Measure the devices at hand, and write their machine as a file that `Cluster.load` reads.

devices  ->  measurements  ->  Machine, and a table of what was measured against what its formulas say
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from autopar.errors import InvalidArgument, Unsupported
from autopar.hardware.cluster import Cluster, DeviceKind
from autopar.hardware.machine import Link, Machine
from autopar.hardware.measure import PIECE_BYTES, WRITTEN_SHARE, Effort, Measurement, Series, series_of

_OF_KERNELS = {"reduction": "reducing_share", "convolution": "convolution_share", "pieces": "piece_bytes"}
"""Measured of GPUs alone, and the figure that each gives."""
_OF_ONE_HOST = {"product", "in step", "memory", "at once", "dispatch", "execution", *_OF_KERNELS}
"""Figures that are measured without any exchange between devices."""
_ESSENTIAL = {"product", "memory"}
_NOT_MEASURED = (
    "inter", "domain", "product_workspace_bytes", "batched_share", "hidden_share", "schedules_for_latency",
    "schedules_for_memory", "product_sums", "fuses_products", "holds_rows", "transposes_operands", "erf_flops",
    "exponentials", "widens_bfloat16", "scatters_sums", "copies_joined", "masks_ragged_products", "transposes_kernels",
    "combined_bytes", "fuses", "keeps_exponentials", "launch_s", "narrow_share", "unaligned_share", "compiler_share",
    "host_bandwidth", "host_memory_bytes", "channels_last", "gathers_outermost", "copies_state", "computes_narrower",
    "chip_bytes", "cores",
)  # fmt: skip
_UNITS = ((1, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def add_calibrate_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `autopar calibrate`."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the machine to FILE, for autopar.Cluster.load")
    parser.add_argument("--quick", action="store_true", help="few sizes and short loops: seconds, and larger errors")


def run_calibrate(arguments: argparse.Namespace) -> int:
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

    def kept(measured: Sequence[Measurement]) -> None:
        if arguments.json is not None:
            fit_machine(devices, measured).save(arguments.json)

    measured = measure(devices, quick=arguments.quick, shown=shown, kept=kept)
    machine = fit_machine(devices, measured)
    console.print(table_of(machine, measured), summary_of(machine, measured))
    if arguments.json is not None:
        console.print(f'autopar.Cluster.load("{arguments.json}") is one host of it.', soft_wrap=True)
    return 0


def measure(
    devices: Sequence[Any],
    *,
    quick: bool = False,
    shown: Callable[[Sequence[Series]], Sequence[Series]] = lambda series: series,
    kept: Callable[[Sequence[Measurement]], None] = lambda measured: None,
) -> list[Measurement]:
    """Measure devices of one process and one kind.

    `shown` may tell the user about each series as it comes, `kept` keep all measurements so far, once a machine can be
    fitted to them: who is cut off then has them.
    """
    Cluster.from_devices(devices)  # of one kind, and there
    effort = Effort.of(quick=quick)
    found: list[Measurement] = []
    missing = sorted(_ESSENTIAL)
    for one in shown(series_of(devices, effort, quick=quick)):
        found += _measured(one, effort)
        missing = sorted(_ESSENTIAL - {each.what for each in found})
        if not missing:
            kept(found)
    if missing:
        raise Unsupported(
            f"No {' and no '.join(missing)} could be measured, which a machine file needs. See the warnings above for "
            "what the devices said, and run again when they are free."
        )
    return found


def _measured(series: Series, effort: Effort) -> list[Measurement]:
    """Return the measurements of a series; none, with a warning, where a GPU or its libraries refuse."""
    try:
        return series.measure(effort)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition("\n")[0]
        warnings.warn(f"{series.name} could not be measured: {reason}", stacklevel=2)
        return []


def fit_machine(devices: Sequence[Any], measured: Sequence[Measurement]) -> Machine:
    """The machine that these devices are a host of; what was not measured is the library's for their kind, if any."""
    kind = Cluster.from_devices(devices).kind
    known = Machine.find(kind)
    rates = fit_rates(measured)
    in_step = fit_in_step_share(measured)
    exchanged = [each for each in measured if each.what not in _OF_ONE_HOST]
    starts_s = [each.seconds for each in measured if each.what == "dispatch"]
    between_s = [each.seconds for each in measured if each.what == "execution"]
    concurrent = fit_concurrent_devices(measured)
    base = Machine.named("cpu") if known is None else known
    intra = fit_link(exchanged) if exchanged else base.intra
    peaks, shares = _peaks(base if known is not None and kind != "cpu" else None, rates.matmul_flops)
    here = f"measured on {len(devices)} x {kind} with jax {jax.__version__}"
    not_measured = f"not measured: as {base.name}"
    found = replace(
        base.within(_memory_bytes(devices, base)),
        name=f"measured-{kind.lower().replace(' ', '-')}",
        devices_per_host=len(devices),
        kind=kind.lower(),
        memory_bandwidth=rates.memory_bandwidth,
        peak_flops=peaks,
        matmul_share=shares,
        matmul_half_flops=rates.matmul_half_flops,
        kernel_s=rates.kernel_s,
        intra=intra,
        domain=base.domain if known is not None and kind != "cpu" and not base.domain % len(devices) else len(devices),
        in_step_share=base.in_step_share if in_step is None else in_step,
        dispatch_s=statistics.median(starts_s) if starts_s else base.dispatch_s,
        execution_s=statistics.median(between_s) if between_s else base.execution_s,
        concurrent_devices=0.0 if concurrent is None else concurrent,
        sources={
            **dict.fromkeys(("memory_bandwidth", "matmul_share", "matmul_half_flops", "kernel_s"), here),
            "dispatch_s": here if starts_s else not_measured,
            "execution_s": here if between_s else not_measured,
            "in_step_share": not_measured if in_step is None else here,
            "concurrent_devices": "one device shares with none" if concurrent is None else here,
            "memory_bytes": "told by the device or the operating system",
            "peak_flops": not_measured if peaks.keys() & base.peak_flops.keys() and kind != "cpu" else here,
            "intra": here if exchanged else not_measured,
            **dict.fromkeys((*_NOT_MEASURED, *_OF_KERNELS.values()), not_measured),
        },
    )
    kernels = fit_kernels(found, measured)
    return replace(found, **kernels, sources={**found.sources, **dict.fromkeys(kernels, here)})


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
    """Return the bytes of one device: its virtual devices share the memory of a host."""
    told = DeviceKind.of(devices[0]).memory_bytes
    if told:
        return told
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
    for each in (one for one in measured if one.what not in ("at once", "execution")):
        fitted = predicted_s(machine, each)
        error = f"{100 * (fitted / each.seconds - 1):+.0f} %"
        cells = each.what, each.dtype, str(each.group_size), _amount(each.nbytes, "B")
        table.add_row(*cells, _seconds(each.seconds), _seconds(fitted), error)
    return table


def summary_of(machine: Machine, measured: Sequence[Measurement]) -> Table:
    """The fitted figures, and how far the formulas are from the measurements they were fitted to."""
    table = Table("figure", "value", "median error", title=f"{machine.name}: figures", box=box.SIMPLE_HEAD)
    exchanged = {each.what for each in measured} - _OF_ONE_HOST
    memory = _usual_error(machine, measured, {"memory"})
    table.add_row("memory bandwidth", _amount(machine.memory_bandwidth, "B/s"), memory)
    table.add_row("kernel", _seconds(machine.kernel_s), memory)
    for dtype in dict.fromkeys(each.dtype for each in measured if each.what == "product"):
        rate = _amount(machine.matmul_flops(dtype), "FLOP/s")
        some = [each for each in measured if each.dtype == dtype]
        table.add_row(f"products of {dtype}", rate, _usual_error(machine, some, {"product"}))
    within = _usual_error(machine, measured, {"in step"})
    table.add_row("products in a step, of that rate", f"{100 * machine.in_step_share:.0f} %", within)
    _add_kernels(table, machine, measured)
    table.add_row("half of it at", _amount(machine.matmul_half_flops, "FLOP"), "")
    table.add_row("start of an executable", _seconds(machine.dispatch_s), "")
    table.add_row("one executable more", _seconds(machine.execution_s), "")
    shared = f"{machine.concurrent_devices:g} of {machine.devices_per_host}" if machine.concurrent_devices else "no"
    table.add_row("devices that take a host", shared, _usual_error_at_once(machine, measured))
    if exchanged:
        error = _usual_error(machine, measured, exchanged)
        table.add_row("link bandwidth", _amount(machine.intra.bandwidth, "B/s"), error)
        table.add_row("link latency", _seconds(machine.intra.latency_s), error)
        table.add_row("link ramp", _amount(machine.intra.ramp_bytes, "B"), error)
    return table


def _add_kernels(table: Table, machine: Machine, measured: Sequence[Measurement]) -> None:
    """Add the figures of kernels that are measured of GPUs."""
    convolved = dict.fromkeys(machine.computed_in(each.dtype) for each in measured if each.what == "convolution")
    of_types = ", ".join(f"{dtype} {100 * machine.share_of_convolutions(dtype):.0f} %" for dtype in convolved)
    rows = (
        ("reduction", "reductions, of the bandwidth", f"{100 * machine.reducing_share:.0f} %"),
        ("convolution", "convolutions, of products in a step", of_types),
        ("pieces", "written in the time of", _amount(machine.piece_bytes, "B")),
    )
    for what, name, value in rows:
        if error := _usual_error(machine, measured, {what}):
            table.add_row(name, value, error)


def _usual_error_at_once(machine: Machine, measured: Sequence[Measurement]) -> str:
    """Return how far devices at once are usually from what they take alone, by the share that they have then."""
    some = [each for each in measured if each.what == "at once"]
    if not some:
        return ""
    most = max(some, key=lambda each: each.group_size)
    errors = [abs(machine.idle_share(each.group_size) * most.seconds / each.seconds - 1) for each in some]
    return f"{100 * statistics.median(errors):.0f} %"


def _usual_error(machine: Machine, measured: Sequence[Measurement], what: set[str]) -> str:
    errors = [abs(predicted_s(machine, each) / each.seconds - 1) for each in measured if each.what in what]
    return f"{100 * statistics.median(errors):.0f} %" if errors else ""


def _seconds(seconds: float) -> str:
    size, unit = next((pair for pair in _UNITS if seconds >= pair[0]), _UNITS[-1])
    return f"{seconds / size:.3g} {unit}"


def _amount(number: float, unit: str) -> str:
    size, prefix = next((pair for pair in _PREFIXES if number >= pair[0]), (1.0, ""))
    return f"{number / size:.3g} {prefix}{unit}"


# --- Fit a machine's figures to measurements: the least relative errors, by the formulas of `autopar.machine` ---
# memory     t = bytes / memory_bandwidth for what fits into no cache; kernel_s is what the least takes, from a cache
#     products   t = kernel_s + (w + half) / rate                                   rate by type, one half for all
#     kernels    those of `predicted_s`, one figure for each kind
#     at once    t(n of D devices) = max(n, c) / D t(D), c devices taking all of their host's compute
#     links      t = passes (n-1) α + passes (n-1)/n (ramp / bandwidth + b / bandwidth)
#
# All are linear in what is sought, or in its quotients, and none of that is negative: the best of the least
# squares over
# every subset of the unknowns, the others being zero. They are weighted in rounds so that what becomes least is the sum
# of |log(fitted / measured)|: too slow and too fast count alike, and a run that something else slowed down counts once.

_ROUNDS = 30
# Below this, errors of a logarithm count by their squares.
_EXACT = 0.01


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Return the figures of one device that the measurements give."""

    kernel_s: float
    memory_bandwidth: float
    matmul_flops: dict[str, float]
    matmul_half_flops: float


def fit_rates(measured: Sequence[Measurement]) -> Rates:
    """The rates of a device from its products and its memory traffic."""
    memory = [each for each in measured if each.what == "memory"]
    least, *others = sorted(memory, key=lambda each: each.nbytes)
    (per_byte,) = least_squares([(each.nbytes,) for each in others], [each.seconds for each in others])
    bandwidth, kernel_s = 1 / per_byte, least.seconds
    products = [replace(each, seconds=each.seconds - kernel_s) for each in measured if each.what == "product"]
    rates, half = _fit_products(products, bandwidth)
    return Rates(kernel_s=kernel_s, memory_bandwidth=bandwidth, matmul_flops=rates, matmul_half_flops=half)


def _fit_products(products: Sequence[Measurement], bandwidth: float) -> tuple[dict[str, float], float]:
    """The rate of each type, and the FLOPs at which half of it is reached."""
    of_type: dict[str, list[Measurement]] = {}
    for dtype in dict.fromkeys(each.dtype for each in products):
        every = [each for each in products if each.dtype == dtype]
        # A product that only waits for memory says nothing of the rate.
        of_type[dtype] = [each for each in every if each.seconds > 1.2 * each.nbytes / bandwidth] or every
    halves: list[float] = []
    for some in of_type.values():
        per_flop, over_s = least_squares([(each.flops, 1.0) for each in some], [each.seconds for each in some])
        halves.append(over_s / per_flop if per_flop else 0.0)
    half = float(np.median(halves))
    rates = {
        dtype: 1 / least_squares([(each.flops + half,) for each in some], [each.seconds for each in some])[0]
        for dtype, some in of_type.items()
    }
    return rates, half


def fit_in_step_share(measured: Sequence[Measurement]) -> float | None:
    """Return the median rate of large products of all types in a step, over that alone; None if none was measured."""
    within = [each for each in measured if each.what == "in step"]
    alone = {(each.dtype, each.flops): each.seconds for each in measured if each.what == "product"}
    return statistics.median(alone[each.dtype, each.flops] / each.seconds for each in within) if within else None


def fit_kernels(machine: Machine, measured: Sequence[Measurement]) -> dict[str, Any]:
    """The figures of kernels of other kinds that were measured, beside what the machine's rates say.

    Reductions have one byte of each kind alike. Shares are at most 1, and no piece is less than it writes.
    """
    of: dict[str, list[Measurement]] = {what: [each for each in measured if each.what == what] for what in _OF_KERNELS}
    found: dict[str, Any] = {}
    if of["reduction"]:
        per_byte = statistics.mean((each.seconds - machine.kernel_s) / each.nbytes for each in of["reduction"])
        found["reducing_share"] = min(1 / (per_byte * machine.memory_bandwidth), 1.0)
    for each in of["convolution"]:
        rate = machine.matmul_flops(each.dtype) * machine.in_step_share
        multiplied_s = max(each.seconds - each.nbytes / machine.memory_bandwidth, each.seconds / 2)
        shares = found.setdefault("convolution_share", dict(machine.convolution_share))
        shares[machine.computed_in(each.dtype)] = min(each.flops / rate / multiplied_s, 1.0)
    for each in of["pieces"]:
        taken = (each.seconds - machine.kernel_s) * machine.memory_bandwidth - each.nbytes * (1 - WRITTEN_SHARE)
        found["piece_bytes"] = max(PIECE_BYTES * taken / (each.nbytes * WRITTEN_SHARE), PIECE_BYTES)
    return found


def fit_concurrent_devices(measured: Sequence[Measurement]) -> float | None:
    """How many devices take all of their host's compute: 0 where each has its own, None where there is one device.

    Work on n of D devices takes max(n, c) / D of the seconds with all of them at work; c is one of the n measured.
    """
    seconds = {each.group_size: each.seconds for each in measured if each.what == "at once"}
    if len(seconds) < 2:
        return None
    most = max(seconds)

    def error(concurrent: int) -> float:
        shares = ((n, max(n, concurrent) / most) for n in seconds)
        return sum(abs(math.log(share * seconds[most] / seconds[n])) for n, share in shares)

    best = min(seconds, key=error)
    return 0.0 if best == most else float(best)


def fit_link(measured: Sequence[Measurement]) -> Link:
    """One level of the network from collectives inside it, and from transfers."""
    rows = [_ring_row(each) for each in measured]
    latency_s, ramp_s, per_byte = least_squares(rows, [each.seconds for each in measured])
    bandwidth = 1 / per_byte if per_byte else max(each.nbytes / each.seconds for each in measured)
    return Link(latency_s=latency_s, bandwidth=bandwidth, ramp_bytes=ramp_s * bandwidth)


def _ring_row(each: Measurement) -> tuple[float, float, float]:
    """The factors of latency, of ramp / bandwidth, and of 1 / bandwidth."""
    if each.what in ("transfer", "collective-permute"):
        return 1.0, 1.0, each.nbytes
    passes, n = 2 if each.what == "all-reduce" else 1, each.group_size
    return passes * (n - 1), passes * (n - 1) / n, passes * (n - 1) / n * each.nbytes


def predicted_s(machine: Machine, each: Measurement) -> float:
    """Return the seconds that the machine's formulas give a measured work."""
    if each.what == "product":
        return machine.matmul_s(each.flops, each.nbytes, each.dtype)
    if each.what == "in step":
        return machine.matmul_s(each.flops / machine.in_step_share, each.nbytes, each.dtype)
    if each.what == "memory":
        return machine.memory_s(each.nbytes)
    if each.what == "reduction":
        return machine.kernel_s + each.nbytes / (machine.memory_bandwidth * machine.reducing_share)
    if each.what == "convolution":
        rate = machine.matmul_flops(each.dtype) * machine.in_step_share * machine.share_of_convolutions(each.dtype)
        return each.flops / rate + each.nbytes / machine.memory_bandwidth
    if each.what == "pieces":
        taken = 1 - WRITTEN_SHARE + WRITTEN_SHARE * machine.piece_bytes / PIECE_BYTES
        return machine.memory_s(taken * each.nbytes)
    if each.what == "dispatch":
        return machine.dispatch_s
    if each.what == "transfer":
        return machine.transfer_s(each.nbytes, same_host=True)
    return machine.collective_s(each.what, each.nbytes, each.group_size)


def least_squares(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """The x ≥ 0 for which the sum of |log(rows · x / seconds)| is about the least."""
    matrix, expected = np.asarray(rows, float), np.asarray(seconds, float)
    scale, found = expected, np.zeros(matrix.shape[1])
    for _ in range(_ROUNDS):
        found = _nonnegative(matrix / scale[:, None], expected / scale)
        fitted = np.maximum(matrix @ found, 1e-6 * expected)
        # (measured - fitted)² / scale² is |log(measured / fitted)|, to first order in the change of fitted.
        logs = np.log(expected / fitted)
        mean = np.where(np.abs(logs) < 1e-6, fitted, (expected - fitted) / np.where(logs == 0, 1, logs))
        scale = np.sqrt(fitted * mean * np.maximum(np.abs(logs), _EXACT))
    return tuple(float(x) for x in found)


def _nonnegative(matrix: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """The least squares over the best subset of columns that gives no negative."""
    columns = range(matrix.shape[1])
    # Bytes and counts differ by nine digits: columns of one size are solved better.
    sizes = np.linalg.norm(matrix, axis=0)
    best, least = np.zeros(len(columns)), math.inf
    for subset in itertools.chain.from_iterable(itertools.combinations(columns, n + 1) for n in columns):
        chosen = list(subset)
        found = np.linalg.lstsq(matrix[:, chosen] / sizes[chosen], expected, rcond=None)[0] / sizes[chosen]
        error = float(np.sum((matrix[:, chosen] @ found - expected) ** 2))
        if (found >= 0).all() and error < least * (1 - 1e-12):
            best, least = np.zeros(len(columns)), error
            best[chosen] = found
    return best
