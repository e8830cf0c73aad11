"""Hold `Auto()` against every plan of small steps: all cuts, submeshes, microbatches, schedules and recomputed stages.

    python -m benchmarks.enumerated_plans --seeds 200 --json enumerated.json

A seed draws a residual network of three layers, and two hosts of two devices with their rates: for some stages are the
best, for others one mesh, or one device. Every other seed draws little memory as well, so that some stages have to be
computed again. Each plan that fits is simulated. The search must find none that takes more than 1.001 of the fastest of
these, and its bound must not be above it; it may do better, by what is not enumerated: layouts chosen for less memory,
other schedules and one program on one mesh. Exits with 1 where either does not hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import track

import autopar
from autopar.compiler.inter_op.stage_costs import Stage, Timing
from autopar.compiler.inter_op.submeshes import Submesh, cluster_shape, place_submeshes
from autopar.compiler.memory.estimate import bytes_with_headroom
from autopar.compiler.planning.stages.layer_costs import LayoutChoice
from autopar.compiler.planning.stages.pipeline_candidate import PipelineCandidate
from autopar.compiler.planning.stages.sharded_plan import shard_candidate
from autopar.compiler.planning.stages.stage_costs import KnownLayers, RangeCosts
from autopar.compiler.planning.stages.stage_problem import StageProblem
from autopar.compiler.planning.stages.virtual_stages import make_virtual_stages
from autopar.errors import MemoryTooSmall
from autopar.hardware.machine import Link, Machine
from autopar.ir.clocks import Hosts
from autopar.ir.schedules import get_schedule

LAYERS, ROWS, TIGHT_ROWS, DEVICES = 3, 4, 512, 4
COUNTS = (1, 2, 4)
SCHEDULES = ("1f1b", "eager-1f1b", "gpipe", "zero-bubble")
ALLOWED = 1.001


@dataclass(frozen=True, kw_only=True)
class Row:
    """A seed: milliseconds of the search's plan and of the fastest enumerated one, and the search's bound."""

    seed: int
    memory_bytes: float | None
    searched_ms: float
    bound_ms: float
    enumerated_ms: float
    enumerated: str
    plans: int
    seconds: float

    @property
    def is_right(self) -> bool:
        """True if no enumerated plan is faster, and none is below the bound."""
        return self.searched_ms <= ALLOWED * self.enumerated_ms and self.bound_ms <= self.enumerated_ms * (1 + 1e-9)


def train_step(params: Any, batch: Any) -> Any:
    """One step of gradient descent of a residual network."""

    def loss_of(params: Any) -> jax.Array:
        h = batch["x"]
        for i, layer in enumerate(params):
            with jax.named_scope(f"h_{i}"):
                h = h + jnp.tanh(h @ layer["up"]) @ layer["down"]
        return jnp.mean((h - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def drawn_arguments(draw: random.Random, rows: int) -> tuple[Any, Any]:
    """Return the shapes of parameters of drawn widths, and of a batch."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    widths = [draw.choice((64, 128, 512)) for _ in range(LAYERS)]
    params = [{"up": array(64, width), "down": array(width, 64)} for width in widths]
    return params, {"x": array(rows, 64), "y": array(rows, 64)}


def drawn_cluster(draw: random.Random) -> autopar.Cluster:
    """Return hosts of two devices with drawn rates: now stages are the best, now one mesh, now one device."""

    def link(lowest: float, highest: float) -> Link:
        return Link(latency_s=10 ** draw.uniform(-7, -5), bandwidth=10 ** draw.uniform(lowest, highest), ramp_bytes=0.0)

    flops = 10 ** draw.uniform(8, 11)
    machine = replace(
        Machine.named("p3.16xlarge"),
        name="drawn",
        devices_per_host=2,
        domain=2,
        intra=link(8, 10),
        inter=link(6, 9),
        peak_flops={"float32": flops},
        matmul_share={"float32": 1.0},
        matmul_half_flops=0.0,
        kernel_s=10 ** draw.uniform(-8, -6),
        dispatch_s=10 ** draw.uniform(-8, -5),
        product_workspace_bytes=0.0,
        sources={},
    )
    return autopar.Cluster(num_devices=DEVICES, machine=machine)


def every_partition(num_layers: int) -> Iterator[list[tuple[tuple[int, int], Submesh]]]:
    """Yield all runs of layers, two at least, on submeshes that there is place for: one is one program."""
    sizes = [Submesh(num_hosts=1, devices_per_host=1), Submesh(num_hosts=1, devices_per_host=2)]
    sizes.append(Submesh(num_hosts=2, devices_per_host=2))
    for count in range(2, num_layers + 1):
        for cuts in itertools.combinations(range(1, num_layers), count - 1):
            borders = [0, *cuts, num_layers]
            for submeshes in itertools.product(sizes, repeat=count):
                if sum(each.num_devices for each in submeshes) <= DEVICES:
                    yield list(zip(itertools.pairwise(borders), submeshes, strict=True))


def every_remat(count: int) -> list[tuple[bool, ...]]:
    """Return which of so many stages are computed again, in all ways, the fewest first."""
    return sorted(itertools.product((False, True), repeat=count), key=sum)


