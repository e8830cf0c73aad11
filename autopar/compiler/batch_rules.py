"""Which primitives keep the examples of a batch apart, and which reduce over them.

`row_verdict` says what an equation does to batched operands: `Rows()` if row i of the result depends on row
i of the operands only, `Reduced(kind)` if the full result is the sum (max, ...) of the microbatches'
results. It raises where neither holds. A primitive without a rule is refused, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from autopar.compiler.batch_index_rules import (
    dynamic_slice,
    dynamic_update_slice,
    gather,
    scatter,
    static_slice,
)
from autopar.compiler.batch_sites import Reduced, Rows, Site, Verdict, batch_axes, refuse, shape_of
from autopar.compiler.batch_states import SUM
from autopar.compiler.jaxprs import compat as jc
from autopar.errors import Unsupported


def row_verdict(site: Site) -> Verdict:
    """What the equation does to the rows of its batched operands."""
    rule = ROW_RULES.get(site.eqn.primitive.name)
    if rule is None:
        raise Unsupported(
            f"{jc.describe(site.eqn)} has batched operands, and no rule says whether "
            f"`{site.eqn.primitive.name}` keeps the examples apart. Write it with other operations, or train "
            "without microbatches (num_microbatches=1)."
        )
    return rule(site)


def _apart(site: Site) -> Verdict:
    return Rows()


def _reduces(kind: str) -> Callable[[Site], Verdict]:
    def rule(site: Site) -> Verdict:
        (axis,) = {a for a in site.axes if a is not None}
        return Reduced(kind=kind) if axis in site.eqn.params["axes"] else Rows()

    return rule


def _not_along(parameter: str, what: str) -> Callable[[Site], Verdict]:
    """Rows stay apart unless the parameter names the batch axis."""

    def rule(site: Site) -> Verdict:
        value = site.eqn.params.get(parameter, -1)
        ndim = max(len(site.shape(i)) for i, a in enumerate(site.axes) if a is not None)
        along = {int(v) % ndim for v in np.atleast_1d(value)}
        if any(a in along for a in site.axes):
            refuse(site.eqn, f"{what} the batch")
        return Rows()

    return rule


def _not_in_last(count: Callable[[Mapping[str, Any]], int], what: str) -> Callable[[Site], Verdict]:
    """Rows stay apart if the batch axis precedes the last `count` axes, on which the operation works."""

    def rule(site: Site) -> Verdict:
        for i, axis in enumerate(site.axes):
            if axis is not None and axis >= len(site.shape(i)) - count(site.eqn.params):
                refuse(site.eqn, f"{what} the batch")
        return Rows()

    return rule


def _reshape(site: Site) -> Verdict:
    (axis,) = (a for a in site.axes[:1] if a is not None)
    (result,), (double,) = site.eqn.outvars, site.doubled.outvars
    axes = batch_axes(result.aval, double.aval)
    if len(axes) == 1 and math.prod(site.shape(0)[:axis]) == math.prod(shape_of(result)[: axes[0]]):
        return Rows()
    return refuse(site.eqn, "puts the batch inside another dimension, where a microbatch is no contiguous slice")


def _tile(site: Site) -> Verdict:
    axis = site.axes[0]
    if axis is not None and site.eqn.params["reps"][axis] != 1:
        refuse(site.eqn, "repeats the batch")
    return Rows()


def _pad(site: Site) -> Verdict:
    axis = site.axes[0]
    if axis is not None and tuple(site.eqn.params["padding_config"][axis]) != (0, 0, 0):
        refuse(site.eqn, "pads the batch")
    return Rows()


def _dot_general(site: Site) -> Verdict:
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = site.eqn.params["dimension_numbers"]
    lhs, rhs = site.axes
    if lhs is None or rhs is None:
        return Rows()
    if (lhs, rhs) in zip(lhs_sum, rhs_sum):
        return Reduced(kind=SUM)
    if (lhs, rhs) in zip(lhs_batch, rhs_batch):
        return Rows()
    return refuse(site.eqn, "combines pairs of the batch's examples, as contrastive losses do")


def _conv(site: Site) -> Verdict:
    p, (lhs, rhs) = site.eqn.params, site.axes
    numbers = p["dimension_numbers"]
    groups, batch_groups = p["feature_group_count"], p["batch_group_count"]
    if lhs == numbers.lhs_spec[0] and rhs is None and batch_groups == 1:
        return Rows()
    if lhs == numbers.lhs_spec[1] and rhs == numbers.rhs_spec[1] and groups == 1:
        return Reduced(kind=SUM)  # the gradient of the kernel contracts the batch
    doubled = site.doubled.params
    if rhs == numbers.rhs_spec[0]:  # vmap over kernels merges the examples into groups
        if lhs is None and (groups, batch_groups) == (1, 1):
            return Rows()
        if lhs == numbers.lhs_spec[1] and doubled["feature_group_count"] == 2 * groups:
            return Rows()
        if lhs == numbers.lhs_spec[0] and doubled["batch_group_count"] == 2 * batch_groups:
            return Rows()
    return refuse(site.eqn, "mixes the batch's examples in a convolution")


def _window(site: Site) -> Verdict:
    p = site.eqn.params
    (axis,) = {a for a in site.axes if a is not None}
    ones = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    if any(p.get(name) is not None and p[name][axis] != 1 for name in ones) or tuple(p["padding"][axis]) != (
        0,
        0,
    ):
        refuse(site.eqn, "slides a window over the batch")
    return Rows()


def names(text: str) -> tuple[str, ...]:
    """A table's words."""
    return tuple(text.split())


