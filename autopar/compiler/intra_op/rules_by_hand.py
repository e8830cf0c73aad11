"""Sharding rules of the primitives that Shardy knows nothing about, or of which it promises less than a `Rule` does.

Shardy's rules say along which dimensions a partitioner may communicate; ours say which primitives need no
communication. They differ wherever a primitive looks at positions: slices, scans along a dimension, windows, indices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from autopar.compiler.intra_op.declared_rules import declared_rule
from autopar.compiler.intra_op.factors import reshaped
from autopar.compiler.intra_op.index_rules import gather, scatter
from autopar.compiler.intra_op.product_rules import convolution, ragged_dot
from autopar.compiler.intra_op.rule import Label, Rule, blocked_rule, rule_of_labels, shapes_of
from autopar.compiler.jaxprs import compat as jc


def rule_by_hand(eqn: jc.JaxprEqn) -> Rule | None:
    """The rule of an equation whose primitive has one written here."""
    make = _RULES.get(eqn.primitive.name)
    return make(eqn) if make else None


def elementwise(eqn: jc.JaxprEqn) -> Rule:
    """Operands and results of one shape; scalars go with every element."""
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


def _along_parameter(name: str) -> Callable[[jc.JaxprEqn], Rule]:
    """Mixes the dimension, or dimensions, that a parameter names."""

    def rule(eqn: jc.JaxprEqn) -> Rule:
        value: Any = eqn.params[name]
        return _along_dimensions(eqn, value if isinstance(value, (tuple, list)) else (value,))

    return rule


def _along_last(eqn: jc.JaxprEqn) -> Rule:
    return _along_dimensions(eqn, (eqn.params.get("axis", eqn.params.get("dimension", -1)),))


def _padded(eqn: jc.JaxprEqn) -> Rule:
    config: Any = eqn.params["padding_config"]
    return _along_dimensions(eqn, [d for d, padding in enumerate(config) if any(padding)])


def _windows(eqn: jc.JaxprEqn) -> Rule:
    """Reductions over windows: a dimension whose windows are single elements, each in its place, is left alone."""
    rank = len(shapes_of(eqn.outvars)[0])
    trivial: dict[str, Any] = {
        "window_dimensions": 1,
        "window_strides": 1,
        "base_dilation": 1,
        "window_dilation": 1,
        "padding": (0, 0),
    }

    def is_touched(d: int) -> bool:
        return any(name in eqn.params and eqn.params[name][d] != value for name, value in trivial.items())

    return _along_dimensions(eqn, [d for d in range(rank) if is_touched(d)])


def _transformed(eqn: jc.JaxprEqn) -> Rule:
    count = len(eqn.params["fft_lengths"])
    return _along_dimensions(eqn, range(-count, 0))


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


def _iota(eqn: jc.JaxprEqn) -> Rule:
    operands, results = shapes_of(eqn.invars), shapes_of(eqn.outvars)
    return rule_of_labels(eqn, [(None,) * len(s) for s in operands], [range(len(s)) for s in results], creates=True)


def _replicated(eqn: jc.JaxprEqn) -> Rule:
    return blocked_rule(eqn, "by hand")


_RULES: dict[str, Callable[[jc.JaxprEqn], Rule]] = {
    **dict.fromkeys(
        (
            "bessel_i0e", "bessel_i1e", "digamma", "igamma", "igammac", "igamma_grad_a", "lgamma", "philox2x32",
            "philox4x32", "polygamma", "random_gamma_grad", "regularized_incomplete_beta", "threefry2x32",
            "threefry4x32", "zeta",
        ),
        elementwise,
    ),
    **dict.fromkeys(
        (
            "copy", "copy_p", "device_put", "layout_constraint", "name", "optimization_barrier", "sharding_constraint",
        ),
        _each_apart,
    ),
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "split"), _along_parameter("axis")),
    **dict.fromkeys(("concatenate", "sort"), _along_parameter("dimension")),
    "rev": _along_parameter("dimensions"),
    "top_k": _along_last,
    "approx_top_k": _along_parameter("reduction_dimension"),
    "fft": _transformed,
    **dict.fromkeys(("dynamic_slice", "dynamic_update_slice", "slice"), elementwise),
    "pad": _padded,
    **dict.fromkeys(
        (
            "reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum", "select_and_gather_add",
            "select_and_scatter", "select_and_scatter_add",
        ),
        _windows,
    ),
    **dict.fromkeys(
        (
            "cholesky", "cholesky_update", "eig", "eigh", "geqp3", "geqrf", "hessenberg", "householder_product", "lu",
            "ormqr", "qr", "schur", "svd", "symmetric_product", "triangular_solve", "tridiagonal",
        ),
        _each_matrix(2),
    ),
    **dict.fromkeys(("lu_pivots_to_permutation", "tridiagonal_solve"), _each_matrix(1)),
    **dict.fromkeys(("iota", "random_bits"), _iota),
    **dict.fromkeys(
        (
            "random_clone", "random_fold_in", "random_gamma", "random_seed", "random_split", "random_unwrap",
            "random_wrap", "rng_bit_generator", "rng_uniform", "sharding_constraint_in_manual",
        ),
        _replicated,
    ),
    "declared_rule": declared_rule,
    "reshape": reshaped,
    "gather": gather,
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"), scatter
    ),
    "conv_general_dilated": convolution,
    "ragged_dot_general": ragged_dot,
}  # fmt: skip
