"""The sharding rule of an equation: the factors that the dimensions of its operands and results are made of.

A factor is an index of the equation written as an einsum. The product `ij,jk->ik` of matrices has three: i and k
stand in the result, j is summed away. A dimension that a reshape splits is made of several: `(ij)->ij`. An axis of the
mesh that splits a factor splits every dimension that the factor belongs to.

    str(rule)                      an axis that splits the factor
    ij,jk->ik sum(j)               i or k: splits the result; j: leaves a summand of the result on each device
    ij->i max(j)                   j: leaves values of which the greatest is the result
    ij->ij blocked(j)              j: never (here a sort along j, say)

The promise: under every choice of axes for the factors that are not blocked, the same primitive on the local parts,
shapes among its parameters made local, gives the local parts of the results.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.compiler.jaxprs import compat as jc

Dims = tuple[tuple[int, ...], ...]
"""The factors of every dimension of one array, major to minor; none for a dimension of size 1."""

_LETTERS = "ijklmnopqrstuvwxyzabcdefghABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Factors are numbers, in the order in which operands and results show them."""

    sizes: tuple[int, ...]
    """The size of every factor."""
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    reductions: Mapping[int, str]
    """The combination of the parts along a factor that no result has: `"sum"`, `"max"` or `"min"`."""
    blocked: frozenset[int]
    """The factors that must not be split."""
    source: str
    """Its author: `"shardy"`, `"by hand"`, `"user"`; `"none"` where it has none and everything is blocked."""

    def __str__(self) -> str:
        """`ij,jk->ik sum(j)`: a letter for each factor, 1 for a dimension of size 1."""
        operands, results = (",".join(map(_letters_of, side)) for side in (self.operands, self.results))
        notes = [
            f"{kind}({''.join(_letter(f) for f in sorted(self.reductions) if self.reductions[f] == kind)})"
            for kind in sorted(set(self.reductions.values()))
        ]
        if self.blocked:
            notes.append(f"blocked({''.join(map(_letter, sorted(self.blocked)))})")
        return " ".join([f"{operands}->{results}", *notes])


def _letter(factor: int) -> str:
    return _LETTERS[factor] if factor < len(_LETTERS) else f"<{factor}>"


def _letters_of(dims: Dims) -> str:
    words = ("".join(map(_letter, factors)) or "1" for factors in dims)
    return "".join(f"({word})" if len(factors) > 1 else word for word, factors in zip(words, dims, strict=True))


Label = Hashable
"""The name of a dimension: an int or a string; a tuple: its several factors; None: it must not be split."""


def shapes_of(atoms: Iterable[Any]) -> list[tuple[int, ...]]:
    """The shapes of the variables and literals of an equation."""
    return [tuple(atom.aval.shape) for atom in atoms]


def adds_up(atom: Any) -> bool:
    """Return whether the elements of a variable can be summands: not booleans, nor random keys."""
    return isinstance(atom.aval.dtype, np.dtype) and atom.aval.dtype != np.bool_


def rule_of_labels(
    eqn: Any,
    operands: Sequence[Sequence[Label]],
    results: Sequence[Sequence[Label]],
    *,
    reductions: Mapping[Label, str] | None = None,
    blocked: Collection[Label] = (),
    sizes: Mapping[Label, int] | None = None,
    creates: bool = False,
    source: str = "by hand",
) -> Rule:
    """The rule of an equation whose dimensions of equal label are split alike.

    `sizes` are needed for the labels inside of tuples only. A label that stands on one side only is blocked, unless
    it is reduced or the equation `creates` its results' elements by their place, as a broadcast does.
    """
    known = dict(sizes or {})
    factors = _Factors(known)
    operand_dims = tuple(
        factors.of_array(shape, labels) for shape, labels in zip(shapes_of(eqn.invars), operands, strict=True)
    )
    result_dims = tuple(
        factors.of_array(shape, labels) for shape, labels in zip(shapes_of(eqn.outvars), results, strict=True)
    )
    numbers = factors.numbers
    reduced = {numbers[label]: kind for label, kind in (reductions or {}).items() if label in numbers}
    never = (
        factors.touched
        | {numbers[label] for label in blocked if label in numbers}
        | (reduced.keys() & _factors_in(result_dims))
        | _unmatched(operand_dims, result_dims, reduced, creates)
        | _repeated((*operand_dims, *result_dims))
    )
    return Rule(
        sizes=tuple(factors.sizes),
        operands=operand_dims,
        results=result_dims,
        reductions={factor: reduced[factor] for factor in sorted(reduced.keys() - never)},
        blocked=frozenset(never),
        source=source,
    )


