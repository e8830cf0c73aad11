"""Pipeline schedules: on every mesh the order of the tasks, and in closed form the time and memory that it takes.

Stages form a chain, F0 -> F1 -> ... -> F(S-1) -> B(S-1) -> ... -> B0; W of a stage follows its B. A schedule is one
class with all that is particular to it, and is known by its name to methods, plans, searches and the lowering:

    schedule       idle time per mesh    in flight, a stages behind          source
    gpipe          (S-1)(f+b)            M                                   arXiv 1811.06965, section 2.3
    1f1b           (S-1)(f+b)            min(M, a+1)                         arXiv 2006.09503, section 3.2
    eager-1f1b     (S-1)(f+b)            min(M, 2a+1)                        arXiv 2211.05322
    1f1b+k+...     (S-1)(f+b)            min(M, a+1+k), k of the stage       arXiv 2509.24859
    interleaved    (S-1)(f+b)/V          min(M, (2a + (V-1) S + 1) / V)      arXiv 2104.04473, section 2.2.2
    zero-bubble    (S-1)(f+b-2w)         min(M, S)                           arXiv 2401.10241, section 2.1

with S equal stages, one to a mesh, M microbatches, V virtual stages per mesh (S counts meshes then), and a stage's
times f and b, of which w is the weight gradient.

`register_schedule` adds a schedule of one's own, which needs no more than the order of a stage's tasks:

    class ReversedGPipe(Schedule):
        def stage_tasks(self, stage, num_stages, num_microbatches):
            return [*forward_tasks(stage, num_microbatches), *reversed(backward_tasks(stage, num_microbatches))]

    register_schedule(ReversedGPipe(name="reversed-gpipe"))
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import numpy as np

from autopar.checks import is_text
from autopar.errors import InvalidArgument, InvalidProgram
from autopar.ir.tasks import Task

TaskOrder = tuple[tuple[Task, ...], ...]  # per mesh
Seconds = Any  # a number, or an array of one number for each of many stages


@dataclass(frozen=True, kw_only=True)
class Schedule(ABC):
    """An order of a pipeline's tasks, with the closed forms by which a search bounds its time and memory.

    Only `stage_tasks` has to be given. The closed forms are by default those of a schedule without overlap, the memory
    is counted in the order of the tasks; a search compares its best candidates by simulating the order itself.
    """

    name: str
    splits_weight_gradients: bool = False
    """The weight gradient of a microbatch is a task of its own, W, and no part of B."""
    virtual_stages: tuple[int, ...] = (1,)
    """Numbers of stages on a mesh that a search tries; the first is the default. (1,): no more than one."""
    hides_transfers: bool = False
    """A mesh has other microbatches to work on while one is on its way."""
    memory_depends_on_num_stages: bool = True
    """The microbatches in flight on a stage depend on more than the number of stages behind it."""

    @abstractmethod
    def stage_tasks(self, stage: int, num_stages: int, num_microbatches: int) -> Sequence[Task]:
        """Return the tasks of one stage in order, if every stage has a mesh of its own."""

    def spread_tasks(self, stage_mesh: Sequence[int], num_microbatches: int) -> TaskOrder:
        """Return the tasks of every mesh in order, if stages of one mesh lie apart in the chain."""
        return _list_schedule(self, stage_mesh, num_microbatches)

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
        return float(_peak_in_flight(self.stage_tasks(stage, num_stages, num_microbatches)))


@dataclass(frozen=True, kw_only=True)
class GPipe(Schedule):
    """All forward, then all backward.

    Huang et al.: GPipe, arXiv 1811.06965, section 2.3. With M microbatches the pipeline idles for S-1 of M+S-1 rounds.
    """

    name: str = "gpipe"
    hides_transfers: bool = True
    memory_depends_on_num_stages: bool = False

    def stage_tasks(self, stage: int, num_stages: int, num_microbatches: int) -> Sequence[Task]:
        """Return every F, then every B."""
        return [*forward_tasks(stage, num_microbatches), *backward_tasks(stage, num_microbatches)]

    def spread_tasks(self, stage_mesh: Sequence[int], num_microbatches: int) -> TaskOrder:
        """Return stage after stage forward, then stage after stage backward."""
        stages = range(len(stage_mesh))
        tasks = [task for stage in stages for task in forward_tasks(stage, num_microbatches)]
        tasks += [task for stage in reversed(stages) for task in backward_tasks(stage, num_microbatches)]
        return tuple(tuple(t for t in tasks if stage_mesh[t.stage] == mesh) for mesh in range(max(stage_mesh) + 1))

    def num_in_flight(
        self, *, stages_behind: int, num_stages: int, num_microbatches: int, virtual_stages: int = 1
    ) -> float:
        """Return M: the first B follows the last F."""
        return float(num_microbatches)


@dataclass(frozen=True, kw_only=True)
class OneForwardOneBackward(Schedule):
    """S-s forward tasks of stage s fill the pipeline, then a backward task makes room for each forward task.

    Narayanan et al.: PipeDream-Flush, arXiv 2006.09503, section 3.2; the closed form of unequal stages is that of
    Zheng et al.: Alpa, arXiv 2201.12023, section 5.1. No microbatch is to spare while a transfer is under way: with S
    equal stages a period takes f + b + x (S-1)/S, which the form takes for f + b + x.
    """

    name: str = "1f1b"
    memory_depends_on_num_stages: bool = False

    def stage_tasks(self, stage: int, num_stages: int, num_microbatches: int) -> Sequence[Task]:
        """Return S-s times F, then B and F by turns."""
        return _alternate(stage, num_microbatches, num_in_flight=num_stages - stage)

    def num_in_flight(
        self, *, stages_behind: int, num_stages: int, num_microbatches: int, virtual_stages: int = 1
    ) -> float:
        """Return min(M, a+1): one for every stage from here on."""
        return min(float(num_microbatches), float(stages_behind + 1))


@dataclass(frozen=True, kw_only=True)
class EagerOneForwardOneBackward(Schedule):
    """1F1B that runs one more forward task ahead per stage behind, which hides the transfers behind it.

    Zhuang et al.: On Optimizing the Communication of Model Parallelism, arXiv 2211.05322.
    """

    name: str = "eager-1f1b"
    hides_transfers: bool = True
    memory_depends_on_num_stages: bool = False

    def stage_tasks(self, stage: int, num_stages: int, num_microbatches: int) -> Sequence[Task]:
        """Return 2(S-s)-1 times F, then B and F by turns."""
        return _alternate(stage, num_microbatches, num_in_flight=2 * (num_stages - stage) - 1)

    def num_in_flight(
        self, *, stages_behind: int, num_stages: int, num_microbatches: int, virtual_stages: int = 1
    ) -> float:
        """Return min(M, 2a+1)."""
        return min(float(num_microbatches), float(2 * stages_behind + 1))


@dataclass(frozen=True, kw_only=True)
class WarmedUp(Schedule):
    """1F1B whose stages run some more forward tasks ahead, each its own number: "1f1b+2+2+0+0".

    A microbatch that takes c over a link comes back 2c later than without. With 2c / (f+b) microbatches more in flight
    on every stage before the link, rounded up, none of them waits; stages behind it would only delay their backward
    tasks by more. After H-1F1B of HARP (arXiv 2509.24859). Four equal stages with f = 1, b = 2, 32 microbatches and a
    link of 3 behind the second take 201 by 1F1B, and 111 with two more on the first two, six in flight at most.
    """

    extra: tuple[int, ...]
    """Forward tasks ahead of those of 1F1B, by stage; none on stages that are not listed."""
    hides_transfers: bool = True

    def stage_tasks(self, stage: int, num_stages: int, num_microbatches: int) -> Sequence[Task]:
        """Return S-s and `extra` times F, then B and F by turns."""
        return _alternate(stage, num_microbatches, num_in_flight=num_stages - stage + self._extra_of(stage))

    def link_s(self, transfer_s: Seconds) -> Seconds:
        """Return half: while one microbatch goes there, another one comes back."""
        return transfer_s / 2

    def num_in_flight(
        self, *, stages_behind: int, num_stages: int, num_microbatches: int, virtual_stages: int = 1
    ) -> float:
        """Return min(M, a+1 and `extra`)."""
        ahead = self._extra_of(num_stages - 1 - stages_behind)
        return min(float(num_microbatches), float(stages_behind + 1 + ahead))

    def _extra_of(self, stage: int) -> int:
        return self.extra[stage] if stage < len(self.extra) else 0


@dataclass(frozen=True, kw_only=True)
class Interleaved(Schedule):
    """1F1B with V stages on a mesh that lie apart in the chain: the first microbatch passes a mesh in V short visits.

    Narayanan et al.: Megatron-LM, arXiv 2104.04473, section 2.2.2. Groups of P microbatches, one per mesh, pass
    through the V stages of a mesh in turn. A mesh's share of the layers is priced as one range of them.
    """

    name: str = "interleaved"
    virtual_stages: tuple[int, ...] = (2, 4)
    hides_transfers: bool = True

    def stage_tasks(self, stage: int, num_stages: int, num_microbatches: int) -> Sequence[Task]:
        """Return the order of 1F1B: with one stage to a mesh there is nothing to interleave."""
        return _ONE_FORWARD_ONE_BACKWARD.stage_tasks(stage, num_stages, num_microbatches)

    def spread_tasks(self, stage_mesh: Sequence[int], num_microbatches: int) -> TaskOrder:
        """Return Megatron's order if the chain passes the meshes round after round, otherwise a list schedule."""
        num_meshes = max(stage_mesh) + 1
        first_round = list(stage_mesh[:num_meshes])
        rounds = len(stage_mesh) // num_meshes
        if len(set(first_round)) < num_meshes or list(stage_mesh) != first_round * rounds:
            return _list_schedule(self, stage_mesh, num_microbatches)
        orders = {
            mesh: _megatron_tasks(depth, num_meshes, rounds, num_microbatches) for depth, mesh in enumerate(first_round)
        }
        return tuple(orders[mesh] for mesh in range(num_meshes))

    def closed_forms(self, virtual_stages: int) -> Schedule:
        """Return 1F1B for one stage on a mesh."""
        return self if virtual_stages > 1 else _ONE_FORWARD_ONE_BACKWARD

    def warmup_s(self, forward_s: Seconds, backward_s: Seconds, weight_s: Seconds, *, virtual_stages: int) -> Seconds:
        """Return (f+b)/V: the first microbatch moves on after one of the V visits."""
        return (forward_s + backward_s) / virtual_stages

    def steady_s(
        self,
        forward_s: Seconds,
        backward_s: Seconds,
        weight_s: Seconds,
        *,
        num_microbatches: int,
        virtual_stages: int,
    ) -> Seconds:
        """Return M (f+b) - (f+b)/V: the other microbatches, and the other visits of the first one."""
        stage_s = forward_s + backward_s
        return (num_microbatches - 1) * stage_s + stage_s * (1 - 1 / virtual_stages)

    def num_in_flight(
        self, *, stages_behind: int, num_stages: int, num_microbatches: int, virtual_stages: int = 1
    ) -> float:
        """Return min(M, (2a + (V-1) S + 1) / V): a virtual stage holds a V-th of what the mesh's whole share would."""
        visits = 2 * stages_behind + (virtual_stages - 1) * num_stages + 1
        return min(float(num_microbatches), visits / virtual_stages)


