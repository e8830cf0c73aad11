"""Find the inputs of a step that carry the batch: those whose first dimension numbers the examples.

    jaxpr, inputs, which of them are state  ->  FoundBatch

The first dimensions of all inputs outside of the state are compared, behind those that a loop goes along in order: of
`[time, examples, features]` the second. In a forward pass, features, positions and rows of tables are reduced away,
while examples stay until a loss or a metric reduces them, or a result keeps them. So the batch are those dimensions
that no other one outlasts:

    outlasts    an equation reduces the one and keeps the other; but a dimension does not outlast the first dimension of
                an array that both are in: time is inside of the examples
    ends        the step reduces it, or a result has it: so keys of random numbers are no batch. If no dimension ends,
                those that are taken apart row by row
    no rounds   no loop goes along it in order and carries something on: training steps and time are no examples, but
                rows that a loop only sums over may be, where there are no others

What else has the dimension of the examples, at any one place, carries the batch too.

Nodes and edges of a graph outlast each other, and are no batch. So do examples and an array in which they are counted
by their labels, unless what may be the state is left out.

If examples come from two sources that never meet (real ones and noise), both are the batch where their sizes are equal;
otherwise the batch is ambiguous.

Where nothing outside of the state is a batch, the state may hold it: environments that a step of reinforcement learning
takes along. The same is then asked of the state that no gradient changes, and that the gradient is taken of. A step
without a gradient that takes examples along, such as one that decodes with a cache of keys, has the batch in both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.compiler.frontend.dimensions import Dimension, StepDimensions, find_dimensions
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.sharding.rule import shapes_of

_NAMED = 4
"""The most inputs that a message names of one kind."""


@dataclass(frozen=True, kw_only=True)
class FoundBatch:
    """The numbers of the inputs that carry the batch; where there are none, the reason."""

    inputs: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()
    """The axis of each along which the examples are."""
    missing: str = ""
    ambiguous: bool = False
    """True if several readings are possible; `missing` names them."""

    @classmethod
    def along(cls, axes: Mapping[int, int]) -> FoundBatch:
        """Return the batch of the inputs that have examples along these axes."""
        return cls(inputs=tuple(sorted(axes)), axes=tuple(axis for _, axis in sorted(axes.items())))

    def by_input(self) -> dict[int, int]:
        """Return the axis along which the examples are, by the number of the input."""
        return dict(zip(self.inputs, self.axes, strict=True))


def find_batch(
    closed: jc.ClosedJaxpr,
    names: Sequence[str],
    arguments: Sequence[int | None],
    *,
    state: Collection[int],
    unbatched: Collection[int] = (),
    given_axes: Mapping[int, int] | None = None,
    unlearned: Collection[int] = (),
) -> FoundBatch:
    """Return the batch of a normalised step.

    `names` and `arguments` are those of its inputs, `state` the inputs that its results replace, and `unbatched` those
    that the user says are no batch. `given_axes` are axes along which the user says that inputs carry it, and
    `unlearned` the state that may hold the batch if nothing else does.
    """
    dims = find_dimensions(closed)
    if given_axes:
        named = {dims.inputs[i][axis] for i, axis in given_axes.items()}
        others = {i: axis for i, axis in _carrying(dims, named).items() if i not in unbatched and i not in state}
        return FoundBatch.along({**others, **given_axes})
    if taken_along := _taken_along(dims, state, unbatched):
        return FoundBatch.along({i: a for i, a in _carrying(dims, taken_along).items() if i not in unbatched})
    found = _among(closed, dims, names, arguments, state, unbatched)
    if not found.inputs and not found.ambiguous and dims.rounds != dims.in_turn:
        found = _among(closed, replace(dims, rounds=dims.in_turn), names, arguments, state, unbatched)
    if found.inputs or found.ambiguous or not unlearned:
        return found
    in_state = _among(closed, dims, names, arguments, set(state).difference(unlearned), unbatched)
    met = all(not dims.differentiated.isdisjoint(dims.inputs[i][axis]) for i, axis in in_state.by_input().items())
    return in_state if in_state.inputs and met else found


def _among(
    closed: jc.ClosedJaxpr,
    dims: StepDimensions,
    names: Sequence[str],
    arguments: Sequence[int | None],
    state: Collection[int],
    unbatched: Collection[int],
) -> FoundBatch:
    """Return the batch among the inputs that are no state."""
    shapes = shapes_of(jc.open_jaxpr(closed)[0].invars)
    carriers = _possible(dims, state, unbatched)
    winners = _not_outlasted(dims, carriers)
    if not winners:  # one array may be the state that examples are counted in, which outlasts them as they do it
        kept = {d: inputs for d, inputs in carriers.items() if any(dims.inputs[i] not in dims.outputs for i in inputs)}
        winners = _not_outlasted(dims, kept)
    if len(winners) > 1:  # one array may be the state: a result has just its dimensions
        winners = [d for d in winners if any(dims.inputs[i] not in dims.outputs for i in carriers[d])] or winners
    if len(winners) > 1:  # what stands beside parameters is one, as one that only a penalty reads
        beside = {arguments[i] for d in carriers if d not in winners for i in carriers[d]}
        winners = [d for d in winners if any(arguments[i] not in beside for i in carriers[d])] or winners
    if unbatched and dims.differentiated:  # the data are left out, so what a result replaces is no batch in their place
        winners = [d for d in winners if any(dims.inputs[i] not in dims.outputs for i in carriers[d])]
    if not winners:
        return FoundBatch(missing="no input outside of the state has independent examples on its first axis")
    leading = {i: _leading(dims, i) for d in winners for i in carriers[d]}
    sizes = {shapes[i][axis] for i, axis in leading.items()}
    if len(sizes) > 1:
        return FoundBatch(missing=_readings(shapes, names, leading, [carriers[d] for d in winners]), ambiguous=True)
    (rows,) = sizes
    of_batch, others = {arguments[i] for i in leading}, set(range(len(names))) - set(state) - set(unbatched)
    unread = {i: 0 for i in _unread(closed) & others if shapes[i][:1] == (rows,) and arguments[i] in of_batch}
    inside = {i: axis for i, axis in _carrying(dims, set(winners)).items() if i in others}
    return FoundBatch.along({**inside, **unread, **leading})


def _taken_along(dims: StepDimensions, state: Collection[int], unbatched: Collection[int]) -> set[Dimension]:
    """Return the examples of which a step without a gradient takes state along, as one that decodes does.

    They are the one dimension that some of its state has first, and another input, and that nothing reduces or numbers.
    """
    if dims.differentiated:
        return set()
    ends = {f for r in dims.reductions for f in r.reduced} | dims.rounds
    first = {True: set[Dimension](), False: set[Dimension]()}
    for i, value in enumerate(dims.inputs):
        if i not in unbatched and value and value[0] and ends.isdisjoint(value[0]):
            first[i in state].add(value[0])
    both = first[True] & first[False]
    return both if len(both) == 1 else set()


def unlearned_state(closed: jc.ClosedJaxpr, state: Mapping[int, int]) -> set[int]:
    """Return the inputs whose results depend on no gradient; `state` has the input that an output replaces."""
    jaxpr, _ = jc.open_jaxpr(closed)
    learned: set[jc.Var] = set()
    for eqn in jaxpr.eqns:
        if not learned.isdisjoint(jc.operands(eqn)) or _takes_gradient(eqn):
            learned.update(eqn.outvars)
    results = {output: jaxpr.outvars[output] for output in state}
    return {state[output] for output, v in results.items() if isinstance(v, jc.Var) and v not in learned}


def _takes_gradient(eqn: jc.JaxprEqn) -> bool:
    inside = (e for body in jc.subjaxprs(eqn) for e in jc.all_equations(body))
    return any(jc.ad_phase(e) == "backward" for e in (eqn, *inside))


def _carrying(dims: StepDimensions, wanted: Collection[Dimension]) -> dict[int, int]:
    """Return where inputs have one of some dimensions, of those that have them once."""
    places = {i: [axis for axis, d in enumerate(value) if d and d in wanted] for i, value in enumerate(dims.inputs)}
    return {i: axes[0] for i, axes in places.items() if len(axes) == 1}


def _leading(dims: StepDimensions, number: int) -> int:
    """Return the first axis of an input that no loop goes along in order; 0 if there is none."""
    value = dims.inputs[number]
    return next((axis for axis, d in enumerate(value) if not d or set(d) - dims.rounds), 0)


def _possible(dims: StepDimensions, state: Collection[int], unbatched: Collection[int]) -> dict[Dimension, list[int]]:
    """The dimensions that may be examples, and the inputs that have them first, or behind those of loops."""
    of_state = {f for i in state for factors in dims.inputs[i] for f in factors}
    carriers: dict[Dimension, list[int]] = {}
    for i, value in enumerate(dims.inputs):
        if (
            i not in state
            and i not in unbatched
            and value
            and of_state.isdisjoint(first := value[_leading(dims, i)])
            and set(first) - dims.rounds
        ):
            carriers.setdefault(first, []).append(i)
    ends = {f for value in dims.outputs for factors in value for f in factors}
    ends.update(f for r in dims.reductions if r.kind == "reduce" for f in r.reduced)
    sliced = {f for r in dims.reductions if r.kind == "slice" for f in r.reduced}
    carriers = _meeting(carriers, ends) or _meeting(carriers, sliced)
    return _meeting(carriers, dims.differentiated) or carriers


def _meeting(carriers: dict[Dimension, list[int]], factors: Collection[int]) -> dict[Dimension, list[int]]:
    return {d: inputs for d, inputs in carriers.items() if any(f in factors for f in d)}


def _not_outlasted(dims: StepDimensions, carriers: Collection[Dimension]) -> list[Dimension]:
    return [d for d in carriers if not any(_outlasts(dims, other, d) for other in carriers if other != d)]


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
    values = (*(value[_leading(dims, i) :] for i, value in enumerate(dims.inputs)), *dims.outputs)
    return any(value[0] == outer and inner in value[1:] for value in values if value)


def _unread(closed: jc.ClosedJaxpr) -> set[int]:
    jaxpr, _ = jc.open_jaxpr(closed)
    read = {v for eqn in jaxpr.eqns for v in jc.operands(eqn)} | {v for v in jaxpr.outvars if isinstance(v, jc.Var)}
    return {i for i, v in enumerate(jaxpr.invars) if v not in read}


def _readings(
    shapes: Sequence[Sequence[int]], names: Sequence[str], axes: Mapping[int, int], readings: Sequence[Sequence[int]]
) -> str:
    def one(carriers: Sequence[int]) -> str:
        named = ", ".join(names[i] for i in carriers[:_NAMED]) + (", ..." if len(carriers) > _NAMED else "")
        first, axis = carriers[0], axes[carriers[0]]
        return f"the {'first axis' if axis == 0 else f'axis {axis}'} of {named} ({shapes[first][axis]} rows)"

    return f"its batch may be {' or '.join(map(one, readings))}"
