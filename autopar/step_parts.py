"""Take a simulated step apart: what its time is made of, so that other figures of a machine are tried in no time.

    Trace, Plan, Program, Timeline, Cluster  ->  StepParts  ->  seconds on a machine

The parts are those along the critical path of the step: tasks as often as they stand there, each with its kernels and
its collectives, and transfers between meshes. On the machine they are of, their seconds are those of the step; on one
with other figures they are what the same path takes, and another may take longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from autopar.compiler.costs.compute import EquationWork
from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.frontend.trace import Trace
from autopar.compiler.lowering.sharded_step import logical_mesh, planned_block
from autopar.compiler.lowering.stage_programs import task_block, tasks_of_stages
from autopar.compiler.memory.estimate import peak_memory
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.sharding.layout import LogicalMesh
from autopar.compiler.spmd.block_times import block_work
from autopar.compiler.spmd.collectives import planned_collectives
from autopar.compiler.spmd.local_program import LocalBlock
from autopar.hardware.cluster import Cluster
from autopar.hardware.machine import Machine
from autopar.ir.plan import Plan
from autopar.ir.program import Program, Run
from autopar.runtime.critical_path import critical_path
from autopar.runtime.timeline import Event, Timeline

_DIGITS = 6
_T = TypeVar("_T")


class CollectivePart(NamedTuple):
    """A collective over devices of each of some domains; `combined` if the compiler combines it with others."""

    kind: str
    inside: int
    across: int
    nbytes: float
    combined: bool

    def seconds(self, costs: MeshCosts) -> float:
        """Return what one takes."""
        costs = costs.combined() if self.combined else costs
        return costs.group_time(self.kind, self.inside, self.across, self.nbytes).total_s


class _OnDevice(NamedTuple):
    """An executable as one device of a mesh runs it, which may overwrite the inputs that are donated."""

    block: LocalBlock
    mesh: LogicalMesh
    donated: Collection[int]


class TransferPart(NamedTuple):
    """Bytes that one device sends to another mesh, in the same domain or not."""

    nbytes: float
    same_domain: bool


@dataclass(frozen=True, kw_only=True)
class TaskParts:
    """One run of a task: its kinds of work and of collectives, and how often it does each."""

    kind: str
    runs: int
    """Times that it stands on the critical path."""
    work: tuple[tuple[EquationWork, float], ...]
    collectives: tuple[tuple[CollectivePart, float], ...]

    @cached_property
    def arrays(self) -> tuple[EquationWork, np.ndarray]:
        """All kinds of work as one of arrays, and how often each is done."""
        figures = np.array([work for work, _ in self.work]).reshape(-1, len(EquationWork._fields))
        return EquationWork(*figures.T), np.array([times for _, times in self.work])


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """The parts of the critical path of a step."""

    tasks: tuple[TaskParts, ...]
    transfers: tuple[tuple[TransferPart, int], ...]
    waited_s: float
    """Seconds in which the path waits for a host, or for compute that others take of it."""

    def step_s(
        self,
        machine: Machine,
        *,
        product: float = 1.0,
        half: float = 1.0,
        memory: float = 1.0,
        vector: float = 1.0,
        task_s: Callable[[TaskParts, float], float] = lambda _, device_s: device_s,
    ) -> float:
        """Return the seconds of the path by the starts of kernels and the links of a machine.

        The rates of the work are those of its own machine, times factors: of products, of the FLOPs at which half of
        that is reached, of the bandwidth of memory, and of vector units. `task_s` says what a run of a task takes by
        its seconds on the device, where something else may keep it waiting.
        """
        costs = MeshCosts(machine=machine, mesh=LogicalMesh(shape=(1,), axis_names=("data",)))
        total_s = self.waited_s
        for task in self.tasks:
            work, times = task.arrays
            scaled = work._replace(
                product_s=work.product_s / product,
                half_s=work.half_s * half / product,
                memory_s=work.memory_s / memory,
                passes_s=work.passes_s / memory,
                other_s=work.other_s / vector,
            )
            device_s = times @ scaled.seconds(machine) + sum(n * each.seconds(costs) for each, n in task.collectives)
            total_s += task.runs * task_s(task, float(device_s))
        links = {True: machine.intra, False: machine.inter}
        return float(total_s + sum(n * links[each.same_domain].transfer_s(each.nbytes) for each, n in self.transfers))

    def to_data(self) -> dict[str, Any]:
        """Return the parts as JSON values."""
        tasks = [
            {
                "kind": task.kind,
                "runs": task.runs,
                "work": [[times, *work] for work, times in task.work],
                "collectives": [[times, *each] for each, times in task.collectives],
            }
            for task in self.tasks
        ]
        transfers = [[times, *each] for each, times in self.transfers]
        return {"tasks": tasks, "transfers": transfers, "waited_s": self.waited_s}

    @staticmethod
    def from_data(raw: Mapping[str, Any]) -> StepParts:
        """Return the parts that `to_data` wrote."""
        tasks = tuple(
            TaskParts(
                kind=task["kind"],
                runs=task["runs"],
                work=tuple((EquationWork(*work), times) for times, *work in task["work"]),
                collectives=tuple((CollectivePart(*each), times) for times, *each in task["collectives"]),
            )
            for task in raw["tasks"]
        )
        transfers = tuple((TransferPart(*each), times) for times, *each in raw["transfers"])
        return StepParts(tasks=tasks, transfers=transfers, waited_s=raw["waited_s"])


def step_parts(
    trace: Trace, plan: Plan, program: Program, timeline: Timeline, cut: Callable[[], StageGraph], cluster: Cluster
) -> StepParts:
    """Return the parts of a simulated step; `plan` has times as `price_plan` gives them, `cut` makes its stages."""
    path = critical_path(timeline)
    runs = (instruction for _, instruction in program.linear_order() if isinstance(instruction, Run))
    name_of = {id(event): run.executable for event, run in zip(timeline.events, runs, strict=True)}
    events = [step for step in path.steps if isinstance(step, Event)]
    times = {name: each for mesh in plan.meshes if mesh.sharding for name, each in mesh.sharding.times.items()}
    # Tasks of a kind that take as long are alike, in whatever stages.
    alike: dict[tuple[str, float, float], list[Event]] = {}
    waited_s = path.waited_s
    for event in events:
        took_s, known = event.stop_s - event.start_s, times.get(name_of[id(event)])
        key = (took_s, 0.0) if known is None else (known.compute_s, known.collective_s)
        alike.setdefault((event.task.kind, *key), []).append(event)
        # Other meshes take some of the compute of a host that they share.
        waited_s += took_s - sum(key)
    blocks = _blocks(trace, plan, {name_of[id(those[0])] for those in alike.values()}, cut)
    tasks: list[TaskParts] = []
    for (kind, compute_s, _), those in alike.items():
        machine = cluster.machine_of(plan.meshes[those[0].mesh].devices)
        known = blocks.get(name_of[id(those[0])])
        work = ((EquationWork(0.0, passes_s=compute_s), 1.0),) if known is None else _work(known, machine)
        sent = () if known is None else _collectives(known, machine)
        tasks.append(TaskParts(kind=kind, runs=len(those), work=work, collectives=sent))
    meshes = [mesh.devices for mesh in program.meshes]
    transfers = Counter(
        TransferPart(
            round((step.stop_s - step.start_s - link.latency_s) * link.bandwidth_of(2) - link.ramp_bytes),
            len({cluster.domain_of(device) for number in pair for device in meshes[number]}) == 1,
        )
        for step in path.steps
        if not isinstance(step, Event)
        for pair in [(step.source, step.destination)]
        for link in [cluster.joining_link(*(meshes[number] for number in pair))]
    )
    return StepParts(tasks=tuple(tasks), transfers=tuple(transfers.items()), waited_s=waited_s)


def _blocks(trace: Trace, plan: Plan, names: set[str], cut: Callable[[], StageGraph]) -> dict[str, _OnDevice]:
    """Return the programs of some executables on one device, of those that are planned."""
    if plan.sharding is not None:
        block, mesh = planned_block(trace, plan)[1], logical_mesh(plan.meshes[0])
        return {trace.name: _OnDevice(block, mesh, trace.donated_inputs)}
    graph, found = cut(), dict[str, _OnDevice]()
    for number, planned in enumerate(plan.meshes):
        if planned.sharding is None or not names & planned.sharding.times.keys():
            continue
        mesh = logical_mesh(planned)
        tasks = tasks_of_stages(graph, plan.stages_on(number))
        wanted = [task for task in tasks if task.name in names]
        blocks = (task_block(task, planned.sharding, mesh, number) for task in wanted)
        found |= {t.name: _OnDevice(block, mesh, t.donated) for t, block in zip(wanted, blocks, strict=True)}
    return found


def _work(program: _OnDevice, machine: Machine) -> tuple[tuple[EquationWork, float], ...]:
    block, mesh, donated = program
    copied = peak_memory(block, mesh, donated, machine=machine).copied if machine.copies_state else ()
    works = block_work(block, MeshCosts(machine=machine, mesh=mesh), copied=copied)
    return _counted((EquationWork(*map(_short, work)), times) for work, times in works)


def _collectives(program: _OnDevice, machine: Machine) -> tuple[tuple[CollectivePart, float], ...]:
    costs = MeshCosts(machine=machine, mesh=program.mesh)
    return _counted(
        (
            CollectivePart(own.kind, *costs.group(own.axes, own.reach), _short(own.nbytes), each.combined),
            each.share * each.times,
        )
        for each in planned_collectives(program.block, program.mesh)
        for own in [each.collective]
    )


def _counted(items: Iterable[tuple[_T, float]]) -> tuple[tuple[_T, float], ...]:
    found: dict[_T, float] = {}
    for item, times in items:
        found[item] = found.get(item, 0.0) + times
    return tuple(found.items())


def _short(value: Any) -> float:
    """Return a figure so that those of equal layers are equal."""
    return float(f"{value:.{_DIGITS}g}")
