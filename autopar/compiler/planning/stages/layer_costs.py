"""Cost a class of layers on a submesh: the intra-operator optimum of one layer, for less and less memory.

    LayerClass, MeshCosts  ->  StageCost, StageCost, ...       the less memory, the more time

Activations leave a layer as they came in, so that the cost of a range of layers is the sum of theirs. A Lagrange
multiplier gives memory a cost in the objective: every multiplier gives one point of the front of time against memory.

The memory of a device at the worst moment of a step is that of the simulator, without a program:

    state          what stays from step to step and from microbatch to microbatch, and the examples of all microbatches
    activation     what the backward task reads of a microbatch                for every microbatch in flight
    temporary      what else a task is given, makes, and needs in between      while it runs
    update         the same as temporary, of the update: then no microbatch is in flight
    on the host    nothing, but three of its parts while they are updated; its bytes take time on the link to the host

    peak = state + max(temporary + in flight · activation, update)
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from autopar.checks import check_spec
from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.frontend.dimension_kinds import part_kinds
from autopar.compiler.inter_op.stage_costs import StageCost
from autopar.compiler.inter_op.submeshes import Submesh
from autopar.compiler.intra_op.plan_tasks import (
    KEPT_WITHIN,
    GroupConstraints,
    GroupPlan,
    GroupTask,
    PricedTaskGraph,
    task_graph,
)
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.flops import aval_bytes
from autopar.compiler.pipeline.host_state import PART_SHARE, PARTS_AT_ONCE
from autopar.compiler.planning.demands.constraints import equation_constraints, layout_from_user
from autopar.compiler.planning.demands.kinds import AllowedSplits, kept_layouts, within_kinds
from autopar.compiler.planning.demands.scope_demands import layouts_in_parts
from autopar.compiler.planning.mesh_sharding import DeviceTask, device_tasks
from autopar.compiler.planning.stages.layer_classes import LayerClass
from autopar.compiler.planning.step_bounds import Work, seconds_on_one_device, total_work, work_of_program
from autopar.compiler.sharding.layout import Layout, LogicalMesh, even_layouts, num_shards
from autopar.compiler.sharding.replicated_values import below_split_size
from autopar.compiler.spmd.block_times import block_times
from autopar.compiler.spmd.local_program import LocalBlock, Value, action_values
from autopar.hardware.machine import Machine
from autopar.methods import Auto

MEMORY_MULTIPLIERS = (0.0, 0.3, 10.0)
"""Prices of memory: seconds that keeping everything whole would cost, in multiples of the time without a price."""
STAGE_PRICES = ((MEMORY_MULTIPLIERS[0], False), *itertools.product(MEMORY_MULTIPLIERS[1:], (False, True)))
"""Prices of memory for a stage as a whole, each at first without a price for what a task keeps within. Layers apart
keep nothing so, and a stage may have the room."""
SAVED_FOR_NOTHING = math.inf
"""The multiplier of layouts that are not solved for yet: the fastest ones, as if they needed the least memory."""
_VERY_MANY_DEVICES = 64
"""Devices of a mesh from which on prices of memory grow with their number."""
_HARDLY_LONGER = 1 + 1e-6
"""Factor on the time of the fastest layouts, for those that save memory: where the fastest fit, they come first."""
ESTIMATE_GAP = 0.01
"""Gap of the layouts of layers, which tell stages apart: proof of the best takes several times the search for it."""
_TYPICAL_IN_FLIGHT = 4
"""Microbatches whose activations are in memory at once, for the memory multipliers only."""


class LayoutChoice(NamedTuple):
    """The way to compute a stage: what memory costs its layouts, what the mesh axes may split, and what runs again."""

    memory_multiplier: float
    splits: AllowedSplits | None = None
    remat: float = 0.0
    """The share of its layers, the first ones, that its backward task computes again; of a layer 0 or 1."""

    @property
    def is_fastest(self) -> bool:
        """True if nothing is done to need less memory."""
        return not (self.remat or self.memory_multiplier)


class LayerOptimum(NamedTuple):
    """The cost of a layer with its best layouts, their gap, and those in which it hands on activations, by type."""

    cost: StageCost
    gap: float
    border: Mapping[Any, Layout]

    @property
    def task_s(self) -> float:
        """The seconds of its forward and its backward pass."""
        return self.cost.forward_s + self.cost.backward_s


@dataclass(kw_only=True, eq=False)
class LayerCosts:
    """The costs of classes on meshes, each computed when it is first asked for.

    The layouts in which the most common class hands on its activations hold for all classes. They divide examples alone
    where that is as good.
    """

    classes: Sequence[LayerClass]
    most_common: int
    method: Auto
    time_limit_s: float = 10.0
    cache_directory: Path | None = None
    optima: dict[Hashable, LayerOptimum] = field(default_factory=dict[Hashable, LayerOptimum])
    """Optima of layers by all that they depend on: layers that others have as well are solved for once."""
    known: dict[Any, LayerOptimum] = field(default_factory=dict[Any, LayerOptimum])
    choices: dict[Any, PricedTaskGraph] = field(default_factory=dict[Any, PricedTaskGraph])
    solved: set[Submesh] = field(default_factory=set[Submesh])
    """The submeshes on which the layouts of layers are asked for."""
    fits: bool = False
    """True if all of the step fits on a device at once: what tasks need for a while is not asked for, and 0."""
    saving: set[Submesh] = field(default_factory=set[Submesh])
    """The submeshes of `solved` on which layouts that save memory are asked for as well."""
    works: dict[tuple[int, Machine], dict[str, tuple[Work, Work]]] = field(
        default_factory=dict[tuple[int, Machine], dict[str, tuple[Work, Work]]]
    )
    """The work of a layer's phases, and the part of it that begins anew for each microbatch, by class and machine."""
    task_works: dict[Hashable, tuple[Work, Work]] = field(default_factory=dict[Hashable, tuple[Work, Work]])
    """The same two of tasks, by all that they depend on: those of tasks that others have as well are found once."""
    alone: dict[tuple[int, Machine], StageCost] = field(default_factory=dict[tuple[int, Machine], StageCost])
    """The cost on one device, by class and machine."""
    adds: dict[tuple[int, Machine], Work] = field(default_factory=dict[tuple[int, Machine], Work])
    """The work of adding to totals, which layers of one microbatch do not, by class and machine."""
    gap: float = 0.0
    """The largest gap of the optima."""

    def cost(self, number: int, mesh_costs: MeshCosts, choice: LayoutChoice) -> StageCost:
        """Return the cost of a layer of class `number` on a mesh, whose layouts are chosen so."""
        return self._optimum(number, mesh_costs, choice).cost

    def is_known(self, number: int, mesh_costs: MeshCosts, choice: LayoutChoice) -> bool:
        """Return whether `cost` has computed the cost of a layer."""
        return (number, mesh_costs.mesh.shape, mesh_costs.machine, choice) in self.known

    def _optimum(self, number: int, mesh_costs: MeshCosts, choice: LayoutChoice) -> LayerOptimum:
        place = (mesh_costs.mesh.shape, mesh_costs.machine, choice)
        if (number, *place) not in self.known:
            border = self._border(number, mesh_costs, choice)
            key = (self.classes[number].key, *place, tuple(border.items()), self.fits)
            if key not in self.optima:
                self.optima[key] = self._solved(number, mesh_costs, choice)
            self.known[number, *place] = self.optima[key]
            self.gap = max(self.gap, self.optima[key].gap)
        return self.known[number, *place]

    def _border(self, number: int, mesh_costs: MeshCosts, choice: LayoutChoice) -> Mapping[Any, Layout]:
        """Return by type the layouts in which the most common class hands on activations, as all others have to."""
        if number == self.most_common:
            return {}
        return self._optimum(self.most_common, mesh_costs, choice._replace(memory_multiplier=0.0)).border

    def _solved(self, number: int, mesh_costs: MeshCosts, choice: LayoutChoice) -> LayerOptimum:
        free = choice._replace(memory_multiplier=0.0)
        found = self._solved_with(self._choices_of(number, mesh_costs, free), number, mesh_costs, choice)
        if number != self.most_common or choice != free or _examples_only(self.classes[number], found.border):
            return found
        # Where features or positions are divided at no gain, other classes would have to divide them, too.
        usual = _by_examples(self.classes[number], mesh_costs.mesh)
        choices = self._choices_with(usual, number, mesh_costs, free)
        by_examples = self._solved_with(choices, number, mesh_costs, choice)
        if by_examples.task_s > (1 + ESTIMATE_GAP) * found.task_s:
            return found
        self.choices[_choices_key(number, mesh_costs, free)] = choices
        return by_examples

    def _solved_with(
        self, choices: PricedTaskGraph, number: int, mesh_costs: MeshCosts, choice: LayoutChoice
    ) -> LayerOptimum:
        layer, free = self.classes[number], choice._replace(memory_multiplier=0.0)
        charged = host_charges(layer, mesh_costs.machine)
        if choice.memory_multiplier:
            charged |= memory_charges(
                layer, self.cost(number, mesh_costs, free), choice.memory_multiplier, mesh_costs.mesh.num_devices
            )
        solved = choices.best(
            charged,
            time_limit_s=self.time_limit_s,
            max_gap=ESTIMATE_GAP,
            cache_directory=self.cache_directory,
        )
        # A stage brings in its state part by part, where this layer's update reads all of its own.
        on_device = device_tasks(layer.tasks, solved, mesh_costs)
        cost = stage_cost(layer, solved, mesh_costs, on_device, part_share=PART_SHARE, at_work=not self.fits)
        if not choice.remat:
            cost = replace(cost, weight_s=cost.weight_s or weight_gradient_s(layer, on_device, mesh_costs))
        return LayerOptimum(cost=cost, gap=gap_of(solved), border=_border(layer, solved))

    def least(self, number: int, machine: Machine, num_devices: int, *, begins: bool = False) -> StageCost:
        """Return a lower bound on the cost of a layer on so many devices, whatever its layouts.

        With `begins`, its times are only what each microbatch takes whatever its number of rows.
        """
        layer = self.classes[number]
        key = (number, machine)
        if key not in self.works:
            self.works[key] = self._works(layer, machine)
        seconds = {
            phase: (anew if begins else whole).on(num_devices) for phase, (whole, anew) in self.works[key].items()
        }
        return StageCost(
            forward_s=seconds["forward"],
            backward_s=seconds["backward"],
            update_s=seconds["update"],
            weight_s=seconds["weight"],
            state_bytes=layer.state_bytes / num_devices,
            activation_bytes=layer.kept_bytes / num_devices,
        )

    def on_one_device(self, number: int, machine: Machine) -> StageCost:
        """Return the cost of a layer on one device, where it has no layouts to choose, without temporary memory."""
        key = (number, machine)
        if key not in self.alone:
            each = [
                (task, seconds_on_one_device(jc.open_jaxpr(task.jaxpr)[0], machine))
                for task in self.classes[number].tasks
            ]
            forward_s, backward_s, update_s = (
                sum(seconds for task, seconds in each if task.phase == phase)
                for phase in ("forward", "backward", "update")
            )
            weight_s = sum(seconds for task, seconds in each if task.name.startswith("weight_gradient"))
            self.alone[key] = replace(
                self.least(number, machine, 1),
                forward_s=forward_s,
                backward_s=backward_s,
                weight_s=weight_s,
                update_s=update_s,
            )
        return self.alone[key]

    def _works(self, layer: LayerClass, machine: Machine) -> dict[str, tuple[Work, Work]]:
        """Return the work of a layer by phase, and the part of it that begins anew for each microbatch."""
        each = [(task, *self._work_of(task, machine)) for task in layer.tasks]

        def of(mine: Iterable[tuple[GroupTask, Work, Work]]) -> tuple[Work, Work]:
            both = [(whole, anew) for _, whole, anew in mine]
            return total_work([whole for whole, _ in both]), total_work([anew for _, anew in both])

        phases = ("forward", "backward", "update")
        works = {phase: of(found for found in each if found[0].phase == phase) for phase in phases}
        return works | {"weight": of(found for found in each if found[0].name.startswith("weight_gradient"))}

    def adding(self, number: int, machine: Machine, num_devices: int) -> float:
        """Return the seconds by which accumulation over several microbatches prolongs a layer."""
        key = (number, machine)
        if key not in self.adds:
            read = {name for task in self.classes[number].tasks if task.phase == "update" for name in task.inputs}
            both = [
                (work_of_program(program, machine, (), ())[0], self._work_of(task, machine)[0])
                for task in self.classes[number].tasks
                if task.phase == "backward"
                for program in [jc.open_jaxpr(_with_totals(task.jaxpr, [name in read for name in task.outputs]))[0]]
            ]
            self.adds[key] = Work(
                fixed_s=sum(adding.fixed_s - alone.fixed_s for adding, alone in both),
                divisible_s=sum(adding.divisible_s - alone.divisible_s for adding, alone in both),
            )
        return self.adds[key].on(num_devices)

    def _work_of(self, task: GroupTask, machine: Machine) -> tuple[Work, Work]:
        key = task.key, machine, task.parameters, task.donated
        if key not in self.task_works:
            program = jc.open_jaxpr(task.jaxpr)[0]
            self.task_works[key] = work_of_program(program, machine, task.parameters, task.donated)
        return self.task_works[key]

    def saved_for_nothing(self, number: int, mesh_costs: MeshCosts, choice: LayoutChoice) -> StageCost:
        """Return an optimistic cost of layouts that save memory: least memory, in hardly more than the least time."""
        fastest = self.cost(number, mesh_costs, choice._replace(memory_multiplier=0.0))
        least = self.least(number, mesh_costs.machine, math.prod(mesh_costs.mesh.shape))
        return replace(
            fastest.in_time(_HARDLY_LONGER),
            state_bytes=min(least.state_bytes, fastest.state_bytes),
            activation_bytes=min(least.activation_bytes, fastest.activation_bytes),
            temporary_bytes=0.0,
            update_bytes=0.0,
        )

    def _choices_of(self, number: int, mesh_costs: MeshCosts, free: LayoutChoice) -> PricedTaskGraph:
        key = _choices_key(number, mesh_costs, free)
        if key not in self.choices:
            usual = self._at_borders(number, mesh_costs, free)
            self.choices[key] = self._choices_with(usual, number, mesh_costs, free)
        return self.choices[key]

    def _choices_with(
        self, usual: Mapping[str, tuple[Layout, ...]], number: int, mesh_costs: MeshCosts, free: LayoutChoice
    ) -> PricedTaskGraph:
        layer = self.classes[number]
        constraints = replace(
            layer_constraints(layer, mesh_costs.mesh, self.method, free.splits, usual),
            alike={**layer.constraints.alike, **_as_they_came(layer)},
        )
        graph = task_graph(layer.tasks, mesh_costs, constraints)
        return PricedTaskGraph(graph=graph, names=layer.state | layer.on_host | layer.kept | layer.fed)

    def _at_borders(self, number: int, mesh_costs: MeshCosts, free: LayoutChoice) -> dict[str, tuple[Layout, ...]]:
        layer, border = self.classes[number], self._border(number, mesh_costs, free)
        types = layer.types
        return {
            name: (border[_type(types[name])],)
            for name in layer.batch_axes
            if name in types and _type(types[name]) in border
        }