@dataclass(frozen=True, kw_only=True)
class ZeroBubble(Schedule):
    """ZB-H1: 1F1B whose W of a microbatch waits on stage s until s more B have run.

    Qi et al.: Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.1. Stage s then holds S-s microbatches for
    their B and s for their W: S everywhere, the most that 1F1B holds on any stage. Late stages hand out their first B
    early; the W left over fill the time of 1F1B's drain. The idle time is (S-1)(max(f, w) + b - 2w) when M >= S, with
    w a part of b; the paper assumes f >= w.
    """

    name: str = "zero-bubble"
    splits_weight_gradients: bool = True

    def stage_tasks(self, stage: int, num_stages: int, num_microbatches: int) -> Sequence[Task]:
        """Return the order of 1F1B with each W as many B later as there are stages before."""
        tasks: list[Task] = []
        for task in _ONE_FORWARD_ONE_BACKWARD.stage_tasks(stage, num_stages, num_microbatches):
            tasks.append(task)
            if task.kind == "B" and task.microbatch is not None and task.microbatch >= stage:
                tasks.append(_task("W", stage, task.microbatch - stage))
        return tasks + [_task("W", stage, m) for m in range(max(0, num_microbatches - stage), num_microbatches)]

    def warmup_s(self, forward_s: Seconds, backward_s: Seconds, weight_s: Seconds, *, virtual_stages: int) -> Seconds:
        """Return max(f, w) + b - 2w: the first microbatch comes back without its weight gradients."""
        return np.maximum(forward_s, weight_s) + backward_s - 2 * weight_s

    def steady_s(
        self,
        forward_s: Seconds,
        backward_s: Seconds,
        weight_s: Seconds,
        *,
        num_microbatches: int,
        virtual_stages: int,
    ) -> Seconds:
        """Return (M-1)(f+b) + w + min(f, w): the weight gradients that are left over count here."""
        others_s = (num_microbatches - 1) * (forward_s + backward_s)
        return others_s + weight_s + np.minimum(forward_s, weight_s)

    def num_in_flight(
        self, *, stages_behind: int, num_stages: int, num_microbatches: int, virtual_stages: int = 1
    ) -> float:
        """Return min(M, S)."""
        return min(float(num_microbatches), float(num_stages))


