"""The report of `verify` on a plan: its collectives as compiled, its numbers beside those of plain `jax.jit`.

    step, planned program, arguments  ->  NumberCheck

Both run on the given arguments, and on three others of one, two and four times their size, drawn around them: the
moments of a new optimizer are all zero, so that one in the place of another would not be seen, and where weights are
small a factor before a tanh hardly shows. A result that replaces an argument is held to its change: after a step of
1e-3 what was not updated is still right to three digits. Two limits hold:

    wrong        at one of these points by more than half of the digits, and than rounding does to the plain step
    imprecise    at two of these points by more than many roundings

A plan of the sound step may be off at one point, where its rounding falls on the other side of a kink; at two of four
it is another function, or lost digits on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from autopar.compiler.analysis.compiled_collectives import CollectiveCheck
from autopar.plain_text import as_text

_TIMES_ROUNDING = 2.0
"""Largest difference of a result, in multiples of the change that moved arguments cause, as roots of summed squares."""
_MOVED_BY = 16
"""Rounding errors by which arguments are moved: a step adds up more than one."""
_MOST_MOVED = 1 / 8
"""Largest relative move, several rounding errors of bfloat16: a step on arguments moved further tells nothing."""
_IMPRECISE = 1.0
"""Largest difference, in multiples of that change, of a result that is not called imprecise."""
_PER_ROOT = 1.0
"""Rounding errors that are allowed besides, per root of the number of terms in a sum, which err in all directions."""

_ELSEWHERE = (1.0, 2.0, 4.0)
"""Sizes of the other arguments, as multiples of the given ones."""

_BLOCK = 2**16
"""Entries of a leaf that are compared at a time."""

Leaves = Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class NumberCheck:
    """The leaf of the step's result that differs most from plain `jax.jit`'s, relative to its largest entry.

    One whose entries are decided by rounding, or that is imprecise, counts as a whole, relative to the root of its
    squares.
    """

    leaf: str
    difference: float
    tolerance: float

    def __bool__(self) -> bool:
        return self.difference <= self.tolerance


@dataclass(frozen=True, kw_only=True)
class VerificationReport:
    """True when the compiled collectives are the planned ones and the numbers, if they were compared, agree."""

    collectives: CollectiveCheck
    numbers: NumberCheck | None

    def __bool__(self) -> bool:
        return bool(self.collectives) and (self.numbers is None or bool(self.numbers))

    def __str__(self) -> str:
        return as_text(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the table of collectives, the memory, and the largest difference."""
        check = self.collectives
        yield check.table()
        again = f"; XLA computes {check.computed_again} results again to need no more" if check.computed_again else ""
        yield Text(f"memory: {check.compiled_peak_bytes / 1e6:.4g} MB per device as compiled{again}")
        if self.numbers is None:
            yield Text("numbers: not compared (abstract arguments, or another target)")
        else:
            verdict = "agree" if self.numbers else "DIFFER"
            yield Text(
                f"numbers: {verdict}; largest difference from jax.jit {self.numbers.difference:.1e} of its size, in "
                f"{self.numbers.leaf}; allowed {self.numbers.tolerance:.0e}"
            )


def verify_numbers(
    names: Sequence[str],
    plain: Callable[[Leaves], Leaves],
    planned: Callable[[Leaves], Leaves],
    leaves: Leaves,
    *,
    replaced: Mapping[int, int],
    rounding: float,
    least_move: float = 0.0,
) -> NumberCheck:
    """Return the result that differs most between two functions of flat arguments, which lie on the host.

    - `names`: of the results.
    - `replaced`: the number of the argument that a result replaces, by the number of the result.
    - `rounding`: of a sum within the step, see `rounding_of_sums`.
    - `least_move`: the share of itself by which a number is moved at least, see `move_of_types`.
    """

    def point(arguments: Leaves, expected: Leaves) -> Point:
        moved = rounded_arguments(arguments, least_move)
        return Point(
            before=[arguments[replaced[n]] if n in replaced else None for n in range(len(names))],
            expected=expected,
            results=planned(arguments),
            rounded=lambda: plain(moved),
            moved_before=[moved[replaced[n]] if n in replaced else None for n in range(len(names))],
        )

    points = [point(leaves, plain(leaves))]
    check = compare_numbers(names, points, rounding=rounding)
    if not check:
        return check
    for seed, times in enumerate(_ELSEWHERE, 1):
        elsewhere = arguments_away_from_zero(leaves, times=times, seed=seed)
        expected = plain(elsewhere)
        if _all_finite(expected):  # The step may not be defined there.
            points.append(point(elsewhere, expected))
    return max(check, compare_numbers(names, points, rounding=rounding), key=_excess)


