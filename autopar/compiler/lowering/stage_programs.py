"""Choose the layouts of the stages of a plan, and write down the programs of their tasks.

    StageGraph, Plan, mesh number  ->  GroupTask, ...        what the mesh runs, and how often
    these                          ->  MeshSharding          every layout, as data of the plan
    that                           ->  ShardedMesh           the task programs with explicit collectives

All stages of a mesh are planned together, for they share its values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from autopar.compiler.costs.compilers import compiler_for
from autopar.compiler.costs.mesh_costs import MeshFigures
from autopar.compiler.intra_op.plan_program import with_shared_latency
from autopar.compiler.intra_op.plan_tasks import GroupConstraints, GroupPlan, GroupTask, task_choices
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.lowering.sharded_step import logical_mesh
from autopar.compiler.lowering.task_executables import EmittedTask, emit_task, emit_zeros, executable_name
from autopar.compiler.memory.estimate import peak_memory
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.sharding.layout import Layout, LogicalMesh, replicated
from autopar.compiler.spmd.block_plan import from_data, layout_from_text, layout_text, to_data
from autopar.compiler.spmd.block_times import block_times
from autopar.compiler.spmd.collectives import planned_collectives
from autopar.compiler.spmd.emit import border_shape, border_spec, localize_task
from autopar.compiler.spmd.local_program import LocalBlock, local_block
from autopar.errors import PlanMismatch
from autopar.ir.plan import Plan
from autopar.ir.plan_sharding import MeshSharding, PlannedCollective, TaskTimes
from autopar.ir.program import ArrayType


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedMesh:
    """The program of every task of one mesh, and the type of every value that lies between tasks."""

    jaxprs: Mapping[str, jc.ClosedJaxpr]
    types: Mapping[str, ArrayType]


_PHASES = {"F": "forward", "B": "backward", "W": "backward", "U": "update"}


def mesh_tasks(graph: StageGraph, plan: Plan, number: int, donated_leaves: Collection[int] = ()) -> list[GroupTask]:
    """What mesh `number` runs, in an order in which it may. `donated_leaves` of the step may be overwritten."""
    every = _emitted(graph, plan, number)
    donated = frozenset(donated_leaves)
    given = {i.value for i in graph.inputs if i.kind == "whole" and i.leaf in donated}
    last = {name: emitted for emitted in every for name in emitted.inputs}
    return [
        GroupTask(
            name=executable_name(emitted),
            jaxpr=emitted.jaxpr,
            inputs=emitted.inputs,
            outputs=emitted.outputs,
            times=1.0 if emitted.task.kind == "U" else float(graph.num_microbatches),
            phase=_PHASES[emitted.task.kind],
            donated=tuple(
                place
                for place, name in enumerate(emitted.inputs)
                # Accumulators are written again; the state is overwritten where it is read last.
                if name in emitted.outputs or (emitted.task.kind == "U" and name in given and last[name] is emitted)
            ),
        )
        for emitted in every
    ]


def _emitted(graph: StageGraph, plan: Plan, number: int) -> list[EmittedTask]:
    return [emit_task(graph, task) for task in graph.tasks if plan.stages[task.stage].mesh == number]


def mesh_constraints(graph: StageGraph, tasks: list[GroupTask]) -> GroupConstraints:
    """What follows from the graph: new state lies where the old did; only totals that stay here may stay sums."""
    shown = {out.value for out in graph.outputs} | set(graph.crossing)
    totals = {a.result for task in graph.tasks for a in task.accumulations if a.kind in ("sum", "mean")}
    updates = {name for task in tasks if task.phase == "update" for name in task.inputs}
    micro = {name for task in tasks if task.phase != "update" for name in (*task.inputs, *task.outputs)}
    local = {name for name in totals - shown if name in updates and name in micro}
    return GroupConstraints(
        alike={
            out.value: out.replaces
            for out in graph.outputs
            if out.value is not None and out.replaces is not None and _same_type(graph, out.value, out.replaces)
        },
        sums=local,
    )


def _same_type(graph: StageGraph, name: str, other: str) -> bool:
    mine, theirs = graph.values[name], graph.values[other]
    return mine.shape == theirs.shape and mine.dtype == theirs.dtype


def plan_mesh(
    tasks: list[GroupTask],
    constraints: GroupConstraints,
    mesh: LogicalMesh,
    figures: MeshFigures,
    *,
    time_limit_s: float = 60.0,
    cache_directory: Path | None = None,
) -> MeshSharding:
    """The best layouts of what a mesh runs."""
    choices = task_choices(tasks, mesh, figures, constraints)
    found = choices.best({}, time_limit_s=time_limit_s, cache_directory=cache_directory)
    return sharding_of(tasks, found, mesh, figures)


def sharding_of(
    tasks: Sequence[GroupTask],
    found: GroupPlan,
    mesh: LogicalMesh,
    figures: MeshFigures,
    blocks: Mapping[str, LocalBlock] | None = None,
) -> MeshSharding:
    """A solution as data, with the times and collectives that it means; `blocks` are its `local_blocks`, if known."""
    times: dict[str, TaskTimes] = {}
    temporary_bytes: dict[str, float] = {}
    collectives: list[PlannedCollective] = []
    blocks = local_blocks(tasks, found, mesh) if blocks is None else blocks
    for task in tasks:
        block = blocks[task.name]
        mine = with_shared_latency(figures) if task.phase == "update" else figures
        took = block_times(block, mesh, mine)
        times[task.name] = TaskTimes(compute_s=took.compute_s, collective_s=took.collective_s)
        memory = peak_memory(block, mesh, task.donated, compiler=compiler_for(figures.name))
        temporary_bytes[task.name] = memory.peak_bytes - memory.arguments_bytes
        collectives += _collectives(task, block, mesh, mine)
    return MeshSharding(
        layouts={
            "values": {name: layout_text(layout, mesh) for name, layout in sorted(found.layouts.items())},
            "tasks": {name: to_data(block, mesh) for name, block in found.tasks.items()},
        },
        times=times,
        collectives=tuple(collectives),
        temporary_bytes=temporary_bytes,
        objective_s=found.optimum.value,
        lower_bound_s=found.optimum.lower_bound,
        figures=figures.name,
    )


def sharding_like(
    sharding: MeshSharding,
    others: Sequence[GroupTask],
    tasks: Sequence[GroupTask],
    found: GroupPlan,
    mesh: LogicalMesh,
    figures: MeshFigures,
) -> MeshSharding:
    """The sharding of tasks that are like `others`, whose sharding is known, by the same solution under their names."""
    names = {other.name: task.name for other, task in zip(others, tasks, strict=True)}
    blocks = local_blocks(tasks, found, mesh)
    collectives = [
        each
        for task in tasks
        for each in _collectives(
            task, blocks[task.name], mesh, with_shared_latency(figures) if task.phase == "update" else figures
        )
    ]
    return replace(
        sharding,
        layouts={
            "values": {name: layout_text(layout, mesh) for name, layout in sorted(found.layouts.items())},
            "tasks": {names[name]: data for name, data in sharding.layouts["tasks"].items()},
        },
        times={names[name]: times for name, times in sharding.times.items()},
        collectives=tuple(collectives),
        temporary_bytes={names[name]: size for name, size in sharding.temporary_bytes.items()},
    )


def local_blocks(tasks: Sequence[GroupTask], found: GroupPlan, mesh: LogicalMesh) -> dict[str, LocalBlock]:
    """What every device does in each task of a solution."""
    return {
        task.name: local_block(jc.open_jaxpr(task.jaxpr)[0], found.tasks[task.name], mesh, phase=task.phase)
        for task in tasks
    }


def _collectives(
    task: GroupTask, block: LocalBlock, mesh: LogicalMesh, figures: MeshFigures
) -> list[PlannedCollective]:
    return [
        PlannedCollective(
            kind=each.collective.kind,
            axes=mesh.names(each.collective.axes),
            group_size=mesh.size(each.collective.axes),
            nbytes=each.collective.nbytes,
            times=each.times * task.times,
            seconds=each.times
            * task.times
            * figures.collective_s(each.collective.kind, each.collective.axes, each.collective.nbytes, mesh),
            dtype=each.dtype,
            what=each.what,
            scope=each.scope or task.name,
            repeated=each.repeated,
        )
        for each in planned_collectives(block, mesh)
    ]


def sharded_mesh(graph: StageGraph, plan: Plan, number: int) -> ShardedMesh:
    """The programs of a mesh whose layouts the plan has; `PlanMismatch` if they are of another program."""
    planned = plan.meshes[number]
    assert planned.sharding is not None
    mesh, compiler = logical_mesh(planned), compiler_for(planned.sharding.figures)
    layouts = {name: layout_from_text(text, mesh) for name, text in planned.sharding.layouts["values"].items()}
    jaxprs: dict[str, jc.ClosedJaxpr] = {}
    types: dict[str, ArrayType] = {}
    for task in mesh_tasks(graph, plan, number):
        block = _block_of(task, planned.sharding, mesh, number)
        jaxprs[task.name] = localize_task(task.jaxpr, block, mesh, compiler=compiler)
        for name in (*task.inputs, *task.outputs):
            types[name] = _type(graph, name, layouts.get(name), mesh)
    for name in graph.values:
        types.setdefault(name, _type(graph, name, layouts.get(name), mesh))
    return ShardedMesh(jaxprs=jaxprs | _zeros(graph, plan, number, types), types=types)


def _zeros(graph: StageGraph, plan: Plan, number: int, types: Mapping[str, ArrayType]) -> dict[str, jc.ClosedJaxpr]:
    """What accumulators start from; every summand of a sum starts at zero."""
    found: dict[str, jc.ClosedJaxpr] = {}
    for task in graph.tasks:
        zeros = emit_zeros(graph, task) if plan.stages[task.stage].mesh == number and task.kind != "U" else None
        if zeros is not None:
            found[executable_name(zeros)] = _broadcast(zeros, [types[name].shape for name in zeros.outputs])
    return found


def _broadcast(zeros: EmittedTask, shapes: list[tuple[int, ...]]) -> jc.ClosedJaxpr:
    function = jc.jaxpr_as_fun(zeros.jaxpr)
    return jc.trace(lambda: [jnp.broadcast_to(x, shape) for x, shape in zip(function(), shapes, strict=True)], [])


def _block_of(task: GroupTask, sharding: MeshSharding, mesh: LogicalMesh, number: int) -> LocalBlock:
    jaxpr = jc.open_jaxpr(task.jaxpr)[0]
    data = sharding.layouts["tasks"].get(task.name)
    plan = None if data is None else from_data(data, mesh)
    if plan is None or len(plan.equations) != len(jaxpr.eqns) or len(plan.arguments) != len(jaxpr.invars):
        found = "no layouts" if plan is None else f"layouts for {len(plan.equations)} equations"
        raise PlanMismatch(
            f"The plan has {found} for the task {task.name} of mesh {number}, which has {len(jaxpr.eqns)}. Make a new "
            "plan with step.trace(...).plan()."
        )
    return local_block(jaxpr, plan, mesh, phase=task.phase)


def _type(graph: StageGraph, name: str, layout: Layout | None, mesh: LogicalMesh) -> ArrayType:
    value: Any = graph.values[name]
    layout = replicated(len(value.shape)) if layout is None else layout
    return ArrayType(
        shape=border_shape(tuple(value.shape), layout, mesh),
        dtype=str(value.dtype),
        spec=border_spec(layout, mesh),
    )
