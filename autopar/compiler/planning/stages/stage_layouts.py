"""Choose the layouts of every stage of a partition, for the stage as a whole.

    StageGraph, Plan, its stages          ->  MeshSharding, ...   within memory, for a search
    Plan, ConstrainedStage, ...           ->  Plan                under given constraints, for the other methods

Stages that compute the same under the same constraints are solved once; the solution is renamed for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from jax.sharding import PartitionSpec

from autopar.compiler.costs.mesh_costs import MeshCosts, with_links
from autopar.compiler.frontend.dimension_kinds import ValueKinds
from autopar.compiler.inter_op.stage_costs import Stage, StageCost, Timing
from autopar.compiler.intra_op.plan_tasks import GroupConstraints, GroupPlan, GroupTask, TaskGraph, task_graph
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.lowering.sharded_step import logical_mesh
from autopar.compiler.lowering.stage_programs import tasks_of_stages
from autopar.compiler.pipeline.host_state import offered_state, values_on_host
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.planning.demands.kinds import graph_kinds
from autopar.compiler.planning.mesh_sharding import DeviceTask, device_tasks, mesh_sharding, mesh_sharding_like
from autopar.compiler.planning.stages.layer_classes import (
    LayerClass,
    Layers,
    class_key,
    layer_class,
    layer_value_numbers,
)
from autopar.compiler.planning.stages.layer_costs import (
    STAGE_PRICES,
    gap_of,
    host_charges,
    layer_constraints,
    memory_charges,
    stage_cost,
)
from autopar.compiler.planning.stages.stage_problem import StageProblem
from autopar.compiler.sharding.layout import to_spec
from autopar.compiler.solver.solve import MAX_GAP
from autopar.compiler.spmd.block_plan import layout_from_text
from autopar.hardware.cluster import Cluster
from autopar.hardware.machine import Link
from autopar.ir.plan import MeshPlan, Plan
from autopar.ir.plan_sharding import MeshSharding
from autopar.progress import tell

_SHARE_OF_TIME = 0.15
"""Share of the time limit for the layouts of one stage with one multiplier: there are several of both."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _StageInputs:
    """A stage, and all that its layouts depend on."""

    stage: Stage
    tasks: list[GroupTask]
    layer: LayerClass
    constraints: GroupConstraints
    mesh_costs: MeshCosts
    num_microbatches: int
    num_in_flight: float
    """Microbatches whose activations are in memory at once."""
    received: Mapping[str, float]
    """Seconds for every byte of what comes from other meshes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SolvedStage:
    """A solution and the stage that it was computed for."""

    layer: LayerClass
    plan: GroupPlan

    def for_layer(self, layer: LayerClass) -> GroupPlan | None:
        """Return the solution for another stage of the same key; None if their tasks have too little in common."""
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
class ConstrainedStage:
    """The tasks of a mesh, and all that their layouts depend on."""

    tasks: list[GroupTask]
    layer: LayerClass
    constraints: GroupConstraints
    received: Mapping[str, float]
    """Seconds for every byte of what comes from other meshes."""
    memory_bytes: float = math.inf
    """Bytes of a device that layouts keep to if any can."""
    num_in_flight: float = 1.0
    """Microbatches whose activations are in memory at once."""


def shard_stages(
    plan: Plan,
    graph: StageGraph,
    stages: Sequence[ConstrainedStage],
    *,
    cluster: Cluster,
    time_limit_s: float,
    cache_directory: Path | None,
) -> Plan:
    """Return the plan with the best layouts that the constraints of each mesh allow; one device needs none."""
    solved: dict[Hashable, SolvedStage] = {}
    meshes: list[MeshPlan] = []
    for planned, stage in zip(plan.meshes, stages, strict=True):
        machine = cluster.machine_of(planned.devices)
        mesh = with_links(logical_mesh(planned), machine)
        mesh_costs = MeshCosts(machine=machine, mesh=mesh)
        key = (mesh.shape, cluster.group_of(planned.devices), _key_of_constrained(stage))
        best = solved[key].for_layer(stage.layer) if key in solved else None
        if best is None:
            best = _best_within(stage, mesh_costs, time_limit_s, cache_directory)
            solved[key] = SolvedStage(layer=stage.layer, plan=best)
        sharding = mesh_sharding(stage.tasks, best, mesh_costs)
        meshes.append(replace(planned, sharding=sharding, links=mesh.links))
    return with_input_specs(replace(plan, meshes=tuple(meshes)), graph)


def _best_within(
    stage: ConstrainedStage,
    mesh_costs: MeshCosts,
    time_limit_s: float,
    cache_directory: Path | None,
) -> GroupPlan:
    """Return the fastest layouts that fit into the memory of a stage; those that need the least if none are found."""
    choices = task_graph(stage.tasks, mesh_costs, stage.constraints)
    best = choices.best(stage.received, time_limit_s=time_limit_s, cache_directory=cache_directory)
    if math.isinf(stage.memory_bytes):
        return best
    free = found = stage_cost(stage.layer, best, mesh_costs)
    for multiplier, within in _prices(choices)[1:]:
        if found.peak_bytes(stage.num_in_flight) <= stage.memory_bytes:
            break
        charges = memory_charges(stage.layer, free, multiplier, mesh_costs.mesh.num_devices, within=within)
        charged = _added(stage.received, charges)
        best = choices.best(charged, time_limit_s=time_limit_s, cache_directory=cache_directory)
        found = stage_cost(stage.layer, best, mesh_costs)
    return best


def _prices(choices: TaskGraph) -> list[tuple[float, bool]]:
    """Return the prices of memory to try, lowest first; those for memory within tasks only if a task keeps some."""
    return [price for price in STAGE_PRICES if choices.kept or not price[1]]


def _key_of_constrained(stage: ConstrainedStage) -> Hashable:
    """Equal for stages whose layouts are the same."""
    numbers, constraints = layer_value_numbers(stage.layer), stage.constraints
    return (
        (class_key(stage.layer), stage.memory_bytes, stage.num_in_flight),
        tuple(numbers.get(constraints.alike.get(name, name), -1) for name in numbers),
        tuple((constraints.allowed.get(name), stage.received.get(name)) for name in numbers),
        tuple(
            constraints.equations.constraint_key(eqn) for task in stage.tasks for eqn in jc.all_equations(task.jaxpr)
        ),
    )


def with_input_specs(plan: Plan, graph: StageGraph) -> Plan:
    """Return a plan whose meshes have layouts with the specs of the inputs that these split."""
    specs: dict[str, PartitionSpec] = {}
    for given in graph.inputs:
        mesh = plan.meshes[plan.stages[given.stages[0]].mesh] if given.stages else None
        if given.leaf is not None and mesh is not None and mesh.sharding is not None:
            layout = layout_from_text(mesh.sharding.layouts["values"].get(given.value, "free"), logical_mesh(mesh))
            if layout is not None and any(layout.dims):
                specs[given.name] = to_spec(layout, logical_mesh(mesh))
    return replace(plan, input_specs=specs)


@dataclass(frozen=True, kw_only=True, eq=False)
class StageLayouts:
    """The layouts of a stage, its cost and the peak bytes of a device with them."""

    cost: StageCost
    peak_bytes: float
    gap: float
    """The share of their time that the best layouts may take less."""
    make_sharding: Callable[[], MeshSharding]

    @cached_property
    def sharding(self) -> MeshSharding:
        """The layouts as data, made when they are first asked for."""
        return self.make_sharding()


class StagesTooSlow(Exception):
    """The layouts of some stages tell that a plan with them is of no interest."""

    def __init__(self, known: Mapping[int, StageLayouts]) -> None:
        """Keep the layouts that are known, by the numbers of their stages."""
        super().__init__()
        self.known = known


def stage_shardings(
    problem: StageProblem,
    layers: Layers,
    graph: StageGraph,
    plan: Plan,
    stages: Sequence[Stage],
    timing: Timing,
    max_gap: float = MAX_GAP,
    are_too_slow: Callable[[Mapping[int, StageLayouts]], bool] = lambda known: False,
    *,
    least_price: float = 0.0,
) -> list[StageLayouts]:
    """Return the layouts of all stages, those of one mesh together, up to a gap if that is possible.

    Memory costs no less than a price, whether it is short or not.

    The slowest stages are the first, since the others wait for them. Raises `StagesTooSlow` as soon as some of them
    `are_too_slow`.
    """
    kinds = None if problem.method.kinds is None else graph_kinds(graph, problem.trace.batch_axes)
    each: list[tuple[_StageInputs, _EquivalentStages]] = []
    for number, stage in enumerate(stages):
        inputs = _stage_inputs(problem, graph, kinds, plan, number, stage, timing)
        ranges = [each.layers for each in plan.stages if each.mesh == number]
        classes = tuple(layers.class_of[start:stop] for start, stop in ranges)
        key = (layers, classes, _key(inputs))
        each.append((inputs, problem.solved_stages.setdefault(key, _EquivalentStages(first=inputs))))
    layouts: dict[int, StageLayouts] = {}
    for number in sorted(range(len(stages)), key=lambda number: -_seconds(stages[number].cost)):
        tell(f"layouts of stage {len(layouts) + 1} of {len(stages)}")
        problem.check_time()
        layouts[number] = _solve(problem, *each[number], max_gap, least_price)
        if len(layouts) < len(stages) and are_too_slow(layouts):
            raise StagesTooSlow(layouts)
    return [layouts[number] for number in range(len(stages))]


def _seconds(cost: StageCost) -> float:
    return cost.forward_s + cost.backward_s


def _stage_inputs(
    problem: StageProblem,
    graph: StageGraph,
    kinds: Mapping[str, ValueKinds] | None,
    plan: Plan,
    number: int,
    stage: Stage,
    timing: Timing,
) -> _StageInputs:
    mesh = logical_mesh(plan.meshes[number])
    tasks = tasks_of_stages(graph, plan.stages_on(number), problem.trace.donated_inputs)
    method = problem.method
    # What the model reads as well counts as there all the time: that is the most it can take.
    on_host = values_on_host(graph, plan).intersection(offered_state(graph))
    layer = layer_class(graph, tasks, method.pins, kinds, on_host)
    lane = next(lane for lane in plan.lanes if plan.stages_on(number)[0] in lane)
    used = sorted({plan.stages[stage].mesh for stage in lane})
    behind, count = len(used) - 1 - used.index(number), len(used)
    timing = replace(timing, num_microbatches=plan.stages[lane.start].microbatches or timing.num_microbatches)
    if problem.stage_meshes:  # the first of the stages of a mesh holds the most
        behind, count = len(plan.stages) - 1 - plan.stages_on(number)[0], len(plan.stages)
    return _StageInputs(
        stage=stage,
        tasks=tasks,
        layer=layer,
        constraints=layer_constraints(layer, mesh, method, stage.cost.choice.splits),
        mesh_costs=MeshCosts(machine=problem.machine_of(stage.submesh), mesh=mesh),
        num_microbatches=timing.num_microbatches,
        num_in_flight=most_in_flight(plan, number, timing, behind, count),
        received=received_seconds(graph, plan, number, problem.hardware),
    )


def most_in_flight(plan: Plan, number: int, timing: Timing, stages_behind: int, num_stages: int) -> float:
    """Return the microbatches whose activations a mesh holds at its fullest."""
    num_layers = [each.layers[1] - each.layers[0] for each in plan.stages if each.mesh == number]
    # Those in flight may all be of the largest virtual stage.
    unevenness = len(num_layers) * max(num_layers) / sum(num_layers)
    return unevenness * timing.num_in_flight(stages_behind=stages_behind, num_stages=num_stages)


def _key(inputs: _StageInputs) -> Hashable:
    """Equal for stages of the same classes of layers whose layouts are the same."""
    numbers = layer_value_numbers(inputs.layer)
    alike, constraint_key = inputs.constraints.alike, inputs.constraints.equations.constraint_key
    return (
        inputs.mesh_costs.mesh.shape,
        inputs.stage.submesh.group,
        inputs.stage.cost.choice,
        class_key(inputs.layer),
        tuple(numbers.get(alike.get(name, name), -1) for name in numbers),
        tuple((number, inputs.received.get(name)) for name, number in numbers.items()),
        tuple(constraint_key(eqn) for task in inputs.tasks for eqn in jc.all_equations(task.jaxpr)),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Solution:
    """The layouts of a stage with a memory multiplier."""

    inputs: _StageInputs
    solved: SolvedStage
    on_device: Mapping[str, DeviceTask]
    cost: StageCost
    asked_gap: float
    """The gap up to which they were solved for."""

    @property
    def gap(self) -> float:
        """The share of their cost by which the best layouts may at most cost less."""
        return gap_of(self.solved.plan)

    @cached_property
    def sharding(self) -> MeshSharding:
        """The layouts as data."""
        mine = self.inputs
        return mesh_sharding(mine.tasks, self.solved.plan, mine.mesh_costs, self.on_device)


@dataclass(kw_only=True, eq=False)
class _EquivalentStages:
    """The solutions of all stages that are equivalent to the first one met."""

    first: _StageInputs
    solutions: dict[tuple[float, bool], _Solution] = field(default_factory=dict[tuple[float, bool], _Solution])
    """The solutions of the least gap that was asked for, by the price of memory."""

    @cached_property
    def choices(self) -> TaskGraph:
        """The layouts to choose from."""
        return task_graph(self.first.tasks, self.first.mesh_costs, self.first.constraints)

    def solution(self, price: tuple[float, bool], problem: StageProblem, max_gap: float) -> _Solution:
        """Return the layouts of the first stage up to a gap, computed when they are first asked for."""
        inputs, (memory_multiplier, within) = self.first, price
        known = self.solutions.get(price)
        if known is None or min(known.gap, known.asked_gap) > max_gap:
            charged = _added(inputs.received, host_charges(inputs.layer, inputs.mesh_costs.machine))
            if memory_multiplier:
                num_devices = inputs.mesh_costs.mesh.num_devices
                mine = memory_charges(inputs.layer, inputs.stage.cost, memory_multiplier, num_devices, within=within)
                charged = _added(charged, mine)
            solved = self.choices.best(
                charged,
                time_limit_s=_SHARE_OF_TIME * problem.method.time_limit_s,
                max_gap=max_gap,
                cache_directory=problem.cache_directory,
            )
            on_device = device_tasks(inputs.tasks, solved, inputs.mesh_costs)
            self.solutions[price] = _Solution(
                inputs=inputs,
                solved=SolvedStage(layer=inputs.layer, plan=solved),
                on_device=on_device,
                cost=stage_cost(inputs.layer, solved, inputs.mesh_costs, on_device),
                asked_gap=max_gap,
            )
        return self.solutions[price]


def _solve(
    problem: StageProblem,
    inputs: _StageInputs,
    equivalent: _EquivalentStages,
    max_gap: float,
    least_price: float,
) -> StageLayouts:
    """Return the layouts for the least price of memory with which the stage fits.

    Layers that the search took to need more than there is may fit as a whole. How much more others like them needed, by
    the layers that the search chose, tells which prices are too low to be tried.
    """
    prices = [each for each in _prices(equivalent.choices) if each >= (least_price, False)]
    submesh, choice = inputs.stage.submesh, inputs.stage.cost.choice
    by_layers, limit = inputs.stage.cost.peak_bytes(inputs.num_in_flight), problem.memory_of(submesh)
    for price in prices:
        shares = problem.needed_shares.setdefault((submesh, choice, price), {})
        if price < (choice.memory_multiplier, False) and _least_bytes(inputs, shares) > limit:
            continue
        solution = equivalent.solution(price, problem, max_gap)
        peak_bytes = solution.cost.peak_bytes(inputs.num_in_flight)
        if by_layers:
            share, count = peak_bytes / by_layers, inputs.num_microbatches
            shares[count] = min(share, shares.get(count, share))
        if price == prices[-1] or peak_bytes <= limit:
            make_sharding = _handed_on(solution, inputs)
            if make_sharding is None:
                return _solve(problem, inputs, _EquivalentStages(first=inputs), max_gap, least_price)
            return StageLayouts(
                cost=solution.cost, peak_bytes=peak_bytes, gap=solution.gap, make_sharding=make_sharding
            )
    raise AssertionError(prices)


def _least_bytes(inputs: _StageInputs, shares: Mapping[int, float]) -> float:
    """Return the bytes that a stage is likely to need at least, by the shares that others needed; 0 for none.

    It needs no less than it would for microbatches as small as theirs: what is gathered does not grow with the rows.
    """
    state = inputs.stage.cost.state_bytes
    rest, count = inputs.stage.cost.peak_bytes(inputs.num_in_flight) - state, inputs.num_microbatches
    return min((share * (state + rest * min(1.0, count / other)) for other, share in shares.items()), default=0.0)


def _handed_on(solution: _Solution, inputs: _StageInputs) -> Callable[[], MeshSharding] | None:
    """Return what makes the sharding for an equivalent stage; None if the two have too little in common."""
    theirs = solution.solved.layer
    if inputs.layer is theirs:
        return lambda: solution.sharding
    plan = solution.solved.for_layer(inputs.layer)
    if plan is None:
        return None
    return lambda: mesh_sharding_like(solution.sharding, theirs.tasks, inputs.tasks, plan, inputs.mesh_costs)


def received_seconds(graph: StageGraph, plan: Plan, number: int, cluster: Cluster) -> dict[str, float]:
    """Return the seconds that every byte of a value from another mesh takes: the fewer a device needs, the better.

    Values that all devices need are sent in parts, one to each, and gathered on the mesh, wherever that is faster.
    """
    seconds: dict[str, float] = {}
    for name, (source, readers) in graph.crossing.items():
        meshes = {plan.stages[reader].mesh for reader in readers}
        if number in meshes and plan.stages[source].mesh != number:
            times = len(graph.microbatches_of(source)) if graph.values[name].per_microbatch else 1
            link = _link_between(plan, cluster, plan.stages[source].mesh, number)
            seconds[name] = times / link.bandwidth
    return seconds


def _link_between(plan: Plan, cluster: Cluster, source: int, target: int) -> Link:
    """Return the link between two meshes; within a group it is a fast one if the plan uses no more than its domain."""
    groups = [cluster.group_of(mesh.devices) for mesh in plan.meshes]
    if groups[source] != groups[target]:
        return cluster.link_between(groups[source], groups[target])
    machine = cluster.groups[groups[source]].machine
    used = sum(len(mesh.devices) for mesh, group in zip(plan.meshes, groups, strict=True) if group == groups[source])
    return machine.intra if used <= machine.domain else machine.inter


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {**one, **other}}
