"""Cut layers into a given number of stages on submeshes of one size: as a pipeline by hand, with the best cuts.

For every cap h on what a stage may hold up (`schedule_times`), the cuts of the least sum are a shortest path,

    F_s[k] = min_j  F_(s-1)[j] + fill(j, k) + c x(j)      over j < k with hold(j, k) <= h and memory of stage s

Partitions that hold up between a and b take at least F under the cap b, and a, and what some stage does once per step:
such intervals of caps are halved, the one with the lowest bound first, until no bound is below the best partition.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.compiler.inter_op.search import StageSearch
from autopar.compiler.inter_op.stage_costs import (
    Partition,
    Stage,
    StageCost,
    StageCosts,
    Timing,
    TransferTime,
    fill_s,
    hold_s,
    in_flight,
    step_time_s,
    with_transfer_s,
)
from autopar.compiler.inter_op.submeshes import Submesh
from autopar.errors import InvalidArgument, MemoryTooSmall


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ways:
    """All ways to run all ranges of layers, indexed [start, stop, way], infinity where there is none."""

    costs: dict[tuple[int, int], Sequence[StageCost]]
    fill_s: np.ndarray
    hold_s: np.ndarray
    links_s: np.ndarray
    """[cut]"""
    timing: Timing


def search_fixed_stages(
    num_layers: int,
    num_stages: int,
    submesh: Submesh,
    stage_costs: StageCosts,
    transfer_s: TransferTime,
    *,
    timing: Timing,
    memory_bytes: float,
) -> StageSearch:
    """The partition into exactly `num_stages` stages that takes the least time; `MemoryTooSmall` if none fits."""
    ways = _ways(num_layers, submesh, stage_costs, transfer_s, timing)
    fits = [
        _fitting(ways, in_flight(timing, stages_behind=behind, num_stages=num_stages), memory_bytes)
        for behind in reversed(range(num_stages))
    ]
    once_s = min((cost.once_s for costs in ways.costs.values() for cost in costs), default=0.0)
    caps = np.unique(ways.hold_s[np.isfinite(ways.hold_s) & np.logical_or.reduce(fits)])
    best: Partition | None = None
    tried: dict[int, float] = {}

    def least_sum(place: int) -> float:
        """F under a cap; notes the partition that attains it."""
        nonlocal best
        if place not in tried:
            tried[place], stages = _shortest(ways, fits, float(caps[place]))
            if stages:
                found = _partition(stages, ways, submesh)
                best = found if best is None or found.step_time_s < best.step_time_s else best
        return tried[place]

    def bound(low: int, high: int) -> tuple[float, int, int]:
        return least_sum(high) + float(caps[low]) + once_s, low, high

    queue = [bound(0, len(caps) - 1)] if len(caps) else []
    lower_bound_s = math.inf
    while queue and best is not None:
        bound_s, low, high = heapq.heappop(queue)
        if bound_s >= best.step_time_s or low == high:
            lower_bound_s = min(lower_bound_s, bound_s)
            if bound_s >= best.step_time_s:
                break
            continue
        middle = (low + high) // 2
        for half in (bound(low, middle), bound(middle + 1, high)):
            if math.isfinite(half[0]):
                heapq.heappush(queue, half)
    if best is None:
        raise _shortage(num_layers, num_stages, submesh, memory_bytes)
    return StageSearch(
        best=best, lower_bound_s=min(lower_bound_s, best.step_time_s), runners_up=(), num_explored=len(tried)
    )


def _ways(
    num_layers: int, submesh: Submesh, stage_costs: StageCosts, transfer_s: TransferTime, timing: Timing
) -> _Ways:
    costs = {(j, k): stage_costs(j, k, submesh) for j in range(num_layers) for k in range(j + 1, num_layers + 1)}
    shape = (num_layers + 1, num_layers + 1, max(map(len, costs.values()), default=1))
    fills, holds = np.full(shape, np.inf), np.full(shape, np.inf)
    links_s = np.array([0.0, *(transfer_s(cut, submesh, submesh) for cut in range(1, num_layers)), 0.0])
    for (j, k), every in costs.items():
        for n, way in enumerate(every):
            fills[j, k, n] = fill_s(timing, way.forward_s, way.backward_s, way.weight_s)
            holds[j, k, n] = hold_s(timing, way.forward_s, way.backward_s, way.weight_s)
    return _Ways(
        costs=costs,
        fill_s=fills,
        hold_s=with_transfer_s(timing, holds, links_s[None, :, None]),
        links_s=links_s,
        timing=timing,
    )


def _fitting(ways: _Ways, flying: float, memory_bytes: float) -> np.ndarray:
    """Which ways fit into memory with so many microbatches in flight."""
    fits = np.zeros(ways.fill_s.shape, dtype=bool)
    for (j, k), every in ways.costs.items():
        fits[j, k, : len(every)] = [way.peak_bytes(flying) <= memory_bytes for way in every]
    return fits


def _shortage(num_layers: int, num_stages: int, submesh: Submesh, memory_bytes: float) -> InvalidArgument:
    if num_stages > num_layers:
        return InvalidArgument(
            f"{num_stages} stages were asked for, the step has {num_layers} layers. Ask for at most {num_layers}."
        )
    stages = "one stage" if num_stages == 1 else f"{num_stages} stages"
    each = ", wherever they are cut" if num_stages > 1 else ""
    return MemoryTooSmall(
        f"{num_layers} layers do not fit into {stages} of {submesh.num_devices} devices with "
        f"{memory_bytes / 2**30:.3g} GiB each{each}. Use more stages or devices, more microbatches, "
        'remat=True, or schedule="1f1b".'
    )


def _shortest(ways: _Ways, fits: Sequence[np.ndarray], cap: float) -> tuple[float, list[tuple[int, int, int]]]:
    """The least sum of stages that hold up at most `cap`, and their starts, stops and ways; infinity if there are none.

    Of several ways of one range the one of the least fill is in it.
    """
    crossing_s = ways.links_s * ways.timing.crossings
    sums = np.full(len(ways.links_s), np.inf)
    sums[0] = 0.0
    origins: list[np.ndarray] = []
    chosen: list[np.ndarray] = []
    for fit in fits:
        fills = np.where(fit & (ways.hold_s <= cap), ways.fill_s, np.inf)
        chosen.append(fills.argmin(axis=-1))
        reached = sums[:, None] + fills.min(axis=-1) + crossing_s[None, :]
        origins.append(reached.argmin(axis=0))
        sums = reached.min(axis=0)
    if not np.isfinite(sums[-1]):
        return math.inf, []
    stages: list[tuple[int, int, int]] = []
    stop = len(sums) - 1
    for origin, way in zip(reversed(origins), reversed(chosen)):
        start = int(origin[stop])
        stages.append((start, stop, int(way[start, stop])))
        stop = start
    return float(sums[-1]), stages[::-1]


def _partition(stages: Sequence[tuple[int, int, int]], ways: _Ways, submesh: Submesh) -> Partition:
    found = tuple(
        Stage(start=start, stop=stop, submesh=submesh, cost=ways.costs[start, stop][way]) for start, stop, way in stages
    )
    crossed = [float(ways.links_s[stage.stop]) for stage in found[:-1]]
    return Partition(stages=found, step_time_s=step_time_s(ways.timing, [stage.cost for stage in found], crossed))