def _with_totals(program: jc.ClosedJaxpr, added: Sequence[bool]) -> jc.ClosedJaxpr:
    """Return a program with further inputs, to each of which it adds one of its results: those that are `added`."""
    body, sums = jc.open_jaxpr(program)[0], list[jc.JaxprEqn]()
    results, totals = list(body.outvars), list[jc.Var]()
    for place, (v, is_added) in enumerate(zip(body.outvars, added, strict=True)):
        if is_added and isinstance(v, jc.Var):
            (add,) = jc.open_jaxpr(jc.trace(operator.add, [v.aval, v.aval]))[0].eqns
            total, result = jc.value_of_type(v.aval), jc.value_of_type(v.aval)
            sums.append(add.replace(invars=[total, v], outvars=[result]))
            totals.append(total)
            results[place] = result
    return jc.part_of(program, [*body.eqns, *sums], [*body.invars, *totals], results)


def layer_constraints(
    layer: LayerClass,
    mesh: LogicalMesh,
    method: Auto,
    splits: AllowedSplits | None,
    usual: Mapping[str, tuple[Layout, ...]] | None = None,
) -> GroupConstraints:
    """Return the constraints on a layer or stage: the user's, and the kinds of dimensions that each axis may split.

    `usual` are the layouts that some of its values have unless a pin or the kinds say otherwise. Raises
    `InvalidArgument` for pins, scopes and constraints that the mesh or the kinds do not allow.
    """
    equations = equation_constraints(mesh, ignore_user_shardings=method.ignore_user_shardings)
    pinned = pinned_layouts(layer, mesh)
    if splits is None:
        return replace(layer.constraints, allowed={**(usual or {}), **pinned}, equations=equations)
    types = layer.types
    every = {
        name: even_layouts(tuple(aval.shape), mesh)
        for name, aval in types.items()
        if name in layer.kinds and not below_split_size(aval)
    }
    allowed = kept_layouts(every | pinned, {name: f"The layout of {name}" for name in types}, layer.kinds, splits, mesh)
    for name, layouts in (usual or {}).items():
        if name not in pinned:
            allowed[name] = tuple(each for each in layouts if each in allowed[name]) or allowed[name]
    dims = part_kinds([(task.jaxpr, task.inputs, task.outputs) for task in layer.tasks], layer.kinds)
    return replace(layer.constraints, allowed=allowed, equations=within_kinds(equations, splits, dims, mesh))


