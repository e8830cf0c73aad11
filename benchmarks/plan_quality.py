"""Hold `autopar.Auto` against the best of the plans that practitioners write by hand, model by model, mesh by mesh.

    python -m benchmarks.plan_quality --models mlp gpt --meshes 8 2x4 --budgets inf 0.5 --json plan_quality.json
    python -m benchmarks.plan_quality --target h100 --sizes large      (compiles ahead of time: needs autopar[gpu-aot])
    python -m benchmarks.plan_quality --target h100 --sizes large --layers 2 --dtype bfloat16   (float32 parameters)
    python -m benchmarks.plan_quality --timed --figures machine.json   (written by `autopar calibrate --json FILE`)

Every plan by hand is compiled, on every mesh whose axes may stand for those of the plan; the best is the one of least
modelled time (`compiled_figures.py`) that keeps within the memory budget, and, apart from it, the one that sends the
fewest bytes. These are often two plans, and no plan need keep below both; what may not be is a plan by hand that takes
less time and sends fewer bytes than ours, and they are counted (`beaten_by`). Where ours is faster, what it sends,
writes and keeps in memory stands beside what the fastest by hand does: if it needs more, the model may not see that.
Budgets are shares of what pure data parallelism keeps in memory. With `--timed` ours takes steps in turn with the three
plans by hand of least modelled time, on the accelerators that are here; the ratio is the median over rounds. With
`--figures` ours is planned, and all modelled, by what was measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
# A device of the CPU runs collectives of different groups at once, each of which holds a thread until all are there.
# With as many threads as devices, XLA's default, some wait for a device that has no thread left to join them.
os.environ.setdefault("PJRT_NPROC", "32")

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

import autopar
from autopar.compiler.analysis.aot_targets import aot_devices
from autopar.errors import AutoparError
from autopar.hardware.machine import Machine
from benchmarks.compiled_figures import CompiledFigures, compile_program, figures_of_compiled
from benchmarks.hand_plans import HandPlan, compile_by_hand, hand_plans
from benchmarks.models import LARGE, MODELS
from benchmarks.models.model import Model, computing_in
from benchmarks.overhead import describe_machine, median_interval

NUM_DEVICES = 8
MESHES = ("8", "2x4", "4x2", "2x2x2")
NUM_TIMED = 3
OURS = "autopar"
MOST = 1.02
"""Most that a faster plan may need of bytes sent, written or kept, in multiples of the need of the fastest by hand."""
BESIDE_FASTEST = ("sent_ratio", "written_ratio", "memory_ratio")


@dataclass(frozen=True, kw_only=True)
class ByHand:
    """A plan by hand as compiled."""

    plan: HandPlan
    compiled: jax.stages.Compiled
    figures: CompiledFigures


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model on one mesh within one budget: ours against theirs. Ratios below 1 are in our favour.

    There are none where no plan by hand keeps within the budget, nor where ours does not.
    """

    model: str
    mesh: str
    budget: float  # bytes, infinity for none
    fastest: str  # plan by hand of least modelled time; "" if none keeps within the budget
    fastest_ms: float
    theirs: CompiledFigures | None  # of that plan
    fewest: str  # plan by hand that sends the fewest bytes
    fewest_mb: float
    beaten_by: str  # plan by hand that takes less time and sends fewer bytes than ours; "" if there is none
    ours: CompiledFigures | None
    planned_ms: float
    plan_s: float  # time to trace and plan
    measured: Mapping[str, float]  # median ms of every plan that was timed
    measured_ratio: float  # of ours and the fastest of these; NaN if nothing was timed
    interval: tuple[float, float]  # 95 % of that median
    message: str  # why there is no plan

    @property
    def time_ratio(self) -> float:
        return 1e3 * self.ours.modelled_s / self.fastest_ms if self.ours and self.fastest and self.within else math.nan

    @property
    def bytes_ratio(self) -> float:
        """A plan that sends nothing counts as one that sends a kilobyte."""
        if not (self.ours and self.fewest and self.within):
            return math.nan
        return max(self.ours.sent_bytes, 1e3) / max(1e6 * self.fewest_mb, 1e3)

    @property
    def sent_ratio(self) -> float:
        return self._beside_fastest("sent_bytes")

    @property
    def written_ratio(self) -> float:
        return self._beside_fastest("written_bytes")

    @property
    def memory_ratio(self) -> float:
        return self._beside_fastest("peak_bytes")

    def _beside_fastest(self, what: str) -> float:
        """Ours as a multiple of the fastest by hand, where ours is faster; what sends nothing, as if a kilobyte."""
        if not (self.ours and self.theirs and self.time_ratio < 1):
            return math.nan
        least = 1e3 if what == "sent_bytes" else 1.0
        return max(getattr(self.ours, what), least) / max(getattr(self.theirs, what), least)

    @property
    def within(self) -> bool:
        return self.ours is not None and self.ours.peak_bytes <= self.budget

    @property
    def missed(self) -> bool:
        """True if a plan by hand keeps within the budget, and ours does not or does not exist."""
        return bool(self.fastest) and not self.within