class _Factors:
    """Numbers for labels, by order of appearance."""

    def __init__(self, known: dict[Label, int]) -> None:
        self.known = known
        self.numbers: dict[Label, int] = {}
        self.sizes: list[int] = []
        self.touched: set[int] = set()

    def of_array(self, shape: tuple[int, ...], labels: Sequence[Label]) -> Dims:
        assert len(shape) == len(labels), (shape, labels)
        return tuple(self._of_dimension(size, label) for size, label in zip(shape, labels, strict=True))

    def _of_dimension(self, size: int, label: Label) -> tuple[int, ...]:
        if size == 1:
            return ()
        if label is None:
            self.touched.add(len(self.sizes))
            self.sizes.append(size)
            return (len(self.sizes) - 1,)
        parts = label if isinstance(label, tuple) else (label,)
        if not isinstance(label, tuple):
            self.known.setdefault(label, size)
        assert math.prod(self.known[part] for part in parts) == size, (size, label, self.known)
        return tuple(self._number(part) for part in parts if self.known[part] != 1)

    def _number(self, label: Label) -> int:
        if label not in self.numbers:
            self.numbers[label] = len(self.sizes)
            self.sizes.append(self.known[label])
        return self.numbers[label]


def _factors_in(arrays: Iterable[Dims]) -> set[int]:
    return {factor for dims in arrays for factors in dims for factor in factors}


def _unmatched(operands: Sequence[Dims], results: Sequence[Dims], reduced: Collection[int], creates: bool) -> set[int]:
    """Factors of one side only: what an equation does along them is unknown."""
    read, written = _factors_in(operands), _factors_in(results)
    return (read - written - set(reduced)) | (set() if creates else written - read)


def _repeated(arrays: Iterable[Dims]) -> set[int]:
    """Factors that one array has twice: its diagonal is not the diagonal of its blocks."""
    counts = (Counter(factor for factors in dims for factor in factors) for dims in arrays)
    return {factor for count in counts for factor, times in count.items() if times > 1}


def blocked_rule(eqn: Any, source: str) -> Rule:
    """Nothing can be split: every device computes the whole equation."""
    operands, results = ([(None,) * len(s) for s in shapes_of(atoms)] for atoms in (eqn.invars, eqn.outvars))
    return rule_of_labels(eqn, operands, results, source=source)


# The factors of a function, composed of those of its operations


