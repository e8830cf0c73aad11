"""Deal the layers of every mesh to its stages, and play their schedule through with the times of unequal stages.

    RangeCosts, stages, virtual stages  ->  StagePart, ...      the mesh and the layers of every stage
    Timing, StagePart, ..., costs       ->  seconds of a step

The formulas of `inter_op.schedule_times` are what a search can bound: exact for equal stages. Here every task starts
when its mesh is free and what it needs has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.compiler.inter_op.stage_costs import Stage, StageCost, Timing
from autopar.compiler.pipeline.schedules import schedule_tasks
from autopar.compiler.planning.stage_costs import RangeCosts


@dataclass(frozen=True, kw_only=True)
class StagePart:
    """A stage: its mesh, its layers `[start, stop)`, and what of the mesh's time it takes."""

    mesh: int
    layers: tuple[int, int]
    share: float
    link_s: float
    """Seconds that a microbatch takes from here to the next stage; the way back takes as long."""


def dealt(sizes: Sequence[int], virtual_stages: int) -> list[tuple[int, tuple[int, int]]]:
    """So many layers to each mesh, in several parts that lie apart: the mesh and the layers of every stage, in order.

    >>> dealt([3, 2], 2)
    [(0, (0, 2)), (1, (2, 3)), (0, (3, 4)), (1, (4, 5))]
    """
    found: list[tuple[int, tuple[int, int]]] = []
    start = 0
    for number in range(virtual_stages):
        for mesh, size in enumerate(sizes):
            stop = start + size // virtual_stages + (number < size % virtual_stages)
            found.append((mesh, (start, stop)))
            start = stop
    return found


def parts_of(ranges: RangeCosts, stages: Sequence[Stage], virtual_stages: int) -> tuple[StagePart, ...]:
    """The stages that the layers of each mesh are dealt to, by the time that they take of the mesh's."""
    parts = dealt([stage.stop - stage.start for stage in stages], virtual_stages)
    took_s: list[float] = []
    for mesh, layers in parts:
        cost = ranges.cost(*layers, stages[mesh].submesh, stages[mesh].cost.choice)
        took_s.append(cost.forward_s + cost.backward_s)
    all_s = [sum(s for s, part in zip(took_s, parts) if part[0] == mesh) for mesh in range(len(stages))]

    def link_s(number: int, cut: int) -> float:
        if number + 1 == len(parts):
            return 0.0
        here, there = (stages[mesh].submesh for mesh, _ in parts[number : number + 2])
        return ranges.transfer_s(cut, here, there) / 2

    return tuple(
        StagePart(
            mesh=mesh,
            layers=(start, stop),
            share=took_s[number] / all_s[mesh] if all_s[mesh] else 1 / virtual_stages,
            link_s=link_s(number, stop),
        )
        for number, (mesh, (start, stop)) in enumerate(parts)
    )


def played_s(timing: Timing, parts: Sequence[StagePart], costs: Sequence[StageCost]) -> float:
    """Seconds of a step of these stages, for the costs of every mesh; what is done once follows the last microbatch."""
    order = schedule_tasks(
        timing.schedule,
        num_stages=len(parts),
        num_meshes=len(costs),
        num_microbatches=timing.num_microbatches,
        stage_mesh=[part.mesh for part in parts],
    )
    split = timing.schedule == "zero-bubble"
    took: dict[tuple[str, int], float] = {}
    for stage, part in enumerate(parts):
        cost = costs[part.mesh]
        took["F", stage] = part.share * cost.forward_s
        took["B", stage] = part.share * (cost.backward_s - (cost.weight_s if split else 0.0))
        took["W", stage] = part.share * cost.weight_s
    ended: dict[tuple[str, int, int | None], float] = {}
    free_s, place = [0.0] * len(costs), [0] * len(costs)
    waiting = True
    while waiting:
        waiting = False
        for mesh, tasks in enumerate(order):
            while place[mesh] < len(tasks):
                task = tasks[place[mesh]]
                ready_s = _ready_s(task.kind, task.stage, task.microbatch, parts, ended)
                if ready_s is None:
                    break
                free_s[mesh] = max(free_s[mesh], ready_s) + took[task.kind, task.stage]
                ended[task.kind, task.stage, task.microbatch] = free_s[mesh]
                place[mesh] += 1
                waiting = True
    assert all(place[mesh] == len(tasks) for mesh, tasks in enumerate(order)), "a schedule that never ends"
    return max(free_s[mesh] + cost.once_s for mesh, cost in enumerate(costs))


def _ready_s(
    kind: str,
    stage: int,
    microbatch: int | None,
    parts: Sequence[StagePart],
    ended: dict[tuple[str, int, int | None], float],
) -> float | None:
    """When what a task needs is there; None while that is not known."""
    match kind:
        case "F" if stage == 0:
            return 0.0
        case "F":
            need, link_s = ("F", stage - 1, microbatch), parts[stage - 1].link_s
        case "B" if stage == len(parts) - 1:
            need, link_s = ("F", stage, microbatch), 0.0
        case "B":
            need, link_s = ("B", stage + 1, microbatch), parts[stage].link_s
        case _:
            need, link_s = ("B", stage, microbatch), 0.0
    end_s = ended.get(need)
    return None if end_s is None else end_s + link_s
