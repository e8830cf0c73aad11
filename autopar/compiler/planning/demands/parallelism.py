"""Restrict the layouts of a step to known forms of parallelism, so that its plan is provably of that form.

Which dimensions carry the batch is known from the step with another number of examples, at half or twice the batch or
in other microbatches: they are those of another size. Of a step that takes no other batch, or is another program then,
they are those that meet the batch of its inputs. In the model (forward and backward), every mesh axis then is

    a data axis     it splits dimensions that carry the batch, and no others
    a model axis    it splits dimensions that do not carry the batch, and no others

    method            data axes    model axes    beside that
    Zero              all          none          state is divided, parameters if the stage is 3, and whole where used
    TensorParallel    none         all
    ExpertParallel    any          any           batches are split over all axes, products along experts or rows
    Megatron          "data"       "model"       examples are split, products with weights so that the weight is, if any
                                                 dimension divides; ZeRO stages divide optimizer state (1), sums of
                                                 gradients (2), parameters (3) over "data"

What only the update touches (moments, clipped gradients) is free but for its inputs. So is, for `Zero`, what has no
examples: parameters are converted to another type before they are gathered, and gradients summed into parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from autopar.compiler.frontend.batch_dimensions import BatchDims, batch_axes, equation_batch_dims
from autopar.compiler.frontend.dimension_kinds import step_kinds
from autopar.compiler.frontend.trace import Trace
from autopar.compiler.intra_op.plan_program import Constraints
from autopar.compiler.intra_op.plan_tasks import GroupTask
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.cse import twins_of_merged
from autopar.compiler.jaxprs.equation_keys import first_difference, same_equations
from autopar.compiler.jaxprs.primitives import PRODUCTS
from autopar.compiler.lowering.microbatch_loop import microbatch_loop
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.sharding.layout import Layout, LogicalMesh, even_layouts, num_shards, replicated, used_axes
from autopar.compiler.sharding.replicated_values import below_split_size
from autopar.compiler.sharding.strategies import Strategy
from autopar.errors import Unsupported
from autopar.methods import ExpertParallel, TensorParallel, Zero

_UPDATE = "update"
_TRIED = 3
"""The most other numbers of microbatches that a step is compared at."""


def parallelism_constraints(
    trace: Trace, closed: jc.ClosedJaxpr, method: Zero | TensorParallel | ExpertParallel, mesh: LogicalMesh
) -> Constraints:
    """Return the constraints of a method on one program on one mesh.

    Raises `Unsupported` for a step whose batch dimensions cannot be found.
    """
    batch_dims = _batch_dims(trace, closed, method)
    experts = _expert_inputs(closed) if isinstance(method, ExpertParallel) else set[int]()
    used, state = _used_by_the_model(closed), set(trace.state_outputs.values())
    inputs: dict[int, tuple[Layout, ...]] = {}
    for i, leaf in enumerate(trace.inputs):
        if not below_split_size(leaf.aval):
            layouts = even_layouts(tuple(leaf.aval.shape), mesh)
            axis = trace.batch_axes.get(i)
            inputs[i] = tuple(
                layout for layout in layouts if _input_allowed(layout, method, mesh, axis, i in used, i in experts)
            )
            if isinstance(method, Zero) and i in state and axis is None:
                inputs[i] = _most_divided(tuple(leaf.aval.shape), inputs[i], mesh)
            if not inputs[i] and axis is not None:  # rows that the devices do not divide, or not among all of them
                inputs[i] = tuple(each for each in layouts if not any((*each.dims[:axis], *each.dims[axis + 1 :])))

    every_axis = frozenset(axis for axis, size in enumerate(mesh.shape) if size > 1)
    data = every_axis if isinstance(method, Zero) else frozenset[int]()
    model = every_axis if isinstance(method, TensorParallel) else frozenset[int]()

    def restrict(eqn: jc.JaxprEqn, every: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        dims = batch_dims.get(id(eqn))
        if dims is None or (isinstance(method, Zero) and _is_of_state(eqn, dims)):
            return every
        kept = _allowed(every, lambda s: _separates_axes(s, dims, data, model))
        return _preferred(kept, lambda s: _splits_examples(s, dims, data))

    def constraint_key(eqn: jc.JaxprEqn) -> Hashable:
        return batch_dims.get(id(eqn))

    gathers_anew = isinstance(method, Zero) and method.stage == 3
    return Constraints(
        inputs=inputs,
        restrict=_with_experts(restrict, method),
        constraint_key=constraint_key,
        keep_split=data if gathers_anew else frozenset[int](),
    )


def _most_divided(shape: tuple[int, ...], layouts: Sequence[Layout], mesh: LogicalMesh) -> tuple[Layout, ...]:
    """Return those layouts of an array that have the most parts."""
    parts = [num_shards(shape, layout, mesh) for layout in layouts]
    return tuple(layout for layout, each in zip(layouts, parts, strict=True) if each == max(parts))


def _is_of_state(eqn: jc.JaxprEqn, dims: BatchDims) -> bool:
    """Return true for an equation without examples: of a parameter that is not whole yet, or of sums of gradients."""
    return not any(dims) or _adds_rows(eqn, dims)


def _adds_rows(eqn: jc.JaxprEqn, dims: BatchDims) -> bool:
    """Return true for what adds rows of examples to the gradient of an embedding."""
    return eqn.primitive.name == "scatter-add" and not dims[0] and bool(dims[2])


def _input_allowed(
    layout: Layout,
    method: Zero | TensorParallel | ExpertParallel,
    mesh: LogicalMesh,
    batch_axis: int | None,
    in_model: bool,
    is_expert: bool,
) -> bool:
    whole = layout == replicated(len(layout.dims))
    everything = tuple(axis for axis, size in enumerate(mesh.shape) if size > 1)
    match method:
        case TensorParallel():
            return whole or batch_axis is None
        case _ if batch_axis is not None:
            return layout.dims[batch_axis] == everything
        case Zero(stage=stage):
            return whole or stage == 3 or not in_model
        case ExpertParallel():
            return whole or not in_model or (is_expert and not any(layout.dims[1:]))


def _with_experts(
    restrict: Callable[[jc.JaxprEqn, tuple[Strategy, ...]], tuple[Strategy, ...]],
    method: Zero | TensorParallel | ExpertParallel,
) -> Callable[[jc.JaxprEqn, tuple[Strategy, ...]], tuple[Strategy, ...]]:
    """Return the restriction; for experts, products are split along batch dimensions or rows of the batch only."""
    if not isinstance(method, ExpertParallel):
        return restrict

    def along_experts(eqn: jc.JaxprEqn, every: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        if eqn.primitive.name != "dot_general":
            return restrict(eqn, every)
        _, (batch, _) = jp.dot_dimensions(eqn)
        weight = len(batch)
        kept = [s for s in every if not any(s.operands[1].dims[weight:]) or not any(s.operands[0].dims[weight:])]
        return restrict(eqn, tuple(kept) or every[:1])

    return along_experts


def _used_by_the_model(closed: jc.ClosedJaxpr) -> set[int]:
    """The inputs that the forward or backward pass reads: parameters, in contrast to the optimizer's state."""
    jaxpr, _ = jc.open_jaxpr(closed)
    read = {v for eqn in jaxpr.eqns if jc.ad_phase(eqn) is not None for v in jc.operands(eqn)}
    # A loop over microbatches is in no phase itself, but its body is.
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            inside = _used_by_the_model(jp.scan_of(eqn).body)
            read |= {v for i, v in enumerate(eqn.invars) if i in inside and isinstance(v, jc.Var)}
    return {i for i, v in enumerate(jaxpr.invars) if v in read}


