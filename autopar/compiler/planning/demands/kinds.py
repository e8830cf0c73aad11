"""Restrict a search to kinds of parallelism: which kinds of dimensions each mesh axis may split.

Every dimension of a step is of one kind (`frontend.dimension_kinds`): "data" (examples), "tensor" (features), "expert",
"sequence" (lengths). A kind is allowed if the method names it. Then a mesh axis may split its dimensions:

    values with examples      the kinds that are allowed
    values without: state,    with "zero": all kinds, so that state is divided among devices that use it whole;
    gradients, updates        without: "tensor" and "expert", if allowed, over axes that do not split examples,
                              and only "expert" over axes that do, because examples come to their experts

With "data" and "tensor" and without "zero", an axis splits either examples or features. All ways to assign the axes are
tried, so that allowing more kinds never loses a plan. Everything else is left to the search.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from autopar.compiler.frontend.dimension_kinds import DimensionKinds, ValueKinds, program_kinds
from autopar.compiler.frontend.scopes import demand_of
from autopar.compiler.intra_op.plan_program import Constraints
from autopar.compiler.intra_op.plan_tasks import GroupTask
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.sharding.layout import Layout, LogicalMesh
from autopar.compiler.sharding.strategies import Strategy
from autopar.errors import InvalidArgument

Key = TypeVar("Key", int, str)

OF_DIMENSIONS = frozenset({"data", "tensor", "sequence", "expert"})


@dataclass(frozen=True, kw_only=True)
class AllowedSplits:
    """The kinds of dimensions that each mesh axis may split."""

    kinds: tuple[str, ...]
    """The kinds that the user names."""
    with_examples: tuple[frozenset[str], ...]
    """The kinds that each axis may split in values with examples, and in equations that read or make such values."""
    without: tuple[frozenset[str], ...]
    """The kinds that each axis may split in all others."""

    def allows(self, layout: Layout, value: ValueKinds, mesh: LogicalMesh, *, examples: bool) -> bool:
        """Return whether a value may be laid out so, at a place with examples or without."""
        allowed = self.with_examples if examples else self.without
        return all(kind in allowed[axis] for axis, kind in _splits(layout, value, mesh))

    def layouts(
        self, every: tuple[Layout, ...], values: tuple[ValueKinds, ...], mesh: LogicalMesh
    ) -> tuple[Layout, ...]:
        """Return those of a value's layouts that are allowed, by its kinds at every place where it is met."""
        examples = any(map(has_examples, values))
        return tuple(a for a in every if all(self.allows(a, value, mesh, examples=examples) for value in values))

    def __str__(self) -> str:
        """Return it as the user wrote it: `Auto(kinds=('data', 'zero'))`."""
        return f"Auto(kinds={self.kinds})"


def allowed_splits(kinds: tuple[str, ...] | None, mesh: LogicalMesh) -> tuple[AllowedSplits | None, ...]:
    """Return the ways to use the axes of a mesh that kinds allow, which are to be tried; None: in whatever way."""
    named = OF_DIMENSIONS if kinds is None else OF_DIMENSIONS.intersection(kinds)
    if kinds is None or (named == OF_DIMENSIONS and "zero" in kinds):
        return (None,)
    of_state = named & {"tensor", "expert"}

    def same(without: frozenset[str]) -> AllowedSplits:
        axes = mesh.shape
        return AllowedSplits(kinds=kinds, with_examples=(named,) * len(axes), without=(without,) * len(axes))

    if "zero" in kinds:
        return (same(OF_DIMENSIONS),)
    if "data" not in kinds:
        return (same(of_state),)
    if "tensor" not in kinds:
        return (same(of_state),)
    real = [axis for axis, size in enumerate(mesh.shape) if size > 1]
    ways: list[AllowedSplits] = []
    for chosen in itertools.product((True, False), repeat=len(real)):
        replicas = {axis for axis, is_replica in zip(real, chosen, strict=True) if is_replica}
        ways.append(
            AllowedSplits(
                kinds=kinds,
                with_examples=tuple(named - {"tensor" if a in replicas else "data"} for a in range(len(mesh.shape))),
                without=tuple(of_state - {"tensor"} if a in replicas else of_state for a in range(len(mesh.shape))),
            )
        )
    return tuple(ways)


