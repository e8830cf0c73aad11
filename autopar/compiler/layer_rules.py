"""Which equations can run on pieces along axis 0: an entry per primitive.

What has no entry here reads whole values, which is always right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from autopar.compiler import layer_moves
from autopar.compiler.jaxprs.compat import JaxprEqn
from autopar.compiler.layer_axis import Rule, independent, reduction, shape_of, size_of

__all__ = ["rule_of"]

ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type
    cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv
    erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le lgamma log
    log1p logistic lt max min mul mulhi name ne neg nextafter not or polygamma population_count pow real
    reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor zeta
    """.split()  # noqa: SIM905 — as words it fits on a screen
)
# The parameter that names the axes which the operation mixes; the others are independent.
MIXED_AXES = {
    "argmax": "axes",
    "argmin": "axes",
    "cumlogsumexp": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "cumprod": "axis",
    "cumsum": "axis",
    "rev": "dimensions",
    "sort": "dimension",
    "squeeze": "dimensions",
}
REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "reduce_and": lax.bitwise_and,
    "reduce_max": lax.max,
    "reduce_min": lax.min,
    "reduce_or": lax.bitwise_or,
    "reduce_prod": lax.mul,
    "reduce_sum": lax.add,
    "reduce_xor": lax.bitwise_xor,
}
# Leading axes of their operands are batch axes.
MATRIX_FUNCTIONS = frozenset(["cholesky", "eigh", "householder_product", "lu", "qr", "svd", "triangular_solve"])


def rule_of(eqn: JaxprEqn) -> Rule | None:
    """What the equation does with axis 0; None if it has to read whole values."""
    name = eqn.primitive.name
    if name in ELEMENTWISE:
        # Scalars, and axes of length one, are broadcast.
        return independent(eqn, [size_of(v) == size_of(eqn.outvars[0]) for v in eqn.invars])
    if name in MIXED_AXES:
        return None if _holds_first(eqn.params[MIXED_AXES[name]]) else independent(eqn)
    if name in REDUCTIONS:
        return reduction(eqn, REDUCTIONS[name]) if 0 in eqn.params["axes"] else independent(eqn)
    if name in MATRIX_FUNCTIONS:
        return independent(eqn) if all(len(shape_of(v)) > 2 for v in eqn.invars) else None
    return _OTHERS[name](eqn) if name in _OTHERS else None


def _holds_first(axes: int | Sequence[int]) -> bool:
    return 0 in (axes if isinstance(axes, (tuple, list)) else (axes,))


def _broadcast(eqn: JaxprEqn) -> Rule | None:
    if len(eqn.invars) != 1:
        return None
    operand, result = eqn.invars[0], eqn.outvars[0]
    return independent(eqn, [eqn.params["broadcast_dimensions"][:1] == (0,) and size_of(operand) == size_of(result)])


def _iota(eqn: JaxprEqn) -> Rule | None:
    return None if eqn.params["dimension"] == 0 or eqn.invars else independent(eqn)


def _tile(eqn: JaxprEqn) -> Rule | None:
    return independent(eqn) if eqn.params["reps"][:1] == (1,) else None


def _transpose(eqn: JaxprEqn) -> Rule | None:
    return independent(eqn) if eqn.params["permutation"][:1] == (0,) else None


def _dot(eqn: JaxprEqn) -> Rule | None:
    (left_contracted, right_contracted), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    if left_batch:
        return independent(eqn) if left_batch[0] == right_batch[0] == 0 else None
    if (0, 0) in zip(left_contracted, right_contracted):
        return reduction(eqn, lax.add)
    if len(left_contracted) == len(shape_of(eqn.invars[0])):
        return independent(eqn, [False, True]) if 0 not in right_contracted else None
    return independent(eqn, [True, False]) if 0 not in left_contracted else None


_OTHERS: dict[str, Callable[[JaxprEqn], Rule | None]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": layer_moves.concatenate,
    "dot_general": _dot,
    "iota": _iota,
    "optimization_barrier": layer_moves.barrier,
    "pad": layer_moves.pad,
    "reshape": layer_moves.reshape,
    "scan": layer_moves.loop,
    "slice": layer_moves.slices,
    "split": layer_moves.split,
    "stack": layer_moves.stack,
    "tile": _tile,
    "transpose": _transpose,
    "unstack": layer_moves.unstack,
}
