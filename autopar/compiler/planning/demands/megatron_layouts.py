"""Restrict the layouts of a step to those of Megatron-LM, with the stages of ZeRO.

Which dimensions carry examples is known from `frontend.dimension_kinds`. In the model (forward and backward) the mesh
axis "data" splits those, and no others; "model" splits the others. Examples are split, and products with weights so
that the weight is, if any dimension divides. ZeRO stages divide over "data" the optimizer's state (1), sums of
gradients (2) and parameters (3).

    value_layouts          values between the tasks of a stage
    equation_constraints   the equations of tasks, or of one program
    program_constraints    both, of a step in one program
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from autopar.compiler.frontend.dimension_kinds import DimensionKinds, ValueKinds, step_kinds
from autopar.compiler.frontend.trace import Trace
from autopar.compiler.intra_op.plan_program import Constraints
from autopar.compiler.intra_op.plan_tasks import GroupTask
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.primitives import PRODUCTS
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.planning.demands.kinds import (
    OF_DIMENSIONS,
    AllowedSplits,
    graph_kinds,
    has_examples,
    is_allowed_strategy,
)
from autopar.compiler.planning.demands.restricted_search import used_by_the_model
from autopar.compiler.sharding.layout import Layout, LogicalMesh, even_layouts, used_axes
from autopar.compiler.sharding.replicated_values import below_split_size
from autopar.compiler.sharding.strategies import Strategy

DATA, MODEL = "data", "model"
"""The names of the mesh axes that split the examples and the weights."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepValues:
    """The named values of a step by their role: those that carry examples, state, gradients."""

    kinds: Mapping[str, ValueKinds]
    parameters: frozenset[str]
    """State that the model reads."""
    optimizer_state: frozenset[str]
    """State that only updates read."""
    gradients: frozenset[str] = frozenset()
    """Sums over the microbatches, which the model makes for the update."""

    def layouts(self, name: str, shape: tuple[int, ...], mesh: LogicalMesh, zero: int) -> tuple[Layout, ...] | None:
        """Return the layouts that a value between programs may have; None if that is up to the programs."""
        data, model, layouts = _axis(mesh, DATA), _axis(mesh, MODEL), even_layouts(shape, mesh)
        kinds = self.kinds.get(name, ())
        if has_examples(kinds):
            layouts = _separating(mesh).layouts(layouts, (kinds,), mesh)
            rows = [dim for dim, factors in enumerate(kinds) if any(kind == "data" for _, kind in factors)]
            return _preferring(layouts, data, rows)
        if name not in self.parameters | self.optimizer_state | self.gradients:
            return None
        if len(shape) > 1 and name not in self.gradients:
            layouts = _preferring(layouts, model)
        if not self._is_divided(name, zero):
            return tuple(each for each in layouts if data not in used_axes(each))
        return _preferring(layouts, data)

    def _is_divided(self, name: str, zero: int) -> bool:
        """True if a ZeRO stage divides a value over the replicas."""
        if name in self.optimizer_state:
            return zero >= 1
        return zero >= (2 if name in self.gradients else 3)


def stage_values(graph: StageGraph, batch_axes: Mapping[int, int]) -> StepValues:
    """Return the values of a stage graph by their roles; `batch_axes` are those of the step's inputs with examples."""
    kinds = graph_kinds(graph, batch_axes)
    model = [task for task in graph.tasks if task.kind != "U"]
    read = {name for task in model for name in task.inputs}
    state = {i.value for i in graph.inputs if i.kind == "whole" and i.leaf not in batch_axes}
    made = {name for task in model for name in (*task.outputs, *(a.result for a in task.accumulations))}
    updated = {name for task in graph.tasks if task.kind == "U" for name in task.inputs}
    return StepValues(
        kinds=kinds,
        parameters=frozenset(state & read),
        optimizer_state=frozenset(state - read),
        gradients=frozenset(name for name in made & updated if not has_examples(kinds.get(name, ()))),
    )


def value_layouts(
    tasks: Sequence[GroupTask], values: StepValues, crossing: Collection[str], mesh: LogicalMesh, zero: int
) -> dict[str, tuple[Layout, ...]]:
    """Return the layouts that the values between the tasks of a mesh may have, by name; others may have any."""
    made = {name for task in tasks for name in task.outputs}
    allowed: dict[str, tuple[Layout, ...]] = {}
    for name, aval in _types(tasks).items():
        stays = name in made and name not in crossing and has_examples(values.kinds.get(name, ()))
        layouts = None if stays or below_split_size(aval) else values.layouts(name, tuple(aval.shape), mesh, zero)
        if layouts is not None:
            allowed[name] = layouts
    return allowed


def _types(tasks: Sequence[GroupTask]) -> dict[str, Any]:
    types: dict[str, Any] = {}
    for task in tasks:
        jaxpr = jc.open_jaxpr(task.jaxpr)[0]
        types |= {name: v.aval for name, v in zip(task.inputs, jaxpr.invars, strict=True)}
        types |= {name: v.aval for name, v in zip(task.outputs, jaxpr.outvars, strict=True)}
    return types