_ONE_FORWARD_ONE_BACKWARD = OneForwardOneBackward()
DEFAULT_SCHEDULE = _ONE_FORWARD_ONE_BACKWARD.name
SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (_ONE_FORWARD_ONE_BACKWARD, EagerOneForwardOneBackward(), GPipe(), Interleaved(), ZeroBubble())
}
"""The schedules by name, in the order in which a search tries them."""


def warmed_up(wanted: Sequence[int]) -> WarmedUp:
    """Return the schedule "1f1b+2+0" of so many more forward tasks ahead by stage; none of them is registered.

    A stage gets no more in flight than the one before it, for whose tasks it would wait before its first backward one.
    """
    extra = list(wanted)
    for stage in range(1, len(extra)):
        extra[stage] = min(extra[stage], extra[stage - 1] + 1)
    return WarmedUp(
        name="".join([DEFAULT_SCHEDULE, *(f"+{number}" for number in extra)]),
        extra=tuple(extra),
        memory_depends_on_num_stages=any(extra),
    )


def register_schedule(schedule: Schedule) -> None:
    """Make a schedule known by its name to methods, plans and searches; a name stands for one schedule only."""
    if SCHEDULES.setdefault(schedule.name, schedule) != schedule:
        raise InvalidArgument(
            f"There is a schedule of the name '{schedule.name}' already: {SCHEDULES[schedule.name]}. A plan names its "
            "schedule: give this one another name."
        )


