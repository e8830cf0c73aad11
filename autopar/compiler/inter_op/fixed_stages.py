"""Cut layers into a given number of stages on submeshes of one size: as a pipeline by hand, with the best cuts.

For every cap h on the largest steady_s (`stage_costs`), the cuts of the least sum are a shortest path,

    F_s[k] = min_j  F_(s-1)[j] + warmup(j, k) + V x(j)     over j < k with steady(j, k) <= h and memory of stage s

The first stage's warm-up has its tail in it, before which no step ends. Partitions whose largest steady_s is between a
and b take at least F under the cap b, and a: such intervals of caps are halved, the one with the lowest bound first,
until no bound is below the best partition. As stages as a whole may take less than the sum of their layers, the next
best cuts are returned as well: the shortest paths under no cap, and under that of the best.
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
    RangeTable,
    Stage,
    StageCosts,
    TabledCosts,
    Timing,
    TransferTime,
    range_table,
    seconds_of_schedule,
)
from autopar.compiler.inter_op.submeshes import Submesh
from autopar.errors import InvalidArgument, MemoryTooSmall
from autopar.plain_text import size_words


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ways:
    """All ways to run all ranges of layers, indexed [start, stop, way], infinity where there is none.

    No range starts behind the last layer: the last row is one of infinities.
    """

    table: RangeTable
    warmup_s: np.ndarray
    """With the tail, where the stage is the first."""
    steady_s: np.ndarray
    links_s: np.ndarray
    """[cut]"""
    timing: Timing


def search_fixed_stages(
    num_layers: int,
    num_stages: int,
    submesh: Submesh,
    stage_costs: StageCosts | TabledCosts,
    transfer_s: TransferTime,
    *,
    timing: Timing,
    memory_bytes: float,
    below_s: float = math.inf,
    top: int = 5,
) -> StageSearch:
    """Return the partition into exactly `num_stages` stages that takes the least time, and `top` runners-up.

    As soon as none takes less than `below_s`, it is any partition, with no runners-up. Raises `MemoryTooSmall` if none
    fits.
    """
    ways = _ways(num_layers, submesh, stage_costs, transfer_s, timing)
    fits = _fitting_stages(ways, num_stages, memory_bytes)
    caps = np.unique(ways.steady_s[np.isfinite(ways.steady_s) & np.logical_or.reduce(fits)])
    best: Partition | None = None
    best_cap_s = math.inf
    tried: dict[int, float] = {}

    def least_sum(place: int) -> float:
        """F under a cap; notes the partition that attains it."""
        nonlocal best, best_cap_s
        if place not in tried:
            tried[place] = math.inf
            for sum_s, stages in _shortest(ways, fits, float(caps[place]), 1):
                tried[place], partition = sum_s, _partition(stages, ways, submesh)
                if best is None or partition.step_time_s < best.step_time_s:
                    best, best_cap_s = partition, float(caps[place])
        return tried[place]

    def bound(low: int, high: int) -> tuple[float, int, int]:
        return least_sum(high) + float(caps[low]), low, high

    queue = [bound(0, len(caps) - 1)] if len(caps) else []
    lower_bound_s = math.inf
    while queue and best is not None:
        bound_s, low, high = heapq.heappop(queue)
        if low == high or bound_s >= best.step_time_s or min(bound_s, best.step_time_s) >= below_s:
            lower_bound_s = min(lower_bound_s, bound_s)
            if low < high:
                break
            continue
        middle = (low + high) // 2
        for half in (bound(low, middle), bound(middle + 1, high)):
            if math.isfinite(half[0]):
                heapq.heappush(queue, half)
    if best is None:
        raise _shortage(ways, num_stages, submesh, memory_bytes)
    return StageSearch(
        best=best,
        lower_bound_s=min(lower_bound_s, best.step_time_s),
        runners_up=_runners_up(ways, fits, submesh, best, best_cap_s, top, below_s),
        num_explored=len(tried),
    )


def _runners_up(
    ways: _Ways,
    fits: Sequence[np.ndarray],
    submesh: Submesh,
    best: Partition,
    best_cap_s: float,
    top: int,
    below_s: float,
) -> tuple[Partition, ...]:
    """Return the fastest of the next shortest paths under no cap, and under that of the best partition.

    None where that takes no less than `below_s`.
    """
    if best.step_time_s >= below_s:
        return ()
    near = [stages for cap_s in (best_cap_s, math.inf) for _, stages in _shortest(ways, fits, cap_s, 1 + top)]
    others = {each.stages: each for each in (_partition(stages, ways, submesh) for stages in near)}
    others.pop(best.stages, None)
    return tuple(sorted(others.values(), key=lambda each: each.step_time_s)[:top])


def _ways(
    num_layers: int,
    submesh: Submesh,
    stage_costs: StageCosts | TabledCosts,
    transfer_s: TransferTime,
    timing: Timing,
) -> _Ways:
    table = range_table(num_layers, submesh, stage_costs)
    behind = np.full((table.values.shape[0], 1, *table.values.shape[2:]), np.inf)
    table = RangeTable(values=np.concatenate([table.values, behind], axis=1), cost=table.cost)
    warmups, steadies, tails = seconds_of_schedule(table.values[:4], timing)
    warmups[0] += tails[0]
    links_s = np.array([0.0, *(transfer_s(cut, submesh, submesh) for cut in range(1, num_layers)), 0.0])
    return _Ways(
        table=table,
        warmup_s=warmups,
        steady_s=timing.with_transfer_s(steadies, links_s[None, :, None]),
        links_s=links_s,
        timing=timing,
    )


def _fitting_stages(ways: _Ways, num_stages: int, memory_bytes: float) -> list[np.ndarray]:
    """Return which ways have room as each of the stages, in their order: one array for those with the same ways."""
    fits: list[np.ndarray] = []
    for behind in reversed(range(num_stages)):
        live = ways.timing.num_in_flight(stages_behind=behind, num_stages=num_stages)
        fit = ways.table.peak_bytes(live) <= memory_bytes
        fits.append(fits[-1] if fits and np.array_equal(fit, fits[-1]) else fit)
    return fits


def _shortage(ways: _Ways, num_stages: int, submesh: Submesh, memory_bytes: float) -> InvalidArgument:
    num_layers = len(ways.links_s) - 1
    if num_stages > num_layers:
        return InvalidArgument(
            f"{num_stages} stages were asked for, the step has {num_layers} layers. Ask for at most {num_layers}."
        )
    stages = "one stage" if num_stages == 1 else f"{num_stages} stages"
    each = ", wherever they are cut" if num_stages > 1 else ""
    least_bytes = _least_bytes(ways, num_stages)
    needed = f"; by layers they need {size_words(least_bytes)} at least" if math.isfinite(least_bytes) else ""
    return MemoryTooSmall(
        f"{num_layers} layers do not fit into {stages} of {submesh.num_devices} devices with "
        f"{size_words(memory_bytes)} each{each}{needed}.",
        least_share=least_bytes / memory_bytes if needed else math.nan,
    )


def _least_bytes(ways: _Ways, num_stages: int) -> float:
    """Return the memory of a device with which some partition into so many stages fits; infinite for none."""
    needed = np.full(len(ways.links_s), np.inf)  # by stop
    needed[0] = 0.0
    for behind in reversed(range(num_stages)):
        live = ways.timing.num_in_flight(stages_behind=behind, num_stages=num_stages)
        needed = np.maximum(needed[:, None], ways.table.peak_bytes(live).min(axis=-1)).min(axis=0)
    return float(needed[-1])


def _shortest(
    ways: _Ways, fits: Sequence[np.ndarray], cap: float, count: int
) -> list[tuple[float, list[tuple[int, int, int]]]]:
    """Return at most `count` least sums under a cap on steady_s, each with starts, stops and ways of its stages.

    Of several ways of one range the one of the least warm-up is in it.
    """
    crossing_s = ways.links_s * ways.timing.virtual_stages
    sums = np.full((len(ways.links_s), count), np.inf)  # [stop, rank]
    sums[0, 0] = 0.0
    origins: list[np.ndarray] = []
    chosen: list[np.ndarray] = []
    below_cap, least, before = ways.steady_s <= cap, np.empty(0), None
    for fit in fits:
        if fit is before:
            chosen.append(chosen[-1])
        else:
            warmups = np.where(fit & below_cap, ways.warmup_s, np.inf)
            chosen.append(warmups.argmin(axis=-1))
            least, before = warmups.min(axis=-1), fit
        reached = sums[:, :, None] + least[:, None, :] + crossing_s  # [start, rank, stop]
        reached = reached.reshape(-1, len(crossing_s))
        first = reached.argmin(axis=0)[None] if count == 1 else reached.argsort(axis=0, kind="stable")[:count]
        origins.append(first)
        sums = np.take_along_axis(reached, origins[-1], axis=0).T
    found: list[tuple[float, list[tuple[int, int, int]]]] = []
    for rank in range(count):
        if math.isfinite(sums[-1, rank]):
            found.append((float(sums[-1, rank]), _path(origins, chosen, rank)))
    return found


def _path(origins: Sequence[np.ndarray], chosen: Sequence[np.ndarray], rank: int) -> list[tuple[int, int, int]]:
    """Return starts, stops and ways along the path of a rank at the last cut."""
    stages: list[tuple[int, int, int]] = []
    stop, count = origins[-1].shape[1] - 1, len(origins[-1])
    for origin, way in zip(reversed(origins), reversed(chosen)):
        start, rank = divmod(int(origin[rank, stop]), count)
        stages.append((start, stop, int(way[start, stop])))
        stop = start
    return stages[::-1]


def _partition(stages: Sequence[tuple[int, int, int]], ways: _Ways, submesh: Submesh) -> Partition:
    costs = [ways.table.cost(start, stop, way) for start, stop, way in stages]
    crossed_s = [float(ways.links_s[stop]) for _, stop, _ in stages[:-1]]
    return Partition(
        stages=tuple(
            Stage(start=start, stop=stop, submesh=submesh, cost=cost) for (start, stop, _), cost in zip(stages, costs)
        ),
        step_time_s=ways.timing.step_time_s(costs, crossed_s),
    )