@dataclass(frozen=True, kw_only=True)
class Point:
    """The results of a step and of its plan for the same arguments, leaf by leaf."""

    before: Leaves
    """The argument that each result replaces; None where it is new."""
    expected: Leaves
    results: Leaves
    rounded: Callable[[], Leaves]
    """Returns the results of the step for `rounded_arguments`."""
    moved_before: Leaves
    """The arguments that these replace."""

    @cached_property
    def moved(self) -> Leaves:
        """The results of the step for `rounded_arguments`, made once."""
        return self.rounded()

    @cached_property
    def distances(self) -> Sequence[_Distances]:
        """The figures of each leaf that the checks read, measured once: a leaf may be large."""
        return [_distances(self, n) for n in range(len(self.expected))]


@dataclass(frozen=True, kw_only=True)
class _Distances:
    """The size, the change, and the plan's difference of a leaf of a step's result, computed in 64 bits.

    Largest entries, and roots of the sum of squares.
    """

    eps: float | None
    """Rounding error of its type; None for whole numbers."""
    largest: float
    largest_change: float
    largest_difference: float
    size: float
    change: float
    difference: float
    moved: float
    """The difference of the results for `rounded_arguments` from those for the arguments."""
    noise: float
    """The same without what their arguments differ by."""


def _distances(point: Point, n: int) -> _Distances:
    expected = point.expected[n]
    is_new = point.before[n] is None
    leaves = [expected, point.results[n], point.moved[n], *([] if is_new else [point.before[n], point.moved_before[n]])]
    largest, squares = np.zeros(3), np.zeros(5)
    for x, y, moved, *replaced in _in_blocks(leaves):
        difference, by = x - y, moved - x
        change, noise = (x, by) if is_new else (x - replaced[0], by - (replaced[1] - replaced[0]))
        largest = np.maximum(largest, [np.max(np.abs(each), initial=0.0) for each in (x, change, difference)])
        squares += [np.sum(np.abs(each) ** 2) for each in (x, change, difference, by, noise)]
    size, *norms = map(float, np.sqrt(squares))
    return _Distances(
        eps=float(jnp.finfo(expected.dtype).eps) if jnp.issubdtype(expected.dtype, np.inexact) else None,
        largest=float(largest[0]),
        largest_change=float(largest[1]),
        largest_difference=float(largest[2]),
        size=size,
        change=norms[0],
        difference=norms[1],
        moved=norms[2],
        noise=norms[3],
    )


def _in_blocks(leaves: Leaves) -> Iterator[list[Any]]:
    """Yield the entries of arrays of one size in 64 bits, in blocks: whole ones would take the memory several times."""
    flat = [_numbers(leaf).reshape(-1) for leaf in leaves]
    for start in range(0, flat[0].size, _BLOCK):
        yield [
            part.astype(np.complex128 if jnp.issubdtype(part.dtype, jnp.complexfloating) else np.float64)
            for part in (each[start : start + _BLOCK] for each in flat)
        ]


def compare_numbers(names: Sequence[str], points: Sequence[Point], *, rounding: float) -> NumberCheck:
    """Return the leaf that differs most from plain `jax.jit`'s: at some point wrong, or at two imprecise.

    Allowed is ten times the square root of the leaf's rounding error. An optimizer may divide by the root of a number
    that is zero but for rounding, which keeps half of the digits, or none: Adam's first step is the sign of the
    gradient. So a leaf may also differ by what moves it for `rounded_arguments`; few entries in a leaf of many, then.
    """
    checks = [_wrong(name, point.distances[n]) for point in points for n, name in enumerate(names)]
    worst = max(checks, key=_excess)
    if not worst:
        return worst
    precise = [
        sorted((_imprecise(name, point.distances[n], rounding) for point in points), key=_excess)[-2:][0]
        for n, name in enumerate(names)
    ]
    return max((worst, *(check for check in precise if not check)), key=_excess)


def rounded_arguments(leaves: Leaves, least_move: float = 0.0) -> list[Any]:
    """Return the arguments with every floating number moved up or down by some times its rounding error.

    It is moved by `least_move` of itself, if that is more.
    """
    rng = np.random.default_rng(0)
    return [_rounded(leaf, rng, least_move) if _is_floating(leaf) else leaf for leaf in leaves]