_ELEMENTWISE = names("""
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p copysign
    cos cosh debug_callback debug_print digamma div eq erf erf_inv erfc exp exp2 expm1 eq_to floor
    ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2
    logistic lt lt_to max min mul mulhi name ne neg nextafter not one_minus_square or polygamma
    polynomial population_count pow real reduce_precision regularized_incomplete_beta rem round
    rsqrt select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign
    sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor zeta zeros_like
    layout_constraint optimization_barrier broadcast_in_dim squeeze expand_dims transpose
    random_bits random_clone random_fold_in random_seed random_split random_unwrap random_wrap
""")

ROW_RULES: dict[str, Callable[[Site], Verdict]] = {
    **dict.fromkeys(_ELEMENTWISE, _apart),
    "reduce_sum": _reduces(SUM),
    "reduce_max": _reduces("max"),
    "reduce_min": _reduces("min"),
    "reduce_and": _reduces("and"),
    "reduce_or": _reduces("or"),
    "reduce_prod": _not_along("axes", "takes the product over"),
    "reduce_xor": _not_along("axes", "takes the parity over"),
    "reduce": _not_along("dimensions", "reduces with a function of its own over"),
    "argmax": _not_along("axes", "looks for the largest of"),
    "argmin": _not_along("axes", "looks for the smallest of"),
    **{
        name: _not_along("axis", "accumulates along")
        for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
    },
    "sort": _not_along("dimension", "sorts"),
    "top_k": _not_along("axis", "looks for the largest of"),
    "rev": _not_along("dimensions", "reverses"),
    "concatenate": _not_along("dimension", "appends to"),
    "split": _not_along("axis", "splits"),
    "stack": _apart,
    "unstack": _not_along("axis", "takes apart"),
    "tile": _tile,
    "reshape": _reshape,
    "slice": static_slice,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "pad": _pad,
    "dot_general": _dot_general,
    "conv_general_dilated": _conv,
    **dict.fromkeys(
        (
            "reduce_window",
            "reduce_window_sum",
            "reduce_window_max",
            "reduce_window_min",
            "select_and_scatter_add",
            "select_and_gather_add",
        ),
        _window,
    ),
    "gather": gather,
    "scatter": scatter(None),
    "scatter-mul": scatter(None),
    "scatter-add": scatter(SUM),
    "scatter-sub": scatter(SUM),
    "scatter-max": scatter("max"),
    "scatter-min": scatter("min"),
    **{
        name: _not_in_last(lambda _: 2, "factorizes along")
        for name in (
            "cholesky",
            "triangular_solve",
            "lu",
            "qr",
            "eigh",
            "svd",
            "householder_product",
            "geqrf",
        )
    },
    "lu_pivots_to_permutation": _not_in_last(lambda _: 1, "permutes"),
    "fft": _not_in_last(lambda p: len(p["fft_lengths"]), "transforms along"),
}
