"""Cut a step into layers, each a stage of its own, and find which layers are equivalent.

    Trace, number of layers, microbatches  ->  Layers

What a layer costs is then found once for each class of layers, whatever the depth of the model: equal programs, handed
equal values in equal places.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax.sharding import PartitionSpec

from autopar.compiler.frontend.checkpoint_regions import find_wide_regions
from autopar.compiler.frontend.dimension_kinds import ValueKinds
from autopar.compiler.frontend.scopes import Demand, demand_of
from autopar.compiler.frontend.trace import Trace
from autopar.compiler.intra_op.plan_tasks import GroupConstraints, GroupTask
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.flops import aval_bytes
from autopar.compiler.lowering.stage_programs import tasks_of_stages
from autopar.compiler.pipeline.cut_stages import StageCut, cut_stages
from autopar.compiler.pipeline.host_state import offered_state
from autopar.compiler.pipeline.layers import count_layers, count_marked_layers, forward_costs, layer_cuts
from autopar.compiler.pipeline.phases import Phases
from autopar.compiler.pipeline.placement import layer_order
from autopar.compiler.pipeline.prepare import PreparedStep, loop_pieces_for, prepare
from autopar.compiler.pipeline.stage_graph import GraphValue, StageGraph
from autopar.compiler.planning.demands.kinds import graph_kinds
from autopar.compiler.planning.demands.scope_demands import least_devices, parameters_in_parts
from autopar.compiler.planning.mesh_sharding import mesh_constraints

LayerCutter = Callable[[Phases, int], Sequence[int]]
"""Return the positions in the forward pass where layers 1, 2, ... begin, for a number of layers that is asked for."""

_MOST_LOOP_PIECES = 128
_LEAST_SHARE = 0.05
"""Share of the mean FLOPs: a layer with less is part of its neighbour."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerClass:
    """A class of equivalent layers: the tasks of one of them, and the constraints on their values."""

    tasks: tuple[GroupTask, ...]
    constraints: GroupConstraints
    batch_axes: Mapping[str, int | None]
    """The values that cross layers or hold examples, and along which axis those are."""
    state: frozenset[str]
    """Values that stay on the devices from step to step, or from microbatch to microbatch."""
    on_host: frozenset[str]
    """Values that stay on the host from step to step."""
    kept: frozenset[str]
    """Values of a microbatch that its backward task reads."""
    fed: frozenset[str]
    """Values that are there for all microbatches at once: their examples, and what a round leaves for a later one."""
    pins: Mapping[str, PartitionSpec]
    """The specs that the user fixed for its inputs."""
    in_parts: Mapping[str, Demand]
    """The inputs of which every device is to hold a part, by the scopes that say so."""
    kinds: Mapping[str, ValueKinds]
    """The kinds of the dimensions of its values, for a search that is restricted to some; else none."""

    @cached_property
    def key(self) -> Hashable:
        """Equal for layers that compute the same from values in the same places."""
        return class_key(self)

    @cached_property
    def types(self) -> Mapping[str, Any]:
        """The types of all values between the tasks."""
        types: dict[str, Any] = {}
        for task in self.tasks:
            jaxpr = jc.open_jaxpr(task.jaxpr)[0]
            types |= {name: v.aval for name, v in zip(task.inputs, jaxpr.invars, strict=True)}
            types |= {name: v.aval for name, v in zip(task.outputs, jaxpr.outvars, strict=True)}
        return types

    @cached_property
    def state_bytes(self) -> int:
        """The bytes of the state, undivided."""
        return self._bytes(self.state)

    @cached_property
    def kept_bytes(self) -> int:
        """The bytes of what the backward task reads, undivided."""
        return self._bytes(self.kept)

    def _bytes(self, names: Iterable[str]) -> int:
        return sum(aval_bytes(self.types[name]) for name in names if name in self.types)


@dataclass(frozen=True, kw_only=True, eq=False)
class Layers:
    """The layers of a step for a number of microbatches: the class of each, and the bytes that cross each cut."""

    cuts: tuple[int, ...]
    loop_pieces: int
    num_microbatches: int
    prepare: Callable[[], PreparedStep]
    classes: tuple[LayerClass, ...]
    class_of: tuple[int, ...]
    crossing_bytes: tuple[float, ...]
    """Bytes of one microbatch over each cut, there and back; what crosses once per step counts its share."""

    @cached_property
    def prepared(self) -> PreparedStep:
        """The step that is cut, for this number of microbatches."""
        return self.prepare()

    def num_recomputed(self, start: int, stop: int, share: float) -> int:
        """Return how many layers of a range are computed again: a share of them, or all where the user's step does."""
        return recomputed_layers(stop - start, 1.0 if self.prepared.recomputes else share)

    @cached_property
    def least_devices(self) -> tuple[int, ...]:
        """The number, by class, that a stage's devices must be a multiple of for the scopes in such a layer to hold."""
        return tuple(
            least_devices(demand_of(eqn) for task in one.tasks for eqn in jc.all_equations(task.jaxpr))
            for one in self.classes
        )


