"""The rules by which primitives keep the examples of a batch apart, or reduce over them.

`row_verdict` says what an equation does to batched operands: `Rows()` if row i of the result depends on row
i of the operands only, `ReducedBatch(kind)` if the full result is the sum (max, ...) of the microbatches'
results. It raises where neither holds. A primitive without a rule is refused, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NoReturn

from autopar.compiler.frontend.batch_dimensions import batch_axes
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.identity_indices import are_identity_indices
from autopar.compiler.jaxprs.primitives import (
    COPIES,
    CUMULATIVE,
    ELEMENTWISE,
    FACTORIZATIONS,
    KEYS,
    LABELS,
    SELECTIONS,
    WINDOWS,
)
from autopar.compiler.microbatch.states import SUM, ReducedBatch, Rows, Site, Verdict, refuse, shape_of
from autopar.compiler.sharding.primitive_rules import rule_by_hand
from autopar.compiler.sharding.rule import Rule
from autopar.errors import Unsupported


def row_verdict(site: Site) -> Verdict:
    """Return what the equation does to the rows of its batched operands."""
    rule = ROW_RULES.get(site.eqn.primitive.name)
    if rule is not None:
        return rule(site)
    sharding_rule = rule_by_hand(site.eqn)
    if sharding_rule is None:
        raise Unsupported(
            f"{jc.describe(site.eqn)} has batched operands, and no rule says whether "
            f"`{site.eqn.primitive.name}` keeps the examples apart. Write it with other operations, declare a rule "
            "for the function that calls it with autopar.sharding_rule, or train without microbatches "
            "(num_microbatches=1)."
        )
    return _of_sharding_rule(site, sharding_rule)


def _of_sharding_rule(site: Site, rule: Rule) -> Verdict:
    """A microbatch is a shard: the batch must be one factor, of all operands alike, that may be split."""
    dims = [operand[axis] for operand, axis in zip(rule.operands, site.axes, strict=True) if axis is not None]
    factor = dims[0][0]
    everywhere = [axis for operand in rule.operands for axis in operand if factor in axis]
    if everywhere != dims or any(axis != (factor,) for axis in dims) or factor in rule.blocked:
        refuse(site.eqn, "mixes the batch's examples, by its sharding rule")
    return ReducedBatch(kind=rule.reductions[factor]) if factor in rule.reductions else Rows()


def _apart(site: Site) -> Verdict:
    return Rows()


def _reduces(kind: str) -> Callable[[Site], Verdict]:
    def rule(site: Site) -> Verdict:
        (axis,) = {a for a in site.axes if a is not None}
        return ReducedBatch(kind=kind) if axis in jp.dimensions_of(site.eqn) else Rows()

    return rule


def _not_along(what: str) -> Callable[[Site], Verdict]:
    """Rows stay apart unless the equation works along the batch axis."""

    def rule(site: Site) -> Verdict:
        ndim = max(len(site.shape(i)) for i, a in enumerate(site.axes) if a is not None)
        along = {dimension % ndim for dimension in jp.dimensions_of(site.eqn)}
        if any(a in along for a in site.axes):
            refuse(site.eqn, f"{what} the batch")
        return Rows()

    return rule


def _not_in_last(count: Callable[[jc.JaxprEqn], int], what: str) -> Callable[[Site], Verdict]:
    """Rows stay apart if the batch axis precedes the last `count` axes, on which the operation works."""

    def rule(site: Site) -> Verdict:
        for i, axis in enumerate(site.axes):
            if axis is not None and axis >= len(site.shape(i)) - count(site.eqn):
                refuse(site.eqn, f"{what} the batch")
        return Rows()

    return rule


def _ragged_dot(site: Site) -> Verdict:
    if site.axes[0] in jp.ragged_dimensions(site.eqn).ragged:
        refuse(site.eqn, "sorts into groups the batch")
    return _as_sharded(site)


def _as_sharded(site: Site) -> Verdict:
    rule = rule_by_hand(site.eqn)
    assert rule is not None
    return _of_sharding_rule(site, rule)


def _reshape(site: Site) -> Verdict:
    (axis,) = (a for a in site.axes[:1] if a is not None)
    (result,), (other,) = site.eqn.outvars, site.at_other_batch.outvars
    axes = batch_axes(result.aval, other.aval)
    if len(axes) == 1 and math.prod(site.shape(0)[:axis]) == math.prod(shape_of(result)[: axes[0]]):
        return Rows()
    return refuse(site.eqn, "puts the batch inside another dimension, where a microbatch is no contiguous slice")


def _tile(site: Site) -> Verdict:
    axis = site.axes[0]
    if axis is not None and jp.repetitions(site.eqn)[axis] != 1:
        refuse(site.eqn, "repeats the batch")
    return Rows()


def _pad(site: Site) -> Verdict:
    axis = site.axes[0]
    if axis is not None and jp.padding_of(site.eqn)[axis] != (0, 0, 0):
        refuse(site.eqn, "pads the batch")
    return Rows()


def _dot_general(site: Site) -> Verdict:
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = jp.dot_dimensions(site.eqn)
    lhs, rhs = site.axes
    if lhs is None or rhs is None:
        return Rows()
    if (lhs, rhs) in zip(lhs_sum, rhs_sum):
        return ReducedBatch(kind=SUM)
    if (lhs, rhs) in zip(lhs_batch, rhs_batch):
        return Rows()
    return refuse(site.eqn, "combines pairs of the batch's examples, as contrastive losses do")


def _conv(site: Site) -> Verdict:
    conv, at_other_batch, (lhs, rhs) = jp.convolution_of(site.eqn), jp.convolution_of(site.at_other_batch), site.axes
    if lhs == conv.lhs_spec[0] and rhs is None and conv.batch_groups == 1:
        return Rows()
    if lhs == conv.lhs_spec[1] and rhs == conv.rhs_spec[1] and conv.feature_groups == 1:
        return ReducedBatch(kind=SUM)  # the gradient of the kernel contracts the batch
    if rhs == conv.rhs_spec[0]:  # vmap over kernels merges the examples into groups
        if lhs is None and (conv.feature_groups, conv.batch_groups) == (1, 1):
            return Rows()
        if lhs == conv.lhs_spec[1] and site.sizes.in_proportion(conv.feature_groups, at_other_batch.feature_groups):
            return Rows()
        if lhs == conv.lhs_spec[0] and site.sizes.in_proportion(conv.batch_groups, at_other_batch.batch_groups):
            return Rows()
    return refuse(site.eqn, "mixes the batch's examples in a convolution")


def _window(site: Site) -> Verdict:
    (axis,) = {a for a in site.axes if a is not None}
    if jp.window_of(site.eqn).slides_along(axis):
        refuse(site.eqn, "slides a window over the batch")
    return Rows()


# Slices, gathers and scatters


def static_slice(site: Site) -> Verdict:
    (axis,) = (a for a in site.axes if a is not None)
    taken = jp.slice_of(site.eqn)
    if (taken.starts[axis], taken.limits[axis], taken.strides[axis]) != (0, site.shape(0)[axis], 1):
        refuse(site.eqn, "takes some of the batch's examples by position")
    return Rows()


def dynamic_slice(site: Site) -> Verdict:
    axis = site.axes[0]
    if axis is None or shape_of(site.eqn.outvars[0])[axis] != site.shape(0)[axis]:
        refuse(site.eqn, "takes some of the batch's examples by position")
    return Rows()


def dynamic_update_slice(site: Site) -> Verdict:
    axis, update = site.axes[:2]
    if axis is None:
        refuse(site.eqn, "writes the batch's examples into a value that has no batch axis")
    if update != axis or site.shape(0)[axis] != site.shape(1)[axis]:
        refuse(site.eqn, "overwrites some of the batch's examples by position")
    return Rows()


def gather(site: Site) -> Verdict:
    taken, (axis, rows) = jp.gather_of(site.eqn), site.axes
    numbers = taken.numbers
    if axis is None:
        return Rows()
    if axis in numbers.operand_batching_dims:
        paired = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(axis)]
        return Rows() if rows == paired else _picks_examples(site)
    if axis in numbers.start_index_map:
        return Rows(identity_column=_identity_column(site, axis, numbers.start_index_map))
    if axis in numbers.collapsed_slice_dims or taken.slice_sizes[axis] != site.shape(0)[axis]:
        _picks_examples(site)
    if rows is not None:
        refuse(site.eqn, "combines pairs of the batch's examples")
    return Rows()


def scatter(kind: str | None) -> Callable[[Site], Verdict]:
    """Return the rule of a scatter whose updates of several rows meet by `kind` in a value without a batch axis.

    None: their order counts.
    """

    def rule(site: Site) -> Verdict:
        numbers, (axis, rows, updates) = jp.scatter_of(site.eqn).numbers, site.axes
        if axis is None:
            if kind is None or rows is None or updates in numbers.update_window_dims:
                refuse(site.eqn, "writes the batch's examples into a value that has no batch axis")
            return ReducedBatch(kind=kind, summands=(0,))
        if axis in numbers.operand_batching_dims:
            paired = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(axis)]
            return Rows() if rows == paired and updates is not None else _picks_examples(site)
        if axis in numbers.scatter_dims_to_operand_dims:
            return Rows(identity_column=_identity_column(site, axis, numbers.scatter_dims_to_operand_dims))
        if rows is not None or updates is None or site.shape(2)[updates] != site.shape(0)[axis]:
            refuse(site.eqn, "combines pairs of the batch's examples")
        return Rows()

    return rule


def _identity_column(site: Site, axis: int, index_map: tuple[int, ...]) -> int:
    """The column of indices that selects along the batch, if each row selects itself: `x[arange(B), y]`."""
    column, rows = index_map.index(axis), site.axes[1]
    if rows is None or site.shape(1)[rows] != site.shape(0)[axis]:
        _picks_examples(site)
    if not are_identity_indices(site.eqn.invars[1], rows, column, site.producers, site.constants):
        _picks_examples(site)
    return column


def _picks_examples(site: Site) -> NoReturn:
    refuse(site.eqn, "picks examples of the batch by index")


# The rule of each primitive

_APART = (
    ELEMENTWISE
    | LABELS
    | COPIES
    | KEYS
    | {"broadcast_in_dim", "debug_callback", "debug_print", "expand_dims", "optimization_barrier", "random_bits"}
    | {"squeeze", "threefry2x32", "transpose"}
)

ROW_RULES: dict[str, Callable[[Site], Verdict]] = {
    **dict.fromkeys(_APART, _apart),
    "reduce_sum": _reduces(SUM),
    "reduce_max": _reduces("max"),
    "reduce_min": _reduces("min"),
    "reduce_and": _reduces("and"),
    "reduce_or": _reduces("or"),
    "reduce_prod": _not_along("takes the product over"),
    "reduce_xor": _not_along("takes the parity over"),
    "reduce": _not_along("reduces with a function of its own over"),
    "argmax": _not_along("looks for the largest of"),
    "argmin": _not_along("looks for the smallest of"),
    **dict.fromkeys(CUMULATIVE, _not_along("accumulates along")),
    "sort": _not_along("sorts"),
    "top_k": _not_along("looks for the largest of"),
    "rev": _not_along("reverses"),
    "concatenate": _not_along("appends to"),
    "split": _not_along("splits"),
    "stack": _apart,
    "unstack": _not_along("takes apart"),
    "tile": _tile,
    "reshape": _reshape,
    "slice": static_slice,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "pad": _pad,
    "dot_general": _dot_general,
    "conv_general_dilated": _conv,
    "ragged_dot_general": _ragged_dot,
    **dict.fromkeys(WINDOWS | SELECTIONS, _window),
    "gather": gather,
    "scatter": scatter(None),
    "scatter-mul": scatter(None),
    "scatter-add": scatter(SUM),
    "scatter-sub": scatter(SUM),
    "scatter-max": scatter("max"),
    "scatter-min": scatter("min"),
    **dict.fromkeys(FACTORIZATIONS, _not_in_last(lambda _: 2, "factorizes along")),
    "triangular_solve": _as_sharded,
    "lu_pivots_to_permutation": _not_in_last(lambda _: 1, "permutes"),
    "fft": _not_in_last(lambda eqn: len(jp.fft_points(eqn)), "transforms along"),
}
