"""Which primitives keep the rows of a batch apart, which reduce over them, and which are linear.

`ROW_RULES[name](site)` says what an equation does to batched operands: `Rows()` if row i of the result depends on row i
of the operands only, `Reduced(kind)` if the full result is the sum (max, ...) of the microbatches' results. It raises
where neither holds. `summand_positions` says in which operands an equation is jointly linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from autopar.compiler import jax_compat as jc
from autopar.compiler.batch_own_rows import is_own_rows
from autopar.compiler.batch_states import SUM
from autopar.errors import NotSplittable, Unsupported


@dataclass(frozen=True, kw_only=True)
class Site:
    """An equation at the full and the doubled batch; the batch axis of each operand (None: it has none)."""

    eqn: jc.JaxprEqn
    doubled: jc.JaxprEqn
    axes: tuple[int | None, ...]
    producers: Mapping[jc.Var, jc.JaxprEqn]
    constants: Mapping[jc.Var, Any]

    def shape(self, operand: int) -> tuple[int, ...]:
        return tuple(self.eqn.invars[operand].aval.shape)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows stay apart. `own_column`: that column of the indices holds each row's own number."""

    own_column: int | None = None


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """The rows are reduced; the operands at `summands` take part in the reduction without being batched."""

    kind: str
    summands: tuple[int, ...] = ()


Verdict = Rows | Reduced


def batch_axes(aval: Any, doubled: Any) -> tuple[int, ...]:
    """The axes along which a value grows with the batch."""
    full, double = getattr(aval, "shape", ()), getattr(doubled, "shape", ())
    return tuple(i for i, (n, m) in enumerate(zip(full, double, strict=True)) if n != m)


def row_verdict(site: Site) -> Verdict:
    """What the equation does to the rows of its batched operands."""
    rule = ROW_RULES.get(site.eqn.primitive.name)
    if rule is None:
        raise Unsupported(
            f"{jc.describe(site.eqn)} has batched operands, and no rule says whether `{site.eqn.primitive.name}` "
            "keeps the examples apart. Write it with other operations, or train without microbatches "
            "(num_microbatches=1)."
        )
    return rule(site)


def refuse(eqn: jc.JaxprEqn, found: str) -> NoReturn:
    """Raise for an equation that mixes the examples of the batch."""
    raise NotSplittable(
        f"{jc.describe(eqn)} {found}. A microbatch has only its own examples, so every operation on the batch must "
        "treat them independently or reduce over them. Apply it along another axis or outside of the train step, or use "
        "num_microbatches=1."
    )


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
        along = {v % ndim for v in (value if isinstance(value, (tuple, list)) else (value,))}
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
    result, double = site.eqn.outvars[0].aval, site.doubled.outvars[0].aval
    axes = batch_axes(result, double)
    if len(axes) == 1 and math.prod(site.shape(0)[:axis]) == math.prod(result.shape[: axes[0]]):
        return Rows()
    refuse(
        site.eqn, "puts the batch inside another dimension, so that a microbatch is no contiguous slice of it"
    )


def _slice(site: Site) -> Verdict:
    (axis,) = (a for a in site.axes if a is not None)
    p, size = site.eqn.params, site.shape(0)[axis]
    strides = p["strides"] or (1,) * len(site.shape(0))
    if (p["start_indices"][axis], p["limit_indices"][axis], strides[axis]) != (0, size, 1):
        refuse(site.eqn, "takes some of the batch's examples by position")
    return Rows()


def _dynamic_slice(site: Site) -> Verdict:
    axis = site.axes[0]
    if axis is None or site.eqn.params["slice_sizes"][axis] != site.shape(0)[axis]:
        refuse(site.eqn, "takes some of the batch's examples by position")
    return Rows()


def _dynamic_update_slice(site: Site) -> Verdict:
    axis, update = site.axes[:2]
    if axis is None:
        refuse(site.eqn, "writes the batch's examples into a value that has no batch axis")
    if update != axis or site.shape(0)[axis] != site.shape(1)[axis]:
        refuse(site.eqn, "overwrites some of the batch's examples by position")
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
    refuse(site.eqn, "combines pairs of the batch's examples, as contrastive losses do")


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
    refuse(site.eqn, "mixes the batch's examples in a convolution")


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


def _gather(site: Site) -> Verdict:
    numbers, (axis, rows) = site.eqn.params["dimension_numbers"], site.axes
    if axis is None:
        return Rows()
    if axis in numbers.operand_batching_dims:
        paired = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(axis)]
        return Rows() if rows == paired else _picks_examples(site)
    if axis in numbers.start_index_map:
        return Rows(own_column=_own_column(site, axis, numbers.start_index_map))
    if axis in numbers.collapsed_slice_dims or site.eqn.params["slice_sizes"][axis] != site.shape(0)[axis]:
        _picks_examples(site)
    if rows is not None:
        refuse(site.eqn, "combines pairs of the batch's examples")
    return Rows()


def _scatter(kind: str | None) -> Callable[[Site], Verdict]:
    """`kind`: the reduction by which rows of updates meet in a value without a batch axis; None if their order counts."""

    def rule(site: Site) -> Verdict:
        numbers, (axis, rows, updates) = site.eqn.params["dimension_numbers"], site.axes
        if axis is None:
            if kind is None or rows is None or updates in numbers.update_window_dims:
                refuse(site.eqn, "writes the batch's examples into a value that has no batch axis")
            return Reduced(kind=kind, summands=(0,))
        if axis in numbers.operand_batching_dims:
            paired = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(axis)]
            return Rows() if rows == paired and updates is not None else _picks_examples(site)
        if axis in numbers.scatter_dims_to_operand_dims:
            return Rows(own_column=_own_column(site, axis, numbers.scatter_dims_to_operand_dims))
        if rows is not None or updates is None or site.shape(2)[updates] != site.shape(0)[axis]:
            refuse(site.eqn, "combines pairs of the batch's examples")
        return Rows()

    return rule


