"""Count the FLOPs of jaxpr equations, and the bytes that they read and write.

    dot_general, ragged_dot   2 · |lhs| · (free dimensions of rhs): multiplications and additions
    conv_general_dilated      2 · batch · out features · in features per group · Π taps; the taps of a
                              dimension are the pairs (output position, kernel position) that meet an input
                              element, not padding, nor the zeros between in a transposed convolution
    attention in one kernel   2 · width for each pair of a query and a key that it sees, for each of 2 products, of 5
                              for the gradients (the scores anew, and four)
    elementwise               1 for each element of the result, also if transcendental, and for random bits
    reductions, cumulative    1 for each element of the operand; windows: 1 for each element of each window
    sort, top_k               the comparisons: log₂ n, and log₂ (k + 1), for each element
    scatter                   what combines the updates; nothing if they overwrite
    gather, slice, reshape    nothing: they move elements
    factorizations, fft       the leading terms of the textbook's count
    scan, while, cond         length × body; trips × body; the branch with the most
    jit, remat, custom_vjp    what they call; Pallas: grid × body; shard_map: devices × body

A `while` whose trips are unknown counts as one trip, and a primitive that is not known here as elementwise.
Counts are those of whole arrays, before any sharding, and of real numbers: a complex product counts as one.

Bytes are those of the operands and results of each equation, as if nothing were fused. What only picks or
replaces elements reads and writes those alone, and what only renames (reshape, barrier) moves nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.compat import JaxprEqn, open_jaxpr, subjaxprs
from autopar.compiler.jaxprs.primitives import (
    ARGUMENT_REDUCTIONS,
    ATTENTION,
    CALLBACKS,
    CUMULATIVE,
    ELEMENTWISE,
    JOINS,
    LABELS,
    MATRIX_PRODUCTS,
    PRODUCTS,
    REARRANGEMENTS,
    REDUCTIONS,
    RESHAPES,
    SCATTERS,
    WINDOWS,
    names,
)
from autopar.compiler.jaxprs.trip_counts import trip_count

_RENAMES = LABELS | RESHAPES | names("optimization_barrier random_wrap random_unwrap bitcast_convert_type")
_MOVES = (
    REARRANGEMENTS
    | CALLBACKS
    | JOINS
    | _RENAMES
    | names(
        "pad iota compress_gradient compress_gradient_in_blocks convert_element_type get swap empty gather "
        "dynamic_update_slice all_gather all_gather_invariant all_to_all ppermute axis_index program_id num_programs "
        "device_put widen_gradient"
    )
)
_OF_EACH_INPUT = REDUCTIONS | ARGUMENT_REDUCTIONS | CUMULATIVE
_REDUCERS = WINDOWS | {"reduce"}
# Leading terms for matrices of m rows and n columns, m ≥ n (Golub and Van Loan).
_FACTORIZATIONS: dict[str, Callable[[int, int], float]] = {
    "cholesky": lambda m, n: n**3 / 3,
    "lu": lambda m, n: m * n**2 - n**3 / 3,
    "geqrf": lambda m, n: 2 * m * n**2 - 2 * n**3 / 3,
    "householder_product": lambda m, n: 2 * m * n**2 - 2 * n**3 / 3,
    "qr": lambda m, n: 4 * m * n**2 - 4 * n**3 / 3,
    "eigh": lambda m, n: 9 * n**3,
    "eig": lambda m, n: 25 * n**3,
    "svd": lambda m, n: 4 * m**2 * n + 8 * m * n**2 + 9 * n**3,
}


def jaxpr_flops(jaxpr: Any) -> float:
    """FLOPs of all equations of an open or closed jaxpr."""
    return sum((equation_flops(eqn) for eqn in open_jaxpr(jaxpr)[0].eqns), 0.0)


def jaxpr_bytes(jaxpr: Any) -> float:
    """Bytes read and written by all equations of an open or closed jaxpr."""
    return sum((equation_bytes(eqn) for eqn in open_jaxpr(jaxpr)[0].eqns), 0.0)


def flops_where(jaxpr: Any, counted: Callable[[JaxprEqn], bool]) -> float:
    """FLOPs of the equations that `counted` holds for, of those that call a jaxpr what holds inside of it."""
    return sum((_flops_where(eqn, counted) for eqn in open_jaxpr(jaxpr)[0].eqns if counted(eqn)), 0.0)


def product_flops_inside(eqn: JaxprEqn) -> float:
    """FLOPs of the products in what an equation runs: the function that `sharding_rule` was given, or a kernel."""

    def counted(inner: JaxprEqn) -> bool:
        return inner.primitive.name in PRODUCTS or runs_jaxprs(inner)

    if eqn.primitive.name == "declared_rule":
        return flops_where(jp.declared_body(eqn), counted)
    return _called(eqn, lambda body: flops_where(body, counted))


def _flops_where(eqn: JaxprEqn, counted: Callable[[JaxprEqn], bool]) -> float:
    return _called(eqn, lambda body: flops_where(body, counted)) if runs_jaxprs(eqn) else equation_flops(eqn)


def runs_jaxprs(eqn: JaxprEqn) -> bool:
    """Return whether the equation's work is that of jaxprs that it runs, and not its own."""
    return _calls(eqn) and not eqn.primitive.name.startswith("scatter")


