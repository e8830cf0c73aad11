"""Fold the repeated layers of an unrolled program: find which equations are equivalent, and which inputs.

    jaxpr, names of its inputs  ->  Fold

Every equation and input starts with a colour: an equation what it computes, in which phase, under which scope; an
input its name, shape and type, with all numbers of names and scopes left out, so that `h_0` and `h_31` look the same.
Then each mixes into its colour those of what it reads and of its readers, over and over (Weisfeiler and Leman), so that
equal colours mean equal surroundings: a query's product is not equivalent to a key's, which is named or used otherwise.

Taken literally this tells every layer from the next, by its distance from the loss. So a colour is only split into
large parts: query and key split the products of all layers in halves, while the ends of the model take one layer off,
which stays with the others.

Equivalent equations may read values that are not: planning counts every read by itself, so its costs stay true.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.equation_keys import equation_classes, literal_key
from autopar.compiler.jaxprs.primitives import NESTED
from autopar.compiler.sharding.replicated_values import free_results

_LARGE = 1 / 2
"""A part of a colour is large if it has more than this share of the members of the largest part."""


@dataclass(frozen=True, kw_only=True)
class Fold:
    """For each equation the first equivalent one, and for inputs that are equivalent to an earlier one, which."""

    classes: list[int]
    equivalent_inputs: dict[int, int]


_known: weakref.WeakKeyDictionary[jc.Jaxpr, dict[Hashable, Fold]] = weakref.WeakKeyDictionary()
"""By program and what the user asks of it, its classes."""


def fold(
    closed: jc.ClosedJaxpr,
    input_names: Sequence[str],
    free_inputs: Sequence[bool],
    *,
    state_outputs: Mapping[int, int],
    input_marks: Mapping[int, Hashable] | None = None,
    equation_mark: Callable[[jc.JaxprEqn], Hashable] = lambda eqn: None,
) -> Fold:
    """Fold the layers of a program.

    `free_inputs` are those without a layout. `state_outputs` maps results to the inputs that they replace. What has
    different marks is not equivalent: what the user wants of an input, or of an equation.
    """
    jaxpr, _ = jc.open_jaxpr(closed)
    inputs = [
        ("input", _starred(name), _type(v), is_free, (input_marks or {}).get(number))
        for number, (name, v, is_free) in enumerate(zip(input_names, jaxpr.invars, free_inputs, strict=True))
    ]
    free = {v for v, is_free in zip(jaxpr.invars, free_inputs, strict=True) if is_free} | set(jaxpr.constvars)
    colours = _numbered([*inputs, *_seen(jaxpr, free, equation_mark), "result"])
    known, key = _known.setdefault(jaxpr, {}), (colours.tobytes(), tuple(sorted(state_outputs.items())))
    if key not in known:  # the same on every mesh where the user asks for the same
        first, num_inputs = _firsts(_stable(colours, _reads(jaxpr, state_outputs))), len(jaxpr.invars)
        known[key] = Fold(
            classes=[int(node) - num_inputs for node in first[num_inputs : num_inputs + len(jaxpr.eqns)]],
            equivalent_inputs={i: int(first[i]) for i in range(num_inputs) if first[i] < i},
        )
    return known[key]


def unfolded(closed: jc.ClosedJaxpr) -> Fold:
    """Return a fold of nothing: every equation and every input by itself."""
    return Fold(classes=list(range(len(jc.open_jaxpr(closed)[0].eqns))), equivalent_inputs={})


def _seen(jaxpr: jc.Jaxpr, free: set[jc.Var], mark: Callable[[jc.JaxprEqn], Hashable]) -> Iterator[Hashable]:
    """Return what tells every equation from others, without its surroundings."""
    scopes: dict[str, str] = {}
    for key, eqn in zip(equation_classes(jaxpr), jaxpr.eqns, strict=True):
        known = tuple(isinstance(atom, jc.Literal) or atom in free for atom in eqn.invars)
        freed = tuple(free_results(eqn, known))
        free.update(v for v, is_free in zip(eqn.outvars, freed, strict=True) if is_free)
        scope = jc.scope_of(eqn)
        if scope not in scopes:
            scopes[scope] = _starred(scope)
        yield (_marked(key, eqn, mark), scopes[scope], jc.ad_phase(eqn), known, freed)


def _numbered(seen: Iterable[Hashable]) -> np.ndarray:
    """Return a colour for everything that is different."""
    numbers: dict[Hashable, int] = {}
    return _mixed(np.array([numbers.setdefault(key, len(numbers)) for key in seen], dtype=np.uint64))


def _starred(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _marked(key: Hashable, eqn: jc.JaxprEqn, mark: Callable[[jc.JaxprEqn], Hashable]) -> Hashable:
    """Return a key, equal for equations that compute the same under the same mark, those with bodies included."""
    if eqn.primitive.name not in NESTED:
        return (key, mark(eqn))
    bodies = tuple(_body_key(jc.open_jaxpr(body)[0], mark) for body in jc.subjaxprs(eqn))
    loop = jp.scan_of(eqn) if eqn.primitive.name == "scan" else None
    sizes = loop and (loop.num_consts, loop.num_carry, loop.length, loop.reverse)
    return (eqn.primitive.name, sizes, tuple(map(_type, (*eqn.invars, *eqn.outvars))), bodies)


def _type(atom: Any) -> Hashable:
    return (atom.aval.shape, atom.aval.dtype)


def program_key(closed: jc.ClosedJaxpr) -> Hashable:
    """Return a key, equal for programs that compute the same from inputs of the same types."""
    jaxpr, consts = jc.open_jaxpr(closed)
    types = tuple(map(_type, (*jaxpr.invars, *jaxpr.constvars)))
    return (types, tuple(map(str, consts)), _body_key(jaxpr, lambda eqn: None))


def _body_key(jaxpr: jc.Jaxpr, mark: Callable[[jc.JaxprEqn], Hashable]) -> Hashable:
    """Return a body as its equations, with values by number."""
    numbers: dict[Any, int] = {}
    for v in (*jaxpr.constvars, *jaxpr.invars):
        numbers[v] = len(numbers)

    def number(atom: Any) -> Hashable:
        return literal_key(atom) if isinstance(atom, jc.Literal) else numbers[atom]

    lines: list[Hashable] = []
    for key, eqn in zip(equation_classes(jaxpr), jaxpr.eqns, strict=True):
        lines.append((_marked(key, eqn, mark), tuple(map(number, eqn.invars))))
        for v in eqn.outvars:
            numbers[v] = len(numbers)
    return (tuple(lines), tuple(map(number, jaxpr.outvars)))


@dataclass(frozen=True, kw_only=True)
class _Reads:
    """Who reads whom: for every read the two nodes, and a number for the result and the operand that it joins."""

    producer: np.ndarray
    reader: np.ndarray
    place: np.ndarray
    num_nodes: int

    def neighbours(self, colours: np.ndarray) -> Callable[[int], Counter[tuple[int, int]]]:
        """Return the colours of what a node reads, and of its readers, with their places: a function of the node."""
        seen = colours.tolist()

        @cache
        def of_node(node: int) -> Counter[tuple[int, int]]:
            return Counter([(place, seen[other]) for place, other in self.by_node[node]])

        return of_node

    @cached_property
    def by_node(self) -> list[list[tuple[int, int]]]:
        """By node, the place and the other end of every read that it takes part in."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.num_nodes)]
        for producer, reader, place in zip(self.producer.tolist(), self.reader.tolist(), self.place.tolist()):
            found[reader].append((place, producer))
            found[producer].append((~place, reader))
        return found