def pinned_layouts(layer: LayerClass, mesh: LogicalMesh) -> dict[str, tuple[Layout, ...]]:
    """Return the layouts that the user fixed; raise `InvalidArgument` for what the mesh or the shapes cannot keep."""
    types = layer.types
    in_parts = {
        name: layouts
        for name, demand in layer.in_parts.items()
        if name in types and (layouts := layouts_in_parts(types[name], demand, mesh)) is not None
    }
    for name, spec in layer.pins.items():
        check_spec(f"{name}, which a pin fixes,", spec, (mesh.axis_names,))
    return in_parts | {
        name: (layout_from_user(f"The pin of {name}", spec, tuple(types[name].shape), mesh),)
        for name, spec in layer.pins.items()
        if name in types
    }


def memory_charges(
    layer: LayerClass, cost: StageCost, memory_multiplier: float, num_devices: int, *, within: bool = False
) -> dict[str, float]:
    """Return the seconds charged for each byte of a value: for all values whole, a multiple of the step's time.

    On very many devices a multiple as much larger: there, even a part of a value that is on few of them is many times
    what each would have of it. Also of what forward tasks keep for the backward pass that they hold, if that is to cost
    as well.
    """
    types = layer.types
    times = next((task.times for task in layer.tasks if task.phase != "update"), 1.0)
    step_s = times * (cost.forward_s + cost.backward_s) + cost.update_s
    weights = {n: 1.0 for n in layer.state if n in types}
    weights |= {n: float(_TYPICAL_IN_FLIGHT) for n in layer.kept | layer.fed if n in types}
    whole = sum(weight * aval_bytes(types[name]) for name, weight in weights.items())
    weights |= {KEPT_WITHIN: 1.0} if within else {}
    all_s = memory_multiplier * max(1.0, num_devices / _VERY_MANY_DEVICES) * step_s
    return {name: all_s * weight / whole for name, weight in weights.items()} if whole else {}


