"""Choose the layouts of every stage that the search found, for the stage as a whole.

    StageGraph, Plan, its stages  ->  MeshSharding, ...

Stages that compute the same, under the same prices of memory, have one solution: it is found once, and handed on by
the numbers of their values.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.compiler.costs.mesh_costs import MeshFigures, figures_of
from autopar.compiler.inter_op.stage_costs import Stage, StageCost, Timing, in_flight
from autopar.compiler.intra_op.plan_tasks import GroupConstraints, GroupPlan, GroupTask, TaskGraph, task_graph
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.lowering.sharded_step import logical_mesh
from autopar.compiler.lowering.stage_programs import tasks_of_stages
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.planning.constraints import equation_constraints
from autopar.compiler.planning.layer_classes import LayerClass, Layers, class_key, layer_class, layer_value_numbers
from autopar.compiler.planning.layer_costs import PRICES, pinned_layouts, prices, stage_cost
from autopar.compiler.planning.mesh_sharding import local_blocks, mesh_sharding, mesh_sharding_like
from autopar.compiler.planning.stage_costs import StageProblem
from autopar.compiler.sharding.layout import LogicalMesh
from autopar.hardware.machine import Machine
from autopar.ir.plan import Plan
from autopar.ir.plan_sharding import MeshSharding
from autopar.progress import tell

_SHARE_OF_TIME = 0.15
"""Of the time limit, for the layouts of one stage at one price: there are several of both."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Asked:
    """A stage, and all that its layouts depend on."""

    stage: Stage
    tasks: list[GroupTask]
    layer: LayerClass
    constraints: GroupConstraints
    mesh: LogicalMesh
    figures: MeshFigures
    flying: float
    """Microbatches whose activations it holds at once."""
    received: Mapping[str, float]
    """Seconds for every byte of what comes from other meshes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SolvedStage:
    """A solution and the stage that it was found for."""

    layer: LayerClass
    plan: GroupPlan

    def for_layer(self, layer: LayerClass) -> GroupPlan | None:
        """The solution for another stage of the same key; None if it says more than their tasks have in common."""
        names = dict(zip(layer_value_numbers(self.layer), layer_value_numbers(layer), strict=True))
        if not self.plan.layouts.keys() <= names.keys():
            return None
        pairs = zip(self.layer.tasks, layer.tasks, strict=True)
        return GroupPlan(
            layouts={names[name]: layout for name, layout in self.plan.layouts.items()},
            tasks={mine.name: self.plan.tasks[theirs.name] for theirs, mine in pairs},
            optimum=self.plan.optimum,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class StageLayouts:
    """The layouts of a stage, and what a device holds with them at the worst moment."""

    sharding: MeshSharding
    cost: StageCost
    peak_bytes: float


def stage_shardings(
    problem: StageProblem, layers: Layers, graph: StageGraph, plan: Plan, stages: Sequence[Stage], timing: Timing
) -> list[StageLayouts]:
    """The layouts of all stages, those of one mesh together."""
    known: dict[Hashable, _Alike] = {}
    found: list[StageLayouts] = []
    for number, stage in enumerate(stages):
        tell(f"layouts of stage {number + 1} of {len(stages)}")
        asked = _asked(problem, graph, plan, number, stage, timing)
        parts = [part.layers for part in plan.stages if part.mesh == number]
        classes = tuple(layers.class_of[start:stop] for start, stop in parts)
        alike = known.setdefault((classes, _key(asked)), _Alike(first=asked))
        found.append(_laid_out(problem, asked, alike))
    return found


def _asked(problem: StageProblem, graph: StageGraph, plan: Plan, number: int, stage: Stage, timing: Timing) -> _Asked:
    mesh = logical_mesh(plan.meshes[number])
    tasks = tasks_of_stages(graph, plan.stages_on(number), problem.trace.donated_inputs)
    layer = layer_class(graph, tasks, problem.method.pins)
    behind, count = len(plan.meshes) - 1 - number, len(plan.meshes)
    parts = [part.layers[1] - part.layers[0] for part in plan.stages if part.mesh == number]
    # Those in flight may all be of the largest part.
    unevenness = len(parts) * max(parts) / sum(parts)
    return _Asked(
        stage=stage,
        tasks=tasks,
        layer=layer,
        constraints=replace(
            layer.constraints, allowed=pinned_layouts(layer, mesh), equations=equation_constraints(problem.method, mesh)
        ),
        mesh=mesh,
        figures=figures_of(problem.kind, mesh.shape),
        flying=unevenness * in_flight(timing, stages_behind=behind, num_stages=count),
        received=received_seconds(graph, plan, number, problem.machine),
    )


def _key(asked: _Asked) -> Hashable:
    """Equal for stages of the same classes of layers whose layouts are the same."""
    numbers = layer_value_numbers(asked.layer)
    alike, constraint_key = asked.constraints.alike, asked.constraints.equations.constraint_key
    return (
        asked.mesh.shape,
        asked.stage.cost.choice,
        class_key(asked.layer),
        tuple(numbers.get(alike.get(name, name), -1) for name in numbers),
        tuple((number, asked.received.get(name)) for name, number in numbers.items()),
        tuple(constraint_key(eqn) for task in asked.tasks for eqn in jc.all_equations(task.jaxpr)),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Laid:
    """What was found for a stage at a price of memory."""

    solved: SolvedStage
    cost: StageCost
    sharding: MeshSharding


@dataclass(kw_only=True, eq=False)
class _Alike:
    """What is known of all stages that are like the first one met."""

    first: _Asked
    choices: TaskGraph | None = None
    laid: dict[float, _Laid] = field(default_factory=dict[float, _Laid])
    """By price."""

    def at(self, price: float, problem: StageProblem) -> _Laid:
        """The layouts of the first stage at a price, found when they are first asked for."""
        asked = self.first
        if self.choices is None:
            self.choices = task_graph(asked.tasks, asked.mesh, asked.figures, asked.constraints)
        if price not in self.laid:
            charged = _added(asked.received, prices(asked.layer, asked.stage.cost, price) if price else {})
            found = self.choices.best(
                charged,
                time_limit_s=_SHARE_OF_TIME * problem.method.time_limit_s,
                cache_directory=problem.cache_directory,
            )
            blocks = local_blocks(asked.tasks, found, asked.mesh)
            self.laid[price] = _Laid(
                solved=SolvedStage(layer=asked.layer, plan=found),
                cost=stage_cost(asked.layer, found, asked.mesh, asked.figures, blocks),
                sharding=mesh_sharding(asked.tasks, found, asked.mesh, asked.figures, blocks),
            )
        return self.laid[price]


def _laid_out(problem: StageProblem, asked: _Asked, alike: _Alike) -> StageLayouts:
    """The layouts for the price of memory that the search chose, or for a higher one until the stage fits."""
    for price in (price for price in PRICES if price >= asked.stage.cost.choice):
        laid = alike.at(price, problem)
        peak_bytes = laid.cost.peak_bytes(asked.flying)
        if price == PRICES[-1] or peak_bytes <= problem.memory_bytes:
            sharding = _handed_on(laid, asked)
            if sharding is None:
                return _laid_out(problem, asked, _Alike(first=asked))
            return StageLayouts(sharding=sharding, cost=laid.cost, peak_bytes=peak_bytes)
    raise AssertionError(asked.stage.cost.choice)


def _handed_on(laid: _Laid, asked: _Asked) -> MeshSharding | None:
    """The sharding for another stage like the one that it was found for; None if they have too little in common."""
    theirs = laid.solved.layer
    if asked.layer is theirs:
        return laid.sharding
    plan = laid.solved.for_layer(asked.layer)
    if plan is None:
        return None
    return mesh_sharding_like(laid.sharding, theirs.tasks, asked.tasks, plan, asked.mesh, asked.figures)


def received_seconds(graph: StageGraph, plan: Plan, number: int, machine: Machine) -> dict[str, float]:
    """Seconds for every byte of what comes from other meshes: the less of it each device needs, the sooner it is there.

    What all devices need is sent in parts, one to each, and gathered on the mesh, wherever that is faster.
    """
    link = machine.intra if plan.num_devices <= machine.domain else machine.inter
    found: dict[str, float] = {}
    for name, (source, readers) in graph.crossing.items():
        meshes = {plan.stages[reader].mesh for reader in readers}
        if number in meshes and plan.stages[source].mesh != number:
            times = graph.num_microbatches if graph.values[name].per_microbatch else 1
            found[name] = times / link.bandwidth
    return found


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {**one, **other}}