@dataclass(frozen=True, kw_only=True)
class Target:
    """Target of compilation, and its machine. `devices` may be abstract, of a GPU that is not here."""

    devices: Sequence[Any]
    cluster: autopar.Cluster | None  # that ours is planned for; None: the devices that are here, by their kind
    machine: Machine


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="NAME")
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), metavar="2x4")
    parser.add_argument("--budgets", nargs="+", type=float, default=[math.inf], help="shares of data parallel's memory")
    parser.add_argument("--sizes", choices=("small", "large"), default="small")
    parser.add_argument("--layers", type=int, help="of every model, or stages of a network of convolutions")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="computed in")
    parser.add_argument("--target", help="compile for this GPU instead of the devices that are here")
    parser.add_argument("--figures", type=Path, metavar="FILE", help="plan for the devices here by what they measured")
    parser.add_argument("--timed", action="store_true", help="take steps, too, on the accelerators here")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every cell")
    args = parser.parse_args(argv)
    if args.timed and args.target:
        parser.error("--timed takes steps on the devices that are here, --target compiles for others; give one of them")
    if args.timed and jax.devices()[0].platform == "cpu":
        parser.error(
            "--timed takes steps on accelerators, and the devices here are virtual ones of a CPU, whose times say "
            "nothing of those. Run it where there are GPUs or TPUs, or compare modelled times without --timed"
        )
    if args.figures and args.target:
        parser.error("--figures says what the devices here do, --target compiles for others; give one of them")
    target = target_of(args.target, args.figures)
    rows: list[Row] = []
    compiled_by_hand: dict[str, dict[str, Any]] = {}
    for name in args.models:
        depth = {} if args.layers is None else {"stages" if name == "convnet" else "layers": args.layers}
        model = MODELS[name](**{**(LARGE[name] if args.sizes == "large" else {}), **depth})
        model = model if args.dtype == "float32" else computing_in(args.dtype, model)
        theirs = list(compile_all(model, target))
        compiled_by_hand[name] = {str(each.plan): asdict(each.figures) for each in theirs}
        shares = list(itertools.product(args.meshes, args.budgets))
        for mesh, share in track(shares, description=name, console=Console(stderr=True), transient=True):
            rows.append(compare(model, mesh, share, theirs, target, args.repetitions if args.timed else 0))
            if args.json:
                result = {"machine": describe_machine(), "target": args.target or "cpu", "sizes": args.sizes}
                result |= {"dtype": args.dtype, "layers": args.layers}
                result |= {"figures": target.machine.to_data()}
                result |= {"summary": summary(rows), "rows": [*map(row_data, rows)], "by_hand": compiled_by_hand}
                args.json.write_text(json.dumps(finite(result), indent=1, allow_nan=False) + "\n")
        jax.clear_caches()
    print_table(rows)


def target_of(name: str | None, figures: Path | None = None) -> Target:
    """The devices that are here by their kind or by measured figures, or those of a target."""
    here = jax.devices()[:NUM_DEVICES]
    if name:
        cluster = autopar.Cluster(num_devices=NUM_DEVICES, kind=name)
        return Target(devices=aot_devices(name, NUM_DEVICES), cluster=cluster, machine=cluster.machine)
    if figures:
        cluster = autopar.Cluster.load(figures).with_devices(len(here))
        return Target(devices=here, cluster=cluster, machine=cluster.machine)
    return Target(devices=here, cluster=None, machine=Machine.of_kind(here[0].device_kind))


def compile_all(model: Model, target: Target) -> Iterator[ByHand]:
    plans = hand_plans(model, NUM_DEVICES)
    for plan in track(plans, description=f"{model.name} by hand", console=Console(stderr=True), transient=True):
        compiled = compile_by_hand(model, plan, target.devices)
        yield ByHand(plan=plan, compiled=compiled, figures=figures_of_compiled(compiled, target.machine))


