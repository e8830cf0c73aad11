"""Orders of a pipeline's tasks: what each waits for, whether all can run, and how many microbatches are in flight.

    TaskOrder  ->  one global order, or `InvalidProgram`

A microbatch passes the chain of stages F0 -> F1 -> ... -> F(S-1) -> B(S-1) -> ... -> B0; W of a stage follows its B.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import chain

from autopar.errors import InvalidProgram
from autopar.ir.tasks import Task

TaskOrder = tuple[tuple[Task, ...], ...]  # per mesh


def peak_in_flight(order: TaskOrder) -> tuple[int, ...]:
    """Return per mesh the most (stage, microbatch) pairs whose F ran and whose last backward task did not."""
    return tuple(peak_of_tasks(tasks) for tasks in order)


def task_needed(task: Task, num_stages: int) -> Task | None:
    """Return the task whose result an F, B or W waits for; None for the first F of a microbatch."""
    stage, microbatch = task.stage, task.microbatch
    if task.kind == "W":
        return new_task("B", stage, microbatch)
    if task.kind == "F":
        return new_task("F", stage - 1, microbatch) if stage else None
    return new_task("B", stage + 1, microbatch) if stage + 1 < num_stages else new_task("F", stage, microbatch)


def linear_order(order: TaskOrder, num_stages: int) -> Iterator[tuple[int, Task]]:
    """Yield (mesh, task) in one global order in which no task comes before what it needs; one per mesh and round.

    Raises `InvalidProgram` if tasks wait for each other in a circle.
    """
    needed = [[task_needed(task, num_stages) for task in tasks] for tasks in order]
    done: set[Task | None] = {None}
    positions = [0] * len(order)
    moved = True
    while moved:
        moved = False
        for mesh, tasks in enumerate(order):
            at = positions[mesh]
            if at < len(tasks) and needed[mesh][at] in done:
                yield mesh, tasks[at]
                done.add(tasks[at])
                positions[mesh] = at + 1
                moved = True
    stuck = [(mesh, tasks[at]) for mesh, (tasks, at) in enumerate(zip(order, positions)) if at < len(tasks)]
    if stuck:
        waits = ", ".join(f"mesh {mesh} at {task}" for mesh, task in stuck)
        raise InvalidProgram(f"Deadlock: {waits}. Each needs a task that comes later. Reorder one of the lists.")


def check_order(order: TaskOrder, *, stage_mesh: Sequence[int], num_microbatches: int) -> None:
    """Raise `InvalidProgram` unless every task is there once, on its stage's mesh, and none waits forever."""
    kinds = "FBW" if any(task.kind == "W" for task in chain(*order)) else "FB"
    expected = {
        new_task(kind, stage, microbatch)
        for kind in kinds
        for stage in range(len(stage_mesh))
        for microbatch in range(num_microbatches)
    }
    counts = Counter(chain(*order))
    wrong = [task for task in expected | set(counts) if counts[task] != (task in expected)]
    if wrong:
        task = min(wrong, key=str)
        raise InvalidProgram(
            f"Task {task} is scheduled {counts[task]} times; it must be {int(task in expected)}. Have the "
            "schedule's tasks hold every task of every microbatch once."
        )
    for mesh, tasks in enumerate(order):
        for task in tasks:
            if stage_mesh[task.stage] != mesh:
                raise InvalidProgram(
                    f"Task {task} is on mesh {mesh}; its stage lives on {stage_mesh[task.stage]}. Have the schedule "
                    "give each mesh the tasks of its own stages."
                )
    for _ in linear_order(order, len(stage_mesh)):
        pass


def forward_tasks(stage: int, num_microbatches: int) -> list[Task]:
    """Return F of every microbatch in turn."""
    return [new_task("F", stage, m) for m in range(num_microbatches)]


def backward_tasks(stage: int, num_microbatches: int) -> list[Task]:
    """Return B of every microbatch in turn."""
    return [new_task("B", stage, m) for m in range(num_microbatches)]


def new_task(kind: str, stage: int, microbatch: int | None) -> Task:
    """Return a task of a kind, a stage and a microbatch."""
    return Task(kind, stage, microbatch)


def alternate(stage: int, num_microbatches: int, *, num_in_flight: int) -> list[Task]:
    """Return so many F of a stage, then B and F by turns."""
    forward, backward = forward_tasks(stage, num_microbatches), backward_tasks(stage, num_microbatches)
    return merge(forward, backward, warmup=min(num_in_flight, num_microbatches) - 1)


def merge(forward: list[Task], backward: list[Task], *, warmup: int) -> list[Task]:
    """Return so many forward tasks, then backward and forward ones by turns."""
    pairs = zip(forward[warmup:], backward)
    steady = len(forward) - warmup
    return [*forward[:warmup], *chain(*pairs), *backward[steady:]]


def peak_of_tasks(tasks: Sequence[Task]) -> int:
    """Return the most (stage, microbatch) pairs of one mesh whose F ran and whose last backward task did not."""
    last = "W" if any(task.kind == "W" for task in tasks) else "B"
    in_flight = peak = 0
    for task in tasks:
        in_flight += (task.kind == "F") - (task.kind == last)
        peak = max(peak, in_flight)
    return peak


def interleaved_tasks(
    depth: int, num_meshes: int, virtual_stages: int, num_microbatches: int, *, ahead: int = 2
) -> list[Task]:
    """Return F and B of a mesh: groups of P microbatches pass through its V stages in turn.

    Mesh d of P runs `ahead` (P-d-1) + (V-1)P forward tasks before its first backward task, and holds one more than
    that. Where P does not divide M, this is the order of the next multiple without the tasks beyond M.
    """
    mine = [visit * num_meshes + depth for visit in range(virtual_stages)]
    groups = [range(first, first + num_meshes) for first in range(0, num_microbatches, num_meshes)]
    forward = [new_task("F", s, m) for group in groups for s in mine for m in group]
    backward = [new_task("B", s, m) for group in groups for s in reversed(mine) for m in group]
    warmup = min(len(forward), ahead * (num_meshes - depth - 1) + (virtual_stages - 1) * num_meshes)
    tasks = merge(forward, backward, warmup=warmup)
    return [task for task in tasks if (task.microbatch or 0) < num_microbatches]


def with_weight_gradients(tasks: Sequence[Task], delay: int) -> list[Task]:
    """Return tasks with W of every B, behind that B which comes so many later; those left over at the end."""
    found: list[Task] = []
    waiting: deque[Task] = deque()
    for task in tasks:
        found.append(task)
        if task.kind == "B":
            waiting.append(new_task("W", task.stage, task.microbatch))
            if len(waiting) > delay:
                found.append(waiting.popleft())
    return [*found, *waiting]
