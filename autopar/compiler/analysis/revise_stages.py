"""Change one decision of a plan by stages.

    an input           each of its other layouts, with all layouts anew on the meshes that read it
    stages             a layer more or less on either side of each border between stages
    shares             a microbatch of one lane to another
    schedule           every other order of the same tasks
    num_microbatches   the next smaller and the next larger number that the batch divides into
    remat              every stage computed again, none, one more or one less
    mesh_shape         the devices of every mesh in another shape
    machines           a mesh on devices of another machine

All layouts are anew for all but the first, by the same programs as when stages are planned. Layouts that do not fit are
chosen once more with a cost of memory, as in a search.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autopar.compiler.analysis.asked import contradicted
from autopar.compiler.analysis.revise_machines import places
from autopar.compiler.analysis.revise_program import with_option
from autopar.compiler.analysis.revision import Planning, Revision, other_schedules
from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.frontend.training_loops import unroll_training_loops
from autopar.compiler.inter_op.stage_costs import StageCost
from autopar.compiler.intra_op.plan_tasks import GroupConstraints, TaskGraph, task_graph
from autopar.compiler.lowering.sharded_step import logical_mesh
from autopar.compiler.lowering.stage_programs import tasks_of_stages
from autopar.compiler.pipeline.prepare import prepare
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.planning.demands.kinds import allowed_splits, graph_kinds
from autopar.compiler.planning.mesh_sharding import mesh_sharding
from autopar.compiler.planning.one_mesh import mesh_choices
from autopar.compiler.planning.stages.layer_classes import LayerClass, layer_class
from autopar.compiler.planning.stages.layer_costs import STAGE_PRICES, layer_constraints, memory_charges
from autopar.compiler.planning.stages.stage_layouts import (
    ConstrainedStage,
    received_seconds,
    shard_stages,
    with_input_specs,
)
from autopar.compiler.sharding.layout import Layout, LogicalMesh, to_spec
from autopar.compiler.solver.problem import Infeasible
from autopar.compiler.solver.solve import solve
from autopar.compiler.spmd.block_plan import layout_from_text
from autopar.errors import AutoparError
from autopar.ir.plan import MeshPlan, Plan, StagePlan
from autopar.ir.plan_sharding import MeshSharding
from autopar.methods import Auto

_TIME_LIMIT_S = 60.0
"""Seconds for the layouts of one mesh."""

Received = Mapping[int, Mapping[str, float]]
"""The seconds for each byte of a value, by mesh and value."""


def stage_layouts(planning: Planning, leaf: int) -> Iterator[Revision]:
    """Yield every layout of an input, with all layouts anew on the meshes that read it."""
    planning.check_can_be_split(leaf)
    plan, graph = planning.plan, planning.cut(planning.plan)
    read = [
        (given.value, plan.stages[stage].mesh)
        for given in graph.inputs
        if given.leaf == leaf and given.value in graph.values
        for stage in given.stages
    ]
    meshes = {number: _Mesh.of(planning, graph, number, leaf) for number in sorted({mesh for _, mesh in read})}
    first = meshes[read[0][1]]
    first_mesh = first.mesh_costs.mesh
    node = first.choices.values[read[0][0]]
    for layout in () if node is None else (each for each in node.layouts if not each.partial):
        words = str(to_spec(layout, first_mesh))
        asked = {
            number: {value: layout for value, where in read if where == number}
            if mesh.mesh_costs.mesh == first_mesh
            else {}
            for number, mesh in meshes.items()
        }
        against = contradicted(planning, leaf, layout, first_mesh)
        try:
            yield Revision(choice=words, plan=_with_layouts(planning, graph, meshes, asked), against=against)
        except Infeasible:
            yield Revision(choice=words, refused="no layouts of the rest go with it", against=against)


def _with_layouts(
    planning: Planning, graph: StageGraph, meshes: Mapping[int, _Mesh], asked: Mapping[int, Mapping[str, Layout]]
) -> Plan:
    """Return the plan with all layouts of some meshes anew, some of them as asked."""

    def with_prices(received: Received) -> Plan:
        sharded = {number: mesh.best(asked[number], received[number]) for number, mesh in meshes.items()}
        return _with_shardings(planning.plan, graph, sharded)

    return _within_memory(planning, {number: mesh.stage for number, mesh in meshes.items()}, with_prices)


def _with_shardings(plan: Plan, graph: StageGraph, sharded: Mapping[int, MeshSharding]) -> Plan:
    meshes = [
        replace(mesh, sharding=sharded[number]) if number in sharded else mesh
        for number, mesh in enumerate(plan.meshes)
    ]
    return with_input_specs(replace(plan, meshes=tuple(meshes)), graph)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Stage:
    """A stage that is to be laid out on a mesh, under the constraints of the plan."""

    constrained: ConstrainedStage

    @classmethod
    def of(cls, planning: Planning, graph: StageGraph, plan: Plan, number: int, but: int | None = None) -> _Stage:
        """Return it for a mesh of a plan like the planned one; inputs that a search laid out are free, and `but`."""
        mesh, asked = logical_mesh(plan.meshes[number]), planning.search
        tasks = tasks_of_stages(graph, plan.stages_on(number), planning.trace.donated_inputs)
        kinds = None if asked.kinds is None else graph_kinds(graph, planning.trace.batch_axes)
        layer = layer_class(graph, tasks, asked.pins, kinds)
        read = {name for task in tasks for name in task.inputs}
        known = {v: layout for v, layout in _layouts_as_planned(planning, graph, mesh).items() if v in read}
        constraints = _search_constraints(asked, layer, mesh, known)
        allowed = dict(constraints.allowed)
        if not planning.is_searched:
            allowed = {value: (layout,) for value, layout in known.items()}
        for given in graph.inputs:
            if given.leaf is not None and given.leaf == but:
                allowed.pop(given.value, None)
        constraints = replace(constraints, allowed=allowed)
        received = received_seconds(graph, plan, number, planning.cluster)
        return cls(constrained=ConstrainedStage(tasks=tasks, layer=layer, constraints=constraints, received=received))

    def charges(self, mesh: MeshPlan, multiplier: float, within: bool) -> dict[str, float]:
        """Return the seconds of each byte of a value, received or in memory, beside the times of a planned mesh."""
        sharding = mesh.sharding
        assert sharding is not None
        stage = self.constrained
        seconds = {"forward": 0.0, "backward": 0.0, "update": 0.0}
        for task in stage.tasks:
            seconds[task.phase] += sharding.times[task.name].total_s
        cost = StageCost(forward_s=seconds["forward"], backward_s=seconds["backward"], update_s=seconds["update"])
        charged = memory_charges(stage.layer, cost, multiplier, len(mesh.devices), within=within)
        names = {**stage.received, **charged}
        return {name: stage.received.get(name, 0.0) + charged.get(name, 0.0) for name in names}


@dataclass(frozen=True, kw_only=True, eq=False)
class _Mesh:
    """A mesh whose layouts are chosen several times, each time with some of them fixed."""

    stage: _Stage
    mesh_costs: MeshCosts

    @classmethod
    def of(cls, planning: Planning, graph: StageGraph, number: int, leaf: int) -> _Mesh:
        """Return a mesh of the plan on which an input is free."""
        mesh = logical_mesh(planning.plan.meshes[number])
        stage = _Stage.of(planning, graph, planning.plan, number, leaf)
        machine = planning.cluster.machine_of(planning.plan.meshes[number].devices)
        return cls(stage=stage, mesh_costs=MeshCosts(machine=machine, mesh=mesh))

    @cached_property
    def choices(self) -> TaskGraph:
        """The graph of all choices, made once."""
        stage = self.stage.constrained
        return task_graph(stage.tasks, self.mesh_costs, stage.constraints)

    def best(self, asked: Mapping[str, Layout], received: Mapping[str, float]) -> MeshSharding:
        """Return the best layouts with some values as asked; raise `Infeasible` where there are none."""
        choices, stage = self.choices, self.stage.constrained
        problem, charges = choices.table.problem(), choices.charges(received)
        problem = replace(problem, costs=tuple(c + charges.get(node, 0.0) for node, c in enumerate(problem.costs)))
        for value, layout in asked.items():
            node = choices.values[value]
            if node is not None:
                problem = with_option(problem, node.number, node.layouts.index(layout))
        solution = choices.plan_of(solve(problem, time_limit_s=_TIME_LIMIT_S))
        return mesh_sharding(stage.tasks, solution, self.mesh_costs)


def _search_constraints(
    search: Auto, layer: LayerClass, mesh: LogicalMesh, known: Mapping[str, Layout]
) -> GroupConstraints:
    """Return what a search asks for on a mesh; of the ways in which kinds allow to use its axes, that of the plan."""
    every = [layer_constraints(layer, mesh, search, splits) for splits in allowed_splits(search.kinds, mesh)]
    as_planned = (
        each for each in every if all(layout in each.allowed.get(v, (layout,)) for v, layout in known.items())
    )
    return next(as_planned, every[0])


def _layouts_as_planned(planning: Planning, graph: StageGraph, mesh: LogicalMesh) -> dict[str, Layout]:
    """Return the layouts that the plan's inputs have on its meshes of this shape, by value."""
    known: dict[str, Layout] = {}
    inputs = {given.value for given in graph.inputs if given.leaf is not None}
    for planned in planning.plan.meshes:
        if planned.sharding is not None and logical_mesh(planned) == mesh:
            for value, text in planned.sharding.layouts["values"].items():
                layout = layout_from_text(text, mesh) if value in inputs else None
                if layout is not None:
                    known.setdefault(value, layout)
    return known


