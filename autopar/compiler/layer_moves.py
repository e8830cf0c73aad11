"""Equations that move rows along axis 0, and loops over it: how they run on pieces."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import prod
from typing import Any

from jax import lax
from jax import numpy as jnp

from autopar.compiler.jaxprs.compat import JaxprEqn, Literal, bind_equation, bind_loop, loop_of, under_scope_of
from autopar.compiler.layer_axis import (
    Apply,
    Bounds,
    Link,
    Rule,
    dtype_of,
    independent,
    shape_of,
    size_of,
)
from autopar.compiler.layer_pieces import Zeros, filled, piecewise, rows, whole

__all__ = ["barrier", "concatenate", "loop", "pad", "reshape", "slices", "split", "stack", "unstack"]


def slices(eqn: JaxprEqn) -> Rule | None:
    params, operand, result = eqn.params, eqn.invars[0], eqn.outvars[0]
    first, strides = params["start_indices"][0], params["strides"]
    if strides is not None and strides[0] != 1:
        return None
    same_rows = shape_of(result)[1:] == shape_of(operand)[1:]

    def apply(args: Sequence[Any], bounds: Sequence[Bounds]) -> list[Any]:
        cut = _within(bounds[0], first, size_of(result))
        pieces: list[Any] = []
        for start, stop in pairwise(cut):
            with under_scope_of(eqn):
                piece = rows(args[0], first + start, first + stop)
                piece = piece if same_rows else filled(piece)
            if not same_rows:
                begins, ends = (0, *params["start_indices"][1:]), (stop - start, *params["limit_indices"][1:])
                piece = bind_equation(eqn, [piece], dict(params, start_indices=begins, limit_indices=ends))[0]
            pieces.append(piece)
        with under_scope_of(eqn):
            return [piecewise(cut, pieces)]

    links = (Link(value=operand), Link(value=result, offset=first))
    return Rule(lengths=(shape_of(operand)[0],), links=links, apply=apply)


def split(eqn: JaxprEqn) -> Rule | None:
    if eqn.params["axis"] != 0:
        return independent(eqn)
    offsets = _offsets(eqn.outvars)

    def apply(args: Sequence[Any], bounds: Sequence[Bounds]) -> list[Any]:
        results: list[Any] = []
        with under_scope_of(eqn):
            for result, offset in zip(eqn.outvars, offsets):
                cut = _within(bounds[0], offset, size_of(result))
                pieces = [rows(args[0], offset + start, offset + stop) for start, stop in pairwise(cut)]
                results.append(piecewise(cut, pieces))
        return results

    return _joined(eqn, eqn.invars[0], eqn.outvars, offsets, apply)


def concatenate(eqn: JaxprEqn) -> Rule | None:
    if eqn.params["dimension"] != 0:
        return independent(eqn)
    offsets = _offsets(eqn.invars)

    def piece(args: Sequence[Any], start: int, stop: int) -> Any:
        found = [
            rows(arg, max(start, offset) - offset, min(stop, offset + arg_size) - offset)
            for arg, offset, arg_size in zip(args, offsets, map(size_of, eqn.invars))
            if arg_size and offset < stop and start < offset + arg_size
        ]
        return found[0] if len(found) == 1 else lax.concatenate([filled(x) for x in found], 0)

    def apply(args: Sequence[Any], bounds: Sequence[Bounds]) -> list[Any]:
        with under_scope_of(eqn):
            return [piecewise(bounds[0], [piece(args, start, stop) for start, stop in pairwise(bounds[0])])]

    return _joined(eqn, eqn.outvars[0], eqn.invars, offsets, apply)


def _joined(
    eqn: JaxprEqn,
    axis: Any,
    parts: Sequence[Any],
    offsets: Sequence[int],
    apply: Apply,
) -> Rule:
    """The rule of an equation whose axis is one value's, made of consecutive parts."""
    links = (Link(value=axis), *(Link(value=v, offset=o) for v, o in zip(parts, offsets)))
    return Rule(lengths=(shape_of(axis)[0],), links=links, apply=apply)


def _offsets(values: Sequence[Any]) -> list[int]:
    return [0, *accumulate(shape_of(v)[0] for v in values)][:-1]


def _within(bounds: Bounds, offset: int, size: int | None) -> Bounds:
    """The bounds that fall into `[offset, offset + size]`, counted from there, with both ends."""
    assert size is not None
    return (0, *(b - offset for b in bounds if offset < b < offset + size), size)


def stack(eqn: JaxprEqn) -> Rule | None:
    if eqn.params["axis"] != 0:
        return independent(eqn)

    def apply(args: Sequence[Any], bounds: Sequence[Bounds]) -> list[Any]:
        with under_scope_of(eqn):
            layers = [whole(x) for x in args]
        pieces = [bind_equation(eqn, layers[start:stop])[0] for start, stop in pairwise(bounds[0])]
        with under_scope_of(eqn):
            return [piecewise(bounds[0], pieces)]

    return Rule(lengths=(len(eqn.invars),), links=(Link(value=eqn.outvars[0]),), apply=apply)