def get_schedule(schedule: str | Schedule) -> Schedule:
    """Return the registered schedule of a name; raise `InvalidArgument` for one that is not registered."""
    if isinstance(schedule, Schedule):
        if schedule not in (SCHEDULES.get(schedule.name), _warmed_up_by_name(schedule.name)):
            raise InvalidArgument(
                f"schedule is {schedule}, which is not registered; a plan names its schedule only. Call "
                "register_schedule with it first, wherever the plan is made or loaded."
            )
        return schedule
    found = (SCHEDULES.get(schedule) or _warmed_up_by_name(schedule)) if is_text(schedule) else None
    if found is None:
        raise InvalidArgument(
            f"schedule is {schedule!r}. Choose one of {', '.join(map(repr, SCHEDULES))}, or call register_schedule "
            "with one of your own first."
        )
    return found


def _warmed_up_by_name(name: str) -> Schedule | None:
    first, *extra = name.split("+")
    if first != DEFAULT_SCHEDULE or not extra or not all(re.fullmatch("[0-9]{1,6}", each) for each in extra):
        return None
    found = warmed_up([int(each) for each in extra])
    if list(found.extra) != [int(each) for each in extra]:
        raise InvalidArgument(
            f"schedule is {name!r}, by which a stage has more microbatches in flight than the one before it: it would "
            f"wait for them without end. Give each stage at most one more than the one before it: {found.name!r}."
        )
    return found