def _own_column(site: Site, axis: int, index_map: tuple[int, ...]) -> int:
    """The column of the indices that selects along the batch axis, if each row selects itself: `x[arange(B), y]`."""
    column, rows = index_map.index(axis), site.axes[1]
    same = rows is not None and site.shape(1)[rows] == site.shape(0)[axis]
    if not same or not is_own_rows(site.eqn.invars[1], rows, column, site.producers, site.constants):
        _picks_examples(site)
    return column


def _picks_examples(site: Site) -> NoReturn:
    refuse(site.eqn, "picks examples of the batch by index")


_ELEMENTWISE = [
    "abs",
    "acos",
    "acosh",
    "add",
    "add_any",
    "and",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "bessel_i0e",
    "bessel_i1e",
    "bitcast_convert_type",
    "cbrt",
    "ceil",
    "clamp",
    "clz",
    "complex",
    "conj",
    "convert_element_type",
    "copy",
    "copy_p",
    "copysign",
    "cos",
    "cosh",
    "debug_callback",
    "debug_print",
    "digamma",
    "div",
    "eq",
    "erf",
    "erf_inv",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "eq_to",
    "floor",
    "ge",
    "gt",
    "igamma",
    "igamma_grad_a",
    "igammac",
    "imag",
    "integer_pow",
    "is_finite",
    "le",
    "le_to",
    "lgamma",
    "log",
    "log1p",
    "log2",
    "logistic",
    "lt",
    "lt_to",
    "max",
    "min",
    "mul",
    "mulhi",
    "name",
    "ne",
    "neg",
    "nextafter",
    "not",
    "one_minus_square",
    "or",
    "polygamma",
    "polynomial",
    "population_count",
    "pow",
    "real",
    "reduce_precision",
    "regularized_incomplete_beta",
    "rem",
    "round",
    "rsqrt",
    "select_n",
    "sharding_constraint",
    "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "stop_gradient",
    "sub",
    "tan",
    "tanh",
    "threefry2x32",
    "xor",
    "zeta",
    "zeros_like",
    "layout_constraint",
    "optimization_barrier",
    "broadcast_in_dim",
    "squeeze",
    "expand_dims",
    "transpose",
    "random_bits",
    "random_clone",
    "random_fold_in",
    "random_seed",
    "random_split",
    "random_unwrap",
    "random_wrap",
]

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
    "reshape": _reshape,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
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
    "gather": _gather,
    "scatter": _scatter(None),
    "scatter-mul": _scatter(None),
    "scatter-add": _scatter(SUM),
    "scatter-sub": _scatter(SUM),
    "scatter-max": _scatter("max"),
    "scatter-min": _scatter("min"),
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

_STRUCTURAL = [
    "broadcast_in_dim",
    "reshape",
    "squeeze",
    "expand_dims",
    "transpose",
    "copy",
    "copy_p",
    "rev",
    "slice",
    "dynamic_slice",
    "gather",
    "sharding_constraint",
    "split",
    "name",
    "layout_constraint",
]

_FIRST = frozenset({0})
_BOTH = frozenset({0, 1})


def summand_positions(eqn: jc.JaxprEqn, kind: str) -> list[frozenset[int]]:
    """The sets of operands in which the equation is jointly linear (or, for max and the like, structural)."""
    name = eqn.primitive.name
    if name in _STRUCTURAL:
        return [_FIRST]
    if name == "concatenate":
        return [frozenset(range(len(eqn.invars)))]
    if name == "select_n":
        return [frozenset(range(1, len(eqn.invars)))]
    if kind != SUM:
        return [_BOTH] if name == kind else [_FIRST] if name == f"reduce_{kind}" else []
    if name in ("div", "convert_element_type") and not _is_inexact(eqn.outvars[0].aval.dtype):
        return []
    return _LINEAR.get(name, [])


def carries_zero(eqn: jc.JaxprEqn, zeros: list[bool]) -> bool:
    """Whether the result is all zeros, given which operands are."""
    if eqn.primitive.name in ("mul", "div", "dot_general", "conv_general_dilated"):
        return False  # zero times infinity is not zero
    return any(all(zeros[i] for i in group) for group in summand_positions(eqn, SUM))


def _is_inexact(dtype: Any) -> bool:
    return (
        bool(np.issubdtype(dtype, np.inexact)) or str(dtype) == "bfloat16" or str(dtype).startswith("float")
    )


_LINEAR: dict[str, list[frozenset[int]]] = {
    **dict.fromkeys(
        [
            "neg",
            "convert_element_type",
            "reduce_sum",
            "cumsum",
            "real",
            "imag",
            "conj",
            "reduce_window_sum",
            "reduce_precision",
            "fft",
            "div",
            "select_and_scatter_add",
            "select_and_gather_add",
        ],
        [_FIRST],
    ),
    **dict.fromkeys(("add", "sub", "add_any", "pad", "complex", "dynamic_update_slice"), [_BOTH]),
    **dict.fromkeys(("mul", "dot_general", "conv_general_dilated"), [_FIRST, frozenset({1})]),
    "scatter-add": [frozenset({0, 2})],
    "scatter-sub": [frozenset({0, 2})],
    "triangular_solve": [frozenset({1})],
}