def unstack(eqn: JaxprEqn) -> Rule | None:
    if eqn.params["axis"] != 0:
        return independent(eqn)

    def apply(args: Sequence[Any], bounds: Sequence[Bounds]) -> list[Any]:
        layers: list[Any] = []
        for start, stop in pairwise(bounds[0]):
            with under_scope_of(eqn):
                piece = filled(rows(args[0], start, stop))
            layers += bind_equation(eqn, [piece])
        return layers

    return Rule(lengths=(len(eqn.outvars),), links=(Link(value=eqn.invars[0]),), apply=apply)


def pad(eqn: JaxprEqn) -> Rule | None:
    operand, fill = eqn.invars
    result, (low, high, interior) = eqn.outvars[0], eqn.params["padding_config"][0]
    if low < 0 or high < 0 or interior:
        return None
    zero = isinstance(fill, Literal) and not fill.val
    low, last = int(low), int(low) + shape_of(operand)[0]

    def piece(args: Sequence[Any], start: int, stop: int) -> Any:
        first, end = max(start, low), min(stop, last)
        shape = (stop - start, *shape_of(result)[1:])
        with under_scope_of(eqn):
            if first >= end:
                return Zeros(shape=shape, dtype=dtype_of(result)) if zero else jnp.broadcast_to(args[1], shape)
            inner = rows(args[0], first - low, end - low)
            if inner.shape == shape:
                return inner
            inner = filled(inner)
        config = ((first - start, stop - end, 0), *eqn.params["padding_config"][1:])
        return bind_equation(eqn, [inner, args[1]], dict(eqn.params, padding_config=config))[0]

    def apply(args: Sequence[Any], bounds: Sequence[Bounds]) -> list[Any]:
        pieces = [piece(args, start, stop) for start, stop in pairwise(bounds[0])]
        with under_scope_of(eqn):
            return [piecewise(bounds[0], pieces)]

    return _joined(eqn, result, [operand], [low], apply)


def reshape(eqn: JaxprEqn) -> Rule | None:
    operand, result = eqn.invars[0], eqn.outvars[0]
    if len(eqn.invars) != 1 or not shape_of(operand) or not shape_of(result) or not prod(shape_of(result)):
        return None
    if eqn.params.get("dimensions") is not None:
        return None
    # Rows of the result that one row of the operand fills.
    ratio = Fraction(prod(shape_of(operand)[1:]), prod(shape_of(result)[1:]))

    def apply(args: Sequence[Any], bounds: Sequence[Bounds]) -> list[Any]:
        cut = tuple(b for b in bounds[0] if (b / ratio).denominator == 1)
        pieces: list[Any] = []
        for start, stop in pairwise(cut):
            with under_scope_of(eqn):
                piece = filled(rows(args[0], int(start / ratio), int(stop / ratio)))
            sizes = (stop - start, *eqn.params["new_sizes"][1:])
            pieces += bind_equation(eqn, [piece], dict(eqn.params, new_sizes=sizes))
        with under_scope_of(eqn):
            return [piecewise(cut, pieces)]

    links = (Link(value=operand, ratio=ratio), Link(value=result))
    return Rule(lengths=(shape_of(result)[0],), links=links, apply=apply)


def barrier(eqn: JaxprEqn) -> Rule:
    """Every operand keeps its own pieces; one barrier still holds all of them together."""

    def apply(args: Sequence[Any], bounds: Sequence[Bounds]) -> list[Any]:
        with under_scope_of(eqn):
            cut = [[filled(rows(x, *span)) for span in pairwise(b)] if b else [x] for x, b in zip(args, bounds)]
        through = iter(bind_equation(eqn, [piece for pieces in cut for piece in pieces]))
        with under_scope_of(eqn):
            return [piecewise(b, [next(through) for _ in pieces]) for pieces, b in zip(cut, bounds)]

    links = [Link(value=v, axis=i) for i, pair in enumerate(zip(eqn.invars, eqn.outvars)) for v in pair if size_of(v)]
    return Rule(lengths=tuple(size_of(v) or 0 for v in eqn.invars), links=tuple(links), apply=apply)


def loop(eqn: JaxprEqn) -> Rule:
    """A scan runs over its pieces in turn: the carry goes through, each piece has its xs and ys."""
    found = loop_of(eqn)
    num_outer = found.num_consts + found.num_carry

    def apply(args: Sequence[Any], bounds: Sequence[Bounds]) -> list[Any]:
        spans = list(pairwise(bounds[0]))
        with under_scope_of(eqn):
            outer = [whole(x) for x in args[:num_outer]]
        consts, carry = outer[: found.num_consts], outer[found.num_consts :]
        pieces: list[Any] = []
        for start, stop in reversed(spans) if found.reverse else spans:
            with under_scope_of(eqn):
                xs = [filled(rows(x, start, stop)) for x in args[num_outer:]]
            results = bind_loop(eqn, [*consts, *carry, *xs], stop - start)
            carry = results[: found.num_carry]
            pieces.append(results[found.num_carry :])
        pieces = pieces[::-1] if found.reverse else pieces
        with under_scope_of(eqn):
            return [*carry, *(piecewise(bounds[0], ys) for ys in zip(*pieces))]

    scanned = (*eqn.invars[num_outer:], *eqn.outvars[found.num_carry :])
    return Rule(lengths=(found.length,), links=tuple(Link(value=v) for v in scanned), apply=apply)
