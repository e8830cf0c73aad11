"""Find the state that can live on the host between steps, and the parts in which updates bring it to the devices.

    StageGraph        ->  which state only updates read: moments, master copies of parameters
                      ->  its parts: what one update reads together, joined until a part is worth a copy
    StageGraph, Plan  ->  the leaves that the plan keeps on the host, and the results that replace them

A part is on the devices while it is updated, with its neighbours on their way in and out: smaller parts take less
memory, and each costs its host the work of starting two copies and an update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.flops import aval_bytes
from autopar.compiler.pipeline.stage_graph import GraphOutput, StageGraph, StageTask
from autopar.compiler.sharding.replicated_values import below_split_size
from autopar.errors import PlanMismatch, Unsupported
from autopar.ir.plan import Plan

PART_SHARE = 1 / 16
"""Of the state of a stage: no part of several arrays is larger, so that three of them are less than a fifth of it."""
PARTS_AT_ONCE = 3
"""On the devices: one that comes, one that is updated, one that leaves."""


def offered_state(graph: StageGraph) -> dict[str, GraphOutput]:
    """Return the inputs that only updates of one stage read and replace, each with the result that replaces it.

    Small ones stay on the devices, and so do the pieces of a leaf that several stages share.
    """
    readers: dict[str, list[StageTask]] = {}
    made: dict[str, int] = {}
    for task in graph.tasks:
        for name in task.inputs:
            readers.setdefault(name, []).append(task)
        made.update((name, task.stage) for name in task.outputs if task.kind == "U")
    inputs = {i.value: i for i in graph.inputs if i.kind == "whole" and i.leaf is not None and i.start is None}
    offered: dict[str, GraphOutput] = {}
    for out in graph.outputs:
        given = inputs.get(out.replaces or "")
        if given is None or out.value is None or out.start is not None or made.get(out.value) != out.stage:
            continue
        before, after = graph.values[given.value], graph.values[out.value]
        tasks = readers.get(given.value, [])
        only_updated = bool(tasks) and all(task.kind == "U" and task.stage == out.stage for task in tasks)
        if only_updated and (before.shape, before.dtype) == (after.shape, after.dtype) and not below_split_size(before):
            offered[given.value] = out
    return offered


def state_on_host(graph: StageGraph) -> tuple[tuple[str, ...], ...]:
    """Return the names of all state that can live on the host, part by part.

    Raises `Unsupported` where there is none.
    """
    offered = offered_state(graph)
    names = {i.value: i.name for i in graph.inputs}
    sizes = {value: aval_bytes(graph.values[value]) for value in offered}
    parts: list[tuple[str, ...]] = []
    for stage in range(graph.num_stages):
        tasks = [task for task in graph.tasks if task.kind == "U" and task.stage == stage]
        together = [each for task in tasks for each in _read_together(task, offered)]
        size_of = [sum(sizes[value] for value in each) for each in together]
        room = max([*size_of, sum(size_of) * PART_SHARE])
        part, filled = list[str](), 0.0
        for values, nbytes in zip(together, size_of, strict=True):
            if part and filled + nbytes > room:
                parts.append(tuple(names[value] for value in part))
                part, filled = [], 0.0
            part += values
            filled += nbytes
        if part:
            parts.append(tuple(names[value] for value in part))
    if not parts:
        raise Unsupported(
            f'offload="optimizer" keeps state on the host that only the update reads, and {graph.name} has none of '
            "more than a few numbers. Use an optimizer with moments, or plan without offload."
        )
    return tuple(parts)


def _read_together(task: StageTask, offered: Mapping[str, GraphOutput]) -> Iterable[list[str]]:
    """Return the state that a task reads, that from which one array is computed together; in order of reading.

    A number that comes of several arrays, such as the norm of all, does not tie these to each other.
    """
    jaxpr = jc.open_jaxpr(task.jaxpr)[0]
    group_of: dict[str, list[str]] = {}
    comes_of: dict[jc.Var, str] = {}
    for name, v in zip(task.inputs, jaxpr.invars, strict=True):
        if name in offered:
            group_of[name], comes_of[v] = [name], name
    order: dict[str, None] = {}
    for eqn in jaxpr.eqns:
        read = dict.fromkeys(comes_of[v] for v in jc.operands(eqn) if v in comes_of)
        order |= read
        if not read or all(below_split_size(v.aval) for v in eqn.outvars):
            continue
        first, *others = read
        for other in others:
            if group_of[other] is not group_of[first]:
                group_of[first].extend(group_of[other])
                for name in group_of[other]:
                    group_of[name] = group_of[first]
        comes_of.update((v, first) for v in eqn.outvars)
    yield from {id(group_of[name]): group_of[name] for name in order}.values()


def values_on_host(graph: StageGraph, plan: Plan) -> frozenset[str]:
    """Return the values of a graph that a plan keeps on the host."""
    names = {name for part in plan.host_state for name in part}
    return frozenset(i.value for i in graph.inputs if i.name in names)


def replaced_on_host(graph: StageGraph, plan: Plan) -> dict[int, int]:
    """Return the leaves that a plan keeps on the host, each with the leaf of the result that replaces it.

    Raises `PlanMismatch` for one that is no input of the step, or that is no state which only an update reads.
    """
    inputs, offered = {i.name: i for i in graph.inputs}, offered_state(graph)
    leaves: dict[int, int] = {}
    for name in (name for part in plan.host_state for name in part):
        given = inputs.get(name)
        if given is None or given.leaf is None or given.value not in offered:
            what = "is none of its inputs" if given is None else "is no state that the updates of one stage alone read"
            raise PlanMismatch(
                f"The plan keeps {name} of {graph.name} on the host, and that {what}. Take it out of the plan's "
                "host_state, or make the plan again."
            )
        leaves[given.leaf] = offered[given.value].leaf
    return leaves