def recomputed_layers(num_layers: int, share: float) -> int:
    """Return how many layers are computed again where at least a share of them is to be."""
    return math.ceil(share * num_layers)


def count_step_layers(trace: Trace, *, num_stages: int = 1, **options: str) -> tuple[int, int]:
    """Return the number of layers that a step is cut into, one a stage at least, and of pieces of its layer scans.

    Raises `InvalidArgument` if the model marks fewer layers than there are stages.
    """
    whole = prepare(trace, num_layers=1, num_microbatches=1, loop_pieces=1, **with_exact(options))
    loops = [
        jp.scan_of(eqn).length
        for eqn in whole.phases.equations
        if eqn.primitive.name == "scan" and 1 < jp.scan_of(eqn).length <= _MOST_LOOP_PIECES
    ]
    if loops and loop_pieces_for(trace, max(loops)) > 1:
        return max(num_stages, *loops), max(num_stages, *loops)
    return count_layers(whole.phases, num_stages), 1


def with_exact(options: Mapping[str, str]) -> dict[str, str]:
    """Return these options of `prepare`, and the exact ones for those that are not given."""
    return {"batch_statistics": "exact", "random": "full_batch"} | dict(options)


def find_layers(
    trace: Trace,
    *,
    num_layers: int,
    loop_pieces: int,
    num_microbatches: int,
    split_weight_gradients: bool,
    remat: bool,
    pins: Mapping[str, PartitionSpec],
    by_kinds: bool = False,
    cut: LayerCutter | None = None,
    offload: bool = False,
    **options: str,
) -> Layers:
    """Cut a step into layers, those of the model unless `cut` says which; `by_kinds` with those of their dimensions.

    With `offload`, state that only updates read is on the host.

    Raises as `prepare` does for batches that cannot be split.
    """
    exact = with_exact(options)
    prepared = prepare(
        trace, num_layers=num_layers, num_microbatches=num_microbatches, loop_pieces=loop_pieces, **exact
    )
    cuts = tuple((cut or model_cuts)(prepared.phases, num_layers))
    wide, still_wide = (find_wide_regions(trace.jaxpr, num_layers=n) for n in (num_layers, len(cuts) + 1))
    if wide != still_wide:
        # With fewer layers a region that was wider than one no longer is, and the plan's layers are those that count.
        return find_layers(
            trace,
            num_layers=len(cuts) + 1,
            loop_pieces=loop_pieces,
            num_microbatches=num_microbatches,
            split_weight_gradients=split_weight_gradients,
            remat=remat,
            pins=pins,
            by_kinds=by_kinds,
            cut=cut,
            offload=offload,
            **options,
        )
    every_layer = range(len(cuts) + 1)
    each_a_stage = StageCut(
        cuts=cuts,
        stages=tuple((layer, layer + 1) for layer in every_layer),
        recomputed=tuple(1 for _ in every_layer) if remat or prepared.recomputes else (),
        split_weight_gradients=split_weight_gradients,
    )
    graph = cut_stages(prepared, each_a_stage)
    classes: dict[Hashable, LayerClass] = {}
    numbers: dict[Hashable, int] = {}
    class_of: list[int] = []
    kinds, on_host = graph_kinds(graph, trace.batch_axes) if by_kinds else {}, offered_state(graph) if offload else ()
    for layer in every_layer:
        one = layer_class(graph, tasks_of_stages(graph, [layer], trace.donated_inputs), pins, kinds, on_host)
        classes.setdefault(one.key, one)
        class_of.append(numbers.setdefault(one.key, len(numbers)))
    return Layers(
        cuts=cuts,
        loop_pieces=loop_pieces,
        num_microbatches=num_microbatches,
        prepare=lambda: prepared,
        classes=tuple(classes.values()),
        class_of=tuple(class_of),
        crossing_bytes=_crossing_bytes(graph, len(cuts) + 1),
    )


def model_cuts(phases: Phases, num_layers: int, num_stages: int = 1) -> tuple[int, ...]:
    """Return the cuts between the model's layers: each is worth its place, or else marked or needed for a stage."""
    cuts = layer_cuts(phases, num_layers)
    kept = worthwhile_cuts(phases, cuts)
    return cuts if len(kept) + 1 < num_stages or count_marked_layers(phases) == num_layers else kept


def worthwhile_cuts(phases: Phases, cuts: Sequence[int]) -> tuple[int, ...]:
    """Return the cuts without those that would leave a layer of next to no work: it joins the one before it."""
    flops, _ = forward_costs(phases, layer_order(phases))
    borders = [0, *cuts, len(flops)]
    least = _LEAST_SHARE * sum(flops) / (len(borders) - 1)
    kept: list[int] = []
    for start, stop in itertools.pairwise(borders):
        if start and sum(flops[start:stop]) >= least and sum(flops[:start]) >= least:
            kept.append(start)
    return tuple(kept)


