"""How one equation uses axis 0, and how it runs piece by piece along it.

An equation that keeps rows apart (or sums them, moves them, loops over them) has an axis of its own, and
each value that carries it a place there:

    row p of the value  =  row  ratio · p + offset  of the axis                  → Link

    mul a b             all three: ratio 1, offset 0         slice x[2:4]        result: offset 2
    concatenate a b     b: offset len(a)                     reshape (4,3)->(12) operand: ratio 3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial, reduce
from itertools import pairwise
from typing import Any

from autopar.compiler.jaxprs.compat import JaxprEqn, bind_equation, under_scope_of
from autopar.compiler.layer_pieces import Zeros, filled, piecewise, rows, whole

__all__ = ["Apply", "Bounds", "Link", "Rule", "dtype_of", "independent", "reduction", "shape_of", "size_of"]

Bounds = tuple[int, ...]
Apply = Callable[[Sequence[Any], Sequence[Bounds]], list[Any]]


@dataclass(frozen=True, kw_only=True)
class Link:
    """Where a value (a variable or literal of the equation) lies on one of the equation's axes."""

    value: Any
    axis: int = 0
    offset: int = 0
    ratio: Fraction = Fraction(1)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How an equation runs on pieces: `apply(operands, bounds of each axis) -> results`."""

    lengths: tuple[int, ...]
    links: tuple[Link, ...]
    apply: Apply


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of a variable or literal; () for what has none (a token)."""
    return tuple(getattr(value.aval, "shape", ()))


def dtype_of(value: Any) -> Any:
    """The dtype of a variable or literal; None for what has none."""
    return getattr(value.aval, "dtype", None)


def size_of(value: Any) -> int | None:
    """The length of axis 0; None of a scalar."""
    return next(iter(shape_of(value)), None)


def independent(eqn: JaxprEqn, carries: Sequence[bool] | None = None) -> Rule | None:
    """Operands that carry the axis are read by piece, the others whole; all results carry it."""
    carries = [True] * len(eqn.invars) if carries is None else carries
    carriers = [*(v for v, carried in zip(eqn.invars, carries) if carried), *eqn.outvars]
    lengths = {size_of(v) for v in carriers}
    if len(lengths) != 1 or None in lengths:
        return None
    return Rule(
        lengths=tuple(length for length in lengths if length is not None),
        links=tuple(Link(value=v) for v in carriers),
        apply=partial(_apply_independent, eqn, carries),
    )


def _apply_independent(
    eqn: JaxprEqn, carries: Sequence[bool], args: Sequence[Any], bounds: Sequence[Bounds]
) -> list[Any]:
    pieces = [_run(eqn, carries, args, start, stop) for start, stop in pairwise(bounds[0])]
    with under_scope_of(eqn):
        return [piecewise(bounds[0], values) for values in zip(*pieces)]


def _run(eqn: JaxprEqn, carries: Sequence[bool], args: Sequence[Any], start: int, stop: int) -> list[Any]:
    """The equation on the rows `[start, stop)` of what carries its axis."""
    with under_scope_of(eqn):
        cut = [rows(x, start, stop) if carried else whole(x) for x, carried in zip(args, carries)]
        if eqn.primitive.name in ("add", "add_any") and all(carries):
            terms = [x for x in cut if not isinstance(x, Zeros)]
            if len(terms) < len(cut):
                return terms or [cut[0]]
        cut = [filled(x) for x in cut]
    return bind_equation(eqn, cut, _params_of_piece(eqn, stop - start))


def _params_of_piece(eqn: JaxprEqn, size: int) -> dict[str, Any]:
    if eqn.primitive.name in ("broadcast_in_dim", "iota"):
        return dict(eqn.params, shape=(size, *eqn.params["shape"][1:]))
    return eqn.params


def reduction(eqn: JaxprEqn, combine: Callable[[Any, Any], Any]) -> Rule:
    def apply(args: Sequence[Any], bounds: Sequence[Bounds]) -> list[Any]:
        carries = [True] * len(args)
        partials = [_run(eqn, carries, args, start, stop)[0] for start, stop in pairwise(bounds[0])]
        with under_scope_of(eqn):
            return [reduce(combine, partials)]

    return Rule(lengths=(shape_of(eqn.invars[0])[0],), links=tuple(Link(value=v) for v in eqn.invars), apply=apply)
