"""Write down the programs of the tasks of stages.

StageGraph, stages             ->  GroupTask, ...   the tasks of the stages, and how often a step runs them
StageGraph, Plan, mesh number  ->  ShardedMesh      the same programs with explicit collectives; plain on one device
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from autopar.compiler.intra_op.plan_tasks import GroupTask, local_task
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.lowering.sharded_step import logical_mesh
from autopar.compiler.lowering.task_executables import (
    EmittedTask,
    emit_concatenation,
    emit_task,
    emit_zeros,
    executable_name,
)
from autopar.compiler.lowering.user_constraints import without_constraints
from autopar.compiler.memory.host_bytes import makes_host_values
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.sharding.layout import Layout, LogicalMesh, replicated
from autopar.compiler.spmd.block_plan import BlockPlan, from_data, layout_from_text
from autopar.compiler.spmd.emit import border_shape, border_spec, emit_spmd_task
from autopar.compiler.spmd.local_program import LocalBlock
from autopar.errors import PlanMismatch
from autopar.ir.plan import Plan
from autopar.ir.plan_sharding import MeshSharding
from autopar.ir.program import ArrayType


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedMesh:
    """The program of every task of one mesh, and the type of every value that lies between tasks.

    On paper there are no programs but those that say what the step keeps on the host.
    """

    jaxprs: Mapping[str, jc.ClosedJaxpr]
    types: Mapping[str, ArrayType]


_PHASES = {"F": "forward", "B": "backward", "W": "backward", "U": "update", "C": "update"}


def tasks_of_stages(
    graph: StageGraph, stages: Collection[int], donated_leaves: Collection[int] = ()
) -> list[GroupTask]:
    """Return the tasks of some stages, in an order in which one mesh may run them.

    `donated_leaves` of the step may be overwritten.
    """
    every = _emitted(graph, stages)
    donated = frozenset(donated_leaves)
    given = {i.value for i in graph.inputs if i.kind == "whole" and i.leaf in donated}
    last = {name: emitted for emitted in every for name in emitted.inputs}
    whole = {i.value for i in graph.inputs if i.kind == "whole"}
    updated = {name for emitted in every if emitted.task.kind == "U" for name in emitted.inputs}
    return [
        GroupTask(
            name=executable_name(emitted),
            jaxpr=emitted.jaxpr,
            inputs=tuple(name.partition("@")[0] for name in emitted.inputs),
            outputs=emitted.outputs,
            times=1.0 if emitted.task.kind in "UC" else float(len(graph.microbatches_of(emitted.task.stage))),
            phase=_PHASES[emitted.task.kind],
            donated=tuple(
                place
                for place, name in enumerate(emitted.inputs)
                # Accumulators are written again; the state is overwritten where it is read last.
                if name in emitted.outputs or (emitted.task.kind == "U" and name in given and last[name] is emitted)
            ),
            parameters=tuple(place for place, name in enumerate(emitted.inputs) if name.partition("@")[0] in whole),
            gradients=tuple(place for place, name in enumerate(emitted.outputs) if name in updated),
        )
        for emitted in every
    ]


def _emitted(graph: StageGraph, stages: Collection[int]) -> list[EmittedTask]:
    """Return the tasks, and behind each the one that joins its results of all microbatches, if there are any."""
    emitted: list[EmittedTask] = []
    for task in graph.tasks:
        if task.stage in stages:
            joined = emit_concatenation(graph, task)
            emitted += [emit_task(graph, task), *([] if joined is None else [joined])]
    return emitted


def mesh_on_one_device(graph: StageGraph, plan: Plan, number: int) -> ShardedMesh:
    """Return the programs of a mesh of one device."""
    stages, mesh = plan.stages_on(number), logical_mesh(plan.meshes[number])
    types = _Types(graph, mesh, {})
    jaxprs = {executable_name(e): without_constraints(e.jaxpr) for e in _emitted(graph, stages)}
    return ShardedMesh(jaxprs=jaxprs | _zeros(graph, stages, types), types=types)


def sharded_mesh(graph: StageGraph, plan: Plan, number: int, *, on_paper: bool) -> ShardedMesh:
    """The programs of a mesh whose layouts the plan has; `PlanMismatch` if they are of another program."""
    planned = plan.meshes[number]
    assert planned.sharding is not None
    mesh = logical_mesh(planned)
    layouts = {name: layout_from_text(text, mesh) for name, text in planned.sharding.layouts["values"].items()}
    types = _Types(graph, mesh, layouts)
    jaxprs: dict[str, jc.ClosedJaxpr] = {}
    for task in tasks_of_stages(graph, plan.stages_on(number)):
        layouts_of_task = task_layouts(task, planned.sharding, mesh, number)
        if not on_paper or makes_host_values(task.jaxpr):
            jaxprs[task.name] = emit_spmd_task(task.jaxpr, local_task(task, layouts_of_task, mesh), mesh)
    zeros = {} if on_paper else _zeros(graph, plan.stages_on(number), types)
    return ShardedMesh(jaxprs=jaxprs | zeros, types=types)


def _zeros(graph: StageGraph, stages: Collection[int], types: Mapping[str, ArrayType]) -> dict[str, jc.ClosedJaxpr]:
    """Return the programs that make the accumulators; every summand of a sum starts at zero."""
    jaxprs: dict[str, jc.ClosedJaxpr] = {}
    for task in graph.tasks:
        zeros = emit_zeros(graph, task) if task.stage in stages and task.kind != "U" else None
        if zeros is not None:
            jaxprs[executable_name(zeros)] = _broadcast(zeros, [types[name].shape for name in zeros.outputs])
    return jaxprs


def _broadcast(zeros: EmittedTask, shapes: list[tuple[int, ...]]) -> jc.ClosedJaxpr:
    function = jc.jaxpr_as_fun(zeros.jaxpr)
    return jc.trace(lambda: [jnp.broadcast_to(x, shape) for x, shape in zip(function(), shapes, strict=True)], [])


def task_block(task: GroupTask, sharding: MeshSharding, mesh: LogicalMesh, number: int) -> LocalBlock:
    """Return what one device of a mesh does of a task; `PlanMismatch` for layouts of another program."""
    return local_task(task, task_layouts(task, sharding, mesh, number), mesh)


def task_layouts(task: GroupTask, sharding: MeshSharding, mesh: LogicalMesh, number: int) -> BlockPlan:
    """Return the planned layouts of a task; `PlanMismatch` for those of another program."""
    jaxpr = jc.open_jaxpr(task.jaxpr)[0]
    data = sharding.layouts["tasks"].get(task.name)
    plan = None if data is None else from_data(data, mesh)
    if plan is None or len(plan.equations) != len(jaxpr.eqns) or len(plan.arguments) != len(jaxpr.invars):
        found = "no layouts" if plan is None else f"layouts for {len(plan.equations)} equations"
        raise PlanMismatch(
            f"The plan has {found} for the task {task.name} of mesh {number}, which has {len(jaxpr.eqns)}. Make a new "
            "plan with step.trace(...).plan()."
        )
    return plan


class _Types(dict[str, ArrayType]):
    """The types of values on a mesh, each found when it is first asked for: a mesh has few of those of a step."""

    def __init__(self, graph: StageGraph, mesh: LogicalMesh, layouts: Mapping[str, Layout | None]) -> None:
        super().__init__()
        self.graph, self.mesh, self.layouts = graph, mesh, layouts

    def __missing__(self, name: str) -> ArrayType:
        value: Any = self.graph.values[name]
        layout = self.layouts.get(name) or replicated(len(value.shape))
        shape = border_shape(tuple(value.shape), layout, self.mesh)
        self[name] = replace(ArrayType.of(value, border_spec(layout, self.mesh)), shape=shape)
        return self[name]