def check_virtual_stages(schedule: Schedule, virtual_stages: int) -> None:
    """Raise `InvalidArgument` for several stages on a mesh with a schedule that has one."""
    if virtual_stages != 1 and schedule.virtual_stages == (1,):
        others = (f'schedule="{name}"' for name, other in SCHEDULES.items() if other.virtual_stages != (1,))
        raise InvalidArgument(
            f'virtual_stages is {virtual_stages} with schedule="{schedule.name}", which has one stage per mesh. Leave '
            f"virtual_stages out, or use {' or '.join(others)}."
        )


def schedule_tasks(schedule: str | Schedule, *, stage_mesh: Sequence[int], num_microbatches: int) -> TaskOrder:
    """Return for every mesh the order of its forward, backward and, if they are split off, weight-gradient tasks.

    `stage_mesh` is the mesh of every stage. Neighbouring stages of one mesh act as one stage.
    """
    schedule = get_schedule(schedule)
    if num_microbatches < 1:
        raise InvalidArgument(f"A pipeline needs at least 1 microbatch; it was given {num_microbatches}.")
    if not stage_mesh or set(stage_mesh) != set(range(max(stage_mesh) + 1)):
        raise InvalidArgument(
            f"{len(stage_mesh)} stages were placed on meshes {list(stage_mesh)}. Number the meshes from 0, and give "
            "every mesh a stage."
        )
    num_meshes = max(stage_mesh) + 1
    runs = [(mesh, list(run)) for mesh, run in groupby(range(len(stage_mesh)), key=stage_mesh.__getitem__)]
    if len(runs) > num_meshes:
        return schedule.spread_tasks(stage_mesh, num_microbatches)
    orders = {
        mesh: _fused(schedule.stage_tasks(depth, num_meshes, num_microbatches), run)
        for depth, (mesh, run) in enumerate(runs)
    }
    return tuple(orders[mesh] for mesh in range(num_meshes))


def peak_in_flight(order: TaskOrder) -> tuple[int, ...]:
    """Return per mesh the most (stage, microbatch) pairs whose F ran and whose last backward task did not."""
    return tuple(_peak_in_flight(tasks) for tasks in order)


def task_needed(task: Task, num_stages: int) -> Task | None:
    """Return the task whose result an F, B or W waits for; None for the first F of a microbatch."""
    stage, microbatch = task.stage, task.microbatch
    if task.kind == "W":
        return _task("B", stage, microbatch)
    if task.kind == "F":
        return _task("F", stage - 1, microbatch) if stage else None
    return _task("B", stage + 1, microbatch) if stage + 1 < num_stages else _task("F", stage, microbatch)


def linear_order(order: TaskOrder, num_stages: int) -> Iterator[tuple[int, Task]]:
    """Yield (mesh, task) in one global order in which no task comes before what it needs; one per mesh and round.

    Raises `InvalidProgram` if tasks wait for each other in a circle.
    """
    done: set[Task | None] = {None}
    positions = [0] * len(order)
    moved = True
    while moved:
        moved = False
        for mesh, tasks in enumerate(order):
            if positions[mesh] < len(tasks) and task_needed(tasks[positions[mesh]], num_stages) in done:
                task = tasks[positions[mesh]]
                yield mesh, task
                done.add(task)
                positions[mesh] += 1
                moved = True
    stuck = [(mesh, tasks[at]) for mesh, (tasks, at) in enumerate(zip(order, positions)) if at < len(tasks)]
    if stuck:
        waits = ", ".join(f"mesh {mesh} at {task}" for mesh, task in stuck)
        raise InvalidProgram(f"Deadlock: {waits}. Each needs a task that comes later. Reorder one of the lists.")


