"""What `verify` found out about a plan: its collectives as compiled, its numbers beside those of plain `jax.jit`."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from autopar.compiler.verify_plan import CollectiveCheck

_TIMES_ROUNDING = 3.0
"""How often a result may differ by what rounding the arguments moves it by."""


@dataclass(frozen=True, kw_only=True)
class NumberCheck:
    """The leaf of the step's result that differs most from plain `jax.jit`'s, relative to its largest entry."""

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
    found: Sequence[Any],
    *,
    rounded: Callable[[], Sequence[Any]] | None = None,
) -> NumberCheck:
    """The worst leaf of two results. Allowed is ten times the square root of the leaf's rounding error.

    An optimizer may divide by the root of a number that is zero but for rounding, which keeps half of the digits, or
    none: Adam's first step is the sign of the gradient. So a result may also differ by some times what differs in
    `rounded`, the expected step's results for arguments that are moved by their rounding error.
    """
    checks = [_compare(*leaf) for leaf in zip(names, expected, found, strict=True)]
    if rounded is not None and not all(checks):
        moved = [_compare(*leaf).difference for leaf in zip(names, expected, rounded(), strict=True)]
        checks = [
            replace(check, tolerance=max(check.tolerance, _TIMES_ROUNDING * difference))
            for check, difference in zip(checks, moved, strict=True)
        ]
    return max(checks, key=lambda check: check.difference / check.tolerance)


def rounded_arguments(leaves: Sequence[Any]) -> list[Any]:
    """The arguments with every floating number moved up or down by its rounding error."""
    rng = np.random.default_rng(0)
    return [_rounded(leaf, rng) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf for leaf in leaves]


def _rounded(leaf: Any, rng: np.random.Generator) -> Any:
    up = rng.integers(0, 2, leaf.shape).astype(bool)
    share = float(jnp.finfo(leaf.dtype).eps)
    return np.asarray(leaf * np.where(up, 1 + share, 1 - share), leaf.dtype)


def _compare(name: str, expected: Any, found: Any) -> NumberCheck:
    if jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
        expected, found = jax.random.key_data(expected), jax.random.key_data(found)
    exact = not jnp.issubdtype(expected.dtype, np.inexact)
    tolerance = 1e-30 if exact else 10 * float(jnp.finfo(expected.dtype).eps) ** 0.5
    wide: Any = np.complex128 if jnp.issubdtype(expected.dtype, np.complexfloating) else np.float64
    x, y = np.asarray(expected).astype(wide), np.asarray(found).astype(wide)
    scale = max(float(np.max(np.abs(x), initial=0.0)), 1e-3)
    difference = float(np.max(np.abs(x - y), initial=0.0)) / scale
    return NumberCheck(leaf=name, difference=float("inf") if np.isnan(difference) else difference, tolerance=tolerance)
