"""Find the work that several devices do alike, as the step works on rows of the batch that do not divide among them.

    Trace, Plan  ->  a note: where, on how many rows at a time, and the part of the step that every device computes

A step that cuts its batch by itself (gradients summed up in a loop, `jax.lax.map`) may leave a few rows at a time. Of
every equation a device computes the FLOPs over the number of devices that divide it, by the plan's layouts. What is
whole although its rows divide is no matter of this: there a search found that dividing it takes longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from autopar.compiler.frontend.dimension_kinds import DimensionKinds, step_kinds
from autopar.compiler.frontend.trace import Trace
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.flops import equation_flops
from autopar.compiler.lowering.sharded_step import logical_mesh, planned_layouts
from autopar.compiler.lowering.stage_programs import task_layouts, tasks_of_stages
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.planning.demands.kinds import task_kinds
from autopar.compiler.sharding.layout import LogicalMesh
from autopar.compiler.sharding.replication import note_replicated
from autopar.compiler.spmd.block_plan import BlockPlan, strategy_of
from autopar.compiler.spmd.collectives import taken, trips, user_line
from autopar.ir.instructions import listed
from autopar.ir.plan import Plan

_MUCH = 1 / 3
"""Least share of a device's FLOPs that it would be spared if all devices divided the work, for a note."""


class _Programs(NamedTuple):
    """The programs of a mesh, each with its layouts and how often a step runs it, and what finds their dimensions."""

    mesh: LogicalMesh
    programs: Sequence[tuple[jc.ClosedJaxpr, BlockPlan, float]]
    kinds: Callable[[], DimensionKinds]


class _Work(NamedTuple):
    """An equation: FLOPs of all its runs in a step, the devices that divide them, the loops around it from outside."""

    eqn: jc.JaxprEqn
    flops: float
    devices: float
    loops: tuple[jc.JaxprEqn, ...]


class _Shared(NamedTuple):
    """The work that devices do alike on some rows at a time; the equation, or the loop, where most of it stands."""

    spared: float
    """The share of its FLOPs that each device would be spared if all of them divided it."""
    computed: float
    """The share of the FLOPs of all work that each device computes now."""
    rows: int
    place: jc.JaxprEqn


def note_shared_work(
    trace: Trace, plan: Plan, cut: Callable[[], StageGraph], parts_of_rows: Callable[[LogicalMesh], int]
) -> None:
    """Note the work that devices do alike, of the mesh with the largest share of it, if it is much.

    `cut` makes the stages of a plan. `parts_of_rows` is the number of devices of a mesh that rows divide among.
    """
    found: list[tuple[_Shared, LogicalMesh]] = []
    for each in _programs(trace, plan, cut):
        shared = _shared_work(each, parts_of_rows(each.mesh))
        if shared is not None:
            found.append((shared, each.mesh))
    if found:
        shared, mesh = max(found, key=lambda each: each[0].spared)
        note_replicated(_words(trace, plan, shared, mesh.num_devices, parts_of_rows(mesh)))


def _programs(trace: Trace, plan: Plan, cut: Callable[[], StageGraph]) -> Iterator[_Programs]:
    """Yield the programs of every mesh that has layouts."""
    if plan.sharding is not None:
        closed, layouts = planned_layouts(trace, plan)
        kinds = partial(step_kinds, closed, trace.batch_axes)
        yield _Programs(logical_mesh(plan.meshes[0]), [(closed, layouts, 1.0)], kinds)
    if any(mesh.sharding is not None for mesh in plan.meshes):
        graph = cut()
        tasks = [tasks_of_stages(graph, plan.stages_on(number)) for number in range(len(plan.meshes))]
        kinds = partial(task_kinds, graph, [task for own in tasks for task in own], trace.batch_axes)
        for number, planned in enumerate(plan.meshes):
            if planned.sharding is not None:
                mesh = logical_mesh(planned)
                layouts = [task_layouts(task, planned.sharding, mesh, number) for task in tasks[number]]
                programs = [(task.jaxpr, each, task.times) for task, each in zip(tasks[number], layouts, strict=True)]
                yield _Programs(mesh, programs, kinds)