@dataclass(frozen=True, kw_only=True)
class FactorRule:
    """The factors of an operation, or of a function; sizes, dimensions and `blocked` as in a `Rule`."""

    sizes: tuple[int, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    reduced: frozenset[int]
    blocked: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation on values by number. It has a rule, or is the call of a function."""

    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: FactorRule | None
    callee: str = ""


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function's operations; the values of its arguments come first."""

    arguments: tuple[tuple[int, ...], ...]
    """The shapes of the arguments."""
    operations: tuple[Operation, ...] | None
    """The operations in order; None where one of them has no rule."""
    results: tuple[int, ...]


def compose(name: str, functions: Mapping[str, Function], known: dict[str, FactorRule | None]) -> FactorRule | None:
    """Return the factors of a function and, in `known`, of all that it calls; None where an operation has no rule.

    A value that one operation writes and another one reads has factors from both; they are made one, dimension by
    dimension, major factors first. Where one side has a factor of 6 and the other factors of 2 and 3, the 6 is split.
    Where sizes share no divisor (a dimension of 12 that is 4·3 here and 3·4 there, after their common parts), the rest
    of the dimension is blocked.
    """
    if name not in known:
        known[name] = _compose(functions[name], functions, known)
    return known[name]


def _compose(
    function: Function, functions: Mapping[str, Function], known: dict[str, FactorRule | None]
) -> FactorRule | None:
    if function.operations is None:
        return None
    joined = JoinedFactors()
    values = dict(enumerate(joined.of_shape(shape) for shape in function.arguments))
    for operation in function.operations:
        rule = operation.rule or compose(operation.callee, functions, known)
        if rule is None:
            return None
        numbers = joined.adopt(rule)
        for value, dims in zip(operation.operands, rule.operands, strict=True):
            for mine, theirs in zip(values[value], dims, strict=True):
                joined.join(mine, [numbers[f] for f in theirs])
        for value, dims in zip(operation.results, rule.results, strict=True):
            values[value] = [[numbers[f] for f in factors] for factors in dims]
    arguments = [values[i] for i in range(len(function.arguments))]
    return joined.rule(arguments, [values[i] for i in function.results])


def reshaped(eqn: jc.JaxprEqn) -> Rule:
    """A reshape: elements keep their order, so that all dimensions together are one dimension of both arrays."""
    joined = JoinedFactors()
    (read,), (written,) = shapes_of(eqn.invars[:1]), shapes_of(eqn.outvars)
    before, after = joined.of_shape(read), joined.of_shape(written)
    joined.join(itertools.chain(*before), itertools.chain(*after))
    factors = joined.rule([before], [after])
    return rule_of_labels(
        eqn, factors.operands, factors.results, blocked=factors.blocked, sizes=dict(enumerate(factors.sizes))
    )


class JoinedFactors:
    """Factors that are made equal, or split, as operations demand."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._parts: dict[int, list[int]] = {}
        """The factor that each was joined with (one), or the factors that it was split into (several, major first)."""
        self._reduced: set[int] = set()
        self._blocked: set[int] = set()

    def of_shape(self, shape: Sequence[int]) -> list[list[int]]:
        return [[self.new(size)] for size in shape]

    def new(self, size: int) -> int:
        """A factor that is like no other yet."""
        self._sizes.append(size)
        return len(self._sizes) - 1

    def size(self, factors: Iterable[int]) -> int:
        """The size of a dimension of these factors."""
        return math.prod(self._sizes[f] for f in self.resolved(factors))

    def adopt(self, rule: FactorRule) -> list[int]:
        """New factors for those of a rule."""
        numbers = [self.new(size) for size in rule.sizes]
        self._reduced |= {numbers[f] for f in rule.reduced}
        self._blocked |= {numbers[f] for f in rule.blocked}
        return numbers

    def join(self, mine: Iterable[int], theirs: Iterable[int]) -> None:
        """Make the factors of one dimension those of another of the same size."""
        left, right = self.resolved(mine), self.resolved(theirs)
        while left and right:
            a, b = left[0], right[0]
            if a == b:
                left, right = left[1:], right[1:]
                continue
            common = math.gcd(self._sizes[a], self._sizes[b])
            if common in (0, 1):
                self._blocked |= {*left, *right}
                return
            if self._sizes[a] == self._sizes[b]:
                self._become(b, [a])
                left, right = left[1:], right[1:]
            else:
                self._split(a, common)
                self._split(b, common)
            left, right = self.resolved(left), self.resolved(right)

    def _split(self, factor: int, major: int) -> None:
        """Make the factor one of size `major` and the rest, if there is any."""
        if self._sizes[factor] != major:
            self._become(factor, [self.new(major), self.new(self._sizes[factor] // major)])

    def _become(self, factor: int, parts: list[int]) -> None:
        self._parts[factor] = parts
        for marked in (self._reduced, self._blocked):
            if factor in marked:
                marked.update(parts)

    def resolved(self, factors: Iterable[int]) -> list[int]:
        """The factors that these are now; those of size 1 are nothing."""
        resolved: list[int] = []
        left = list(factors)[::-1]
        while left:
            factor = left.pop()
            if factor in self._parts:
                left += self._parts_of(factor)[::-1]
            elif self._sizes[factor] != 1:
                resolved.append(factor)
        return resolved

    def _parts_of(self, factor: int) -> list[int]:
        """The parts at the end of a chain of factors, which are kept, so that chains stay short."""
        chain = [factor]
        while len(parts := self._parts[chain[-1]]) == 1 and parts[0] in self._parts:
            chain.append(parts[0])
        self._parts.update(dict.fromkeys(chain, parts))
        return parts

    def rule(self, arguments: Sequence[list[list[int]]], results: Sequence[list[list[int]]]) -> FactorRule:
        """Return the factors that the function's arguments and results have now."""

        def dims(value: list[list[int]]) -> Dims:
            return tuple(tuple(self.resolved(factors)) for factors in value)

        return FactorRule(
            sizes=tuple(self._sizes),
            operands=tuple(map(dims, arguments)),
            results=tuple(map(dims, results)),
            reduced=frozenset(self._reduced),
            blocked=frozenset(self._blocked),
        )
