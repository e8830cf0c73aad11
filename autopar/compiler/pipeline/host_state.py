"""Find the values that can live on the host, and the parts in which updates bring the state of them to the devices.

    StageGraph        ->  which state only updates read: moments, master copies of parameters; and the parameters
                      ->  its parts: what one update reads together, joined until a part is worth a copy
    StageGraph, Plan  ->  the leaves that the plan keeps on the host, and the results that replace them
                      ->  activations and sums of gradients that may leave between the tasks that use them

A part is on the devices while it is updated, with its neighbours on their way in and out: smaller parts take less
memory, and each costs its host the work of starting two copies and an update.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.flops import aval_bytes
from autopar.compiler.pipeline.stage_graph import GraphOutput, StageGraph, StageTask
from autopar.compiler.sharding.replicated_values import below_split_size
from autopar.errors import PlanMismatch, Unsupported
from autopar.ir.plan import Plan
from autopar.ir.schedules import schedule_tasks

PART_SHARE = 1 / 16
"""Share of a stage's state: no part of several arrays is larger, so that three of them are less than a fifth of it."""
PARTS_AT_ONCE = 3
"""Parts on the devices at once: one that comes, one that is updated, one that leaves."""
SOON = PARTS_AT_ONCE
"""Number of tasks: a value that is used again so soon stays on the devices, for it would come before it had left."""


def with_offload(plan: Plan, graph: StageGraph, offloads: Collection[str], own: Collection[str]) -> Plan:
    """Return a plan that keeps on the host what is named: "optimizer", "parameters", "activations".

    So it does inputs of these names that the step puts there of its `own`; small ones stay on the devices. Raises
    `Unsupported` where the step has no such state.
    """
    parameters = "parameters" in offloads
    state = state_on_host(graph, parameters=parameters) if parameters or "optimizer" in offloads else ()
    state += _own_state(graph, set(own).difference(*state))
    values = ("activations",) * ("activations" in offloads) + ("gradients",) * parameters
    return replace(plan, host_state=state, host_values=values)


def _own_state(graph: StageGraph, names: Collection[str]) -> tuple[tuple[str, ...], ...]:
    inputs = {i.name: i.value for i in graph.inputs if i.name in names}
    large = {name for name, value in inputs.items() if not below_split_size(graph.values[value])}
    if not large:
        return ()
    parts = [tuple(name for name in part if name in large) for part in state_on_host(graph, parameters=True)]
    if missing := sorted(large.difference(*parts)):
        raise Unsupported(
            f"{graph.name} puts {missing[0]} into the memory of the host, where it can live if the updates of one "
            "stage replace it, whole and in its own shape; here several stages do, or none. Use fewer stages, or keep "
            "it on the devices: leave the transfers out."
        )
    return tuple(part for part in parts if part)


