"""Change one decision of a plan of one program on one mesh.

an input           each of its other layouts, by one more solution of the same integer program
num_microbatches   the next smaller and the next larger number that the batch divides into
remat              no layer computed again, or all that can be
mesh_shape         the devices in every other shape of two axes
machines           as many devices of another machine, or those that it has
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from autopar.compiler.analysis.asked import contradicted
from autopar.compiler.analysis.revise_machines import places
from autopar.compiler.analysis.revision import Planning, Revision, given_spec
from autopar.compiler.intra_op.choice_graph import block_plan_of
from autopar.compiler.lowering.sharded_step import logical_mesh
from autopar.compiler.pipeline.rematerialize import Offer, offered_layers
from autopar.compiler.planning.demands.constraints import pins_of_inputs
from autopar.compiler.planning.demands.kinds import allowed_splits
from autopar.compiler.planning.one_mesh import MeshSearchResult, mesh_choices, plan_of, search_on
from autopar.compiler.sharding.layout import LogicalMesh, even_layouts, to_spec
from autopar.compiler.sharding.replicated_values import below_split_size
from autopar.compiler.solver.problem import MRF, Infeasible
from autopar.compiler.solver.solve import solve
from autopar.errors import AutoparError, InvalidArgument, MemoryTooSmall
from autopar.hardware.machine import Machine
from autopar.ir.plan import Plan
from autopar.methods import Auto


def program_layouts(planning: Planning, leaf: int) -> Iterator[Revision]:
    """Yield every layout of an input, with all other layouts anew."""
    planning.check_can_be_split(leaf)
    auto, name = _search_as_planned(planning, leaf), planning.trace.inputs[leaf].name
    searched = _searched(planning, auto)
    mesh = searched.mesh_costs.mesh
    choice = searched.intra_op.choices.arguments[leaf]
    assert choice is not None, "an input that can be split has layouts"
    problem = searched.intra_op.table.problem()
    for layout in even_layouts(tuple(planning.trace.inputs[leaf].aval.shape), mesh):
        spec = to_spec(layout, mesh)
        against = contradicted(planning, leaf, layout, mesh)
        pinned = replace(auto, pins={**auto.pins, f"^{re.escape(name)}$": spec})
        try:
            if layout in choice.layouts:
                optimum = solve(with_option(problem, choice.number, choice.layouts.index(layout)))
                plan = _as_plan(planning, auto, _with_optimum(searched, optimum))
            else:  # the user's scopes leave it out
                plan = _as_plan(planning, pinned, _searched(planning, pinned))
        except (Infeasible, InvalidArgument):
            yield Revision(choice=str(spec), refused="no layouts of the rest go with it", against=against)
            continue
        if not planning.fits(plan):
            plan = _within_memory(planning, pinned) or plan
        yield Revision(choice=str(spec), plan=plan, against=against)


def program_decisions(planning: Planning, decision: str) -> Iterator[Revision]:
    """Yield the nearest other choices for a decision, with all layouts anew."""
    plan = planning.plan
    assert plan.sharding is not None
    match decision:
        case "num_microbatches":
            for count in planning.other_counts():
                yield _revision(planning, str(count), num_microbatches=count)
        case "remat":
            offered = offered_layers(planning.trace)
            for layers in {(): None, tuple(sorted(offered.layers)): None}:
                if layers != plan.sharding.recomputed_layers:
                    words = remat_words(len(layers), offered.num_layers)
                    yield _revision(planning, words, recompute=Offer(
                        num_layers=offered.num_layers, layers=layers, names=offered.names))  # fmt: skip
        case "mesh_shape" if planning.is_searched:
            for mesh in mesh_choices(Auto(), plan.num_devices):
                if tuple(sorted(mesh.shape)) != tuple(sorted(plan.meshes[0].shape)):
                    words = "x".join(map(str, mesh.shape))
                    yield _revision(planning, words, mesh_shape=mesh.shape, axis_names=mesh.axis_names)
        case "machines":
            for place in places(planning):
                if place.meshes is None:
                    yield Revision(choice=place.choice, refused=place.refused)
                else:
                    moved = replace(planning, plan=replace(plan, meshes=place.meshes))
                    (mesh,) = place.meshes
                    yield _revision(moved, place.choice, mesh_shape=mesh.shape, axis_names=mesh.axis_names)
        case _:
            return


def searched_anew(planning: Planning, plan: Plan) -> Plan:
    """Return a plan with all layouts chosen anew, within memory if that can be."""
    moved = _revision(replace(planning, plan=plan), "")
    assert moved.plan is not None, moved.refused
    return moved.plan


def remat_words(count: int, num_layers: int) -> str:
    """Return how many layers are computed again, in words."""
    return f"{count} of {num_layers} layers computed again" if count else "nothing computed again"


def with_option(problem: MRF, node: int, option: int) -> MRF:
    """Return the problem with one option of a node as the only one."""
    costs: list[np.ndarray] = list(problem.costs)
    costs[node] = np.where(np.arange(len(costs[node])) == option, costs[node], np.inf)
    return replace(problem, costs=tuple(costs))


def _revision(planning: Planning, words: str, *, recompute: Offer | None = None, **fields: Any) -> Revision:
    auto = _search_as_planned(planning, **fields)
    try:
        plan = _as_plan(planning, auto, _searched(planning, auto, recompute), recompute)
        if not planning.fits(plan):
            plan = _within_memory(planning, auto, recompute) or plan
        return Revision(choice=words, plan=plan)
    except AutoparError as error:
        return Revision(choice=words, refused=str(error))


def _search_as_planned(planning: Planning, but: int | None = None, **fields: Any) -> Auto:
    """Return the search for the plan's mesh, with the inputs that the user laid out as they are, but for one."""
    plan, mesh = planning.plan, planning.plan.meshes[0]
    pinned = pins_of_inputs(planning.trace, planning.search.pins)
    given = {
        f"^{re.escape(leaf.name)}$": given_spec(plan, leaf.name)
        for number, leaf in enumerate(planning.trace.inputs)
        if number != but and (number in pinned or not (planning.is_searched or below_split_size(leaf.aval)))
    }
    planned: dict[str, Any] = {
        "kinds": planning.search.kinds,
        "ignore_user_shardings": planning.search.ignore_user_shardings,
        "num_stages": 1,
        "mesh_shape": mesh.shape,
        "axis_names": mesh.axis_names,
        "pins": given,
        "num_microbatches": plan.num_microbatches,
        "memory": "off",
        "random": plan.random,
        "batch_statistics": plan.batch_statistics,
    }
    return Auto(**(planned | fields))