def within_kinds(
    constraints: Constraints, allowed: AllowedSplits | None, dims: DimensionKinds | None, mesh: LogicalMesh
) -> Constraints:
    """Return the constraints on equations that the user wrote into the model, within the kinds that are allowed.

    Raises `InvalidArgument` where an equation cannot keep both.
    """
    if allowed is None or dims is None:
        return constraints

    def operands_of(eqn: jc.JaxprEqn) -> tuple[tuple[ValueKinds, ...], ...]:
        return tuple(dims.of(atom) for atom in (*eqn.invars, *eqn.outvars))

    def restrict(eqn: jc.JaxprEqn, every: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        kept = constraints.restrict(eqn, every)
        values = operands_of(eqn)
        examples = any(has_examples(value) for each in values for value in each)
        within = tuple(s for s in kept if is_allowed_strategy(s, values, examples, allowed, mesh))
        if not within:
            raise _against(_asked_by(eqn), allowed)
        return within

    def forms(v: jc.Var, every: tuple[Layout, ...]) -> tuple[Layout, ...]:
        return allowed.layouts(every, dims.of(v), mesh)

    return replace(
        constraints,
        restrict=restrict,
        forms=forms,
        constraint_key=lambda eqn: (constraints.constraint_key(eqn), operands_of(eqn)),
    )


def graph_kinds(graph: StageGraph, batch_axes: Mapping[int, int]) -> Mapping[str, ValueKinds]:
    """Return the kinds of the dimensions of the values between the tasks of a stage graph."""
    examples, state = _given(graph, batch_axes)
    added = [a for task in graph.tasks for a in task.accumulations]
    found = program_kinds(
        [(task.jaxpr, task.inputs, task.outputs) for task in graph.tasks],
        examples=examples,
        state=state,
        joined=[(a.operand, a.result) for a in added if a.kind != "concatenate"],
    )
    # What the microbatches make of their examples stands behind each other.
    behind = {a.result: list(found.named[a.operand]) for a in added if a.kind == "concatenate"}
    for a in (a for a in added if a.kind == "concatenate"):
        behind[a.result][a.axis] = ((graph.values[a.result].shape[a.axis], "data"),)
    return {**found.named, **{name: tuple(value) for name, value in behind.items()}}


def task_kinds(graph: StageGraph, tasks: Iterable[GroupTask], batch_axes: Mapping[int, int]) -> DimensionKinds:
    """Return the kinds of the dimensions of all values in the tasks of all stages of a graph."""
    examples, state = _given(graph, batch_axes)
    return program_kinds([(task.jaxpr, task.inputs, task.outputs) for task in tasks], examples=examples, state=state)


def _given(graph: StageGraph, batch_axes: Mapping[int, int]) -> tuple[list[tuple[str, int]], list[str]]:
    """Return the inputs that hold examples, each with their dimension, and the inputs that are state."""
    whole = [i for i in graph.inputs if i.kind == "whole"]
    examples = [(i.value, i.axis) for i in graph.inputs if i.kind == "microbatch"]
    examples += [(i.value, batch_axes[i.leaf]) for i in whole if i.leaf is not None and i.leaf in batch_axes]
    return examples, [i.value for i in whole if i.leaf not in batch_axes]


def kept_layouts(
    given: Mapping[Key, tuple[Layout, ...]],
    called: Mapping[Key, str],
    kinds: Mapping[Key, ValueKinds],
    allowed: AllowedSplits,
    mesh: LogicalMesh,
) -> dict[Key, tuple[Layout, ...]]:
    """Return those of the layouts that each value may have that the kinds allow.

    Raises `InvalidArgument` with what a value is `called` where the user's own constraints leave it no other.
    """
    kept = {key: allowed.layouts(layouts, (kinds[key],), mesh) for key, layouts in given.items()}
    for key in (key for key, layouts in kept.items() if not layouts):
        raise _against(called[key], allowed)
    return kept


def _asked_by(eqn: jc.JaxprEqn) -> str:
    demand = demand_of(eqn)
    return f"The sharding constraint {jc.describe(eqn)}" if demand is None else f"{demand.scope} at {jc.describe(eqn)}"


def _against(what: str, allowed: AllowedSplits) -> InvalidArgument:
    return InvalidArgument(
        f"{what} asks for a layout that {allowed} does not allow. Name its kind as well, leave kinds out, or take "
        "back what asks for it."
    )


def is_allowed_strategy(
    strategy: Strategy,
    values: tuple[tuple[ValueKinds, ...], ...],
    examples: bool,
    allowed: AllowedSplits,
    mesh: LogicalMesh,
) -> bool:
    layouts = (*strategy.operands, *strategy.results)
    return all(
        allowed.allows(layout, value, mesh, examples=examples)
        for layout, each in zip(layouts, values, strict=True)
        for value in each
    )


def has_examples(value: ValueKinds) -> bool:
    """Return whether a value holds examples."""
    return any(kind == "data" for factors in value for _, kind in factors)


def _splits(layout: Layout, value: ValueKinds, mesh: LogicalMesh) -> Iterator[tuple[int, str]]:
    """Yield the axes that split a value, each with the kinds of what it splits; the major factor is split first."""
    for axes, factors in zip(layout.dims, value, strict=True):
        left = list(factors)
        for axis in axes:
            yield from ((axis, kind) for kind in _taken(left, mesh.shape[axis]))


def _taken(left: list[tuple[int, str]], parts: int) -> Iterator[str]:
    """Divide the first of these factors, and the next where it is divided up. Yield the kinds of those."""
    while parts > 1 and left:
        size, kind = left.pop(0)
        yield kind
        if size > parts:
            left.insert(0, (-(-size // parts), kind))
        parts = -(-parts // size)