def offered_state(graph: StageGraph, *, parameters: bool = False) -> dict[str, GraphOutput]:
    """Return the inputs that only updates of one stage read and replace, each with the result that replaces it.

    With `parameters` those that the model reads as well. Small ones stay on the devices, and so do the pieces of a leaf
    that several stages share.
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
        updated = [task for task in tasks if task.kind == "U"]
        ours = bool(tasks) and given.owned and all(task.stage == out.stage for task in updated)
        ours = ours and ((parameters and given.stages[0] == out.stage) or len(updated) == len(tasks))
        if ours and (before.shape, before.dtype) == (after.shape, after.dtype) and not below_split_size(before):
            offered[given.value] = out
    return offered


def state_on_host(graph: StageGraph, *, parameters: bool = False) -> tuple[tuple[str, ...], ...]:
    """Return the names of all state that can live on the host, part by part; with `parameters`, of these as well.

    Raises `Unsupported` where there is none.
    """
    offered = offered_state(graph, parameters=parameters)
    names = {i.value: i.name for i in graph.inputs}
    sizes = {value: aval_bytes(graph.values[value]) for value in offered}
    updates = [task for task in graph.tasks if task.kind == "U"]
    read = {name for task in updates for name in task.inputs}
    # A copy in fewer bits is replaced without being read.
    unread = {out.value: name for name, out in offered.items() if name not in read}
    parts: list[tuple[str, ...]] = []
    for stage in range(graph.num_stages):
        together = _used_together([task for task in updates if task.stage == stage], offered, unread)
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
    if not parts and parameters:
        raise Unsupported(
            f'offload="parameters" keeps parameters on the host that the step replaces, whole on one stage, and '
            f"{graph.name} has none of more than a few numbers. Give layers parameters of their own in place of a scan "
            "over layers, or plan without offload."
        )
    if not parts:
        raise Unsupported(
            f'offload="optimizer" keeps state on the host that only the update reads, and {graph.name} has none of '
            "more than a few numbers. Use an optimizer with moments, or plan without offload."
        )
    return tuple(parts)


def _used_together(
    tasks: Sequence[StageTask], offered: Collection[str], unread: Mapping[str | None, str]
) -> list[list[str]]:
    """Return the state that tasks read, that from which one array is computed together; in order of reading.

    A number that comes of several arrays, such as the norm of all, does not tie these to each other. `unread` state,
    by the value that replaces it, goes with what that is computed from.
    """
    group_of: dict[str, list[str]] = {}
    made_of: dict[str, str] = {}
    order: dict[str, None] = {}
    for task in tasks:
        jaxpr = jc.open_jaxpr(task.jaxpr)[0]
        comes_of: dict[jc.Var, str] = {}
        for name, v in zip(task.inputs, jaxpr.invars, strict=True):
            if name in offered:
                group_of.setdefault(name, [name])
            if name in offered or name in made_of:
                comes_of[v] = made_of.get(name, name)
        for eqn in jaxpr.eqns:
            read = dict.fromkeys(comes_of[v] for v in jc.operands(eqn) if v in comes_of)
            order |= read
            if not read or all(below_split_size(v.aval) for v in eqn.outvars):
                continue
            first, *others = read
            for other in others:
                _join(group_of, first, other)
            comes_of.update((v, first) for v in eqn.outvars)
        for value, v in zip(task.outputs, jaxpr.outvars, strict=True):
            if isinstance(v, jc.Var) and v in comes_of:
                made_of[value] = comes_of[v]
            if value in unread:
                name = unread[value]
                group_of[name], order[name] = [name], None
                _join(group_of, made_of.get(value, name), name)
    return list({id(group_of[name]): group_of[name] for name in order}.values())


def _join(group_of: dict[str, list[str]], one: str, other: str) -> None:
    if group_of[other] is not group_of[one]:
        group_of[one].extend(group_of[other])
        for name in group_of[other]:
            group_of[name] = group_of[one]


def waiting_values(graph: StageGraph, kinds: Collection[str]) -> frozenset[str]:
    """Return the values that the step makes and that leave for the host between the tasks that use them.

    `kinds` are "activations", all that a microbatch's tasks hand on, and "gradients", all else; small ones stay. What
    the step itself offloads is among them always.
    """
    given = {i.value for i in graph.inputs} | {out.value for out in graph.outputs}
    return frozenset(
        name
        for name, value in graph.values.items()
        if (("activations" if value.per_microbatch else "gradients") in kinds or name in graph.offloaded)
        and name not in given
        and not below_split_size(value)
    )


def check_waiting(graph: StageGraph, plan: Plan) -> None:
    """Raise `Unsupported` for a plan that keeps activations on the host, and on no mesh has them leave."""
    if "activations" not in plan.host_values:
        return
    stage_mesh = [stage.mesh for stage in plan.stages]
    orders = schedule_tasks(plan.schedule, stage_mesh=stage_mesh, num_microbatches=plan.num_microbatches)
    forward = {
        (task.stage, task.microbatch): place for tasks in orders for place, task in enumerate(tasks) if task.kind == "F"
    }
    longest = max(
        place - forward[task.stage, task.microbatch]
        for tasks in orders
        for place, task in enumerate(tasks)
        if task.kind == "B"
    )
    if longest <= SOON:
        raise Unsupported(
            f'offload="activations" keeps on the host what waits for the backward pass, and in {graph.name} that is '
            f"computed at most {longest} tasks behind the forward pass: nothing could leave and come back before. Give "
            "more microbatches, stages or virtual stages, or plan without it."
        )


def values_on_host(graph: StageGraph, plan: Plan) -> frozenset[str]:
    """Return the values of a graph that a plan keeps on the host."""
    names = {name for part in plan.host_state for name in part}
    return frozenset(i.value for i in graph.inputs if i.name in names)


def replaced_on_host(graph: StageGraph, plan: Plan) -> dict[int, int]:
    """Return the leaves that a plan keeps on the host, each with the leaf of the result that replaces it.

    Raises `PlanMismatch` for one that is no input of the step, or that is no state which only an update reads.
    """
    inputs, offered = {i.name: i for i in graph.inputs}, offered_state(graph, parameters=True)
    leaves: dict[int, int] = {}
    for name in (name for part in plan.host_state for name in part):
        given = inputs.get(name)
        if given is None or given.leaf is None or given.value not in offered:
            what = "is none of its inputs" if given is None else "is no state that the updates of one stage replace"
            raise PlanMismatch(
                f"The plan keeps {name} of {graph.name} on the host, and that {what}. Take it out of the plan's "
                "host_state, or make the plan again."
            )
        leaves[given.leaf] = offered[given.value].leaf
    return leaves