def stage_decisions(planning: Planning, decision: str) -> Iterator[Revision]:
    """Yield the nearest other choices for a decision, with all layouts anew."""
    plan = planning.plan
    match decision:
        case "shares":
            yield from _moved_microbatches(planning)
        case "stages":
            for border in (stage for lane in plan.lanes for stage in lane[1:]):
                for move in (-1, 1):
                    yield from _moved_border(planning, border, move)
        case "schedule":
            for name in other_schedules(plan):
                yield _revision(planning, name, plan, schedule=name)
        case "num_microbatches":
            for count in planning.other_counts():
                yield _revision(planning, str(count), plan, num_microbatches=count, stages=_shared(plan, count))
        case "remat" if not _recomputes(planning):
            for again in (False, True):
                stages = tuple(replace(stage, recomputed=stage.num_layers * again) for stage in plan.stages)
                if stages != plan.stages:
                    words = "every stage computed again" if again else "nothing computed again"
                    yield _revision(planning, words, plan, stages=stages)
            yield from _one_computed_again(planning)
        case "mesh_shape" if planning.is_searched:
            yield from _other_shapes(planning)
        case "machines":
            for place in places(planning):
                if place.meshes is None:
                    yield Revision(choice=place.choice, refused=place.refused)
                else:
                    yield _revision(planning, place.choice, plan, meshes=place.meshes)
        case _:
            return