def _searched(planning: Planning, auto: Auto, recompute: Offer | None = None) -> MeshSearchResult:
    recompute = recompute or _recomputed(planning.plan)
    assert auto.mesh_shape is not None
    order = logical_mesh(planning.plan.meshes[0]).order
    mesh = LogicalMesh(shape=auto.mesh_shape, axis_names=auto.mesh_axes, order=order)
    every = (
        search_on(
            planning.trace,
            auto,
            mesh,
            machine=_machine(planning),
            allowed=allowed,
            recomputed_layers=recompute.layers,
            num_layers=recompute.num_layers if recompute.layers else 1,
            checked=True,
        )
        for allowed in allowed_splits(auto.kinds, mesh)
    )
    return min(every, key=lambda searched: searched.step_time_s)


def _machine(planning: Planning) -> Machine:
    return planning.cluster.machine_of(planning.plan.meshes[0].devices)


def _recomputed(plan: Plan) -> Offer:
    """Return the layers that a plan computes again, as they are offered to a search."""
    sharding = plan.sharding
    assert sharding is not None
    names = dict(zip(sharding.recomputed_layers, sharding.recomputed, strict=True))
    named = tuple(names.get(number, "") for number in range(sharding.num_layers))
    return Offer(num_layers=sharding.num_layers, layers=sharding.recomputed_layers, names=named)


def _with_optimum(searched: MeshSearchResult, optimum: Any) -> MeshSearchResult:
    """Return the result of a search with another solution of its problem."""
    made = block_plan_of(searched.intra_op.choices, optimum.assignment)
    program = replace(searched.intra_op.program, plan=made)
    intra_op = replace(searched.intra_op, program=program, optimum=optimum)
    return replace(searched, intra_op=intra_op, block=program.block, peak_bytes=program.memory.peak_bytes)


def _within_memory(planning: Planning, auto: Auto, recompute: Offer | None = None) -> Plan | None:
    """Return the best plan that keeps within memory; None if there is none."""
    within = replace(auto, memory=max(planning.memory_bytes, 1.5))  # 1 and less would be a share
    try:
        return _as_plan(planning, within, _searched(planning, within, recompute), recompute)
    except MemoryTooSmall:
        return None


def _as_plan(planning: Planning, auto: Auto, searched: MeshSearchResult, recompute: Offer | None = None) -> Plan:
    """Return the result of a search on the devices of the plan."""
    plan = planning.plan
    found = plan_of(planning.trace, auto, searched, lambda: recompute or _recomputed(plan))
    mesh = replace(found.meshes[0], devices=plan.meshes[0].devices, machine=plan.meshes[0].machine)
    return replace(found, meshes=(mesh,), method=plan.method, schedule=plan.schedule)
