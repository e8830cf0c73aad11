"""Find the inputs of a step that carry the batch: those whose first dimension numbers the examples.

    jaxpr, inputs, which of them are state  ->  FoundBatch

The first dimensions of all inputs outside of the state are compared. In a forward pass, features, positions and rows of
tables are reduced away, while examples stay until a loss or a metric reduces them, or a result keeps them. So the batch
are those dimensions that no other one outlasts:

    outlasts    an equation reduces the one and keeps the other; but a dimension does not outlast the first dimension of
                an array that both are in: time is inside of the examples
    ends        the step reduces it, or a result has it: so keys of random numbers are no batch. If no dimension ends,
                those that are taken apart row by row
    no rounds   no loop goes along it in order and carries something on: training steps and time are no examples

Nodes and edges of a graph outlast each other, and are no batch. If examples come from two sources that never meet (real
ones and noise), both are the batch where their sizes are equal; otherwise the batch is ambiguous.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autopar.compiler.frontend.dimensions import Dimension, StepDimensions, find_dimensions
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.sharding.rule import shapes_of

_NAMED = 4
"""The most inputs that a message names of one kind."""


@dataclass(frozen=True, kw_only=True)
class FoundBatch:
    """The numbers of the inputs that carry the batch; where there are none, the reason."""

    inputs: tuple[int, ...] = ()
    missing: str = ""
    ambiguous: bool = False
    """True if several readings are possible; `missing` names them."""


def find_batch(
    closed: jc.ClosedJaxpr,
    names: Sequence[str],
    arguments: Sequence[int | None],
    *,
    state: Collection[int],
    unbatched: Collection[int] = (),
) -> FoundBatch:
    """Return the batch of a normalised step.

    `names` and `arguments` are those of its inputs, `state` the inputs that its results replace, and `unbatched` those
    that the user says are no batch.
    """
    dims = find_dimensions(closed)
    carriers = _possible(dims, state, unbatched)
    winners = [d for d in carriers if not any(_outlasts(dims, other, d) for other in carriers if other != d)]
    if len(winners) > 1:  # one array may be the state: a result has just its dimensions
        winners = [d for d in winners if any(dims.inputs[i] not in dims.outputs for i in carriers[d])] or winners
    if unbatched and dims.differentiated:  # the data are left out, so what a result replaces is no batch in their place
        winners = [d for d in winners if any(dims.inputs[i] not in dims.outputs for i in carriers[d])]
    if not winners:
        return FoundBatch(missing="no input outside of the state has independent examples on its first axis")
    shapes = shapes_of(jc.open_jaxpr(closed)[0].invars)
    sizes = {shapes[carriers[d][0]][0] for d in winners}
    if len(sizes) > 1:
        return FoundBatch(missing=_readings(closed, names, [carriers[d] for d in winners]), ambiguous=True)
    found = {i for d in winners for i in carriers[d]}
    (rows,) = sizes
    unread = _unread(closed) - set(state) - set(unbatched)
    found |= {i for i in unread if shapes[i][:1] == (rows,) and arguments[i] in {arguments[j] for j in found}}
    return FoundBatch(inputs=tuple(sorted(found)))


def _possible(dims: StepDimensions, state: Collection[int], unbatched: Collection[int]) -> dict[Dimension, list[int]]:
    """The first dimensions that may be examples, and the inputs that have them."""
    of_state = {f for i in state for factors in dims.inputs[i] for f in factors}
    carriers: dict[Dimension, list[int]] = {}
    for i, value in enumerate(dims.inputs):
        if (
            i not in state
            and i not in unbatched
            and value
            and of_state.isdisjoint(value[0])
            and set(value[0]) - dims.rounds
        ):
            carriers.setdefault(value[0], []).append(i)
    ends = {f for value in dims.outputs for factors in value for f in factors}
    ends.update(f for r in dims.reductions if r.kind == "reduce" for f in r.reduced)
    sliced = {f for r in dims.reductions if r.kind == "slice" for f in r.reduced}
    carriers = _meeting(carriers, ends) or _meeting(carriers, sliced)
    return _meeting(carriers, dims.differentiated) or carriers


def _meeting(carriers: dict[Dimension, list[int]], factors: Collection[int]) -> dict[Dimension, list[int]]:
    return {d: inputs for d, inputs in carriers.items() if any(f in factors for f in d)}


def _outlasts(dims: StepDimensions, one: Dimension, other: Dimension) -> bool:
    """Return whether one dimension is kept where another is reduced, and does not stand inside of that."""
    if _stands_inside(dims, other, one):
        return True
    if _stands_inside(dims, one, other):
        return False
    own = frozenset(one) - frozenset(other)
    forward = (r for r in dims.reductions if not r.backward)
    return any(not r.reduced.isdisjoint(other) and not r.kept.isdisjoint(own) for r in forward)


def _stands_inside(dims: StepDimensions, inner: Dimension, outer: Dimension) -> bool:
    values = (*dims.inputs, *dims.outputs)
    return any(value[0] == outer and inner in value[1:] for value in values if value)


def _unread(closed: jc.ClosedJaxpr) -> set[int]:
    jaxpr, _ = jc.open_jaxpr(closed)
    read = {v for eqn in jaxpr.eqns for v in jc.operands(eqn)} | {v for v in jaxpr.outvars if isinstance(v, jc.Var)}
    return {i for i, v in enumerate(jaxpr.invars) if v not in read}


def _readings(closed: jc.ClosedJaxpr, names: Sequence[str], readings: Sequence[Sequence[int]]) -> str:
    shapes = shapes_of(jc.open_jaxpr(closed)[0].invars)

    def one(carriers: Sequence[int]) -> str:
        named = ", ".join(names[i] for i in carriers[:_NAMED]) + (", ..." if len(carriers) > _NAMED else "")
        return f"the first axis of {named} ({shapes[carriers[0]][0]} rows)"

    return f"its batch may be {' or '.join(map(one, readings))}"
