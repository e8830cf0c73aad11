"""In which operands an equation is linear, so that a sum over microbatches can be taken after it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from autopar.compiler.batch_states import SUM
from autopar.compiler.jaxprs import compat as jc

_FIRST, _SECOND, _BOTH = frozenset({0}), frozenset({1}), frozenset({0, 1})
_SCATTERED = frozenset({0, 2})

_STRUCTURAL = (
    *("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "copy", "copy_p", "rev", "split"),
    *("slice", "dynamic_slice", "gather", "sharding_constraint", "layout_constraint", "name", "tile"),
    "unstack",
)
_LINEAR_IN_FIRST = (
    *("neg", "convert_element_type", "reduce_precision", "real", "imag", "conj", "reduce_sum", "cumsum"),
    *("div", "fft", "reduce_window_sum", "select_and_scatter_add", "select_and_gather_add"),
)
_LINEAR_IN_BOTH = ("add", "sub", "add_any", "pad", "complex", "dynamic_update_slice")
_BILINEAR = ("mul", "dot_general", "conv_general_dilated")


def summand_positions(eqn: jc.JaxprEqn, kind: str) -> list[frozenset[int]]:
    """The sets of operands in which the equation is jointly linear (or, for max and the like, structural)."""
    name = eqn.primitive.name
    if name in _STRUCTURAL:
        return [_FIRST]
    if name in ("concatenate", "stack"):
        return [frozenset(range(len(eqn.invars)))]
    if name == "select_n":
        return [frozenset(range(1, len(eqn.invars)))]
    if kind != SUM:
        return [_BOTH] if name == kind else [_FIRST] if name == f"reduce_{kind}" else []
    return _linear_positions(eqn)


def _linear_positions(eqn: jc.JaxprEqn) -> list[frozenset[int]]:
    name, result = eqn.primitive.name, eqn.outvars[:1]
    if name in ("div", "convert_element_type") and not all(_is_inexact(v) for v in result):
        return []  # integers round
    if name in _LINEAR_IN_FIRST:
        return [_FIRST]
    if name in _LINEAR_IN_BOTH:
        return [_BOTH]
    if name in _BILINEAR:
        return [_FIRST, _SECOND]
    if name in ("scatter-add", "scatter-sub"):
        return [_SCATTERED]
    return [_SECOND] if name == "triangular_solve" else []


def carries_zero(eqn: jc.JaxprEqn, zeros: list[bool]) -> bool:
    """Whether the result is all zeros, given which operands are."""
    if eqn.primitive.name in (*_BILINEAR, "div"):
        return False  # zero times infinity is not zero
    return any(all(zeros[i] for i in group) for group in summand_positions(eqn, SUM))


def _is_inexact(atom: Any) -> bool:
    return bool(jnp.issubdtype(atom.aval.dtype, jnp.inexact))
