"""Fold the repeated layers of an unrolled program: find which equations are equivalent, and which inputs.

    jaxpr, names of its inputs  ->  Fold

Equations and inputs are coloured by refinement (Weisfeiler and Leman). An equation starts with what it computes, its
phase and its scope; an input with its name, shape and type. Numbers in names and scopes are left out, so that `h_0` and
`h_31` look the same. Then every colour is mixed with those of operands and readers, again and again: equal colours mean
equal surroundings. The product of a query is not equivalent to that of a key, which is named or used otherwise.

Refined to the end, every layer would have colours of its own, by its distance from the loss. So a colour is split only
into large parts. Query and key split the products of all layers in halves; the first and last layer of a model would
take one product off, and stay with the others.

The body of a long loop is coloured together with the program around it. Its inputs have the surroundings of the loop's
operands, its results are read by the readers of the loop's, and the next iteration reads the carry.

Equivalent equations may read values that are not equivalent. Planning counts every read by itself, so that the costs
stay exact.
"""

from __future__ import annotations

import math
import re
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.equation_keys import equation_classes, literal_key
from autopar.compiler.jaxprs.primitives import NESTED
from autopar.compiler.sharding.replicated_values import free_in_body, free_results

_LARGE = 1 / 2
"""A part of a colour is large if it has more than this share of the members of the largest part."""


@dataclass(frozen=True, kw_only=True)
class Fold:
    """The first equivalent equation of each equation, and the earlier input that each equivalent input is equal to.

    For loops that are folded themselves, by number of the equation, the fold of their bodies.
    """

    classes: Sequence[int]
    equivalent_inputs: Mapping[int, int] = field(default_factory=dict[int, int])
    equivalent_results: Mapping[int, int] = field(default_factory=dict[int, int])
    """The same for the results of a body."""
    bodies: Mapping[int, Fold] = field(default_factory=dict[int, "Fold"])


_known: weakref.WeakKeyDictionary[jc.Jaxpr, dict[Hashable, Fold]] = weakref.WeakKeyDictionary()
"""The classes of programs, by what the user asks of them."""


def fold(
    closed: jc.ClosedJaxpr,
    input_names: Sequence[str],
    free_inputs: Sequence[bool],
    *,
    state_outputs: Mapping[int, int],
    input_marks: Mapping[int, Hashable] | None = None,
    equation_mark: Callable[[jc.JaxprEqn], Hashable] = lambda eqn: None,
    bodies_from: float = math.inf,
) -> Fold:
    """Fold the layers of a program, and those in its loops of at least `bodies_from` equations.

    `free_inputs` are those without a layout. `state_outputs` maps results to the inputs that they replace. What has
    different marks is not equivalent: what the user wants of an input, or of an equation.
    """
    jaxpr, _ = jc.open_jaxpr(closed)
    inputs = [
        ("input", _starred(name), _type(v), is_free, (input_marks or {}).get(number))
        for number, (name, v, is_free) in enumerate(zip(input_names, jaxpr.invars, free_inputs, strict=True))
    ]
    free = {v for v, is_free in zip(jaxpr.invars, free_inputs, strict=True) if is_free} | set(jaxpr.constvars)
    loops = _loops(jaxpr, bodies_from)
    seen = [*inputs, *_seen(jaxpr, free, equation_mark, {loop.number for loop in loops}), "result"]
    for loop in loops:
        seen += _seen_inside(loop, jaxpr.eqns[loop.number], free, equation_mark)
    colours = _numbered(seen)
    known, key = _known.setdefault(jaxpr, {}), (colours.tobytes(), tuple(sorted(state_outputs.items())))
    if key not in known:  # the same on every mesh where the user asks for the same
        first, num_inputs = _firsts(_stable(colours, _reads(jaxpr, state_outputs, loops))), len(jaxpr.invars)
        known[key] = Fold(
            classes=_numbers(first, num_inputs, len(jaxpr.eqns)),
            equivalent_inputs=_earlier(_numbers(first, 0, num_inputs)),
            bodies={loop.number: loop.folded(first) for loop in loops},
        )
    return known[key]


def unfolded(jaxpr: jc.Jaxpr) -> Fold:
    """Return a fold of nothing: every equation and every input by itself."""
    return Fold(classes=range(len(jaxpr.eqns)))


def _numbers(first: np.ndarray, start: int, count: int) -> list[int]:
    """Return for some nodes that follow one another the number among them of the first one like each."""
    return (first[start : start + count] - start).tolist()


def _earlier(firsts: Sequence[int]) -> dict[int, int]:
    return {number: one for number, one in enumerate(firsts) if one < number}


@dataclass(frozen=True, kw_only=True, eq=False)
class _Loop:
    """A loop that is looked into: the number of its equation, and that of the first node of its body's inputs.

    Its equations and results follow them.
    """

    number: int
    scan: jp.Scan
    body: jc.Jaxpr
    inputs: int

    @property
    def equations(self) -> int:
        """The node of the first equation."""
        return self.inputs + len(self.body.invars)

    @property
    def results(self) -> int:
        """The node of the first result."""
        return self.equations + len(self.body.eqns)

    @property
    def end(self) -> int:
        """The node behind the last result."""
        return self.results + len(self.body.outvars)

    def folded(self, first: np.ndarray) -> Fold:
        """Return the fold of the body. Parts of the carry are equivalent as results where they are as inputs."""
        inputs = _numbers(first, self.inputs, len(self.body.invars))
        results = _numbers(first, self.results, len(self.body.outvars))
        carry = slice(self.scan.num_consts, self.scan.num_consts + self.scan.num_carry)
        results[: self.scan.num_carry] = [one - self.scan.num_consts for one in inputs[carry]]
        return Fold(
            classes=_numbers(first, self.equations, len(self.body.eqns)),
            equivalent_inputs=_earlier(inputs),
            equivalent_results=_earlier(results),
        )


