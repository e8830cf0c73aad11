"""Choose the layouts of what a mesh runs, and write them down as data of the plan.

    GroupTask, ..., GroupConstraints, mesh  ->  GroupPlan      by integer programming
    that                                    ->  DeviceTask     what one device does of each task, its times and memory
    that                                    ->  MeshSharding   every layout, with the times and collectives it means

All stages of a mesh are planned together, for they share its values.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.intra_op.plan_tasks import GroupConstraints, GroupPlan, GroupTask, local_task, task_graph
from autopar.compiler.memory.estimate import MemoryEstimate, peak_memory
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.spmd.block_plan import BlockPlan, layout_text, to_data
from autopar.compiler.spmd.block_times import BlockTimes, block_times
from autopar.compiler.spmd.collectives import planned_collectives
from autopar.compiler.spmd.local_program import LocalBlock
from autopar.ir.memory_part import MemoryPart
from autopar.ir.plan_sharding import MeshSharding, PlannedCollective, TaskTimes


def mesh_constraints(graph: StageGraph, tasks: list[GroupTask]) -> GroupConstraints:
    """Return what the graph asks for: new state lies where the old did; only totals that stay here may stay sums."""
    updates = {name for task in tasks if task.phase == "update" for name in task.inputs}
    micro = {name for task in tasks if task.phase != "update" for name in (*task.inputs, *task.outputs)}
    local = updates & micro & graph.hidden_totals
    return GroupConstraints(alike=graph.replaced, sums=local)


def plan_mesh(tasks: list[GroupTask], constraints: GroupConstraints, mesh_costs: MeshCosts) -> MeshSharding:
    """Return the best layouts of the tasks of a mesh."""
    solution = task_graph(tasks, mesh_costs, constraints).best({})
    return mesh_sharding(tasks, solution, mesh_costs)


def mesh_sharding(
    tasks: Sequence[GroupTask],
    solution: GroupPlan,
    mesh_costs: MeshCosts,
    on_device: Mapping[str, DeviceTask] | None = None,
) -> MeshSharding:
    """Return a solution as data, with its times and collectives; `on_device` are its `device_tasks`, if known."""
    times: dict[str, TaskTimes] = {}
    temporary_bytes: dict[str, float] = {}
    temporary_parts: dict[str, tuple[MemoryPart, ...]] = {}
    collectives: list[PlannedCollective] = []
    mesh = mesh_costs.mesh
    on_device = device_tasks(tasks, solution, mesh_costs) if on_device is None else on_device
    for task in tasks:
        done = on_device[task.name]
        block, took, memory = done.block, done.times, done.memory
        times[task.name] = TaskTimes(compute_s=took.compute_s, collective_s=took.collective_s)
        temporary_bytes[task.name] = memory.peak_bytes - memory.arguments_bytes
        temporary_parts[task.name] = memory.parts
        collectives += priced_collectives(block, mesh_costs, times=task.times, name=task.name)
    return MeshSharding(
        layouts={
            "values": {name: layout_text(layout, mesh) for name, layout in sorted(solution.layouts.items())},
            "tasks": {name: to_data(block, mesh) for name, block in solution.tasks.items()},
        },
        times=times,
        collectives=tuple(collectives),
        temporary_bytes=temporary_bytes,
        temporary_parts=temporary_parts,
        objective_s=solution.optimum.value,
        lower_bound_s=solution.optimum.lower_bound,
        figures=mesh_costs.machine.name,
    )


def mesh_sharding_like(
    sharding: MeshSharding,
    others: Sequence[GroupTask],
    tasks: Sequence[GroupTask],
    solution: GroupPlan,
    mesh_costs: MeshCosts,
) -> MeshSharding:
    """Return the sharding of tasks that are like `others`, whose sharding is known, under names of their own."""
    mesh = mesh_costs.mesh
    names = {other.name: task.name for other, task in zip(others, tasks, strict=True)}
    collectives: list[PlannedCollective] = []
    for task in tasks:
        block = local_task(task, solution.tasks[task.name], mesh)
        collectives += priced_collectives(block, mesh_costs, times=task.times, name=task.name)
    return replace(
        sharding,
        layouts={
            "values": {name: layout_text(layout, mesh) for name, layout in sorted(solution.layouts.items())},
            "tasks": {names[name]: data for name, data in sharding.layouts["tasks"].items()},
        },
        times={names[name]: times for name, times in sharding.times.items()},
        collectives=tuple(collectives),
        temporary_bytes={names[name]: size for name, size in sharding.temporary_bytes.items()},
        temporary_parts={names[name]: parts for name, parts in sharding.temporary_parts.items()},
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceTask:
    """A task as one device does it: its program, the seconds of one run, and the memory that this needs."""

    block: LocalBlock
    times: BlockTimes
    estimate: Callable[[], MemoryEstimate]

    @cached_property
    def memory(self) -> MemoryEstimate:
        """The memory of one run, computed when it is first asked for."""
        return self.estimate()


def device_tasks(tasks: Sequence[GroupTask], solution: GroupPlan, mesh_costs: MeshCosts) -> dict[str, DeviceTask]:
    """Return by its name what one device does of each task of a solution."""
    return {task.name: _device_task(task, solution.tasks[task.name], mesh_costs) for task in tasks}


_Known = tuple[BlockPlan, MeshCosts, DeviceTask]
_known: weakref.WeakKeyDictionary[GroupTask, deque[_Known]] = weakref.WeakKeyDictionary()
_NUM_KNOWN = 8
"""The number of solutions of a task that are remembered: of several memory multipliers many are the same."""


def _device_task(task: GroupTask, plan: BlockPlan, mesh_costs: MeshCosts) -> DeviceTask:
    known = _known.setdefault(task, deque(maxlen=_NUM_KNOWN))
    for *given, found in known:
        if given == [plan, mesh_costs]:
            return found
    block, machine = local_task(task, plan, mesh_costs.mesh), mesh_costs.machine
    estimate = cache(partial(peak_memory, block, mesh_costs.mesh, task.donated, machine=machine))
    copied = estimate().copied if machine.copies_state and task.donated else ()
    found = DeviceTask(block=block, times=block_times(block, mesh_costs, copied), estimate=estimate)
    known.append((plan, mesh_costs, found))
    return found


def priced_collectives(
    block: LocalBlock, mesh_costs: MeshCosts, *, times: float = 1, name: str = ""
) -> list[PlannedCollective]:
    """Return the collectives of a program that a step runs so many times; `name` is the scope of those without one."""
    mesh = mesh_costs.mesh
    return [
        PlannedCollective(
            kind=each.collective.kind,
            axes=mesh.names(each.collective.axes),
            group_size=mesh.reach(each.collective.axes, each.collective.reach),
            reach=each.collective.reach,
            nbytes=each.collective.nbytes,
            times=each.times * times,
            seconds=times * each.seconds(mesh_costs),
            dtype=each.dtype,
            what=each.what,
            scope=each.scope or name,
            line=each.line,
            repeated=each.repeated,
            invariant_trips=each.invariant_trips,
        )
        for each in planned_collectives(block, mesh)
    ]
