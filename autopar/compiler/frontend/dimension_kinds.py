"""Tell the kinds of a step's dimensions: examples, features, experts, lengths.

    programs, which of their inputs are examples and state  ->  DimensionKinds

`find_value_dimensions` finds which dimensions of values are one and the same. Each of its factors has one kind:

    data        it counts examples
    expert      of parameters, and a batch dimension of their products with examples: [e]cd,[e]df->[e]cf
    tensor      any other dimension of the state, and all that is the same dimension: features, heads, classes
    sequence    all others: positions, rows and columns of images, places in a buffer

A table of positions is state whose rows are a sequence. So a dimension of the state is a length if products of
parameters only carry it along, and none contracts it or makes it. A part of a dimension (y = x[1:]) is of its kind,
unless the part has a kind by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.compiler.frontend.dimensions import Dimension, ValueDimensions, find_value_dimensions
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.sharding.rule import shapes_of

Factors = tuple[tuple[int, str], ...]
"""The factors of a dimension, major to minor: the size and the kind of each. None for a dimension of size 1."""
ValueKinds = tuple[Factors, ...]
"""The factors of every dimension of a value."""
NamedProgram = tuple[jc.ClosedJaxpr, Sequence[str], Sequence[str]]
"""A program, and the names of its inputs and outputs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DimensionKinds:
    """The kinds of the dimensions of values: those with names, and all variables of the programs."""

    named: Mapping[str, ValueKinds]
    variables: Mapping[jc.Var, tuple[ValueKinds, ...]]
    """The kinds of each variable, once for every time that its program is entered with other kinds."""

    def of(self, atom: Any) -> tuple[ValueKinds, ...]:
        """Return the kinds of a variable; of a literal, which is whole everywhere, there are none."""
        return self.variables.get(atom, ()) if isinstance(atom, jc.Var) else ()


@dataclass(frozen=True, kw_only=True, eq=False)
class StepKinds(DimensionKinds):
    """The kinds of the dimensions of a step in one program."""

    inputs: tuple[ValueKinds, ...]
    results: tuple[ValueKinds, ...]


def step_kinds(closed: jc.ClosedJaxpr, batch_axes: Mapping[int, int]) -> StepKinds:
    """Return the kinds of a step's dimensions; `batch_axes` are those of its inputs that number examples."""
    jaxpr, _ = jc.open_jaxpr(closed)
    names = [str(number) for number in range(len(jaxpr.invars))]
    outputs = [f"result {number}" for number in range(len(jaxpr.outvars))]
    found = program_kinds(
        [(closed, names, outputs)],
        examples=[(str(number), axis) for number, axis in batch_axes.items()],
        state=[name for number, name in enumerate(names) if number not in batch_axes],
    )
    return StepKinds(
        named=found.named,
        variables=found.variables,
        inputs=tuple(found.named[name] for name in names),
        results=tuple(found.named[name] for name in outputs),
    )


def program_kinds(
    programs: Iterable[NamedProgram],
    *,
    examples: Iterable[tuple[str, int]],
    state: Iterable[str],
    joined: Iterable[tuple[str, str]] = (),
) -> DimensionKinds:
    """Return the kinds of the dimensions of programs that together are a step.

    `examples` are the values that hold them, and along which dimension; `state` is what there is before the step beside
    them. Values of a pair in `joined` have the same dimensions.
    """
    dims = find_value_dimensions(programs, joined=joined)
    data = {f for name, axis in examples if name in dims.named for f in dims.named[name][axis]}
    of_state = {f for name in state if name in dims.named for factors in dims.named[name] for f in factors}
    kinds = _kinds(dims, data, of_state - data)
    return _labelled(dims, kinds)


def _kinds(dims: ValueDimensions, data: set[int], of_state: set[int]) -> dict[int, str]:
    """Return the kind of every factor that is no length."""
    experts, of_weights, carried = set[int](), set[int](), set[int]()
    for product in dims.products:
        with_examples = [not data.isdisjoint(own | product.batch | product.contracted) for own in product.own]
        if with_examples[0] == with_examples[1]:
            continue
        inputs, weights = product.own if with_examples[0] else product.own[::-1]
        if product.primitive == "dot_general":
            experts |= product.batch
            of_weights |= weights | product.contracted
        else:
            of_weights |= weights | product.batch | product.contracted
        carried |= inputs
    kinds = dict.fromkeys(data, "data")
    kinds |= dict.fromkeys(of_state & experts, "expert")
    kinds |= dict.fromkeys((of_state - experts) - (carried - of_weights), "tensor")
    settled = data | of_state
    waiting = sorted(kinds)
    neighbours: dict[int, set[int]] = {}
    for one, other in dims.followed:
        # Of dimensions of several factors nobody knows which follows which.
        if len(one) == len(other) == 1:
            neighbours.setdefault(one[0], set()).add(other[0])
            neighbours.setdefault(other[0], set()).add(one[0])
    while waiting:
        factor = waiting.pop(0)
        for other in sorted(neighbours.get(factor, ())):
            if other not in settled:
                settled.add(other)
                kinds[other] = kinds[factor]
                waiting.append(other)
    return kinds


def _labelled(dims: ValueDimensions, kinds: Mapping[int, str]) -> DimensionKinds:
    def label(value: Sequence[Dimension]) -> ValueKinds:
        return tuple(tuple((dims.sizes[f], kinds.get(f, "sequence")) for f in factors) for factors in value)

    return DimensionKinds(
        named={name: label(value) for name, value in dims.named.items()},
        variables={v: tuple(dict.fromkeys(map(label, each))) for v, each in dims.variables.items()},
    )


def part_kinds(programs: Iterable[NamedProgram], named: Mapping[str, ValueKinds]) -> DimensionKinds:
    """Return the kinds of the dimensions of a part of a step's programs, those of whose named values are known."""
    programs = list(programs)
    shapes: dict[str, tuple[int, ...]] = {}
    for closed, inputs, outputs in programs:
        jaxpr, _ = jc.open_jaxpr(closed)
        shapes |= dict(zip(outputs, shapes_of(jaxpr.outvars), strict=True))
        shapes |= dict(zip(inputs, shapes_of(jaxpr.invars), strict=True))
    known = {name: named[name] for name in shapes if name in named}
    parts = {name: [[size for size, _ in factors] for factors in value] for name, value in known.items()}
    dims = find_value_dimensions(programs, parts=parts)
    kinds: dict[int, str] = {}
    for name, value in known.items():
        for mine, factors in zip(value, dims.named[name], strict=True):
            kinds |= _kinds_of_parts(mine, [(f, dims.sizes[f]) for f in factors])
    return _labelled(dims, kinds)


def _kinds_of_parts(whole: Factors, parts: Sequence[tuple[int, int]]) -> dict[int, str]:
    """Return the kinds of the factors of a dimension by those of the larger factors that these are parts of."""
    kinds: dict[int, str] = {}
    left = list(whole)
    for factor, size in parts:
        if not left:
            break
        whole_size, kinds[factor] = left[0]
        left[:1] = [(whole_size // size, kinds[factor])] if whole_size > size else []
    return kinds
