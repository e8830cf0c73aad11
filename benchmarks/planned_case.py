"""Plan a model for a cluster by one method, and say how long a step takes there: no device is needed.

    Workload, Cluster, method  ->  Row

Methods, beside the search of everything:

    data         every GPU holds the state and computes on a part of the batch
    zero3        the same, the state divided (Rajbhandari et al. 2020)
    megatron     the best of a few divisions into data, tensor and pipeline parallelism (Narayanan et al. 2021)
    intra-only   any sharding on one mesh of all devices
    inter-only   a pipeline of stages of one device each, with as many layers in each
    equal-mesh   and equal-layer and equal-operator: the search without one of its decisions (`stage_ablations.py`)

Data, zero3, megatron and inter-only are by hand (`autopar.Megatron`, candidates in `hand_candidates.py`). All plans may
use the same share of a GPU's memory, that of `Auto` by default: the rest is for CUDA's context, buffers of NCCL, and
what fragments. A plan that needs more is out of memory: its row tells the bytes of the leanest plan, and no time.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import autopar
from autopar.errors import InvalidArgument, MemoryTooSmall, NotSplittable
from benchmarks.hand_candidates import HAND_METHODS, hand_candidates, replica_bytes
from benchmarks.models.sizes import closest
from benchmarks.models.workload import Workload
from benchmarks.stage_ablations import ABLATIONS, ablated_plan
from benchmarks.weak_scaling_rows import Row, row_of

METHODS = ("auto", *HAND_METHODS, "intra-only", *ABLATIONS)
_ROWS = 8
_SHARE_OF_MEMORY = 0.9
_TIME_LIMIT_S = 300.0
"""More than the default: models whose layers are all different need it, and a busy machine."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Timed:
    """A plan, the seconds of its step, and the bytes of the device that holds the most."""

    plan: autopar.Plan
    step_time_s: float
    peak_bytes: float
    fits: bool


@dataclass(frozen=True, kw_only=True)
class _OutOfMemory:
    """The reason that there is no plan, and the least bytes that a GPU would need, if they are known."""

    why: str
    peak_bytes: float | None = None


def planned_row(
    workload: Workload, cluster: autopar.Cluster, method: str | autopar.Plan, *, num_microbatches: int | None = None
) -> Row:
    """The modelled step of a model on a cluster, by a method of `METHODS` or by a plan.

    Raises `InvalidArgument` for a method that there is not or that does not fit the model, and for a plan that was made
    for another cluster.
    """
    begin = time.perf_counter()
    name = closest("The method", method, METHODS) if isinstance(method, str) else f"plan of {method.method}"
    found: _Timed | _OutOfMemory
    if isinstance(method, autopar.Plan):
        found = _timed(_traced(workload, cluster).plan(method), cluster)
    elif name in HAND_METHODS:
        found = _by_hand(workload, cluster, name, num_microbatches)
    else:
        found = _searched(workload, cluster, name, num_microbatches)
    plan_time_s = time.perf_counter() - begin
    if isinstance(found, _OutOfMemory):
        return row_of(
            workload,
            gpus=cluster.num_devices,
            method=name,
            step_time_s=None,
            peak_bytes=found.peak_bytes,
            plan=f"out of memory: {found.why}",
            plan_time_s=plan_time_s,
        )
    bounded = found.plan.sharding or found.plan.certificate
    return row_of(
        workload,
        gpus=cluster.num_devices,
        method=name,
        step_time_s=found.step_time_s if found.fits else None,
        peak_bytes=found.peak_bytes,
        plan_time_s=plan_time_s,
        lower_bound_s=None if bounded is None else bounded.lower_bound_s,
        plan=summary(found.plan) if found.fits else f"out of memory: {summary(found.plan)}",
    )


def summary(plan: autopar.Plan) -> str:
    """The decisions of a plan that go into one line, like "2 stages x 64 microbatches, 1f1b: data=1 model=4 (x2)"."""
    shapes = Counter(" ".join(f"{axis}={size}" for axis, size in zip(m.axis_names, m.shape)) for m in plan.meshes)
    meshes = ", ".join(shape if count == 1 else f"{shape} (x{count})" for shape, count in shapes.items())
    schedule = f", {plan.schedule}" if plan.num_stages > 1 else ""
    parts = [(plan.num_stages, "stage"), (plan.num_microbatches, "microbatch")]
    words = [f"{count} {noun if count == 1 else noun + ('es' if noun.endswith('h') else 's')}" for count, noun in parts]
    return f"{' x '.join(words)}{schedule}: {meshes}"


