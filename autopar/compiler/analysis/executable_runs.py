"""Find what one device does in a run of each executable: what it computes, and the collectives, in program order.

    Trace, Plan, StageGraph, Program  ->  executable  ->  ExecutableRun

A plan lists the collectives of a step; here they are those of one run of an executable, with the devices that exchange.
Of an equation a device computes the FLOPs over the number of devices that divide it in its layouts: what several repeat
counts for each of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.frontend.trace import Trace
from autopar.compiler.jaxprs.flops import aval_bytes, equation_bytes, equation_flops
from autopar.compiler.lowering.sharded_step import logical_mesh, planned_block
from autopar.compiler.lowering.stage_programs import task_block, tasks_of_stages
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.planning.mesh_sharding import priced_collectives
from autopar.compiler.resharding.emit import groups_of, permutation
from autopar.compiler.resharding.steps import Permute
from autopar.compiler.sharding.layout import LogicalMesh, num_shards
from autopar.compiler.spmd.collectives import taken, trips
from autopar.compiler.spmd.local_program import Evaluate, LocalBlock, Reshard, RunBody
from autopar.hardware.cluster import Cluster
from autopar.ir.instructions import item_bytes
from autopar.ir.plan import MeshPlan, Plan
from autopar.ir.plan_sharding import PlannedCollective
from autopar.ir.program import Executable, MeshProgram, Program


@dataclass(frozen=True, kw_only=True)
class RunCollective:
    """A collective of an executable: `times` and `seconds` of `planned` are those of one run of it."""

    planned: PlannedCollective
    groups: tuple[tuple[int, ...], ...]
    """The ordinals of the devices that exchange with each other, each device once."""
    pairs: tuple[tuple[int, int], ...] = ()
    """For a collective-permute: from which device to which other one."""


@dataclass(frozen=True, kw_only=True)
class ExecutableRun:
    """One run of an executable on one device: FLOPs, bytes of what its equations read and write, collectives."""

    flops: float
    nbytes: float
    collectives: tuple[RunCollective, ...] = ()


def executable_runs(
    trace: Trace, plan: Plan, program: Program, cut: Callable[[], StageGraph], cluster: Cluster
) -> Mapping[str, ExecutableRun]:
    """Return what a device does in a run of every executable of a program, priced for the devices of a cluster.

    `plan` has the shardings of its meshes, as `price_plan` gives them; `cut` makes the stages of a plan of several.
    """
    found = {name: _by_results(each, program.meshes[each.mesh]) for name, each in program.executables.items()}
    for name, block, mesh in _blocks(trace, plan, cut):
        flops, nbytes = np.sum([(0.0, 0.0), *_work(block, logical_mesh(mesh))], axis=0).tolist()
        sent = _collectives(block, mesh, cluster, name)
        found[name] = ExecutableRun(flops=flops, nbytes=nbytes, collectives=sent)
    return found


def _by_results(executable: Executable, mesh: MeshProgram) -> ExecutableRun:
    """Return the run of an executable without layouts of its own: a device makes its shards of the results."""
    whole = sum(math.prod(each.shape) * item_bytes(each.dtype) for each in executable.outputs)
    share = sum(each.bytes_per_device(mesh) for each in executable.outputs) / whole if whole else 1.0
    return ExecutableRun(flops=share * executable.flops, nbytes=share * executable.bytes_accessed)


def _blocks(trace: Trace, plan: Plan, cut: Callable[[], StageGraph]) -> Iterator[tuple[str, LocalBlock, MeshPlan]]:
    """Yield the programs of the executables that have layouts, as one device runs them, on their meshes."""
    if plan.sharding is not None:
        yield trace.name, planned_block(trace, plan)[1], plan.meshes[0]
        return
    several = [number for number, mesh in enumerate(plan.meshes) if len(mesh.devices) > 1]
    graph = cut() if several else None
    for number in several:
        mesh = plan.meshes[number]
        if graph is not None and mesh.sharding is not None:
            for task in tasks_of_stages(graph, plan.stages_on(number)):
                yield task.name, task_block(task, mesh.sharding, logical_mesh(mesh), number), mesh


def _work(block: LocalBlock, mesh: LogicalMesh) -> Iterator[tuple[float, float]]:
    """Yield the FLOPs and bytes of a device for every equation of a program, as often as it runs them."""
    for action in block.actions:
        if isinstance(action, RunBody):
            rounds = taken(action.eqn) * trips(action.eqn)
            for body in action.bodies:
                yield from ((rounds * flops, rounds * nbytes) for flops, nbytes in _work(body, mesh))
        elif isinstance(action, Evaluate):
            yield equation_flops(action.eqn) / action.strategy.devices, _bytes(action, mesh)


def _bytes(action: Evaluate, mesh: LogicalMesh) -> float:
    """Return the bytes of an equation by its layouts: those of its whole operands and results, in proportion."""
    atoms, strategy = (*action.eqn.invars, *action.eqn.outvars), action.strategy
    whole = [aval_bytes(atom.aval) for atom in atoms]
    parts = [
        each / num_shards(getattr(atom.aval, "shape", ()), layout, mesh)
        for each, atom, layout in zip(whole, atoms, (*strategy.operands, *strategy.results), strict=True)
    ]
    return equation_bytes(action.eqn) * sum(parts) / sum(whole) if sum(whole) else 0.0


def _collectives(block: LocalBlock, planned: MeshPlan, cluster: Cluster, name: str) -> tuple[RunCollective, ...]:
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