def compare(model: Model, mesh: str, share: float, theirs: Sequence[ByHand], target: Target, repetitions: int) -> Row:
    """Plan with `Auto`, compile, and hold against the plans by hand; take `repetitions` steps of each."""
    shape = tuple(map(int, mesh.split("x")))
    budget = share * theirs[0].figures.peak_bytes  # The first is pure data parallelism.
    able = [each for each in theirs if each.plan.fits(shape) and each.figures.peak_bytes <= budget]
    able.sort(key=lambda each: each.figures.modelled_s)
    fewest = min(able, key=lambda each: each.figures.sent_bytes, default=None)
    step = autopar.parallelize(
        model.step,
        method=autopar.Auto(mesh_shape=shape, memory="off" if math.isinf(budget) else budget),
        donate_argnums=0,
        # Without a cluster plans are compiled to see that they keep the budget, and may use all of it.
        cluster=target.cluster,
    )
    start = time.perf_counter()
    ours, planned_ms, message = None, math.nan, ""
    times: dict[str, list[float]] = {}
    try:
        planned = step.trace(model.abstract_state, model.abstract_batch).plan()
        plan_s = time.perf_counter() - start
        compiled = compile_program(planned.lower().program, target.devices)
        ours = figures_of_compiled(compiled, target.machine)
        planned_ms = 1e3 * planned.plan.sharding.step_time_s
        if repetitions:
            times = time_in_turn(model, step, compiled, able[:NUM_TIMED], repetitions)
    except (AutoparError, AssertionError, NotImplementedError) as error:
        plan_s, message = time.perf_counter() - start, f"{type(error).__name__}: {error}"
    ratio, interval = ratio_to_fastest(times)
    return Row(
        model=model.name,
        mesh=mesh,
        budget=budget,
        fastest=str(able[0].plan) if able else "",
        fastest_ms=1e3 * able[0].figures.modelled_s if able else math.nan,
        theirs=able[0].figures if able else None,
        fewest=str(fewest.plan) if fewest else "",
        fewest_mb=fewest.figures.sent_bytes / 1e6 if fewest else math.nan,
        beaten_by=next((str(each.plan) for each in able if ours and beats(each.figures, ours)), ""),
        ours=ours,
        planned_ms=planned_ms,
        plan_s=plan_s,
        measured={name: 1e3 * statistics.median(seconds) for name, seconds in times.items()},
        measured_ratio=ratio,
        interval=interval,
        message=message,
    )


def beats(theirs: CompiledFigures, ours: CompiledFigures) -> bool:
    return theirs.modelled_s < ours.modelled_s and theirs.sent_bytes < ours.sent_bytes


def time_in_turn(
    model: Model,
    step: Callable[..., Any],
    ours: jax.stages.Compiled,
    theirs: Sequence[ByHand],
    repetitions: int,
) -> dict[str, list[float]]:
    """Seconds of each step of each contestant; who begins a round changes from one to the next.

    Everyone finds state and batch where its plan wants them: `ours` says where that is for `step`.
    """
    contestants: dict[str, tuple[Callable[..., Any], Any, Any]] = {}
    for each in theirs:
        state, batch = jax.device_put((model.create_state(), model.create_batch()), each.compiled.input_shardings[0])
        contestants[str(each.plan)] = (each.compiled, state, batch)
    leaves, tree = jax.tree.flatten((model.create_state(), model.create_batch()))
    assert len(leaves) == len(ours.input_shardings[0])
    state, batch = jax.tree.unflatten(tree, jax.device_put(leaves, list(ours.input_shardings[0])))
    contestants[OURS] = (step, state, batch)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for repetition in range(1 + repetitions):
        for name in names[repetition % len(names) :] + names[: repetition % len(names)]:
            run, state, batch = contestants[name]
            start = time.perf_counter()
            state, metrics = run(state, batch)
            jax.block_until_ready((state, metrics))
            if repetition:  # The first round settles.
                times[name].append(time.perf_counter() - start)
            contestants[name] = (run, state, batch)
    return times


