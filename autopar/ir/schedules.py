"""Pipeline schedules: on every mesh the order of the tasks, and in closed form the time and memory that it takes.

Stages form a chain, F0 -> F1 -> ... -> F(S-1) -> B(S-1) -> ... -> B0; W of a stage follows its B. A schedule is one
class with all that is particular to it, and is known by its name to methods, plans, searches and the lowering:

    schedule                   idle time per mesh       in flight, a stages behind       source
    gpipe                      (S-1)(f+b)               M                                arXiv 1811.06965, section 2.3
    1f1b                       (S-1)(f+b)               min(M, a+1)                      arXiv 2006.09503, section 3.2
    eager-1f1b                 (S-1)(f+b)               min(M, 2a+1)                     arXiv 2211.05322
    1f1b+k+...                 (S-1)(f+b)               min(M, a+1+k), k of the stage    arXiv 2509.24859
    interleaved                (S-1)(f+b)/V             min(M, (2a + (V-1) S + 1) / V)   arXiv 2104.04473, section 2.2.2
    zero-bubble                (S-1)(f+b-2w)            min(M, S)                        arXiv 2401.10241, section 2.1
    zero-bubble-h2             (S-1) max(f, f+b-3w)     min(M, 2S-1)                     the same, section 2.2
    interleaved-zero-bubble    (S-1)(f+b-2w)/V          min(M, S)                        with section 2.1's rule
    zero-bubble-v              (S-1) f/2 if all equal   min(M, S)                        arXiv 2405.15362, section 4
    dualpipe-v                 S f/2 if all equal       min(M, S + 1/2)                  arXiv 2412.19437, section 3.2.1

with S equal stages, one to a mesh, M microbatches, V virtual stages per mesh (S counts meshes then), and a stage's
times f and b, of which w is the weight gradient. Those that split weight gradients off are in
`zero_bubble_schedules`.

`register_schedule` adds a schedule of one's own, which needs no more than the order of a stage's tasks:

    class ReversedGPipe(Schedule):
        def stage_tasks(self, stage, num_stages, num_microbatches):
            return [*forward_tasks(stage, num_microbatches), *reversed(backward_tasks(stage, num_microbatches))]

    register_schedule(ReversedGPipe(name="reversed-gpipe"))

A method may be given such a schedule itself: searches for other steps do not try that one then.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from autopar.checks import is_text
from autopar.errors import InvalidArgument
from autopar.ir.schedule import Schedule, Seconds, first_round, list_schedule
from autopar.ir.task_order import (
    TaskOrder,
    alternate,
    backward_tasks,
    forward_tasks,
    interleaved_tasks,
    new_task,
)
from autopar.ir.tasks import Task
from autopar.ir.zero_bubble_schedules import DualPipeV, InterleavedZeroBubble, ZeroBubble, ZeroBubbleH2, ZeroBubbleV


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
        return alternate(stage, num_microbatches, num_in_flight=num_stages - stage)

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
        return alternate(stage, num_microbatches, num_in_flight=2 * (num_stages - stage) - 1)

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
        return alternate(stage, num_microbatches, num_in_flight=num_stages - stage + self._extra_of(stage))

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
    virtual_stages: tuple[int, ...] = (2, 3, 4)
    hides_transfers: bool = True

    def stage_tasks(self, stage: int, num_stages: int, num_microbatches: int) -> Sequence[Task]:
        """Return the order of 1F1B: with one stage to a mesh there is nothing to interleave."""
        return _ONE_FORWARD_ONE_BACKWARD.stage_tasks(stage, num_stages, num_microbatches)

    def spread_tasks(self, stage_mesh: Sequence[int], num_microbatches: int) -> TaskOrder:
        """Return Megatron's order if the chain passes the meshes round after round, otherwise a list schedule."""
        meshes, rounds = first_round(stage_mesh)
        if list(stage_mesh) != meshes * rounds:
            return list_schedule(self, stage_mesh, num_microbatches)
        order = {
            mesh: interleaved_tasks(depth, len(meshes), rounds, num_microbatches) for depth, mesh in enumerate(meshes)
        }
        return tuple(tuple(order[mesh]) for mesh in range(len(meshes)))

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


_ONE_FORWARD_ONE_BACKWARD = OneForwardOneBackward()
DEFAULT_SCHEDULE = _ONE_FORWARD_ONE_BACKWARD.name
SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        _ONE_FORWARD_ONE_BACKWARD,
        EagerOneForwardOneBackward(),
        GPipe(),
        Interleaved(),
        ZeroBubble(),
        ZeroBubbleH2(),
        InterleavedZeroBubble(),
        ZeroBubbleV(),
        DualPipeV(),
    )
}
"""The schedules by name, in the order in which a search tries them."""
_GIVEN: dict[str, Schedule] = {}
"""The schedules that a method was given and nobody registered, by name: this process's plans find them here."""


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
    SCHEDULES.setdefault(schedule.name, get_schedule(schedule))


def get_schedule(schedule: str | Schedule) -> Schedule:
    """Return the schedule of a name, or the one that is given, by whose name this process knows it from now on.

    Raises `InvalidArgument` for a name that no schedule has, and for a schedule with the name of another one.
    """
    if isinstance(schedule, Schedule):
        known = _known(schedule.name) or _GIVEN.setdefault(schedule.name, schedule)
        if known != schedule:
            raise InvalidArgument(
                f"There is a schedule of the name '{schedule.name}' already: {known}. A plan names its schedule: give "
                "this one another name."
            )
        return schedule
    found = _known(schedule) if is_text(schedule) else None
    if found is None:
        raise InvalidArgument(
            f"schedule is {schedule!r}. Choose one of {', '.join(map(repr, SCHEDULES))}, or give one of your own as a "
            "value. A plan names its schedule only: where one is loaded that was made with your own, call "
            "register_schedule with that first."
        )
    return found


def _known(name: str) -> Schedule | None:
    return SCHEDULES.get(name) or _GIVEN.get(name) or _warmed_up_by_name(name)


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
    """Raise `InvalidArgument` for more stages on a mesh than the schedule has an order for."""
    most = _most_stages(schedule)
    if virtual_stages > most:
        others = (f'schedule="{name}"' for name, other in SCHEDULES.items() if _most_stages(other) >= virtual_stages)
        raise InvalidArgument(
            f'virtual_stages is {virtual_stages} with schedule="{schedule.name}", which has '
            f"{'one stage' if most == 1 else f'at most {most} stages'} per mesh. "
            f"Leave virtual_stages out, or use {' or '.join(others)}."
        )


def _most_stages(schedule: Schedule) -> float:
    return 1 if schedule.virtual_stages == (1,) else schedule.most_virtual_stages


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


def _fused(tasks: Sequence[Task], run: list[int]) -> tuple[Task, ...]:
    """Neighbouring stages of one mesh act as one stage: each task becomes one task per stage."""
    return tuple(
        new_task(task.kind, stage, task.microbatch)
        for task in tasks
        for stage in (run if task.kind == "F" else reversed(run))
    )
