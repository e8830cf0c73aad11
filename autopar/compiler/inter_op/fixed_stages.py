"""Cut layers into a given number of stages on submeshes of one size: as a pipeline by hand, with the best cuts.

For every cap h on what a stage may hold up (`schedule_times`), the cuts of the least sum are a shortest path,

    F_s[k] = min_j  F_(s-1)[j] + fill(j, k) + c x(j)      over j < k with hold(j, k) <= h and memory of stage s

and the best of all caps is taken: a partition is found under the cap that is its own largest hold. What stages do once
per step counts in the time, but does not move the cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.compiler.inter_op.schedule_times import Timing, fill_s, hold_s, in_flight, step_time_s, with_transfer_s
from autopar.compiler.inter_op.stage_costs import Partition, Stage, StageCost, StageCosts, TransferTime
from autopar.compiler.inter_op.submeshes import Submesh
from autopar.errors import InvalidArgument, MemoryTooSmall


@dataclass(frozen=True, kw_only=True, eq=False)
class _Step:
    """What the stages of one position in the pipeline cost: per range of layers the way that takes the least."""

    costs: list[list[StageCost | None]]
    fill_s: np.ndarray
    hold_s: np.ndarray


def search_fixed_stages(
    num_layers: int,
    num_stages: int,
    submesh: Submesh,
    stage_costs: StageCosts,
    transfer_s: TransferTime,
    *,
    timing: Timing,
    memory_bytes: float,
) -> Partition:
    """The partition into exactly `num_stages` stages that takes the least time; `MemoryTooSmall` if none fits."""
    links_s = np.array([0.0, *(transfer_s(cut, submesh, submesh) for cut in range(1, num_layers)), 0.0])
    every = {(j, k): list(stage_costs(j, k, submesh)) for j in range(num_layers) for k in range(j + 1, num_layers + 1)}
    steps = [
        _step(num_layers, every, in_flight(timing, stages_behind=behind, num_stages=num_stages), memory_bytes, timing)
        for behind in reversed(range(num_stages))
    ]
    holds = [with_transfer_s(timing, step.hold_s, links_s[None, :]) for step in steps]
    caps = np.unique(np.concatenate([hold[np.isfinite(hold)] for hold in holds]))
    best: Partition | None = None
    for cap in caps:
        cuts = _shortest(steps, holds, links_s * timing.crossings, cap)
        if cuts is None:
            continue
        found = _partition(cuts, steps, submesh, links_s, timing)
        if best is None or found.step_time_s < best.step_time_s:
            best = found
        if float(cap) >= best.step_time_s:
            break  # whatever holds longer takes longer
    if best is None:
        raise _shortage(num_layers, num_stages, submesh, memory_bytes)
    return best


def _shortage(num_layers: int, num_stages: int, submesh: Submesh, memory_bytes: float) -> InvalidArgument:
    if num_stages > num_layers:
        return InvalidArgument(
            f"{num_stages} stages were asked for, the step has {num_layers} layers. Ask for at most {num_layers}."
        )
    return MemoryTooSmall(
        f"{num_layers} layers do not fit into {num_stages} stages of {submesh.num_devices} devices with "
        f"{memory_bytes / 2**30:.3g} GiB each, wherever they are cut. Use more stages or devices, more microbatches, "
        'remat=True, or schedule="1f1b".'
    )


def _step(
    num_layers: int,
    every: dict[tuple[int, int], list[StageCost]],
    flying: float,
    memory_bytes: float,
    timing: Timing,
) -> _Step:
    shape = (num_layers + 1, num_layers + 1)
    fills, holds = np.full(shape, np.inf), np.full(shape, np.inf)
    costs: list[list[StageCost | None]] = [[None] * (num_layers + 1) for _ in range(num_layers + 1)]
    for (j, k), ways in every.items():
        fitting = [way for way in ways if way.peak_bytes(flying) <= memory_bytes]
        if fitting:
            way = min(fitting, key=lambda way: timing.num_microbatches * (way.forward_s + way.backward_s) + way.once_s)
            costs[j][k] = way
            fills[j, k] = fill_s(timing, way.forward_s, way.backward_s, way.weight_s)
            holds[j, k] = hold_s(timing, way.forward_s, way.backward_s, way.weight_s)
    return _Step(costs=costs, fill_s=fills, hold_s=holds)


def _shortest(
    steps: Sequence[_Step], holds: Sequence[np.ndarray], links_s: np.ndarray, cap: float
) -> tuple[int, ...] | None:
    """The cuts of the least sum whose stages hold up at most `cap`; None if there are none."""
    num_layers = len(links_s) - 1
    sums = np.full(num_layers + 1, np.inf)
    sums[0] = 0.0
    origins: list[np.ndarray] = []
    for step, hold in zip(steps, holds, strict=True):
        ways = sums[:, None] + np.where(hold <= cap, step.fill_s, np.inf) + links_s[None, :]
        origins.append(ways.argmin(axis=0))
        sums = ways.min(axis=0)
    if not np.isfinite(sums[num_layers]):
        return None
    cuts = [num_layers]
    for origin in reversed(origins):
        cuts.append(int(origin[cuts[-1]]))
    return tuple(reversed(cuts))


def _partition(
    cuts: Sequence[int], steps: Sequence[_Step], submesh: Submesh, links_s: np.ndarray, timing: Timing
) -> Partition:
    stages: list[Stage] = []
    for step, start, stop in zip(steps, cuts, cuts[1:]):
        cost = step.costs[start][stop]
        assert cost is not None
        stages.append(Stage(start=start, stop=stop, submesh=submesh, cost=cost))
    crossed = [float(links_s[cut]) for cut in cuts[1:-1]]
    time_s = step_time_s(timing, [stage.cost for stage in stages], crossed)
    return Partition(stages=tuple(stages), step_time_s=time_s)