def _loops(jaxpr: jc.Jaxpr, bodies_from: float) -> list[_Loop]:
    """Return the loops of a program that are looked into, their nodes behind those of the program."""
    loops: list[_Loop] = []
    begin = len(jaxpr.invars) + len(jaxpr.eqns) + 1
    for number, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name == "scan":
            scan = jp.scan_of(eqn)
            body = jc.open_jaxpr(scan.body)[0]
            if len(body.eqns) >= bodies_from:
                loops.append(_Loop(number=number, scan=scan, body=body, inputs=begin))
                begin = loops[-1].end
    return loops


def _seen_inside(
    loop: _Loop, eqn: jc.JaxprEqn, free: set[jc.Var], mark: Callable[[jc.JaxprEqn], Hashable]
) -> Iterator[Hashable]:
    """Return what tells the inputs, equations and results of a loop's body apart; `free` are the program's values."""
    scan, body = loop.scan, loop.body
    is_free = free_in_body(scan, [isinstance(atom, jc.Literal) or atom in free for atom in eqn.invars])
    for number, (v, known) in enumerate(zip(body.invars, is_free, strict=True)):
        part = (number >= scan.num_consts) + (number >= scan.num_consts + scan.num_carry)
        yield ("loop input", loop.number, part, _type(v), known)
    inside = {v for v, known in zip(body.invars, is_free, strict=True) if known} | set(body.constvars)
    yield from (("loop", loop.number, each) for each in _seen(body, inside, mark))
    for number, atom in enumerate(body.outvars):
        yield ("loop result", loop.number, number < scan.num_carry, _type(atom))


def _seen(
    jaxpr: jc.Jaxpr, free: set[jc.Var], mark: Callable[[jc.JaxprEqn], Hashable], loops: Collection[int] = ()
) -> Iterator[Hashable]:
    """Return what tells every equation from others, without its surroundings; `loops` are unlike all others."""
    scopes: dict[str, str] = {}
    for number, (key, eqn) in enumerate(zip(equation_classes(jaxpr), jaxpr.eqns, strict=True)):
        known = tuple(isinstance(atom, jc.Literal) or atom in free for atom in eqn.invars)
        freed = tuple(free_results(eqn, known))
        free.update(v for v, is_free in zip(eqn.outvars, freed, strict=True) if is_free)
        scope = jc.scope_of(eqn)
        if scope not in scopes:
            scopes[scope] = _starred(scope)
        if number in loops:
            yield ("a loop", number)
            continue
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
    """The reads of a program: the two nodes of each, and a number for the result and the operand that it joins."""

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
        """The reads that each node takes part in: the place of each, and the node at its other end."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.num_nodes)]
        for producer, reader, place in zip(self.producer.tolist(), self.reader.tolist(), self.place.tolist()):
            found[reader].append((place, producer))
            found[producer].append((~place, reader))
        return found


_Read = tuple[int, int, int, int]
"""A read: the maker of a value, the number among its results, the reader, and the number of its operand."""


def _reads(jaxpr: jc.Jaxpr, state_outputs: Mapping[int, int], loops: Sequence[_Loop]) -> _Reads:
    """Return the reads of a program. What replaces an input is read by it; other results are read by the last node."""
    at: dict[Any, tuple[int, int]] = {v: (number, 0) for number, v in enumerate(jaxpr.invars)}
    found: list[_Read] = []
    inside = {loop.number: loop for loop in loops}
    for number, eqn in enumerate(jaxpr.eqns):
        node, loop = len(jaxpr.invars) + number, inside.get(number)
        if loop is None:
            found += _read_by(eqn, at, node)
            at.update((v, (node, place)) for place, v in enumerate(eqn.outvars))
            continue
        found += [
            (*at[a], loop.inputs + place, 0) for place, a in enumerate(eqn.invars) if isinstance(a, jc.Var) and a in at
        ]
        found += _reads_inside(loop)
        at.update((v, (loop.results + place, 0)) for place, v in enumerate(eqn.outvars))
    last = len(jaxpr.invars) + len(jaxpr.eqns)
    found += [
        (*at[a], state_outputs.get(number, last), 0)
        for number, a in enumerate(jaxpr.outvars)
        if isinstance(a, jc.Var) and a in at
    ]
    table = np.array(found, dtype=np.int64).reshape(-1, 4)
    place = _mixed((table[:, 1] * 4096 + table[:, 3]).astype(np.uint64))
    num_nodes = loops[-1].end if loops else last + 1
    return _Reads(producer=table[:, 0], reader=table[:, 2], place=place, num_nodes=num_nodes)


def _read_by(eqn: jc.JaxprEqn, at: Mapping[Any, tuple[int, int]], node: int) -> list[_Read]:
    return [(*at[a], node, operand) for operand, a in enumerate(eqn.invars) if isinstance(a, jc.Var) and a in at]


def _reads_inside(loop: _Loop) -> list[_Read]:
    """Return the reads of a loop's body; the next round reads what becomes of the carry."""
    at: dict[Any, tuple[int, int]] = {v: (loop.inputs + number, 0) for number, v in enumerate(loop.body.invars)}
    found: list[_Read] = []
    for node, eqn in enumerate(loop.body.eqns, start=loop.equations):
        found += _read_by(eqn, at, node)
        at.update((v, (node, number)) for number, v in enumerate(eqn.outvars))
    for number, a in enumerate(loop.body.outvars):
        if isinstance(a, jc.Var) and a in at:
            found.append((*at[a], loop.results + number, 0))
        if number < loop.scan.num_carry:
            found.append((loop.results + number, 0, loop.inputs + loop.scan.num_consts + number, 1))
    return found


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