def _reads(jaxpr: jc.Jaxpr, state_outputs: Mapping[int, int]) -> _Reads:
    """Return the reads of a program. What replaces an input is read by it; other results are read by the last node."""
    at: dict[Any, tuple[int, int]] = {v: (number, 0) for number, v in enumerate(jaxpr.invars)}
    found: list[tuple[int, int, int, int]] = []
    for node, eqn in enumerate(jaxpr.eqns, start=len(jaxpr.invars)):
        found += [(*at[a], node, operand) for operand, a in enumerate(eqn.invars) if isinstance(a, jc.Var) and a in at]
        at.update((v, (node, number)) for number, v in enumerate(eqn.outvars))
    last = len(jaxpr.invars) + len(jaxpr.eqns)
    found += [
        (*at[a], state_outputs.get(number, last), 0)
        for number, a in enumerate(jaxpr.outvars)
        if isinstance(a, jc.Var) and a in at
    ]
    table = np.array(found, dtype=np.int64).reshape(-1, 4)
    place = _mixed((table[:, 1] * 4096 + table[:, 3]).astype(np.uint64))
    return _Reads(producer=table[:, 0], reader=table[:, 2], place=place, num_nodes=last + 1)


def _refined(colours: np.ndarray, reads: _Reads) -> np.ndarray:
    """Mix every colour with those of what is read and of the readers: sums of hashes, whose order is no matter."""
    refined = _mixed(colours)
    np.add.at(refined, reads.reader, _mixed(colours[reads.producer] ^ reads.place))
    np.add.at(refined, reads.producer, _mixed(~colours[reads.reader] ^ reads.place))
    return _mixed(refined)


def _stable(colours: np.ndarray, reads: _Reads) -> np.ndarray:
    """Refine until no colour has several large parts any more."""
    before, count = -1, len(np.unique(colours))
    while count > before:
        colours = _without_small_parts(colours, _refined(colours, reads), reads)
        before, count = count, len(np.unique(colours))
    return colours


def _without_small_parts(colours: np.ndarray, refined: np.ndarray, reads: _Reads) -> np.ndarray:
    """Give the small parts of every colour to the large part that has most neighbours in common with them."""
    _, node, part, size = np.unique(refined, return_index=True, return_inverse=True, return_counts=True)
    _, colour = np.unique(colours[node], return_inverse=True)
    largest = np.zeros(len(size), dtype=np.int64)
    np.maximum.at(largest, colour, size)
    small = size <= _LARGE * largest[colour]
    given = np.arange(len(size))
    near, nearer = reads.neighbours(colours), reads.neighbours(refined)
    for one in np.flatnonzero(small):
        large, mine = np.flatnonzero((colour == colour[one]) & ~small), near(int(node[one]))
        common = [(mine & near(int(node[other]))).total() for other in large]
        if 2 * max(common) >= mine.total():
            # Where two are as near, what they read and give decides.
            mine = nearer(int(node[one]))
            farther = [(mine & nearer(int(node[other]))).total() for other in large]
            given[one] = large[max(range(len(large)), key=lambda number: (common[number], farther[number]))]
    return refined[node][given][part]


def _mixed(values: np.ndarray) -> np.ndarray:
    """Return a hash of 64 bits that spreads numbers evenly (SplitMix64)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _firsts(colours: np.ndarray) -> np.ndarray:
    """Return for every node the first one of its colour."""
    _, first, group = np.unique(colours, return_index=True, return_inverse=True)
    return first[group]