def program_constraints(trace: Trace, closed: jc.ClosedJaxpr, mesh: LogicalMesh, zero: int) -> Constraints:
    """Return the constraints on a step in one program."""
    kinds, read = step_kinds(closed, trace.batch_axes), used_by_the_model(closed)
    state = set(range(len(trace.inputs))) - trace.batch_axes.keys()
    values = StepValues(
        kinds=kinds.named,
        parameters=frozenset(str(i) for i in state & read),
        optimizer_state=frozenset(str(i) for i in state - read),
    )
    inputs = {
        i: layouts
        for i, leaf in enumerate(trace.inputs)
        if not below_split_size(leaf.aval)
        and (layouts := values.layouts(str(i), tuple(leaf.aval.shape), mesh, zero)) is not None
    }
    constraints = equation_constraints(lambda eqn: jc.ad_phase(eqn) is None, kinds, mesh, zero)
    return replace(constraints, inputs=inputs)


def stage_constraints(tasks: Iterable[GroupTask], kinds: DimensionKinds, mesh: LogicalMesh, zero: int) -> Constraints:
    """Return the constraints on the equations of the tasks of a mesh."""
    updates = {id(e) for task in tasks if task.phase == "update" for e in jc.all_equations(task.jaxpr)}
    return equation_constraints(lambda eqn: id(eqn) in updates, kinds, mesh, zero)


def equation_constraints(
    is_update: Callable[[jc.JaxprEqn], bool], kinds: DimensionKinds, mesh: LogicalMesh, zero: int
) -> Constraints:
    """Return the constraints on equations, by the kinds of what they read and make; those of updates are freer."""
    data, model = _axis(mesh, DATA), _axis(mesh, MODEL)
    separating, dividing = _separating(mesh), _separating(mesh, divides_state=True)

    def restrict(eqn: jc.JaxprEqn, every: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        values = _kinds_of(eqn, kinds)
        examples = [any(map(has_examples, each)) for each in values]
        adds_rows = eqn.primitive.name == "scatter-add" and not examples[0] and examples[2]
        if not any(examples) and zero >= (1 if is_update(eqn) else 2):
            return every  # a sum of gradients, or a parameter that is no longer, or not yet, whole
        if adds_rows and zero >= 2:
            kept = tuple(s for s in every if is_allowed_strategy(s, values, False, dividing, mesh))
        else:
            kept = tuple(s for s in every if is_allowed_strategy(s, values, any(examples), separating, mesh))
        kept = kept or every[:1]  # which splits nothing
        if adds_rows:  # to the gradient of an embedding, of which every replica may get all rows instead of the sum
            return kept
        kept = _preferred(kept, lambda s: _splits_examples(s, examples, data))
        weights = [number for number, each in enumerate(examples) if not each]
        if eqn.primitive.name not in PRODUCTS or len(weights) in (0, len(examples)):
            return kept
        return _preferred(kept, lambda s: any(model in used_axes(_layouts(s)[number]) for number in weights))

    def constraint_key(eqn: jc.JaxprEqn) -> Hashable:
        return is_update(eqn), _kinds_of(eqn, kinds)

    keep_split = frozenset[int]() if data is None or zero < 3 else frozenset({data})
    return Constraints(restrict=restrict, constraint_key=constraint_key, keep_split=keep_split)


def _separating(mesh: LogicalMesh, *, divides_state: bool = False) -> AllowedSplits:
    """The axis "data" splits examples, or whatever there is if it `divides_state`; "model" splits what is none."""
    of_model, of_data = OF_DIMENSIONS - {"data"}, OF_DIMENSIONS if divides_state else frozenset({"data"})
    with_examples = tuple(of_data if name == DATA else of_model for name in mesh.axis_names)
    without = tuple(frozenset[str]() if name == DATA else of_model for name in mesh.axis_names)
    return AllowedSplits(
        kinds=("data", "tensor"), with_examples=with_examples, without=with_examples if divides_state else without
    )


def _kinds_of(eqn: jc.JaxprEqn, kinds: DimensionKinds) -> tuple[tuple[ValueKinds, ...], ...]:
    return tuple(kinds.of(atom) for atom in (*eqn.invars, *eqn.outvars))


def _splits_examples(strategy: Strategy, examples: Sequence[bool], data: int | None) -> bool:
    """True if every replica works on examples of its own."""
    return all(data in used_axes(layout) for layout, has in zip(_layouts(strategy), examples, strict=True) if has)


def _preferring(layouts: Sequence[Layout], axis: int | None, dims: Sequence[int] | None = None) -> tuple[Layout, ...]:
    """The layouts that split `dims`, or any dimension, over an axis; if no dimension divides, all."""
    return _preferred(tuple(layouts), lambda layout: axis in _axes_of(layout, dims))


def _axes_of(layout: Layout, dims: Sequence[int] | None) -> Collection[int]:
    return used_axes(layout) if dims is None else [axis for d in dims for axis in layout.dims[d]]


Each = TypeVar("Each", Layout, Strategy)


def _preferred(every: tuple[Each, ...], wanted: Callable[[Each], bool]) -> tuple[Each, ...]:
    """The wanted ones; all if there are none."""
    return tuple(each for each in every if wanted(each)) or every


def _layouts(strategy: Strategy) -> tuple[Layout, ...]:
    return (*strategy.operands, *strategy.results)


def _axis(mesh: LogicalMesh, name: str) -> int | None:
    """The number of an axis; None for one of size 1, which the mesh does without."""
    return mesh.axis_names.index(name) if name in mesh.axis_names else None