def ratio_to_fastest(times: Mapping[str, Sequence[float]]) -> tuple[float, tuple[float, float]]:
    """The median over rounds of our time relative to that of the plan by hand which measured fastest."""
    theirs = [seconds for name, seconds in times.items() if name != OURS]
    if not theirs:
        return math.nan, (math.nan, math.nan)
    fastest = min(theirs, key=statistics.median)
    return median_interval([mine / other for mine, other in zip(times[OURS], fastest, strict=True)])


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Geometric mean and worst of every ratio, and the cells in which it is the worst."""
    result: dict[str, Any] = {}
    for what in ("bytes_ratio", "time_ratio", "measured_ratio", *BESIDE_FASTEST):
        known = {f"{row.model} {row.mesh} {_size(row.budget)}": getattr(row, what) for row in rows}
        known = {cell: ratio for cell, ratio in known.items() if not math.isnan(ratio)}
        if known:
            worst = max(known, key=known.__getitem__)
            result[what] = {
                "cells": len(known),
                "geometric_mean": statistics.geometric_mean(known.values()),
                "worst": known[worst],
                "worst_cell": worst,
                "above_most": sum(ratio > MOST for ratio in known.values()),
            }
    over = sum(row.ours is not None and not row.within for row in rows)
    return (
        result
        | {"rows": len(rows), "over_budget": over, "missed": sum(row.missed for row in rows)}
        | {"beaten": sum(bool(row.beaten_by) for row in rows)}
    )


def row_data(row: Row) -> dict[str, Any]:
    ratios = {what: getattr(row, what) for what in ("time_ratio", "bytes_ratio", *BESIDE_FASTEST)}
    return asdict(row) | ratios | {"within": row.within}


def finite(value: Any) -> Any:
    """The value with None for every number that JSON does not have: no budget, nothing measured."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key: finite(each) for key, each in value.items()}
        case list() | tuple():
            return [finite(each) for each in value]
        case _:
            return value


def print_table(rows: Sequence[Row]) -> None:
    console = Console(width=None if Console().is_terminal else 250)
    table = Table(title="autopar.Auto against the best plan by hand")
    for column in ("model", "mesh", "budget MB", "peak MB", "fewest bytes by hand", "MB", "ours", "ratio"):
        table.add_column(column, justify="left" if column in ("model", "mesh") or "hand" in column else "right")
    beside = ("sent", "written", "memory")
    for column in ("fastest by hand", "model ms", "ours", "ratio", *beside, "measured ratio", "plan s"):
        table.add_column(column, justify="left" if "hand" in column else "right")
    for row in rows:
        table.add_row(row.model, row.mesh, _size(row.budget), *_cells(row))
    console.print(table)
    counts = summary(rows)
    for what, name in (("bytes_ratio", "bytes"), ("time_ratio", "modelled time"), ("measured_ratio", "measured time")):
        if what in counts:
            mean, worst, cell = (counts[what][key] for key in ("geometric_mean", "worst", "worst_cell"))
            console.print(f"{name}: geometric mean {mean:.3f}, worst {worst:.3f} ({cell})")
    for what in BESIDE_FASTEST:
        if what in counts:
            mean, worst, cell, above = (
                counts[what][key] for key in ("geometric_mean", "worst", "worst_cell", "above_most")
            )
            console.print(
                f"where ours is faster, {what.removesuffix('_ratio')} beside the fastest by hand: geometric mean "
                f"{mean:.3f}, worst {worst:.3f} ({cell}), above {MOST} in {above} of {counts[what]['cells']}"
            )
    console.print(
        f"{counts['over_budget']} of {len(rows)} plans keep more in memory than their budget (!); "
        f"in {counts['missed']} cells a plan by hand keeps within it and ours does not; "
        f"in {counts['beaten']} one takes less time and sends fewer bytes than ours."
    )


def _cells(row: Row) -> Iterator[str]:
    """Cells of the row after model, mesh and budget."""
    if row.ours is None:
        yield from ("", row.fewest, _number(row.fewest_mb), "none", "", row.fastest, _number(row.fastest_ms))
        yield row.message[:60]
        return
    yield _number(row.ours.peak_bytes / 1e6) + "!" * (not row.within)
    yield from (row.fewest or "-", _number(row.fewest_mb))
    yield from (_number(row.ours.sent_bytes / 1e6), _number(row.bytes_ratio), row.fastest or "-")
    yield from map(_number, (row.fastest_ms, 1e3 * row.ours.modelled_s, row.time_ratio))
    yield from map(_number, (*(getattr(row, what) for what in BESIDE_FASTEST), row.measured_ratio))
    yield f"{row.plan_s:.1f}"


def _size(budget: float) -> str:
    return "any" if math.isinf(budget) else f"{budget / 1e6:.3g}"


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4g}"


if __name__ == "__main__":
    main()