def host_charges(layer: LayerClass, machine: Machine) -> dict[str, float]:
    """Return the seconds that each byte of what is on the host takes to come to a device; it leaves beside others."""
    return dict.fromkeys(sorted(layer.on_host), machine.host_copy_s(1.0))


def stage_cost(
    layer: LayerClass,
    solved: GroupPlan,
    mesh_costs: MeshCosts,
    on_device: Mapping[str, DeviceTask] | None = None,
    *,
    part_share: float = 1.0,
    at_work: bool = True,
) -> StageCost:
    """Return the cost of a solution; `on_device` are its `device_tasks`, if known.

    An update brings in all that it reads of the state on the host at once, or a share of it at a time. Unless memory
    `at_work` is asked for, there is none but what stays from task to task.
    """
    seconds = {"forward": 0.0, "backward": 0.0, "update": 0.0}
    weight_s = 0.0
    on_device = device_tasks(layer.tasks, solved, mesh_costs) if on_device is None else on_device
    for task in layer.tasks:
        task_s = on_device[task.name].times.total_s
        seconds[task.phase] += task_s
        weight_s += task_s if task.name.startswith("weight_gradient") else 0.0
    memory = stage_memory(layer, solved.layouts, on_device if at_work else {}, mesh_costs.mesh, part_share)
    return StageCost(
        forward_s=seconds["forward"],
        backward_s=seconds["backward"],
        update_s=max(seconds["update"], mesh_costs.machine.host_copy_s(memory.host_bytes)),
        weight_s=weight_s,
        state_bytes=memory.state_bytes,
        activation_bytes=memory.activation_bytes,
        temporary_bytes=memory.temporary_bytes,
        update_bytes=memory.update_bytes,
    )