def _one_computed_again(planning: Planning) -> Iterator[Revision]:
    """Yield the plan with one layer more computed again, of the first stage that has some left, and with one less."""
    plan = planning.plan
    ordered = list(enumerate(plan.stages))
    more = next(((number, 1) for number, stage in ordered if stage.recomputed < stage.num_layers), None)
    less = next(((number, -1) for number, stage in reversed(ordered) if stage.recomputed), None)
    for number, step in (change for change in (more, less) if change is not None):
        stages = [*plan.stages]
        stage = stages[number] = replace(stages[number], recomputed=stages[number].recomputed + step)
        mixed = 0 < sum(each.recomputed for each in stages) < sum(each.num_layers for each in stages)
        if mixed:  # else it is one of the two above
            some = f"{stage.recomputed} of {stage.num_layers} layers"
            count = {0: "no layer", stage.num_layers: "every layer"}.get(stage.recomputed, some)
            words = f"{count} of stage {number} computed again"
            yield _revision(planning, words, plan, stages=tuple(stages))


def _moved_border(planning: Planning, border: int, move: int) -> Iterator[Revision]:
    """Yield the plan with the border before a stage moved by a layer, if both sides keep one."""
    stages = list(planning.plan.stages)
    before, after = stages[border - 1], stages[border]
    at = after.layers[0] + move
    if before.layers[0] < at < after.layers[1]:
        stages[border - 1] = before.with_layers(before.layers[0], at)
        stages[border] = after.with_layers(at, after.layers[1])
        words = f"stage {border} from layer {at}, not {after.layers[0]}"
        yield _revision(planning, words, planning.plan, stages=tuple(stages))


def _moved_microbatches(planning: Planning) -> Iterator[Revision]:
    """Yield the plan with a microbatch of one lane given to another, if it keeps one."""
    plan = planning.plan
    for giver, receiver in itertools.permutations(range(len(plan.shares)), 2):
        if plan.shares[giver] > 1:
            shares = list(plan.shares)
            shares[giver] -= 1
            shares[receiver] += 1
            yield _revision(planning, shares_words(shares), plan, stages=_with_shares(plan, shares))


