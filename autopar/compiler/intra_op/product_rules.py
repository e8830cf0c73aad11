"""Sharding rules of convolutions, and of products of matrices in ragged groups.

convolution    ij..,kj..->ik.. sum(j)            batch, features in, features out; the window never
in g groups    i(gj)..,(gk)j..->i(gk)..          whole groups of features
ragged_dot     mk,gkn,g->mn sum(k)               rows belong to one group after the other: m and g never
"""

from __future__ import annotations

from typing import Any

from autopar.compiler.intra_op.rule import Label, Rule, rule_of_labels, shapes_of
from autopar.compiler.jaxprs import compat as jc


def convolution(eqn: jc.JaxprEqn) -> Rule:
    """Batch and features of a convolution; groups are split as a whole, their numbers made local."""
    params: Any = eqn.params
    numbers = params["dimension_numbers"]
    left, right = shapes_of(eqn.invars)
    (result,) = shapes_of(eqn.outvars)
    by_features, by_batch = params["feature_group_count"], params["batch_group_count"]
    groups = max(by_features, by_batch)
    sizes: dict[Label, int] = {
        "group": groups,
        "batch": result[numbers.out_spec[0]],
        "in": right[numbers.rhs_spec[1]],
        "out": right[numbers.rhs_spec[0]] // groups,
    }
    batch: Label = ("group", "batch") if by_batch > 1 else ("batch",)
    features: Label = ("group", "in") if by_features > 1 else ("in",)
    out: Label = ("group", "out")
    # Inside of a group, a part of the features cannot be told from a smaller group.
    blocked = {"out"} if groups > 1 else set[str]()
    return rule_of_labels(
        eqn,
        [
            _placed(numbers.lhs_spec, batch, features, len(left)),
            _placed(numbers.rhs_spec, out, ("in",), len(right)),
        ],
        [_placed(numbers.out_spec, ("batch",), out, len(result))],
        reductions={} if by_features > 1 else {"in": "sum"},
        blocked=blocked | ({"batch"} if by_batch > 1 else set()),
        sizes=sizes,
    )


def _placed(spec: Any, first: Label, second: Label, rank: int) -> list[Label]:
    """Labels at the first two dimensions that a spec names, none at those of the window."""
    labels: list[Label] = [None] * rank
    labels[spec[0]], labels[spec[1]] = first, second
    return labels


def ragged_dot(eqn: jc.JaxprEqn) -> Rule:
    """Everything but the ragged dimension, the groups and the batch."""
    numbers: Any = eqn.params["ragged_dot_dimension_numbers"]
    (left_sum, right_sum), (left_batch, right_batch) = numbers.dot_dimension_numbers
    left, right, groups = shapes_of(eqn.invars)
    ragged = set(numbers.lhs_ragged_dimensions)
    paired = dict(zip(right_sum, left_sum, strict=True)) | dict(zip(right_batch, left_batch, strict=True))
    never = ragged | set(left_batch)

    def of_left(d: int) -> Label:
        return None if d in never else f"left {d}"

    def of_right(d: int) -> Label:
        if d in numbers.rhs_group_dimensions:
            return None
        return of_left(paired[d]) if d in paired else f"right {d}"

    rest_left = [of_left(d) for d in range(len(left)) if d not in (*left_sum, *left_batch)]
    rest_right = [
        of_right(d) for d in range(len(right)) if d not in (*right_sum, *right_batch, *numbers.rhs_group_dimensions)
    ]
    result = [*[None] * len(left_batch), *rest_left, *rest_right]
    (shape,) = shapes_of(eqn.outvars)
    return rule_of_labels(
        eqn,
        [[of_left(d) for d in range(len(left))], [of_right(d) for d in range(len(right))], [None] * len(groups)],
        # Where the summed dimension is ragged, the result has one more: the groups.
        [[*[None] * (len(shape) - len(result)), *result]],
        reductions={f"left {d}": "sum" for d in left_sum},
    )