def _expert_inputs(closed: jc.ClosedJaxpr) -> set[int]:
    """The inputs that stand in a product with their first dimension as a batch dimension."""
    jaxpr, _ = jc.open_jaxpr(closed)
    numbers = {v: i for i, v in enumerate(jaxpr.invars)}
    experts = set[int]()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            for v, dims in zip(eqn.invars, jp.dot_dimensions(eqn).batch, strict=True):
                if isinstance(v, jc.Var) and v in numbers and 0 in dims:
                    experts.add(numbers[v])
    return experts


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
        divided = _is_of_state(eqn, dims) and zero >= 2
        own_data_axes = frozenset[int]() if divided else data_axes
        kept = _allowed(every, lambda s: _separates_axes(s, dims, own_data_axes, model_axes))
        if _adds_rows(
            eqn, dims
        ):  # to the gradient of an embedding, of which every replica may get all rows instead of the sum
            return kept
        kept = _preferred(kept, lambda s: _splits_examples(s, dims, data_axes))
        weights = [number for number, each in enumerate(dims) if not each]
        if eqn.primitive.name not in PRODUCTS or len(weights) in (0, len(dims)):
            return kept
        return _preferred(kept, lambda s: any(model in used_axes(_layouts(s)[number]) for number in weights))

    def constraint_key(eqn: jc.JaxprEqn) -> Hashable:
        return known.get(id(eqn))

    return Constraints(
        restrict=restrict, constraint_key=constraint_key, keep_split=data_axes if zero == 3 else frozenset[int]()
    )