def weight_gradient_s(layer: LayerClass, on_device: Mapping[str, DeviceTask], mesh_costs: MeshCosts) -> float:
    """Return the seconds of a layer's backward pass that no other layer waits for; 0 where none waits for any of it."""
    seconds = 0.0
    for task in layer.tasks:
        waited_for = {place for place, name in enumerate(task.outputs) if name in layer.batch_axes}
        if task.phase == "backward" and waited_for:
            block = on_device[task.name].block
            rest = [a for a, needed in zip(block.actions, _needed_for(block, waited_for), strict=True) if not needed]
            seconds += block_times(replace(block, actions=tuple(rest)), mesh_costs).total_s
    return seconds


def _needed_for(block: LocalBlock, places: Collection[int]) -> list[bool]:
    """Return for each action of a program whether one of the results at these places needs it."""
    outputs, needed = [block.outputs[place] for place in places], list[bool]()
    wanted = {value for value in outputs if isinstance(value, Value)}
    for action in reversed(block.actions):
        results, operands = action_values(action)
        needed.append(not wanted.isdisjoint(results))
        wanted.update(operands if needed[-1] else ())
    return needed[::-1]


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """The bytes of one device, by the time for which they are there."""

    state_bytes: float
    activation_bytes: float
    temporary_bytes: float
    update_bytes: float
    host_bytes: float
    """Bytes on the host, for one device."""