def check_order(order: TaskOrder, *, stage_mesh: Sequence[int], num_microbatches: int) -> None:
    """Raise `InvalidProgram` unless every task is there once, on its stage's mesh, and none waits forever."""
    kinds = "FBW" if any(task.kind == "W" for task in chain(*order)) else "FB"
    expected = {
        _task(kind, stage, microbatch)
        for kind in kinds
        for stage in range(len(stage_mesh))
        for microbatch in range(num_microbatches)
    }
    counts = Counter(chain(*order))
    for task in sorted(expected | set(counts), key=str):
        if counts[task] != (task in expected):
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
    return [_task("F", stage, m) for m in range(num_microbatches)]


def backward_tasks(stage: int, num_microbatches: int) -> list[Task]:
    """Return B of every microbatch in turn."""
    return [_task("B", stage, m) for m in range(num_microbatches)]


def _task(kind: str, stage: int, microbatch: int | None) -> Task:
    return Task(kind=kind, stage=stage, microbatch=microbatch)


def _alternate(stage: int, num_microbatches: int, *, num_in_flight: int) -> list[Task]:
    forward, backward = forward_tasks(stage, num_microbatches), backward_tasks(stage, num_microbatches)
    return _merge(forward, backward, warmup=min(num_in_flight, num_microbatches) - 1)


def _merge(forward: list[Task], backward: list[Task], *, warmup: int) -> list[Task]:
    """So many forward tasks first, then both by turns."""
    pairs = zip(forward[warmup:], backward)
    steady = len(forward) - warmup
    return [*forward[:warmup], *chain(*pairs), *backward[steady:]]


def _fused(tasks: Sequence[Task], run: list[int]) -> tuple[Task, ...]:
    """Neighbouring stages of one mesh act as one stage: each task becomes one task per stage."""
    return tuple(
        _task(task.kind, stage, task.microbatch)
        for task in tasks
        for stage in (run if task.kind == "F" else reversed(run))
    )


def _peak_in_flight(tasks: Sequence[Task]) -> int:
    last = "W" if any(task.kind == "W" for task in tasks) else "B"
    in_flight = peak = 0
    for task in tasks:
        in_flight += (task.kind == "F") - (task.kind == last)
        peak = max(peak, in_flight)
    return peak


def _megatron_tasks(depth: int, num_meshes: int, virtual_stages: int, num_microbatches: int) -> tuple[Task, ...]:
    """Groups of P microbatches pass through the V stages of a mesh in turn.

    Mesh d of P runs 2(P-d-1) + (V-1)P forward tasks before its first backward task, and holds one more than
    that. Where P does not divide M, this is the order of the next multiple without the tasks beyond M.
    """
    mine = [visit * num_meshes + depth for visit in range(virtual_stages)]
    groups = [range(first, first + num_meshes) for first in range(0, num_microbatches, num_meshes)]
    forward = [_task("F", s, m) for group in groups for s in mine for m in group]
    backward = [_task("B", s, m) for group in groups for s in reversed(mine) for m in group]
    warmup = min(len(forward), 2 * (num_meshes - depth - 1) + (virtual_stages - 1) * num_meshes)
    tasks = _merge(forward, backward, warmup=warmup)
    return tuple(task for task in tasks if (task.microbatch or 0) < num_microbatches)


def _list_schedule(schedule: Schedule, stage_mesh: Sequence[int], num_microbatches: int) -> TaskOrder:
    """In every unit of time each mesh takes its most urgent ready task.

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
    candidates = [_task(kind, stage, count) for (kind, stage), count in counts.items() if stage in mine]
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