def simulated_times(
    traced: autopar.Traced, problem: StageProblem, num_microbatches: int
) -> Iterator[tuple[float, str]]:
    """Yield the simulated seconds of every partition that fits, by every schedule.

    Stages are computed again only where the partition does not fit otherwise: that takes no less time.
    """
    known, ranges_of = KnownLayers.of(problem), dict[bool, RangeCosts]()
    for splits in (False, True):
        again = RangeCosts(problem, *known(num_microbatches, True, splits=splits), remat=True)
        ranges_of[splits] = RangeCosts(problem, *known(num_microbatches, False, splits=splits), again=again)
    for parts in every_partition(len(ranges_of[False].layers.class_of)):
        for schedule in SCHEDULES:
            ranges = ranges_of[get_schedule(schedule).splits_weight_gradients]
            ranges.solve({submesh for _, submesh in parts})
            fitting: list[tuple[bool, ...]] = []
            for remats in every_remat(len(parts)):
                if any(all(mine or not theirs for mine, theirs in zip(remats, less)) for less in fitting):
                    continue
                candidate = _candidate(problem, ranges, parts, schedule, remats)
                sharded = None if candidate is None else shard_candidate(problem, candidate)
                if sharded is not None and sharded.fits:
                    fitting.append(remats)
                    words = f"{num_microbatches} x {schedule}: {parts}, computed again: {remats}"
                    yield traced.plan(sharded.plan).simulate().step_time_s, words


def _candidate(
    problem: StageProblem,
    ranges: RangeCosts,
    parts: Sequence[tuple[tuple[int, int], Submesh]],
    schedule: str,
    remats: Sequence[bool],
) -> PipelineCandidate | None:
    """Return a partition as the search has it; None where its submeshes find no place."""
    devices = place_submeshes([submesh for _, submesh in parts], cluster_shape(DEVICES, 2))
    if devices is None:
        return None
    stages = tuple(
        Stage(
            start=start,
            stop=stop,
            submesh=submesh,
            cost=ranges.cost(start, stop, submesh, LayoutChoice(0.0, remat=remat)),
        )
        for ((start, stop), submesh), remat in zip(parts, remats, strict=True)
    )
    timing = Timing(schedule=get_schedule(schedule), num_microbatches=ranges.layers.num_microbatches)
    return PipelineCandidate(
        layers=ranges.layers,
        timing=timing,
        bound_s=0.0,
        stages=stages,
        virtual_stages=make_virtual_stages(ranges, stages, devices, timing),
        hosts=Hosts.of_devices(devices, problem.hardware),
    )


def compare(seed: int) -> Row:
    """Search and enumerate the plans of a seed. Where nothing fits, the time of both is infinite."""
    start_s, draw = time.perf_counter(), random.Random(seed)
    cluster, is_tight = drawn_cluster(draw), seed % 2 == 1
    arguments = drawn_arguments(draw, TIGHT_ROWS if is_tight else ROWS)
    traced = autopar.parallelize(train_step, cluster=cluster).trace(*arguments)
    method, memory = autopar.Auto(), None
    if is_tight:
        two = autopar.Auto(num_stages=2, num_microbatches=2, remat=False)
        memory = bytes_with_headroom(draw.uniform(0.4, 1.0) * traced.plan(two).simulate().peak_bytes)
        method = autopar.Auto(memory=memory)
    problem = StageProblem(trace=traced.trace, method=method, hardware=cluster, cache_directory=None)
    times = [each for count in COUNTS for each in simulated_times(traced, problem, count)]
    best_s, words = min(times, default=(math.inf, "nothing fits"))
    try:
        found = traced.plan(method).plan.certificate
        assert found is not None
        searched_s, bound_s = found.step_time_s, found.lower_bound_s
    except MemoryTooSmall:
        searched_s, bound_s = math.inf, 0.0
    return Row(
        seed=seed,
        memory_bytes=memory,
        searched_ms=1e3 * searched_s,
        bound_ms=1e3 * bound_s,
        enumerated_ms=1e3 * best_s,
        enumerated=words,
        plans=len(times),
        seconds=time.perf_counter() - start_s,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Compare all seeds, and print a line for each that is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=200, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every seed; those that it has stand")
    args = parser.parse_args(argv)
    kept = json.loads(args.json.read_text(encoding="utf-8")) if args.json and args.json.exists() else []
    rows = {row["seed"]: Row(**row) for row in kept}
    seeds = range(args.first, args.first + args.seeds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in track(seeds, description="seeds", console=Console(stderr=True), transient=True):
            if seed not in rows:
                rows[seed] = compare(seed)
                if not rows[seed].is_right:
                    print(f"WRONG {rows[seed]}", flush=True)
                if args.json:
                    text = json.dumps([asdict(row) for row in rows.values()], indent=1)
                    args.json.write_text(text + "\n", encoding="utf-8")
                jax.clear_caches()
    mine = [rows[seed] for seed in seeds]
    right, tight = [row for row in mine if row.is_right], [row for row in mine if row.memory_bytes is not None]
    behind = [row for row in mine if row.searched_ms < (1 - 1e-9) * row.enumerated_ms]
    again, none = sum("True" in row.enumerated for row in tight), sum(not row.plans for row in tight)
    print(
        f"{len(right)} of {len(mine)} right of {sum(row.plans for row in mine)} plans. {len(tight)} have little "
        f"memory: in {again} the fastest enumerated plan computes stages again, in {none} none fits. The search has a "
        f"faster one in {len(behind)}; {sum(row.seconds for row in mine):.0f} s"
    )
    return int(len(right) < len(mine))


if __name__ == "__main__":
    sys.exit(main())