def _shared_work(given: _Programs, parts: int) -> _Shared | None:
    """Return the work that devices do alike on rows that do not divide into so many parts, if it is much."""
    every = [
        work
        for closed, layouts, times in given.programs
        for work in _works(jc.open_jaxpr(closed)[0], layouts, given.mesh, times)
    ]
    computed = sum(work.flops / work.devices for work in every)

    def spared(works: Sequence[_Work]) -> float:
        return sum(work.flops * (1 / work.devices - 1 / given.mesh.num_devices) for work in works) / computed

    if not computed or parts == 1 or spared(every) < _MUCH:
        return None
    kinds = given.kinds()
    few = [work for work in every if (rows := _rows(work, kinds)) and all(each % parts for each in rows)]
    if spared(few) < _MUCH:
        return None
    largest = max(few, key=lambda work: spared([work]))
    return _Shared(
        spared=spared(few),
        computed=computed / sum(work.flops for work in every),
        rows=max(_rows(largest, kinds)),
        place=(*largest.loops, largest.eqn)[0],
    )


def _works(
    jaxpr: jc.Jaxpr, plan: BlockPlan, mesh: LogicalMesh, times: float, loops: tuple[jc.JaxprEqn, ...] = ()
) -> Iterator[_Work]:
    """Yield the work of a program that a step runs so many times, without what is free on every device."""
    for eqn, planned in zip(jaxpr.eqns, plan.equations, strict=True):
        if planned is None:
            continue
        if planned.bodies:
            around = (*loops, eqn) if eqn.primitive.name in ("scan", "while") else loops
            for body, inner in zip(jp.bodies_of(eqn), planned.bodies, strict=True):
                yield from _works(jc.open_jaxpr(body)[0], inner, mesh, times * taken(eqn) * trips(eqn), around)
        elif flops := times * equation_flops(eqn):
            yield _Work(eqn, flops, strategy_of(eqn, planned, mesh).devices, loops)


def _rows(work: _Work, kinds: DimensionKinds) -> set[int]:
    """Return the numbers of rows of the values that an equation meets; one in a loop over the rows themselves."""
    found = _rows_of([*work.eqn.invars, *work.eqn.outvars], kinds)
    return found or ({1} if any(_is_over_rows(loop, kinds) for loop in work.loops) else found)


def _is_over_rows(loop: jc.JaxprEqn, kinds: DimensionKinds) -> bool:
    """Return whether each round of a loop has one row of the batch."""
    if loop.primitive.name != "scan":
        return False
    scanned = loop.invars[jp.scan_of(loop).first_x :]
    return bool(_rows_of(scanned, kinds, slice(1))) and not _rows_of(scanned, kinds, slice(1, None))


def _rows_of(atoms: Sequence[Any], kinds: DimensionKinds, dims: slice = slice(None)) -> set[int]:
    """Return the numbers of rows that values have along some of their dimensions, where they have any."""
    values = [value[dims] for atom in atoms for value in kinds.of(atom)]
    sizes = ([size for factors in value for size, kind in factors if kind == "data"] for value in values)
    return {math.prod(each) for each in sizes if each}


def _words(trace: Trace, plan: Plan, shared: _Shared, num_devices: int, parts: int) -> str:
    rows = "one row" if shared.rows == 1 else f"{shared.rows} rows"
    names = listed(tuple(trace.inputs[i].name for i in trace.batch_inputs))
    line, of = user_line(shared.place), trace.name if len(plan.meshes) == 1 else f"its stages of {trace.name}"
    where = f"{line} works on {rows} of {names} at a time" if line else f"a microbatch has {rows} of {names}"
    helps = [f"Make these a multiple of {parts}"]
    count, others = divmod(trace.num_rows, parts)
    if line and not others and any(map(jc.ad_phase, jc.all_equations(trace.jaxpr))):
        by_autopar = f" and let autopar cut it into num_microbatches={count}" if count > 1 else ""
        helps.append(f"take one gradient of the whole batch{by_autopar}")
    helps.append("name more kinds" if plan.method == "Auto" else "use Auto(), which can split other dimensions")
    return (
        f"Each of {num_devices} devices computes {100 * shared.computed:.0f} % of the FLOPs of {of}, and not "
        f"1/{num_devices} of them, because {where}, which {parts} devices cannot share evenly. "
        f"{', '.join(helps[:-1])}, or {helps[-1]}."
    )