_registered: dict[str, Callable[[JaxprEqn], float]] = {}


def register_flops(*primitives: str) -> Callable[[Callable[[JaxprEqn], float]], Callable[[JaxprEqn], float]]:
    """Make a function of an equation the FLOP count of primitives that the table above does not know, by name."""

    def register(count: Callable[[JaxprEqn], float]) -> Callable[[JaxprEqn], float]:
        _registered.update(dict.fromkeys(primitives, count))
        return count

    return register


def registered_flops() -> tuple[tuple[str, Callable[[JaxprEqn], float]], ...]:
    """Return the primitives whose FLOPs were registered, with the functions that count them."""
    return tuple(_registered.items())


def equation_flops(eqn: JaxprEqn) -> float:
    """FLOPs of one equation, as counted by the table above."""
    if (count := _registered.get(eqn.primitive.name)) is not None:
        return count(eqn)
    match eqn.primitive.name:
        case name if name in MATRIX_PRODUCTS:
            return _dot_flops(eqn)
        case name if name in SCATTERS:
            return _scatter_flops(eqn)
        case name if name in ATTENTION:
            return attention_flops(eqn, jp.attention_of(eqn).pairs)
        case "declared_rule":
            return jaxpr_flops(jp.declared_body(eqn))
        case "conv_general_dilated":
            return _convolution_flops(eqn)
        case "reduce":
            return _size(eqn.invars[0]) * jaxpr_flops(next(subjaxprs(eqn)))
        case "select_and_scatter_add" | "select_and_gather_add":
            # A comparison for each element of a window, and the addition of what was selected.
            return _size(eqn.invars[0]) * (math.prod(jp.window_of(eqn).sizes) + 1)
        case "sort":
            (dimension,) = jp.dimensions_of(eqn)
            return _size(eqn.invars[0]) * _log2(_shape(eqn.invars[0])[dimension])
        case "top_k":
            (dimension,) = jp.dimensions_of(eqn)
            return _size(eqn.invars[0]) * _log2(_shape(eqn.outvars[0])[dimension] + 1)
        case "triangular_solve":
            return _size(eqn.invars[1]) * _shape(eqn.invars[0])[-1]
        case "fft":
            return _fft_flops(eqn)
        case _:
            return _simple_flops(eqn)


def equation_bytes(eqn: JaxprEqn) -> float:
    """Bytes that one equation reads and writes; an operand that is read twice counts once."""
    name = eqn.primitive.name
    operands = {id(v): aval_bytes(v.aval) for v in eqn.invars}
    results = float(sum(aval_bytes(v.aval) for v in eqn.outvars))
    if name in _RENAMES:
        return 0.0
    if name.startswith("scatter"):
        indices, updates = (aval_bytes(v.aval) for v in eqn.invars[1:3])
        return indices + updates * (2 if name == "scatter" else 3)
    match name:
        case "slice":
            return 2 * results
        case "gather" | "dynamic_slice":
            return 2 * results + sum(aval_bytes(v.aval) for v in eqn.invars[1:])
        case "dynamic_update_slice":
            update, *indices = (aval_bytes(v.aval) for v in eqn.invars[1:])
            return 2.0 * update + sum(indices)
        case _ if _calls(eqn) and name != "pallas_call":
            return _called(eqn, jaxpr_bytes)
        case _:
            return sum(operands.values()) + results


def aval_bytes(aval: Any) -> int:
    """Bytes of an array of this shape and dtype: half for int4, a key its words, a token 0."""
    aval = getattr(aval, "inner_aval", aval)  # a reference is as large as what it refers to
    if not hasattr(aval, "dtype"):
        return 0
    return (math.prod(aval.shape) * _bits(aval.dtype) + 7) // 8


@functools.cache
def _bits(dtype: Any) -> int:
    if jnp.issubdtype(dtype, jnp.integer):
        return int(jnp.iinfo(dtype).bits)
    if jnp.issubdtype(dtype, jnp.floating):
        return int(cast(Any, jnp.finfo(dtype)).bits)
    return 8 * int(dtype.itemsize)


def _shape(var: Any) -> tuple[int, ...]:
    aval = getattr(var.aval, "inner_aval", var.aval)
    return tuple(getattr(aval, "shape", ()))


def _size(var: Any) -> float:
    return float(math.prod(_shape(var)))


def _log2(count: int) -> float:
    """Rounds of comparisons among `count` elements."""
    return float(math.ceil(math.log2(count))) if count > 1 else 0.0