def _shared(plan: Plan, count: int) -> tuple[StagePlan, ...]:
    """Return the stages of a plan for another number of microbatches, of which lanes have shares like now."""
    if not plan.shares:
        return plan.stages
    exact = [share * count / plan.num_microbatches for share in plan.shares]
    shares = [int(each) for each in exact]
    for lane in sorted(range(len(exact)), key=lambda lane: shares[lane] - exact[lane])[: count - sum(shares)]:
        shares[lane] += 1
    return _with_shares(plan, shares)


def _with_shares(plan: Plan, shares: Sequence[int]) -> tuple[StagePlan, ...]:
    """Return the stages of a plan with these numbers of microbatches for its lanes."""
    lanes = zip(plan.lanes, shares, strict=True)
    return tuple(replace(plan.stages[stage], microbatches=share) for lane, share in lanes for stage in lane)


def shares_words(shares: Sequence[int]) -> str:
    """Return the microbatches of the lanes of a plan as `3 + 1`."""
    return " + ".join(map(str, shares)) or "no lanes"


def _other_shapes(planning: Planning) -> Iterator[Revision]:
    """Yield the plan with all meshes of one size in each other shape."""
    plan = planning.plan
    for size in sorted({len(mesh.devices) for mesh in plan.meshes}):
        for shape in (mesh.shape for mesh in mesh_choices(Auto(), size)):
            changed = tuple(_reshaped(mesh, shape) if len(mesh.devices) == size else mesh for mesh in plan.meshes)
            if all(_same_shape(old, new) for old, new in zip(plan.meshes, changed, strict=True)):
                continue
            words = f"{'x'.join(map(str, shape))} for meshes of {size} devices"
            yield _revision(planning, words, plan, meshes=changed)


def _reshaped(mesh: MeshPlan, shape: tuple[int, ...]) -> MeshPlan:
    names = Auto(mesh_shape=shape).mesh_axes
    return replace(mesh, shape=shape, axis_names=names, sharding=None)


def _same_shape(mesh: MeshPlan, other: MeshPlan) -> bool:
    return sorted(size for size in mesh.shape if size > 1) == sorted(size for size in other.shape if size > 1)


def _recomputes(planning: Planning) -> bool:
    """Return whether the user rematerialises more than a layer at once, so that every stage has to."""
    plan = planning.plan
    return prepare(
        unroll_training_loops(planning.trace),
        num_layers=plan.num_layers,
        num_microbatches=plan.num_microbatches,
        loop_pieces=plan.loop_pieces,
        batch_statistics=plan.batch_statistics,
        random=plan.random,
    ).recomputes


def _revision(planning: Planning, words: str, plan: Plan, **changes: Any) -> Revision:
    """Return the plan with some fields changed, and all layouts anew."""
    try:
        return Revision(choice=words, plan=laid_out_anew(planning, replace(plan, **changes)))
    except AutoparError as error:
        return Revision(choice=words, refused=str(error))


def laid_out_anew(planning: Planning, bare: Plan) -> Plan:
    """Return a plan with all layouts chosen anew, within memory if that can be."""
    bare = replace(bare, certificate=None, input_specs={})
    graph = planning.cut(bare)
    if all(len(mesh.devices) == 1 for mesh in bare.meshes):
        return replace(bare, meshes=tuple(replace(mesh, sharding=None) for mesh in bare.meshes))
    stages = {number: _Stage.of(planning, graph, bare, number) for number in range(len(bare.meshes))}

    def with_prices(received: Received) -> Plan:
        priced = [replace(stage.constrained, received=received[number]) for number, stage in stages.items()]
        return shard_stages(
            bare, graph, priced, cluster=planning.cluster, time_limit_s=_TIME_LIMIT_S, cache_directory=None
        )

    return _within_memory(planning, stages, with_prices)


def _within_memory(planning: Planning, stages: Mapping[int, _Stage], with_prices: Callable[[Received], Plan]) -> Plan:
    """Return the first plan that fits, at rising prices of memory; the one without a price if none does."""
    first = with_prices({number: stage.constrained.received for number, stage in stages.items()})
    if planning.fits(first):
        return first
    tried: list[Received] = []
    for price in STAGE_PRICES[1:]:
        charged = {n: stage.charges(first.meshes[n], *price) for n, stage in stages.items()}
        if charged in tried:  # stages that keep nothing within a task have no price for it
            continue
        tried.append(charged)
        if planning.fits(plan := with_prices(charged)):
            return plan
    return first