def layer_class(
    graph: StageGraph,
    tasks: Sequence[GroupTask],
    pins: Mapping[str, PartitionSpec] | None = None,
    kinds: Mapping[str, ValueKinds] | None = None,
    on_host: Collection[str] = (),
) -> LayerClass:
    """Return the class of a layer, or of a stage, from its tasks; `kinds` are those of the graph's values.

    `on_host` are the values that are kept there.
    """
    batch = [graph.values[i.value].shape[i.axis] for i in graph.inputs if i.kind == "microbatch"]
    rows = batch[0] if batch else 0
    read = {name for task in tasks for name in task.inputs}
    met = read | {name for task in tasks for name in task.outputs}
    crossing = met & graph.crossing.keys()
    microbatch = {i.value for i in graph.inputs if i.kind == "microbatch"} & read
    fed = microbatch | graph.read_in_later_rounds & met
    whole = {i.value for i in graph.inputs if i.kind == "whole"} & read
    totals = {name for task in tasks if task.phase != "update" for name in task.outputs if name in task.inputs}
    backward = {name for task in tasks if task.phase == "backward" for name in task.inputs}
    forward = {n for task in tasks if task.phase == "forward" for n in (*task.inputs, *task.outputs)}
    return LayerClass(
        tasks=tuple(tasks),
        constraints=mesh_constraints(graph, list(tasks)),
        batch_axes={n: _rows_axis(graph.values[n], rows) for n in sorted(crossing | microbatch) if n not in whole},
        state=frozenset(whole | totals).difference(on_host),
        on_host=frozenset(whole.intersection(on_host)),
        pins=_pinned(sorted(whole | microbatch), pins or {}),
        in_parts={
            task.inputs[number]: demand
            for task in tasks
            for number, demand in parameters_in_parts(task.jaxpr).items()
            if task.inputs[number] in whole
        },
        kept=frozenset(n for n in backward & forward if graph.values[n].per_microbatch and n not in totals | fed),
        fed=frozenset(fed),
        kinds={name: kinds[name] for name in sorted(met) if name in kinds} if kinds else {},
    )


def _rows_axis(value: GraphValue, rows: int) -> int | None:
    """Return the axis of a microbatch's value that holds its examples: the first one as long as the microbatch.

    A guess by size decides only where the value is laid out, never what it is.
    """
    if not value.per_microbatch or not rows:
        return None
    return next((axis for axis, size in enumerate(value.shape) if size == rows), None)


def _pinned(names: Sequence[str], pins: Mapping[str, PartitionSpec]) -> dict[str, PartitionSpec]:
    pinned: dict[str, PartitionSpec] = {}
    for name in names:
        specs = [spec for pattern, spec in pins.items() if re.search(pattern, name)]
        if specs:
            pinned[name] = specs[0]
    return pinned


def layer_value_numbers(layer: LayerClass) -> dict[str, int]:
    """The values of the tasks of a layer by the order in which they are met."""
    names = dict.fromkeys(name for task in layer.tasks for name in (*task.inputs, *task.outputs))
    return {name: number for number, name in enumerate(names)}


def class_key(layer: LayerClass) -> Hashable:
    """Equal for layers that compute the same from values in the same places."""
    numbers = layer_value_numbers(layer)

    def numbered(names: Any) -> tuple[int, ...]:
        return tuple(sorted(numbers[name] for name in names if name in numbers))

    tasks = tuple(
        (
            task.phase,
            task.times,
            task.donated,
            task.key,
            tuple(numbers[n] for n in task.inputs),
            tuple(numbers[n] for n in task.outputs),
        )
        for task in layer.tasks
    )
    alike = [(numbers[a], numbers[b]) for a, b in layer.constraints.alike.items() if a in numbers and b in numbers]
    axes = [(numbers[name], axis) for name, axis in layer.batch_axes.items() if name in numbers]
    return (
        tasks,
        tuple(sorted(alike)),
        tuple(sorted(axes, key=str)),
        numbered(layer.constraints.sums),
        numbered(layer.state),
        numbered(layer.on_host),
        numbered(layer.kept),
        numbered(layer.fed),
        tuple(sorted((numbers[name], str(spec)) for name, spec in layer.pins.items())),
        tuple(sorted((numbers[name], str(demand)) for name, demand in layer.in_parts.items())),
        tuple(sorted((numbers[name], kinds) for name, kinds in layer.kinds.items())),
    )


def _crossing_bytes(graph: StageGraph, num_layers: int) -> tuple[float, ...]:
    cuts = [0.0] * (num_layers - 1)
    for name, (source, readers) in graph.crossing.items():
        value = graph.values[name]
        share = 1.0 if value.per_microbatch else 1.0 / graph.num_microbatches
        for cut in range(min(source, *readers), max(source, *readers)):
            cuts[cut] += share * aval_bytes(value)
    return tuple(cuts)
