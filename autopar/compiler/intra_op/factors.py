"""Compose the factors of a function from those of its operations.

A value that one operation writes and another one reads has factors from both; they are made one, dimension by
dimension, major factors first. Where one side has a factor of 6 and the other factors of 2 and 3, the 6 is split.
Where sizes share no divisor (a dimension of 12 that is 4·3 here and 3·4 there, after their common parts), the rest of
the dimension is blocked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.compiler.intra_op.rule import Dims, Rule, rule_of_labels, shapes_of
from autopar.compiler.jaxprs import compat as jc


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
    """Their shapes."""
    operations: tuple[Operation, ...] | None
    """None where one of them has no rule."""
    results: tuple[int, ...]


def compose(name: str, functions: Mapping[str, Function], known: dict[str, FactorRule | None]) -> FactorRule | None:
    """The factors of a function and, in `known`, of all that it calls; None where an operation has no rule."""
    if name not in known:
        known[name] = _compose(functions[name], functions, known)
    return known[name]


def _compose(
    function: Function, functions: Mapping[str, Function], known: dict[str, FactorRule | None]
) -> FactorRule | None:
    if function.operations is None:
        return None
    joined = _Joined()
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
    joined = _Joined()
    (read,), (written,) = shapes_of(eqn.invars[:1]), shapes_of(eqn.outvars)
    before, after = joined.of_shape(read), joined.of_shape(written)
    joined.join(itertools.chain(*before), itertools.chain(*after))
    factors = joined.rule([before], [after])
    return rule_of_labels(
        eqn, factors.operands, factors.results, blocked=factors.blocked, sizes=dict(enumerate(factors.sizes))
    )


class _Joined:
    """Factors that are made equal, or split, as operations demand."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._parts: dict[int, list[int]] = {}
        """What a factor was joined with (one factor), or split into (several, major first)."""
        self._reduced: set[int] = set()
        self._blocked: set[int] = set()

    def of_shape(self, shape: Sequence[int]) -> list[list[int]]:
        return [[self._new(size)] for size in shape]

    def _new(self, size: int) -> int:
        self._sizes.append(size)
        return len(self._sizes) - 1

    def adopt(self, rule: FactorRule) -> list[int]:
        """New factors for those of a rule."""
        numbers = [self._new(size) for size in rule.sizes]
        self._reduced |= {numbers[f] for f in rule.reduced}
        self._blocked |= {numbers[f] for f in rule.blocked}
        return numbers

    def join(self, mine: Iterable[int], theirs: Iterable[int]) -> None:
        """Make the factors of one dimension those of another of the same size."""
        left, right = list(mine), list(theirs)
        while True:
            left, right = self._resolved(left), self._resolved(right)
            if not left or not right:
                return
            a, b = left[0], right[0]
            if a == b:
                left, right = left[1:], right[1:]
                continue
            common = math.gcd(self._sizes[a], self._sizes[b])
            if common in (0, 1):
                self._blocked |= {*left, *right}
                return
            self._split(a, common)
            self._split(b, common)
            (a, *_), (b, *_) = self._resolved([a]), self._resolved([b])
            if a != b:
                self._become(b, [a])

    def _split(self, factor: int, major: int) -> None:
        """Make the factor one of size `major` and the rest, if there is any."""
        if self._sizes[factor] != major:
            self._become(factor, [self._new(major), self._new(self._sizes[factor] // major)])

    def _become(self, factor: int, parts: list[int]) -> None:
        self._parts[factor] = parts
        for marked in (self._reduced, self._blocked):
            if factor in marked:
                marked.update(parts)

    def _resolved(self, factors: Iterable[int]) -> list[int]:
        """The factors that these are now; those of size 1 are nothing."""
        found: list[int] = []
        for factor in factors:
            if factor in self._parts:
                found += self._resolved(self._parts[factor])
            elif self._sizes[factor] != 1:
                found.append(factor)
        return found

    def rule(self, arguments: Sequence[list[list[int]]], results: Sequence[list[list[int]]]) -> FactorRule:
        """What has become of the function's arguments and results."""

        def dims(value: list[list[int]]) -> Dims:
            return tuple(tuple(self._resolved(factors)) for factors in value)

        return FactorRule(
            sizes=tuple(self._sizes),
            operands=tuple(map(dims, arguments)),
            results=tuple(map(dims, results)),
            reduced=frozenset(self._reduced),
            blocked=frozenset(self._blocked),
        )
