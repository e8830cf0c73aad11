"""The report of `verify` on a plan: its collectives as compiled, its numbers beside those of plain `jax.jit`."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from autopar.compiler.analysis.compiled_collectives import CollectiveCheck

_TIMES_ROUNDING = 2.0
"""A result may differ by so many times the change that moved arguments cause, in the root of its squares."""
_MOVED_BY = 16
"""Rounding errors by which arguments are moved: a step adds up more than one."""


@dataclass(frozen=True, kw_only=True)
class NumberCheck:
    """The leaf of the step's result that differs most from plain `jax.jit`'s, relative to its largest entry.

    One whose entries are decided by rounding counts as a whole, relative to the root of its squares.
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
        text = io.StringIO()
        Console(file=text, width=110, color_system=None, legacy_windows=False).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the table of collectives, the memory, and the largest difference."""
        check = self.collectives
        yield check.table()
        yield Text(f"memory: {check.compiled_peak_bytes / 1e6:.4g} MB per device as compiled")
        if self.numbers is None:
            yield Text("numbers: not compared (abstract arguments, or another target)")
        else:
            verdict = "agree" if self.numbers else "DIFFER"
            yield Text(
                f"numbers: {verdict}; largest difference from jax.jit {self.numbers.difference:.1e} of its size, in "
                f"{self.numbers.leaf}; allowed {self.numbers.tolerance:.0e}"
            )


def compare_numbers(
    names: Sequence[str],
    expected: Sequence[Any],
    results: Sequence[Any],
    *,
    rounded: Callable[[], Sequence[Any]] | None = None,
) -> NumberCheck:
    """Return the leaf that differs most. Allowed is ten times the square root of the leaf's rounding error.

    An optimizer may divide by the root of a number that is zero but for rounding, which keeps half of the digits, or
    none: Adam's first step is the sign of the gradient. So a leaf may also differ by what moves it in `rounded`, the
    results of the expected step for `rounded_arguments`; few entries in a leaf of many, then.
    """
    leaves = list(zip(names, expected, results, strict=True))
    checks = [_compare(*leaf) for leaf in leaves]
    if rounded is not None and not all(checks):
        checks = [
            check if check else _compare_as_a_whole(check, wanted, other, moved)
            for check, (_, wanted, other), moved in zip(checks, leaves, rounded(), strict=True)
        ]
    return max(checks, key=lambda check: check.difference / check.tolerance)


def rounded_arguments(leaves: Sequence[Any]) -> list[Any]:
    """Return the arguments with every floating number moved up or down by some times its rounding error."""
    rng = np.random.default_rng(0)
    return [_rounded(leaf, rng) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf for leaf in leaves]


def _rounded(leaf: Any, rng: np.random.Generator) -> Any:
    up = rng.integers(0, 2, leaf.shape).astype(bool)
    share = _MOVED_BY * float(jnp.finfo(leaf.dtype).eps)
    return np.asarray(leaf * np.where(up, 1 + share, 1 - share), leaf.dtype)


def _compare(name: str, expected: Any, result: Any) -> NumberCheck:
    exact = not jnp.issubdtype(expected.dtype, np.inexact)
    tolerance = 1e-30 if exact else 10 * float(jnp.finfo(expected.dtype).eps) ** 0.5
    x, y = _wide(expected), _wide(result)
    scale = max(float(np.max(np.abs(x), initial=0.0)), 1e-3)
    difference = float(np.max(np.abs(x - y), initial=0.0)) / scale
    return NumberCheck(leaf=name, difference=float("inf") if np.isnan(difference) else difference, tolerance=tolerance)


def _compare_as_a_whole(check: NumberCheck, expected: Any, result: Any, moved: Any) -> NumberCheck:
    """Return the check of a leaf beside what rounding does to it; the one before, if it differs by more."""
    x = _wide(expected)
    size = max(float(np.linalg.norm(x)), 1e-30)
    difference, allowed = (float(np.linalg.norm(x - _wide(other))) / size for other in (result, moved))
    whole = NumberCheck(leaf=check.leaf, difference=difference, tolerance=_TIMES_ROUNDING * allowed)
    return whole if whole else check


def _wide(leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).astype(np.complex128 if jnp.issubdtype(leaf.dtype, jnp.complexfloating) else np.float64)
