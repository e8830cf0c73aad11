"""Restrict the layouts of stages to those of Megatron-LM, with the stages of ZeRO.

Which dimensions carry the batch is known from the step in other microbatches: they are those of another size. In the
model (forward and backward) the mesh axis "data" splits dimensions that carry the batch, and no others; "model" splits
dimensions that do not. Examples are split, and products with weights so that the weight is, if any dimension divides.
ZeRO stages divide over "data" the optimizer's state (1), sums of gradients (2) and parameters (3).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.compiler.frontend.batch_dimensions import BatchDims, batch_axes, equation_batch_dims
from autopar.compiler.frontend.trace import Trace
from autopar.compiler.intra_op.plan_program import Constraints
from autopar.compiler.intra_op.plan_tasks import GroupTask
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.primitives import PRODUCTS
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.sharding.layout import Layout, LogicalMesh, even_layouts, used_axes
from autopar.compiler.sharding.replicated_values import below_split_size
from autopar.compiler.sharding.strategies import Strategy
from autopar.errors import Unsupported

_UPDATE = "update"


@dataclass(frozen=True, kw_only=True, eq=False)
class StageValues:
    """The values of a stage graph by their role: those that carry examples, and where; state; gradients."""

    batch_dims: Mapping[str, tuple[int, ...]]
    """The dimensions that carry examples, for values of microbatches; a value without examples has none."""
    parameters: frozenset[str]
    """State that the model reads."""
    optimizer_state: frozenset[str]
    """State that only updates read."""
    gradients: frozenset[str]
    """Sums over the microbatches, which the model makes for the update."""


def stage_values(graph: StageGraph, other: StageGraph, batch_leaves: Collection[int]) -> StageValues:
    """Return the roles of a graph's values, given the same graph with other microbatches.

    Raises `Unsupported` where that is another program.
    """
    batch_dims: dict[str, tuple[int, ...]] = {}
    for name, value in graph.values.items():
        if value.per_microbatch:
            twin = other.values.get(name)
            if twin is None or len(twin.shape) != len(value.shape):
                raise _another_program(name)
            batch_dims[name] = batch_axes(value, twin)
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
    """Return the layouts that the values between the tasks of a mesh may have, by name; others may have any."""
    data, model = _axis(mesh, "data"), _axis(mesh, "model")
    allowed: dict[str, tuple[Layout, ...]] = {}
    of_state = values.parameters | values.optimizer_state | values.gradients
    for name, aval in _types(tasks).items():
        if below_split_size(aval):
            continue
        layouts = even_layouts(tuple(aval.shape), mesh)
        batch = values.batch_dims.get(name, ())
        if batch and (name in crossing or not _is_made(name, tasks)):
            allowed[name] = _preferring(_without(layouts, model, dims=batch), data, dims=batch)
        elif name in of_state:
            if aval.ndim > 1 and name not in values.gradients:
                layouts = _preferring(layouts, model)
            allowed[name] = _preferring(layouts, data) if _divided(name, values, zero) else _without(layouts, data)
    return allowed


def _types(tasks: Sequence[GroupTask]) -> dict[str, Any]:
    types: dict[str, Any] = {}
    for task in tasks:
        jaxpr = jc.open_jaxpr(task.jaxpr)[0]
        types |= {name: v.aval for name, v in zip(task.inputs, jaxpr.invars, strict=True)}
        types |= {name: v.aval for name, v in zip(task.outputs, jaxpr.outvars, strict=True)}
    return types


def _is_made(name: str, tasks: Sequence[GroupTask]) -> bool:
    return any(name in task.outputs for task in tasks)


def _divided(name: str, values: StageValues, zero: int) -> bool:
    """True if a ZeRO stage divides a value over the replicas."""
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


def _axis(mesh: LogicalMesh, name: str) -> int | None:
    """The number of an axis; None for one of size 1, which the mesh does without."""
    return mesh.axis_names.index(name) if name in mesh.axis_names else None


def stage_constraints(
    tasks: Sequence[GroupTask], others: Sequence[GroupTask], mesh: LogicalMesh, zero: int
) -> Constraints:
    """Return the constraints on the equations of tasks; `others` are the same tasks with other microbatches."""
    known: dict[int, BatchDims | str] = {}
    for task, other in zip(tasks, others, strict=True):
        if task.phase == "update":
            known.update((id(eqn), _UPDATE) for eqn in jc.all_equations(task.jaxpr))
        else:
            known.update(_task_batch_dims(task, other))
    data, model = _axis(mesh, "data"), _axis(mesh, "model")
    data_axes, model_axes = (frozenset(() if axis is None else (axis,)) for axis in (data, model))

    def restrict(eqn: jc.JaxprEqn, every: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        dims = known.get(id(eqn))
        if dims is None:
            return every
        if isinstance(dims, str):
            return (
                every if zero else _allowed(every, lambda s: all(data not in used_axes(each) for each in _layouts(s)))
            )
        # Without examples it is a sum of gradients or a parameter that is no longer, or not yet, whole.
        adds_rows = eqn.primitive.name == "scatter-add" and not dims[0] and bool(dims[2])
        divided = (not any(dims) or adds_rows) and zero >= 2
        own_data_axes = frozenset[int]() if divided else data_axes
        kept = _allowed(every, lambda s: _separates_axes(s, dims, own_data_axes, model_axes))
        if adds_rows:  # to the gradient of an embedding, of which every replica may get all rows instead of the sum
            return kept
        kept = _preferred(kept, lambda s: _splits_examples(s, dims, data))
        weights = [number for number, each in enumerate(dims) if not each]
        if eqn.primitive.name not in PRODUCTS or len(weights) in (0, len(dims)):
            return kept
        return _preferred(kept, lambda s: any(model in used_axes(_layouts(s)[number]) for number in weights))

    def constraint_key(eqn: jc.JaxprEqn) -> Hashable:
        return known.get(id(eqn))

    return Constraints(
        restrict=restrict, constraint_key=constraint_key, keep_split=data_axes if zero == 3 else frozenset[int]()
    )


def _splits_examples(strategy: Strategy, dims: BatchDims, data: int | None) -> bool:
    """True if every replica works on examples of its own."""
    return all(data in _axes_of(layout, batch) for layout, batch in zip(_layouts(strategy), dims, strict=True) if batch)


def _preferred(every: tuple[Strategy, ...], wanted: Callable[[Strategy], bool]) -> tuple[Strategy, ...]:
    """The wanted strategies; all if there are none."""
    return tuple(strategy for strategy in every if wanted(strategy)) or every


def _separates_axes(strategy: Strategy, batch_dims: BatchDims, data: Collection[int], model: Collection[int]) -> bool:
    """True if the data axes split only dimensions that carry the batch, and the model axes only others."""
    return not any(
        axis in (model if dimension in batch else data)
        for layout, batch in zip(_layouts(strategy), batch_dims, strict=True)
        for dimension, axes in enumerate(layout.dims)
        for axis in axes
    )


def _layouts(strategy: Strategy) -> tuple[Layout, ...]:
    return (*strategy.operands, *strategy.results)


def _allowed(every: tuple[Strategy, ...], is_allowed: Callable[[Strategy], bool]) -> tuple[Strategy, ...]:
    """Return the allowed strategies; the first, which splits nothing, if there are none."""
    return tuple(strategy for strategy in every if is_allowed(strategy)) or every[:1]


def _task_batch_dims(task: GroupTask, other: GroupTask) -> dict[int, BatchDims]:
    batch_dims = equation_batch_dims(task.jaxpr, jc.all_equations(other.jaxpr))
    if batch_dims is None:
        raise _another_program(task.name)
    return batch_dims


def _another_program(made: str) -> Unsupported:
    return Unsupported(
        f"Megatron finds the examples by comparing the step with itself in other microbatches, and {made} is of "
        "another program then. Use Auto(), which does without, or another number of microbatches."
    )


def without_other_batch(trace: Trace) -> Unsupported:
    """Return the error for a step of which no other batch tells the dimensions that carry the batch."""
    return Unsupported(
        f"Megatron must know which dimensions carry the batch, and {trace.name} was not traced at another batch size: "
        f"{trace.no_other_batch_because}. Use Auto(), which does without, or name the arguments that carry the batch "
        "in batch_argnums and inputs that do not in unbatched."
    )