def stage_memory(
    layer: LayerClass,
    layouts: Mapping[str, Layout | None],
    on_device: Mapping[str, DeviceTask],
    mesh: LogicalMesh,
    part_share: float,
) -> StageMemory:
    """Return the memory of a layer or a stage, by the layouts of its values and what its tasks need on a device.

    Of tasks that are not given, nothing is counted but what stays.
    """
    types = layer.types
    counted = layer.state | layer.kept | layer.fed

    def total_bytes(names: Iterable[str]) -> float:
        return sum(device_bytes(types[name], layouts.get(name), mesh) for name in names if name in types)

    temporary = update = part = 0.0
    for task in (each for each in layer.tasks if each.name in on_device):
        memory = on_device[task.name].memory
        extra = memory.peak_bytes - total_bytes(_counted(task, counted))
        if task.phase == "update":
            brought = total_bytes(layer.on_host.intersection(task.inputs))
            update, part = max(update, extra - brought), max(part, brought)
        else:
            temporary = max(temporary, extra)
    num_microbatches = max((task.times for task in layer.tasks), default=1.0)
    return StageMemory(
        state_bytes=total_bytes(layer.state) + num_microbatches * total_bytes(layer.fed),
        activation_bytes=total_bytes(layer.kept),
        temporary_bytes=temporary,
        update_bytes=update + PARTS_AT_ONCE * part_share * part,
        host_bytes=total_bytes(layer.on_host),
    )


