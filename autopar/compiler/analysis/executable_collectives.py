"""Find what each executable of a program sends: its collectives in program order, and which devices exchange.

    Trace, Plan, StageGraph  ->  executable  ->  RunCollective, RunCollective, ...

A plan lists the collectives of a step; here they are those of one run of an executable, by its name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.frontend.trace import Trace
from autopar.compiler.lowering.sharded_step import logical_mesh, planned_block
from autopar.compiler.lowering.stage_programs import task_block, tasks_of_stages
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.planning.mesh_sharding import priced_collectives
from autopar.compiler.resharding.emit import groups_of, permutation
from autopar.compiler.resharding.steps import Permute
from autopar.compiler.sharding.layout import LogicalMesh
from autopar.compiler.spmd.local_program import LocalBlock, Reshard, RunBody
from autopar.hardware.cluster import Cluster
from autopar.ir.plan import MeshPlan, Plan
from autopar.ir.plan_sharding import PlannedCollective


@dataclass(frozen=True, kw_only=True)
class RunCollective:
    """A collective of an executable: `times` and `seconds` of `planned` are those of one run of it."""

    planned: PlannedCollective
    groups: tuple[tuple[int, ...], ...]
    """The ordinals of the devices that exchange with each other, each device once."""
    pairs: tuple[tuple[int, int], ...] = ()
    """For a collective-permute: from which device to which other one."""


def executable_collectives(
    trace: Trace, plan: Plan, cut: Callable[[], StageGraph], cluster: Cluster
) -> Mapping[str, tuple[RunCollective, ...]]:
    """Return the collectives of every executable that has any, priced for the devices of a cluster.

    `plan` has the shardings of its meshes, as `price_plan` gives them; `cut` makes the stages of a plan of several.
    """
    if plan.sharding is not None:
        return {trace.name: _of_block(planned_block(trace, plan)[1], plan.meshes[0], cluster, trace.name)}
    graph, found = cut(), dict[str, tuple[RunCollective, ...]]()
    for number, mesh in enumerate(plan.meshes):
        if mesh.sharding is None or not mesh.sharding.collectives:
            continue
        for task in tasks_of_stages(graph, plan.stages_on(number)):
            block = task_block(task, mesh.sharding, logical_mesh(mesh), number)
            found[task.name] = _of_block(block, mesh, cluster, task.name)
    return {name: each for name, each in found.items() if each}


def _of_block(block: LocalBlock, planned: MeshPlan, cluster: Cluster, name: str) -> tuple[RunCollective, ...]:
    mesh = logical_mesh(planned)
    costs = MeshCosts(machine=cluster.machine_of(planned.devices), mesh=mesh)
    permutes = _permutes(block)
    return tuple(
        RunCollective(
            planned=each,
            groups=_groups(each, planned.devices, mesh),
            pairs=_pairs(next(permutes), planned.devices, mesh) if each.kind == "collective-permute" else (),
        )
        for each in priced_collectives(block, costs, name=name)
    )


def _permutes(block: LocalBlock) -> Iterator[Permute]:
    for action in block.actions:
        if isinstance(action, Reshard):
            yield from (step for step in action.steps if isinstance(step, Permute))
        elif isinstance(action, RunBody):
            for body in action.bodies:
                yield from _permutes(body)


def _lines(axes: Sequence[int], devices: Sequence[int], mesh: LogicalMesh) -> np.ndarray:
    """Return the devices along some axes, the last of these fastest: a row for each place on the other axes."""
    grid = np.array(devices).reshape(mesh.shape)
    last = range(grid.ndim - len(axes), grid.ndim)
    return np.moveaxis(grid, list(axes), list(last)).reshape(-1, mesh.size(axes))


def _groups(each: PlannedCollective, devices: Sequence[int], mesh: LogicalMesh) -> tuple[tuple[int, ...], ...]:
    axes = tuple(mesh.axis_names.index(name) for name in each.axes)
    lines = _lines(axes, devices, mesh)
    if each.reach == "all":
        return tuple(tuple(row) for row in lines.tolist())
    parts = groups_of(axes, "inside" if each.reach == "inside" else "across", mesh)
    return tuple(tuple(row[list(part)].tolist()) for row, part in itertools.product(lines, parts))


def _pairs(step: Permute, devices: Sequence[int], mesh: LogicalMesh) -> tuple[tuple[int, int], ...]:
    moved = [(a, b) for a, b in permutation(step, mesh.shape) if a != b]
    return tuple((int(row[a]), int(row[b])) for row in _lines(step.axes, devices, mesh) for a, b in moved)
