"""Restrict the layouts of a stage to data parallelism on one mesh axis and tensor parallelism on the other.

Which dimensions carry examples is known from the same stage with other microbatches: they are those that differ. With
the axes "data" and "model" then, in forward and backward tasks,

    what carries examples       is split over "data" along those dimensions, and never over "model"
    a product with a weight     is split over "model" so that the weight is, by columns, rows or heads
    parameters, where used      are whole over "data"

and what is divided over "data" beside that is what the ZeRO stage says: optimizer state (1), sums of gradients (2),
parameters (3). Where no dimension divides, the value stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.compiler.intra_op.plan_program import Wishes
from autopar.compiler.intra_op.plan_tasks import GroupTask
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.parallelism_kinds import Dims, differing_dims
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.sharding.free_values import is_small
from autopar.compiler.sharding.layout import Layout, LogicalMesh, all_layouts, used_axes
from autopar.compiler.sharding.strategies import Strategy
from autopar.errors import Unsupported

_PRODUCTS = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated"})
_UPDATE = "update"


@dataclass(frozen=True, kw_only=True, eq=False)
class StageValues:
    """What the values of a stage graph are: which carry examples and where, and which are state or gradients."""

    batch_dims: Mapping[str, tuple[int, ...]]
    """Of values of microbatches; a value without examples has none."""
    parameters: frozenset[str]
    """State that the model reads."""
    optimizer_state: frozenset[str]
    """State that only updates read."""
    gradients: frozenset[str]
    """What the model makes for the update: sums over the microbatches."""


def stage_values(graph: StageGraph, other: StageGraph, batch_leaves: Collection[int]) -> StageValues:
    """What the values of a graph are, given the same graph with other microbatches."""
    batch_dims = {
        name: _differing(value.shape, other.values[name].shape)
        for name, value in graph.values.items()
        if value.per_microbatch
    }
    model = [task for task in graph.tasks if task.kind != "U"]
    read = {name for task in model for name in task.inputs}
    state = {i.value for i in graph.inputs if i.kind == "whole" and i.leaf not in batch_leaves}
    made = {name for task in model for name in (*task.outputs, *(a.result for a in task.accumulations))}
    updated = {name for task in graph.tasks if task.kind == "U" for name in task.inputs}
    return StageValues(
        batch_dims=batch_dims,
        parameters=frozenset(state & read),
        optimizer_state=frozenset(state - read),
        gradients=frozenset(name for name in made & updated if not batch_dims.get(name)),
    )


def value_layouts(
    tasks: Sequence[GroupTask], values: StageValues, crossing: Collection[str], mesh: LogicalMesh, zero: int
) -> dict[str, tuple[Layout, ...]]:
    """The layouts that the values between the tasks of a mesh may have, by name; what is missing may have any."""
    data, model = _axis(mesh, "data"), _axis(mesh, "model")
    found: dict[str, tuple[Layout, ...]] = {}
    for name, aval in _types(tasks).items():
        if is_small(aval):
            continue
        layouts = all_layouts(tuple(aval.shape), mesh)
        batch = values.batch_dims.get(name, ())
        if batch and (name in crossing or not _is_made(name, tasks)):
            found[name] = _preferring(_without(layouts, model, dims=batch), data, dims=batch)
        elif name in values.parameters | values.optimizer_state | values.gradients:
            if aval.ndim > 1 and name not in values.gradients:
                layouts = _preferring(layouts, model)
            found[name] = _preferring(layouts, data) if _divided(name, values, zero) else _without(layouts, data)
    return found


def equation_restrictions(
    tasks: Sequence[GroupTask], others: Sequence[GroupTask], mesh: LogicalMesh, zero: int
) -> Wishes:
    """What the equations of a mesh's tasks may do; `others` are the same tasks with other microbatches."""
    known: dict[int, Dims | str] = {}
    for task, other in zip(tasks, others, strict=True):
        if task.phase == "update":
            known.update((id(eqn), _UPDATE) for eqn in jc.all_equations(task.jaxpr))
        else:
            known.update(_differing_dims(task, other))
    data, model = _axis(mesh, "data"), _axis(mesh, "model")

    def restrict(eqn: jc.JaxprEqn, every: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        dims = known.get(id(eqn))
        if dims is None:
            return every
        if isinstance(dims, str):
            return every if zero else _kept(every, lambda s: all(data not in used_axes(each) for each in _layouts(s)))
        kept = _kept(every, lambda s: _keeps_examples(s, dims, data, model, zero))
        kept = _preferred(kept, lambda s: _splits_examples(s, dims, data))
        weights = [number for number, each in enumerate(dims) if not each]
        if eqn.primitive.name not in _PRODUCTS or len(weights) in (0, len(dims)):
            return kept
        return _preferred(kept, lambda s: any(model in used_axes(_layouts(s)[number]) for number in weights))

    def restricted_as(eqn: jc.JaxprEqn) -> Hashable:
        return known.get(id(eqn))

    kept = frozenset({data}) if zero == 3 and data is not None else frozenset[int]()
    return Wishes(restrict=restrict, restricted_as=restricted_as, keep_split=kept)


def _differing_dims(task: GroupTask, other: GroupTask) -> dict[int, Dims]:
    found = differing_dims(task.jaxpr, other.jaxpr)
    if found is None:
        raise Unsupported(
            f"Megatron finds the examples by comparing the step with itself in other microbatches, and {task.name} is "
            "another program then. Use Auto(), which does without, or another number of microbatches."
        )
    return found


def _keeps_examples(strategy: Strategy, dims: Dims, data: int | None, model: int | None, zero: int) -> bool:
    """Whether examples are split over "data" only, and nothing else is where examples are."""
    # Without examples it is a sum of gradients or a parameter that is no longer, or not yet, whole.
    free = not any(dims) and zero >= 2
    for layout, batch in zip(_layouts(strategy), dims, strict=True):
        for dimension, axes in enumerate(layout.dims):
            carries = dimension in batch
            if (model in axes and carries) or (data in axes and not carries and not free):
                return False
    return True


def _splits_examples(strategy: Strategy, dims: Dims, data: int | None) -> bool:
    """Whether every replica works on examples of its own."""
    return all(data in _axes_of(layout, batch) for layout, batch in zip(_layouts(strategy), dims, strict=True) if batch)


def _layouts(strategy: Strategy) -> tuple[Layout, ...]:
    return (*strategy.operands, *strategy.results)


def _kept(every: tuple[Strategy, ...], allowed: Callable[[Strategy], bool]) -> tuple[Strategy, ...]:
    """The allowed strategies; the first, which splits nothing, if there are none."""
    return tuple(strategy for strategy in every if allowed(strategy)) or every[:1]


def _preferred(every: tuple[Strategy, ...], wanted: Callable[[Strategy], bool]) -> tuple[Strategy, ...]:
    """The wanted strategies; all if there are none."""
    return tuple(strategy for strategy in every if wanted(strategy)) or every


def _divided(name: str, values: StageValues, zero: int) -> bool:
    """Whether a ZeRO stage divides a value over the replicas."""
    if name in values.optimizer_state:
        return zero >= 1
    return zero >= (2 if name in values.gradients else 3)


def _without(layouts: Iterable[Layout], axis: int | None, dims: tuple[int, ...] | None = None) -> tuple[Layout, ...]:
    """The layouts that do not split `dims`, or any dimension, over an axis."""
    return tuple(each for each in layouts if axis not in _axes_of(each, dims))


def _preferring(layouts: Sequence[Layout], axis: int | None, dims: tuple[int, ...] | None = None) -> tuple[Layout, ...]:
    """The layouts that split `dims`, or any dimension, over an axis; if no dimension divides, all."""
    return tuple(each for each in layouts if axis in _axes_of(each, dims)) or tuple(layouts)


def _axes_of(layout: Layout, dims: tuple[int, ...] | None) -> Collection[int]:
    return used_axes(layout) if dims is None else [axis for d in dims for axis in layout.dims[d]]


def _is_made(name: str, tasks: Sequence[GroupTask]) -> bool:
    return any(name in task.outputs for task in tasks)


def _types(tasks: Sequence[GroupTask]) -> dict[str, Any]:
    types: dict[str, Any] = {}
    for task in tasks:
        jaxpr = jc.open_jaxpr(task.jaxpr)[0]
        types |= {name: v.aval for name, v in zip(task.inputs, jaxpr.invars, strict=True)}
        types |= {name: v.aval for name, v in zip(task.outputs, jaxpr.outvars, strict=True)}
    return types


def _axis(mesh: LogicalMesh, name: str) -> int | None:
    """The number of an axis; None for one of size 1, which the mesh does without."""
    return mesh.axis_names.index(name) if name in mesh.axis_names else None


def _differing(shape: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(d for d, (m, n) in enumerate(zip(shape, other, strict=True)) if m != n)
