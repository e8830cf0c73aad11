"""A pipeline schedule: on every mesh the order of the tasks, and in closed form the time and memory that it takes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.ir.task_order import TaskOrder, new_task, peak_of_tasks, task_needed
from autopar.ir.tasks import Task

Seconds = Any  # a number, or an array of one number for each of many stages


@dataclass(frozen=True, kw_only=True)
class Schedule(ABC):
    """An order of a pipeline's tasks, with the closed forms by which a search bounds its time and memory.

    Only `stage_tasks` has to be given. The closed forms are by default those of a schedule without overlap, the memory
    is counted in the order of the tasks; a search compares its best candidates by simulating the order itself.
    """

    name: str
    splits_weight_gradients: bool = False
    """True if the weight gradient of a microbatch is a task of its own, W, and no part of B."""
    virtual_stages: tuple[int, ...] = (1,)
    """Numbers of stages on a mesh that a search tries; the first is the default. (1,): no more than one."""
    hides_transfers: bool = False
    """True if a mesh has other microbatches to work on while one is on its way."""
    most_virtual_stages: float = math.inf
    """Most stages on a mesh for which there is an order of this schedule."""
    memory_depends_on_num_stages: bool = True
    """True if the microbatches in flight on a stage depend on more than the number of stages behind it."""

    @abstractmethod
    def stage_tasks(self, stage: int, num_stages: int, num_microbatches: int) -> Sequence[Task]:
        """Return the tasks of one stage in order, if every stage has a mesh of its own."""

    def meshes_of_stages(self, num_meshes: int, virtual_stages: int) -> list[int]:
        """Return the mesh of every stage in order, with so many of them on each mesh: round after round."""
        return list(range(num_meshes)) * virtual_stages

    def spread_tasks(self, stage_mesh: Sequence[int], num_microbatches: int) -> TaskOrder:
        """Return the tasks of every mesh in order, if stages of one mesh lie apart in the chain."""
        return list_schedule(self, stage_mesh, num_microbatches)

    def closed_forms(self, virtual_stages: int) -> Schedule:
        """Return the schedule whose closed forms hold with so many stages on a mesh."""
        return self

    def warmup_s(self, forward_s: Seconds, backward_s: Seconds, weight_s: Seconds, *, virtual_stages: int) -> Seconds:
        """Return the seconds that a stage adds to the way of the first microbatch there and back."""
        return forward_s + backward_s

    def steady_s(
        self,
        forward_s: Seconds,
        backward_s: Seconds,
        weight_s: Seconds,
        *,
        num_microbatches: int,
        virtual_stages: int,
    ) -> Seconds:
        """Return the seconds that the other microbatches take if this stage is the slowest and transfers are free."""
        return (num_microbatches - 1) * (forward_s + backward_s)

    def link_s(self, transfer_s: Seconds) -> Seconds:
        """Return the seconds per microbatch of a cut that is crossed there and back in `transfer_s`."""
        return transfer_s

    def num_in_flight(
        self, *, stages_behind: int, num_stages: int, num_microbatches: int, virtual_stages: int = 1
    ) -> float:
        """Return the microbatches whose activations a stage holds at its fullest; more stages never mean fewer."""
        stage = num_stages - 1 - stages_behind
        return float(peak_of_tasks(self.stage_tasks(stage, num_stages, num_microbatches)))


def first_round(stage_mesh: Sequence[int]) -> tuple[list[int], int]:
    """Return the first stages' meshes, as many as there are, and how many such rounds all stages are."""
    num_meshes = max(stage_mesh) + 1
    return list(stage_mesh[:num_meshes]), len(stage_mesh) // num_meshes


def list_schedule(schedule: Schedule, stage_mesh: Sequence[int], num_microbatches: int) -> TaskOrder:
    """Return the order by which, in every unit of time, each mesh takes its most urgent ready task.

    A new microbatch enters a mesh only while fewer (stage, microbatch) pairs are in flight there than the closed form
    has. Microbatches enter in order, so a younger one never holds back the oldest, and the simulation ends. Its order
    is a restriction of one global order, and hence free of deadlocks.
    """
    num_meshes = max(stage_mesh) + 1
    kinds = "FBW" if schedule.splits_weight_gradients else "FB"
    counts = {(kind, stage): 0 for stage in range(len(stage_mesh)) for kind in kinds}  # tasks run so far
    orders: list[list[Task]] = [[] for _ in range(num_meshes)]
    stages = [[s for s, mesh in enumerate(stage_mesh) if mesh == number] for number in range(num_meshes)]
    by_depth = sorted(range(num_meshes), key=lambda mesh: stages[mesh][0])
    limits = {
        mesh: _most_pairs(schedule, num_meshes - 1 - depth, num_meshes, num_microbatches, len(stages[mesh]))
        for depth, mesh in enumerate(by_depth)
    }
    while any(count < num_microbatches for count in counts.values()):
        ready = [_ready(counts, mine, limits[mesh], num_microbatches) for mesh, mine in enumerate(stages)]
        for tasks, candidates in zip(orders, ready):
            if candidates:
                task = min(candidates, key=lambda task: _urgency(task, num_meshes))
                tasks.append(task)
                counts[task.kind, task.stage] += 1
    return tuple(map(tuple, orders))


def _most_pairs(
    schedule: Schedule, meshes_behind: int, num_meshes: int, num_microbatches: int, virtual_stages: int
) -> int:
    microbatches = schedule.num_in_flight(
        stages_behind=meshes_behind,
        num_stages=num_meshes,
        num_microbatches=num_microbatches,
        virtual_stages=virtual_stages,
    )
    return round(virtual_stages * microbatches)


def _ready(counts: dict[tuple[str, int], int], mine: list[int], limit: int, num_microbatches: int) -> list[Task]:
    """The next task of each kind and stage of one mesh, where what it needs has run."""
    last = "W" if ("W", 0) in counts else "B"
    num_stages = sum(kind == "F" for kind, _ in counts)
    full = sum(counts["F", stage] - counts[last, stage] for stage in mine) >= limit
    candidates = [new_task(kind, stage, count) for (kind, stage), count in counts.items() if stage in mine]
    return [
        task
        for task in candidates
        if counts[task.kind, task.stage] < num_microbatches
        and not (full and task.kind == "F" and task.stage == mine[0])
        and ((need := task_needed(task, num_stages)) is None or counts[need.kind, need.stage] > (task.microbatch or 0))
    ]


def _urgency(task: Task, num_meshes: int) -> tuple[int, int, int, int]:
    """B before F before W; then groups of one microbatch per mesh, as in Megatron's order."""
    microbatch = task.microbatch or 0
    stage = -task.stage if task.kind == "B" else task.stage
    return "BFW".index(task.kind), microbatch // num_meshes, stage, microbatch