def arguments_away_from_zero(leaves: Leaves, *, times: float, seed: int) -> list[Any]:
    """Return the arguments with every floating number grown by `times` 1 to 1.25, and small ones where all are zero.

    Signs stay, as do the zeros of a mask.
    """
    rng = np.random.default_rng(seed)

    def moved(leaf: Any) -> Any:
        part = rng.random(np.shape(leaf))
        wide = np.asarray(leaf, np.float64)
        return np.asarray(times * (wide * (1 + part / 4) if np.any(wide) else 0.005 + part / 100), leaf.dtype)

    return [moved(leaf) if _is_floating(leaf) else leaf for leaf in leaves]


def rounding_of_sums(avals: Sequence[Any], *, bits: int) -> float:
    """Return the relative error of a sum over the largest of some arrays, added up in the least precise type of all.

    `bits` are those of the fraction that the devices multiply with, where they are fewer than the type's.
    """
    sizes = [int(np.prod(aval.shape)) for aval in avals if hasattr(aval, "shape")]
    return max(2.0**-bits, _rounding_of_types(avals)) * max(sizes, default=1) ** 0.5


def move_of_types(avals: Sequence[Any]) -> float:
    """Return the share by which arguments of a step with these arrays are moved: as if of the least precise of all.

    Parameters in float32 that the step reads in bfloat16 it rounds first: it would not see float32's rounding error. Of
    types of 8 bits one rounding error is enough.
    """
    error = _rounding_of_types(avals)
    return max(error, min(_MOVED_BY * error, _MOST_MOVED))


def _rounding_of_types(avals: Sequence[Any]) -> float:
    return max((float(jnp.finfo(aval.dtype).eps) for aval in avals if _is_floating(aval)), default=0.0)


def _is_floating(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def _all_finite(leaves: Leaves) -> bool:
    return all(bool(np.all(np.isfinite(np.asarray(leaf)))) for leaf in leaves if jnp.issubdtype(leaf.dtype, np.inexact))


def _rounded(leaf: Any, rng: np.random.Generator, least_move: float) -> Any:
    up = rng.integers(0, 2, leaf.shape).astype(bool)
    share = max(_MOVED_BY * float(jnp.finfo(leaf.dtype).eps), least_move)
    return np.asarray(leaf * np.where(up, 1 + share, 1 - share), leaf.dtype)


def _excess(check: NumberCheck) -> float:
    return check.difference / check.tolerance


def _wrong(name: str, leaf: _Distances) -> NumberCheck:
    """Return the largest difference in a leaf relative to its largest entry, or in the norm if rounding decides it."""
    size = max(leaf.largest, 1e-3)
    tolerance, difference = 1e-30, leaf.largest_difference / size
    if leaf.eps is not None:
        share = max(leaf.largest_change / size, 1e-30)
        tolerance = 10 * leaf.eps**0.5 * min(share, 1.0) + _MOVED_BY * leaf.eps
    check = NumberCheck(leaf=name, difference=float("inf") if np.isnan(difference) else difference, tolerance=tolerance)
    return check if check else _wrong_as_a_whole(check, leaf)


def _wrong_as_a_whole(check: NumberCheck, leaf: _Distances) -> NumberCheck:
    """Return the check of a leaf beside what rounding does to it; the one before, if it differs by more."""
    size = max(leaf.size, 1e-30)
    whole = NumberCheck(
        leaf=check.leaf, difference=leaf.difference / size, tolerance=max(_TIMES_ROUNDING * leaf.moved / size, 1e-30)
    )
    return whole if whole else check


def _imprecise(name: str, leaf: _Distances, rounding: float) -> NumberCheck:
    """Return the difference in the root of a leaf's squares, beside that of rounded arguments and of long sums."""
    if leaf.eps is None:
        return NumberCheck(leaf=name, difference=0.0, tolerance=1.0)  # `_wrong` has asked for the same
    size = max(leaf.size, 1e-30)
    allowed = _IMPRECISE * leaf.noise + _PER_ROOT * max(rounding, leaf.eps) * leaf.change
    return NumberCheck(leaf=name, difference=leaf.difference / size, tolerance=allowed / size + _PER_ROOT * leaf.eps)


def _numbers(leaf: Any) -> Any:
    return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