def _splits_examples(strategy: Strategy, dims: BatchDims, data: Set[int]) -> bool:
    """True if every replica works on examples of its own."""
    layouts = zip(_layouts(strategy), dims, strict=True)
    return all(data <= frozenset(_axes_of(layout, batch)) for layout, batch in layouts if batch)


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


def _batch_dims(
    trace: Trace, closed: jc.ClosedJaxpr, method: Zero | TensorParallel | ExpertParallel
) -> dict[int, BatchDims]:
    """Return the dimensions of operands and results that grow with the batch, by equation of the model."""
    kind, microbatches = type(method).__name__, method.num_microbatches if trace.differentiates else 1
    if not trace.batch_inputs or (trace.at_other_batch is None and microbatches > 1):
        raise without_other_batch(trace, kind)
    if microbatches == 1 and (trace.at_other_batch is None or not same_equations(trace.jaxpr, trace.at_other_batch)):
        return _dims_of_examples(trace, closed)
    one, other = _with_other_examples(trace, method)
    dims = equation_batch_dims(closed, twins_of_merged(one, other)) if same_equations(one, other) else None
    if dims is None:
        raise Unsupported(
            f"{kind} compares {trace.name} with itself at half or twice the batch or in other microbatches, and the "
            f"two are different programs{first_difference(one, other)}. Use Auto() instead."
        )
    return {id(eqn): dims[id(eqn)] for eqn, of_model in _equations(closed) if of_model}


def _dims_of_examples(trace: Trace, closed: jc.ClosedJaxpr) -> dict[int, BatchDims]:
    """Return the same for a step that takes no other batch: the dimensions that meet those of its batch."""
    kinds = step_kinds(closed, trace.batch_axes)

    def dims(atom: Any) -> tuple[int, ...]:
        return tuple(
            sorted(
                {
                    dimension
                    for value in kinds.of(atom)
                    for dimension, factors in enumerate(value)
                    if any(kind == "data" for _, kind in factors)
                }
            )
        )

    model = (eqn for eqn, of_model in _equations(closed) if of_model)
    return {id(eqn): tuple(map(dims, (*eqn.invars, *eqn.outvars))) for eqn in model}


def without_other_batch(trace: Trace, kind: str) -> Unsupported:
    """Return the error of a method that has to know the dimensions of the batch, which no other batch tells."""
    return Unsupported(
        f"{kind} must know which dimensions carry the batch, and {trace.name} was not traced at another batch size: "
        f"{trace.no_other_batch_because}. Use Auto(), which does without, or name the arguments that carry the batch "
        "in batch_argnums and inputs that do not in unbatched."
    )


def _with_other_examples(
    trace: Trace, method: Zero | TensorParallel | ExpertParallel
) -> tuple[jc.ClosedJaxpr, jc.ClosedJaxpr]:
    """The step, and the same with another number of examples at a time, of the same equations if there is one.

    Raises `Unsupported` where the batch can be cut into no other microbatches than are asked for.
    """

    def in_microbatches(count: int) -> jc.ClosedJaxpr:
        return microbatch_loop(trace, count, method.batch_statistics, method.search().random)

    count = method.num_microbatches if trace.differentiates else 1
    if count == 1:
        assert trace.at_other_batch is not None
        return trace.jaxpr, trace.at_other_batch
    rows = trace.num_rows
    # Of a row each may be another program, and is the last to be tried.
    others = (n for n in range(2, rows + 1) if n != count and rows % n == 0)
    nearest = sorted(others, key=lambda n: (n == rows, abs(n - count)))
    if not nearest:
        raise Unsupported(
            f"{type(method).__name__} compares {trace.name} with itself in other microbatches, and {rows} examples can "
            f"be cut into no others than {count}. Use other numbers of examples or microbatches, or Auto() instead."
        )
    one, twins = in_microbatches(count), map(in_microbatches, nearest[:_TRIED])
    first = next(twins)
    return one, first if same_equations(one, first) else next((t for t in twins if same_equations(one, t)), first)


def _equations(closed: Any, of_model: bool = False) -> Iterator[tuple[jc.JaxprEqn, bool]]:
    """Yield every equation at every depth, and whether it is of the model, as all is in a remat region that is."""
    for eqn in jc.open_jaxpr(closed)[0].eqns:
        inside = of_model or jc.ad_phase(eqn) is not None
        yield eqn, inside
        for body in jc.subjaxprs(eqn):
            yield from _equations(body, inside)