# --- plans by hand ------------------------------------------------------------------------------------------------


def _by_hand(
    workload: Workload, cluster: autopar.Cluster, name: str, num_microbatches: int | None
) -> _Timed | _OutOfMemory:
    """The fastest of the candidates that fits, or the leanest; of one degree, the first that fits."""
    if name == "data" and replica_bytes(workload) > cluster.machine.memory_bytes:
        return _OutOfMemory(why="the state and its gradients alone", peak_bytes=replica_bytes(workload))
    tried: list[_Timed] = []
    for candidate in hand_candidates(name, workload, cluster, num_microbatches):
        used = cluster.with_devices(math.prod((candidate.data or 1, candidate.tensor, candidate.pipeline)))
        try:
            tried.append(_timed_by_hand(workload, used, candidate))
        except NotSplittable:  # Groups of tokens do not divide into as many microbatches as examples do.
            continue
        if tried[-1].fits and (name != "megatron" or cluster.num_devices == 1):
            break
    if not tried:
        raise InvalidArgument(
            f"The batch of {workload.batch_size} does not divide among {cluster.num_devices} GPUs, or not into the "
            "microbatches that were asked for. Give numbers that divide it, or another method."
        )
    fitting = [each for each in tried if each.fits]
    if fitting:
        return min(fitting, key=lambda each: each.step_time_s)
    return min(tried, key=lambda each: each.peak_bytes)


@cache
def _timed_by_hand(workload: Workload, cluster: autopar.Cluster, candidate: autopar.Megatron) -> _Timed:
    """The same for the same degrees: several methods have them on few GPUs."""
    return _timed(_traced(workload, cluster).plan(candidate), cluster)


# --- searches -----------------------------------------------------------------------------------------------------


def _searched(
    workload: Workload, cluster: autopar.Cluster, name: str, num_microbatches: int | None
) -> _Timed | _OutOfMemory:
    """The plan of a search, or why there is none. One GPU gets the fewest microbatches that fit into its memory."""
    counts: list[int | None] = [num_microbatches]
    if num_microbatches is None and cluster.num_devices == 1:
        counts = list(_counts(workload))
    reason, traced = "", _traced(workload, cluster)
    for count in counts:
        options: dict[str, Any] = {"num_microbatches": count, "batch_statistics": workload.batch_statistics}
        options["time_limit_s"] = _TIME_LIMIT_S
        options["remat"] = False  # The models say themselves what is computed again.
        method = autopar.Auto(num_stages=1 if name == "intra-only" else None, **options)
        try:
            ablated = name in ABLATIONS and cluster.num_devices > 1
            found = ablated_plan(traced, cluster, method, name) if ablated else traced.plan(method)
        except MemoryTooSmall as error:
            reason = error.shortage
        else:
            return _timed(found, cluster)
    return _OutOfMemory(why=reason)


def _counts(workload: Workload) -> Iterator[int]:
    """Numbers of microbatches, from few to many."""
    rows = _ROWS
    while rows:
        if workload.batch_size % rows == 0:
            yield workload.batch_size // rows
        rows //= 2


@lru_cache(maxsize=2)
def _traced(workload: Workload, cluster: autopar.Cluster) -> autopar.Traced:
    step = autopar.parallelize(workload.step, donate_argnums=(0,), cluster=cluster)
    return step.trace(workload.abstract_state, workload.abstract_batch)


def _timed(planned: autopar.Planned, cluster: autopar.Cluster) -> _Timed:
    sharding = planned.plan.sharding
    room = _SHARE_OF_MEMORY * cluster.machine.memory_bytes
    if sharding is None:
        report = planned.simulate(cluster)
        return _Timed(
            plan=planned.plan,
            step_time_s=report.step_time_s,
            peak_bytes=report.peak_bytes,
            fits=report.peak_bytes <= room,
        )
    # One program on one mesh: the search has priced it as it runs.
    if sharding.figures != cluster.machine.name or planned.plan.num_devices != cluster.num_devices:
        raise InvalidArgument(
            f"The plan was made for {planned.plan.num_devices} devices of {sharding.figures!r}, the cluster has "
            f"{cluster.num_devices} of {cluster.machine.name!r}. Give the cluster that it was made for."
        )
    return _Timed(
        plan=planned.plan,
        step_time_s=sharding.step_time_s,
        peak_bytes=sharding.peak_bytes,
        fits=sharding.peak_bytes <= room,
    )