def _simple_flops(eqn: JaxprEqn) -> float:
    """FLOPs of what needs no rule of its own."""
    name = eqn.primitive.name
    if name in _MOVES:
        return 0.0
    if name in ELEMENTWISE:
        return sum([_size(v) for v in eqn.outvars])
    if name in _OF_EACH_INPUT:
        return _size(eqn.invars[0])
    if name in WINDOWS:
        each = jaxpr_flops(next(subjaxprs(eqn))) if name == "reduce_window" else 1
        return _size(eqn.outvars[0]) * math.prod(jp.window_of(eqn).sizes) * each
    if name in _FACTORIZATIONS:
        *batch, rows, columns = _shape(eqn.invars[0])
        return math.prod(batch) * float(_FACTORIZATIONS[name](max(rows, columns), min(rows, columns)))
    if _calls(eqn):
        return _called(eqn, jaxpr_flops)
    return sum(_size(v) for v in eqn.outvars)


def _dot_flops(eqn: JaxprEqn) -> float:
    """A ragged dimension is divided among the groups, so that they together cost as much as one dot."""
    (_, contracted), (_, batch) = jp.dot_dimensions(eqn)
    bound = {*contracted, *batch, *jp.ragged_dimensions(eqn).groups}
    free = math.prod(size for axis, size in enumerate(_shape(eqn.invars[1])) if axis not in bound)
    return 2 * _size(eqn.invars[0]) * free


def attention_flops(eqn: JaxprEqn, pairs: float) -> float:
    """FLOPs of the products in a kernel of attention that meets so many pairs of a query and a key for each head."""
    kernel = jp.attention_of(eqn)
    by_keys, by_values = (3, 2) if kernel.backward else (1, 1)
    widths = by_keys * kernel.width + by_values * kernel.value_width
    return 2.0 * kernel.batch * kernel.heads * pairs * widths


def _convolution_flops(eqn: JaxprEqn) -> float:
    conv = jp.convolution_of(eqn)
    specs = (conv.lhs_spec, conv.rhs_spec, conv.out_spec)
    lhs, rhs, out = (_in_order(_shape(var), spec) for var, spec in zip((*eqn.invars, *eqn.outvars), specs, strict=True))
    taps = 1
    for dimension in range(len(conv.strides)):
        taps *= _taps(
            lhs[2 + dimension],
            rhs[2 + dimension],
            out[2 + dimension],
            stride=conv.strides[dimension],
            padding=conv.padding[dimension][0],
            lhs_dilation=conv.lhs_dilation[dimension],
            rhs_dilation=conv.rhs_dilation[dimension],
        )
    return 2.0 * out[0] * out[1] * rhs[1] * taps


def _in_order(shape: tuple[int, ...], order: Sequence[int]) -> list[int]:
    """Sizes as (batch, features, spatial...), or (out features, in features, spatial...) of a kernel."""
    return [shape[axis] for axis in order]


def _taps(
    size: int, kernel: int, results: int, *, stride: int, padding: int, lhs_dilation: int, rhs_dilation: int
) -> int:
    """Pairs of an output and a kernel position that meet an element of the input along one dimension."""
    positions = np.arange(results)[:, None] * stride + np.arange(kernel) * rhs_dilation - padding
    inside = (positions >= 0) & (positions <= (size - 1) * lhs_dilation)
    return int(np.count_nonzero(inside & (positions % lhs_dilation == 0)))


def _scatter_flops(eqn: JaxprEqn) -> float:
    if (combine := jp.scatter_of(eqn).combine) is not None:
        return _size(eqn.invars[2]) * jaxpr_flops(combine)
    return 0.0 if eqn.primitive.name == "scatter" else _size(eqn.invars[2])


def _fft_flops(eqn: JaxprEqn) -> float:
    points = max(_size(eqn.invars[0]), _size(eqn.outvars[0]))
    avals: list[Any] = [eqn.invars[0].aval, eqn.outvars[0].aval]
    real = any(aval.dtype.kind != "c" for aval in avals)
    return (2.5 if real else 5.0) * points * math.log2(max(math.prod(jp.fft_points(eqn)), 1))


def _calls(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name not in _REDUCERS and next(subjaxprs(eqn), None) is not None


def _called(eqn: JaxprEqn, count: Callable[[Any], float]) -> float:
    """The sum of `count` over the jaxprs that the equation runs, as often as it runs them."""
    match eqn.primitive.name:
        case "scan":
            loop = jp.scan_of(eqn)
            return loop.length * count(loop.body)
        case "while":
            trips, loop = trip_count(eqn), jp.while_of(eqn)
            return trips * count(loop.body) + (trips + 1) * count(loop.cond)
        case "cond":
            return max(map(count, jp.branches_of(eqn)))
        case "custom_linear_solve":
            return count(jp.linear_solver(eqn))
        case "pallas_call":
            # A dimension of the grid that is known at run time only counts once.
            return math.prod(jp.kernel_grid(eqn)) * count(next(subjaxprs(eqn)))
        case "shard_map":
            return math.prod(jp.manual_axes(eqn).values()) * count(next(subjaxprs(eqn)))
        case _:
            return sum((count(jaxpr) for jaxpr in subjaxprs(eqn)), 0.0)
