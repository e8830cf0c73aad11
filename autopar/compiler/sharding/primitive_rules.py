"""Sharding rules of the primitives that Shardy knows nothing about, or of which it promises less than a `Rule` does.

Shardy's rules say along which dimensions a partitioner may communicate; ours say which primitives need no
communication. They differ wherever a primitive looks at positions: slices, scans along a dimension, windows, indices.

The primitives that most equations have are here as well, with the rules that Shardy gives them: to lower hundreds of
equations, of a step that is traced for the first time, takes longer than all else that is asked about them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.primitives import (
    ATTENTION,
    COPIES,
    CUMULATIVE,
    ELEMENTWISE,
    FACTORIZATIONS,
    REDUCTIONS,
    SCATTERS,
    SELECTIONS,
    SORTS,
    WINDOWS,
    names,
)
from autopar.compiler.sharding.attention_rules import attention_rule
from autopar.compiler.sharding.declared_rules import declared_rule
from autopar.compiler.sharding.rule import Label, Rule, adds_up, blocked_rule, reshaped, rule_of_labels, shapes_of

MakeRule = Callable[[jc.JaxprEqn], Rule]
_RULES: dict[str, MakeRule] = {}


def register_rule(*primitives: str) -> Callable[[MakeRule], MakeRule]:
    """Make a function of an equation the rule of these primitives, by name: `@register_rule("gather")`.

    For a primitive of a user's own there is `rule_lookup:register_sharding_rule`.
    """

    def register(make: MakeRule) -> MakeRule:
        assert not (known := _RULES.keys() & set(primitives)), f"{sorted(known)} have a sharding rule already"
        _RULES.update(dict.fromkeys(primitives, make))
        return make

    return register


def has_rule(primitive: str) -> bool:
    """Return whether a rule is registered for the primitive of this name."""
    return primitive in _RULES


def registered_rules() -> tuple[tuple[str, MakeRule], ...]:
    """Return the primitives that have a rule, with the functions that make them."""
    return tuple(_RULES.items())


def rule_by_hand(eqn: jc.JaxprEqn) -> Rule | None:
    """The rule of an equation whose primitive has one registered; None for the others."""
    make = _RULES.get(eqn.primitive.name)
    return make(eqn) if make else None


# The equations of which programs mostly consist: elements apart, dimensions rearranged, products and sums

_SUMMANDS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min"}


@register_rule(
    *ELEMENTWISE
    - names(
        "bessel_i0e bessel_i1e bitcast_convert_type compress_gradient compress_gradient_in_blocks digamma igamma "
        "igammac igamma_grad_a lgamma polygamma regularized_incomplete_beta zeta"
    ),
    "stop_gradient",
)
def _at_each_place(eqn: jc.JaxprEqn) -> Rule:
    """Dimensions of one place are one, or of size 1; scalars go with every element."""
    operands, results = ([range(len(shape)) for shape in shapes_of(side)] for side in (eqn.invars, eqn.outvars))
    return rule_of_labels(eqn, operands, results)


@register_rule("transpose")
def _transposed(eqn: jc.JaxprEqn) -> Rule:
    order = jp.permutation_of(eqn)
    return rule_of_labels(eqn, [range(len(order))], [order])


@register_rule("broadcast_in_dim")
def _spread(eqn: jc.JaxprEqn) -> Rule:
    (result,) = shapes_of(eqn.outvars)
    sizes = [jp.broadcast_dimensions(eqn), *[()] * (len(eqn.invars) - 1)]
    return rule_of_labels(eqn, sizes, [range(len(result))], creates=True)


@register_rule("tile")
def _repeated(eqn: jc.JaxprEqn) -> Rule:
    """Repeat a single element as a broadcast does; repeats of several elements leave no part of them in its place."""
    (shape,), repetitions = shapes_of(eqn.invars), jp.repetitions(eqn)
    labels = [d if size == 1 or repetitions[d] == 1 else None for d, size in enumerate(shape)]
    return rule_of_labels(eqn, [labels], [labels], creates=True)


@register_rule(*REDUCTIONS)
def _reduced(eqn: jc.JaxprEqn) -> Rule:
    """Combine parts of sums and of the greatest or least; other reductions see the whole dimension."""
    (shape,) = shapes_of(eqn.invars)
    gone, kind = jp.dimensions_of(eqn), _SUMMANDS.get(eqn.primitive.name)
    reductions: dict[Label, str] = dict.fromkeys(gone, kind) if kind and adds_up(eqn.outvars[0]) else {}
    kept = [d for d in range(len(shape)) if d not in gone]
    return rule_of_labels(eqn, [range(len(shape))], [kept], reductions=reductions)


@register_rule("dot_general")
def _product(eqn: jc.JaxprEqn) -> Rule:
    """Batch, rows and columns stand in the result; the rest is summed over."""
    (left_sum, right_sum), (left_batch, right_batch) = jp.dot_dimensions(eqn)
    left, right = (len(shape) for shape in shapes_of(eqn.invars))
    paired = dict(zip((*right_sum, *right_batch), (*left_sum, *left_batch), strict=True))
    of_right = [paired[d] if d in paired else left + d for d in range(right)]
    rows = [d for d in range(left) if d not in (*left_sum, *left_batch)]
    columns = [label for label in of_right if label >= left]
    reductions: dict[Label, str] = dict.fromkeys(left_sum, "sum") if adds_up(eqn.outvars[0]) else {}
    return rule_of_labels(eqn, [range(left), of_right], [[*left_batch, *rows, *columns]], reductions=reductions)


# Gather and scatter
#
# Three kinds of dimensions can be split. A window that covers a dimension of the array goes along with it. A dimension
# of the indices is one of the result of a gather, or of a scatter's updates. An array that is split along a dimension
# that the indices name has the rows wanted here and there:
#
#     gather        wi,jx->ji sum(w)     a device takes the rows that are its own, and zeros for the others
#     scatter-add   wi,jx,ji->wi sum(j)  a device drops the updates for rows of others, and adds those that it has


@register_rule("gather")
def _gather(eqn: jc.JaxprEqn) -> Rule:
    """Slices of an array at indices."""
    array, indices = shapes_of(eqn.invars)
    (result,) = shapes_of(eqn.outvars)
    numbers, sizes, *_ = jp.gather_of(eqn)
    batching = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))

    def of_array(d: int) -> Label:
        if d in batching:
            return f"index {batching[d]}"
        if sizes[d] == array[d]:
            return f"window {d}"
        return f"place {d}" if sizes[d] == 1 and d in numbers.start_index_map and adds_up(eqn.outvars[0]) else None

    windows = _outside(len(array), numbers.collapsed_slice_dims, batching)
    named = dict(zip(numbers.offset_dims, windows, strict=True))
    batch = iter(_index_labels(indices))
    return rule_of_labels(
        eqn,
        [[of_array(d) for d in range(len(array))], [*_index_labels(indices), None]],
        [[_window(named[d], sizes[named[d]], array) if d in named else next(batch) for d in range(len(result))]],
        reductions={f"place {d}": "sum" for d in range(len(array))},
    )


@register_rule(*SCATTERS)
def _scatter(eqn: jc.JaxprEqn) -> Rule:
    """An array with updates written, or added, to slices of it; only what is added may come from several devices."""
    array, indices, updates = shapes_of(eqn.invars)
    numbers = jp.scatter_of(eqn).numbers
    batching = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    windows = _outside(len(array), numbers.inserted_window_dims, batching)
    named = dict(zip(numbers.update_window_dims, windows, strict=True))
    sizes = {named[u]: updates[u] for u in named}

    def of_array(d: int) -> Label:
        if d in batching:
            return f"index {batching[d]}"
        return _window(d, sizes[d], array) if d in sizes else f"place {d}"

    batch = iter(_index_labels(indices))
    array_labels = [of_array(d) for d in range(len(array))]
    adds = eqn.primitive.name == "scatter-add" and adds_up(eqn.outvars[0])
    rows = [label for k, label in enumerate(_index_labels(indices)) if k not in batching.values()]
    return rule_of_labels(
        eqn,
        [
            array_labels,
            [*_index_labels(indices), None],
            [_window(named[u], updates[u], array) if u in named else next(batch) for u in range(len(updates))],
        ],
        [array_labels],
        reductions=dict.fromkeys(rows, "sum") if adds else {},
    )


def _index_labels(indices: tuple[int, ...]) -> list[str]:
    """All dimensions of the indices but the last, along which the coordinates of one index stand."""
    return [f"index {k}" for k in range(len(indices) - 1)]


def _window(d: int, size: int, array: tuple[int, ...]) -> Label:
    return f"window {d}" if size == array[d] else None


def _outside(rank: int, *dims: Any) -> list[int]:
    inside = {d for group in dims for d in group}
    return [d for d in range(rank) if d not in inside]


# Convolutions, and products of matrices in ragged groups
#
# convolution    ij..,kj..->ik.. sum(j)            batch, features in, features out; the window never
# in g groups    i(gj)..,(gk)j..->i(gk)..          whole groups of features
# ragged_dot     mk,gkn,g->mn sum(k)               rows belong to one group after the other: g never; of m a device has
#                                                  those rows of each group that are its own


@register_rule("conv_general_dilated")
def _convolution(eqn: jc.JaxprEqn) -> Rule:
    """Batch and features of a convolution; groups are split as a whole, their numbers made local."""
    conv = jp.convolution_of(eqn)
    left, right = shapes_of(eqn.invars)
    (result,) = shapes_of(eqn.outvars)
    by_features, by_batch = conv.feature_groups, conv.batch_groups
    groups = max(by_features, by_batch)
    sizes: dict[Label, int] = {
        "group": groups,
        "batch": result[conv.out_spec[0]],
        "in": right[conv.rhs_spec[1]],
        "out": right[conv.rhs_spec[0]] // groups,
    }
    batch: Label = ("group", "batch") if by_batch > 1 else ("batch",)
    features: Label = ("group", "in") if by_features > 1 else ("in",)
    out: Label = ("group", "out")
    # Inside of a group, a part of the features cannot be told from a smaller group.
    blocked = {"out"} if groups > 1 else set[str]()
    return rule_of_labels(
        eqn,
        [
            _placed(conv.lhs_spec, batch, features, len(left)),
            _placed(conv.rhs_spec, out, ("in",), len(right)),
        ],
        [_placed(conv.out_spec, ("batch",), out, len(result))],
        reductions={} if by_features > 1 else {"in": "sum"},
        blocked=blocked | ({"batch"} if by_batch > 1 else set()),
        sizes=sizes,
    )


def _placed(spec: Any, first: Label, second: Label, rank: int) -> list[Label]:
    """Labels at the first two dimensions that a spec names, none at those of the window."""
    labels: list[Label] = [None] * rank
    labels[spec[0]], labels[spec[1]] = first, second
    return labels


@register_rule("ragged_dot_general")
def _ragged_dot(eqn: jc.JaxprEqn) -> Rule:
    """Everything but the groups and the batch; the ragged dimension where all of the batch has the same groups."""
    (left_sum, right_sum), (left_batch, right_batch) = jp.dot_dimensions(eqn)
    ragged, by_group = jp.ragged_dimensions(eqn)
    left, right, groups = shapes_of(eqn.invars)
    paired = dict(zip(right_sum, left_sum, strict=True)) | dict(zip(right_batch, left_batch, strict=True))
    never = {*left_batch, *(ragged if len(groups) > 1 or len(ragged) != 1 else ())}

    def of_left(d: int) -> Label:
        return None if d in never else f"left {d}"

    def of_right(d: int) -> Label:
        if d in by_group:
            return None
        return of_left(paired[d]) if d in paired else f"right {d}"

    rest_left = [of_left(d) for d in range(len(left)) if d not in (*left_sum, *left_batch)]
    rest_right = [of_right(d) for d in range(len(right)) if d not in (*right_sum, *right_batch, *by_group)]
    result = [*[None] * len(left_batch), *rest_left, *rest_right]
    (shape,) = shapes_of(eqn.outvars)
    return rule_of_labels(
        eqn,
        [[of_left(d) for d in range(len(left))], [of_right(d) for d in range(len(right))], [None] * len(groups)],
        # Where the summed dimension is ragged, the result has one more: the groups.
        [[*[None] * (len(shape) - len(result)), *result]],
        reductions={f"left {d}": "sum" for d in left_sum},
    )


# Dimensions that stand at the same place in all arrays


@register_rule(
    *names(
        "bessel_i0e bessel_i1e digamma dynamic_slice dynamic_update_slice igamma igammac igamma_grad_a lgamma "
        "philox2x32 philox4x32 polygamma random_gamma_grad regularized_incomplete_beta slice threefry2x32 "
        "threefry4x32 zeta"
    )
)
def _elementwise(eqn: jc.JaxprEqn) -> Rule:
    """Operands and results of one shape, where they are cut to no less; scalars go with every element."""
    return _along_dimensions(eqn, ())


def _along_dimensions(eqn: jc.JaxprEqn, touched: Collection[int]) -> Rule:
    """Arrays with the same dimensions, of which the equation mixes the `touched` ones and those that change in size."""
    shapes = [shape for shape in shapes_of([*eqn.invars, *eqn.outvars]) if shape]
    rank = max(map(len, shapes), default=0)
    assert all(len(shape) == rank for shape in shapes), (jc.describe(eqn), shapes)
    touched = {dimension % rank for dimension in touched} if rank else set()
    kept = [len({shape[d] for shape in shapes}) == 1 and d not in touched for d in range(rank)]

    def labels(shape: tuple[int, ...]) -> list[Label]:
        return [d if kept[d] else None for d in range(len(shape))]

    operands, results = ([labels(shape) for shape in shapes_of(side)] for side in (eqn.invars, eqn.outvars))
    return rule_of_labels(eqn, operands, results)


@register_rule(*CUMULATIVE, *SORTS, "concatenate", "rev", "split")
def _mixed(eqn: jc.JaxprEqn) -> Rule:
    """Mixes the dimensions along which it works."""
    return _along_dimensions(eqn, jp.dimensions_of(eqn))


@register_rule("pad")
def _padded(eqn: jc.JaxprEqn) -> Rule:
    return _along_dimensions(eqn, [d for d, padding in enumerate(jp.padding_of(eqn)) if any(padding)])


@register_rule(*WINDOWS, *SELECTIONS)
def _windows(eqn: jc.JaxprEqn) -> Rule:
    """Reductions over windows: a dimension whose windows are single elements, each in its place, is left alone."""
    window = jp.window_of(eqn)
    return _along_dimensions(eqn, [d for d in range(len(window.sizes)) if window.slides_along(d)])


@register_rule("fft")
def _transformed(eqn: jc.JaxprEqn) -> Rule:
    return _along_dimensions(eqn, range(-len(jp.fft_points(eqn)), 0))


@register_rule(*COPIES, *names("device_put layout_constraint name optimization_barrier sharding_constraint"))
def _each_apart(eqn: jc.JaxprEqn) -> Rule:
    """Result i is operand i."""
    operands = [[f"{i}.{d}" for d in range(len(shape))] for i, shape in enumerate(shapes_of(eqn.invars))]
    return rule_of_labels(eqn, operands, operands)


def _each_matrix(core: int) -> Callable[[jc.JaxprEqn], Rule]:
    """Does the same to every item of a batch, whose dimensions come first; items of the first operand have `core`."""

    def rule(eqn: jc.JaxprEqn) -> Rule:
        operands, results = shapes_of(eqn.invars), shapes_of(eqn.outvars)
        batch = len(operands[0]) - core

        def labels(shape: tuple[int, ...]) -> list[Label]:
            return [d if d < batch else None for d in range(len(shape))]

        return rule_of_labels(eqn, list(map(labels, operands)), list(map(labels, results)))

    return rule


register_rule(*FACTORIZATIONS - {"triangular_solve"})(_each_matrix(2))
register_rule("lu_pivots_to_permutation", "tridiagonal_solve")(_each_matrix(1))


@register_rule("triangular_solve")
def _triangular_solve(eqn: jc.JaxprEqn) -> Rule:
    """Every matrix of a batch, and every right side of one."""
    matrices, sides = shapes_of(eqn.invars)
    batch: list[Label] = [*range(len(matrices) - 2)]
    own = len(sides) - (1 if jp.solves_from_left(eqn) else 2)
    labels = [*batch, *("sides" if d == own else None for d in range(len(batch), len(sides)))]
    return rule_of_labels(eqn, [[*batch, None, None], labels], [labels])


@register_rule("iota", "random_bits")
def _iota(eqn: jc.JaxprEqn) -> Rule:
    operands, results = shapes_of(eqn.invars), shapes_of(eqn.outvars)
    return rule_of_labels(eqn, [(None,) * len(s) for s in operands], [range(len(s)) for s in results], creates=True)


@register_rule(
    *names(
        "random_clone random_fold_in random_gamma random_seed random_split random_unwrap random_wrap rng_bit_generator "
        "rng_uniform sharding_constraint_in_manual"
    )
)
def _replicated(eqn: jc.JaxprEqn) -> Rule:
    return blocked_rule(eqn, "by hand")


register_rule(*ATTENTION)(attention_rule)
register_rule("declared_rule")(declared_rule)
register_rule("reshape")(reshaped)