def _counted(task: GroupTask, names: frozenset[str]) -> frozenset[str]:
    """Return the names among a task's inputs and outputs, but not among an update's outputs, which replace others."""
    made = () if task.phase == "update" else task.outputs
    return names.intersection((*task.inputs, *made))


def device_bytes(aval: Any, layout: Layout | None, mesh: LogicalMesh) -> float:
    """Return the bytes of a value on one device."""
    return aval_bytes(aval) / (1 if layout is None else num_shards(aval.shape, layout, mesh))


def _border(layer: LayerClass, solved: GroupPlan) -> dict[Any, Layout]:
    """Return by type the layout in which activations and examples cross the borders of a layer."""
    types = layer.types
    return {
        _type(types[name]): layout
        for name, layout in solved.layouts.items()
        if name in layer.batch_axes and layout is not None
    }


def _as_they_came(layer: LayerClass) -> dict[str, str]:
    """Pair activations and cotangents that leave a layer with those of their type that came in: one layout for both."""
    types = layer.types
    made = {name for task in layer.tasks for name in task.outputs}
    came = {_type(types[n]): n for n in layer.batch_axes if n in types and n not in made}
    return {
        name: came[_type(types[name])]
        for name in layer.batch_axes
        if name in types and name in made and _type(types[name]) in came
    }


def _choices_key(number: int, mesh_costs: MeshCosts, free: LayoutChoice) -> Hashable:
    return number, mesh_costs.mesh.shape, mesh_costs.machine, free


def _divides_only(layout: Layout, axis: int | None) -> bool:
    return not layout.partial and not any(axes for dim, axes in enumerate(layout.dims) if dim != axis)


def _examples_only(layer: LayerClass, border: Mapping[Any, Layout]) -> bool:
    """Return whether nothing but examples is divided where a layer hands on activations."""
    types = layer.types
    return all(
        _divides_only(border[_type(types[name])], axis)
        for name, axis in layer.batch_axes.items()
        if name in types and _type(types[name]) in border
    )


def _by_examples(layer: LayerClass, mesh: LogicalMesh) -> dict[str, tuple[Layout, ...]]:
    """Return the layouts of activations at the borders of a layer that divide nothing but examples."""
    types = layer.types
    return {
        name: tuple(each for each in even_layouts(tuple(types[name].shape), mesh) if _divides_only(each, axis))
        for name, axis in layer.batch_axes.items()
        if name in types
    }


def _type(aval: Any) -> tuple[Any, ...]:
    return (tuple(aval.shape), str(aval.dtype))


def gap_of(solved: GroupPlan) -> float:
    """Return the optimality gap: the share of their cost that the best layouts can at most save."""
    best, bound = solved.optimum.value, solved.optimum.lower_bound
    return 0.0 if best <= 0 else max(0.0, 1 - bound / best)
