"""Run equations on values held in pieces along axis 0, so that every stage can own its layers' piece.

    whole      [ 0  1  2  3  4 ]
    Pieces     [ 0  1 ][ 2  3  4 ]       bounds (0, 2, 5)

A piece that is known to be zero (the gradient of layers that a slice left out) is a `Zeros`: it costs nothing until an
equation reads it. `rows` takes any range out of any value, so pieces of other bounds are never an error, only slower.

An equation that keeps rows apart (or sums them, moves them, loops over them) has an axis of its own, and each value
that carries it a place there:

    row p of the value  =  row  ratio · p + offset  of the axis                  → AxisLink

    mul a b             all three: ratio 1, offset 0         slice x[2:4]        result: offset 2
    concatenate a b     b: offset len(a)                     reshape (4,3)->(12) operand: ratio 3

`rule_of` returns the rule of an equation. One without a rule reads whole values, which is always right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial, reduce
from itertools import accumulate, pairwise
from math import prod
from typing import Any

from jax import lax
from jax import numpy as jnp

from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs import primitives
from autopar.compiler.jaxprs.compat import JaxprEqn, Literal, bind_equation, under_scope_of

# Values in pieces


@dataclass(frozen=True, kw_only=True)
class Zeros:
    """A piece of zeros that nothing has computed."""

    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """A value as consecutive pieces: `values[i]` holds the rows `[bounds[i], bounds[i + 1])`."""

    bounds: tuple[int, ...]
    values: tuple[Any, ...]


def piecewise(bounds: Sequence[int], values: Sequence[Any]) -> Any:
    """The value made of these pieces; a single piece is the value itself."""
    return filled(values[0]) if len(values) == 1 else Pieces(bounds=tuple(bounds), values=tuple(values))


def filled(value: Any) -> Any:
    """An array of the zeros that `value` stands for; every other value is returned as it is."""
    return lax.full(value.shape, 0, value.dtype) if isinstance(value, Zeros) else value


def rows(value: Any, start: int, stop: int) -> Any:
    """Return the rows `[start, stop)` along axis 0: a piece as it is where the bounds fit, else cut or joined."""
    if not isinstance(value, Pieces):
        return _cut(value, start, stop)
    pieces = [
        _cut(piece, max(start, first) - first, min(stop, last) - first)
        for first, last, piece in zip(value.bounds, value.bounds[1:], value.values)
        if first < stop and start < last
    ]
    if all(isinstance(piece, Zeros) for piece in pieces):
        return Zeros(shape=(stop - start, *pieces[0].shape[1:]), dtype=pieces[0].dtype)
    return pieces[0] if len(pieces) == 1 else lax.concatenate([filled(piece) for piece in pieces], 0)


def whole(value: Any) -> Any:
    """The value as one array."""
    return filled(rows(value, 0, value.bounds[-1])) if isinstance(value, Pieces) else filled(value)


def _cut(piece: Any, start: int, stop: int) -> Any:
    if start == 0 and stop == piece.shape[0]:
        return piece
    if isinstance(piece, Zeros):
        return Zeros(shape=(stop - start, *piece.shape[1:]), dtype=piece.dtype)
    return lax.slice_in_dim(piece, start, stop)


# Rules of equations

Bounds = tuple[int, ...]
Apply = Callable[[Sequence[Any], Sequence[Bounds]], list[Any]]


@dataclass(frozen=True, kw_only=True)
class AxisLink:
    """The place of a value (a variable or literal of the equation) on one of the equation's axes."""

    value: Any
    axis: int = 0
    offset: int = 0
    ratio: Fraction = Fraction(1)


@dataclass(frozen=True, kw_only=True)
class PieceRule:
    """The run of an equation on pieces: `apply(operands, bounds of each axis) -> results`."""

    lengths: tuple[int, ...]
    links: tuple[AxisLink, ...]
    apply: Apply


def array_shape(value: Any) -> tuple[int, ...]:
    """The shape of a variable or literal; () for what has none (a token)."""
    return tuple(getattr(value.aval, "shape", ()))


def dtype_of(value: Any) -> Any:
    """The dtype of a variable or literal; None for what has none."""
    return getattr(value.aval, "dtype", None)


def size_of(value: Any) -> int | None:
    """The length of axis 0; None of a scalar."""
    return next(iter(array_shape(value)), None)


# These mix the rows along some axes; along the others they are independent.
_MIXING = primitives.ARGUMENT_REDUCTIONS | primitives.CUMULATIVE | {"rev", "sort", "squeeze"}
_COMBINED_BY: dict[str, Callable[[Any, Any], Any]] = {
    "reduce_and": lax.bitwise_and,
    "reduce_max": lax.max,
    "reduce_min": lax.min,
    "reduce_or": lax.bitwise_or,
    "reduce_prod": lax.mul,
    "reduce_sum": lax.add,
    "reduce_xor": lax.bitwise_xor,
}


def rule_of(eqn: JaxprEqn) -> PieceRule | None:
    """Return the equation's rule for axis 0; None if it has to read whole values."""
    name = eqn.primitive.name
    if name in primitives.ELEMENTWISE | primitives.COPIES | {"name"}:
        # Scalars, and axes of length one, are broadcast.
        return independent(eqn, [size_of(v) == size_of(eqn.outvars[0]) for v in eqn.invars])
    if name in _MIXING:
        return None if 0 in jp.dimensions_of(eqn) else independent(eqn)
    if name in _COMBINED_BY:
        return reduction(eqn, _COMBINED_BY[name]) if 0 in jp.dimensions_of(eqn) else independent(eqn)
    if name in primitives.FACTORIZATIONS:
        return independent(eqn) if all(len(array_shape(v)) > 2 for v in eqn.invars) else None
    return _OTHERS[name](eqn) if name in _OTHERS else None


def independent(eqn: JaxprEqn, carries: Sequence[bool] | None = None) -> PieceRule | None:
    """Operands that carry the axis are read by piece, the others whole; all results carry it."""
    carries = [True] * len(eqn.invars) if carries is None else carries
    carriers = [*(v for v, carried in zip(eqn.invars, carries) if carried), *eqn.outvars]
    lengths = {size_of(v) for v in carriers}
    if len(lengths) != 1 or None in lengths:
        return None
    return PieceRule(
        lengths=tuple(length for length in lengths if length is not None),
        links=tuple(AxisLink(value=v) for v in carriers),
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
        if eqn.primitive.name in primitives.ADDITIONS and all(carries):
            terms = [x for x in cut if not isinstance(x, Zeros)]
            if len(terms) < len(cut):
                return terms or [cut[0]]
        cut = [filled(x) for x in cut]
    return bind_equation(eqn, cut, _params_of_piece(eqn, stop - start))


def _params_of_piece(eqn: JaxprEqn, size: int) -> dict[str, Any]:
    """The parameters that are others on a piece of `size` rows."""
    if eqn.primitive.name in ("broadcast_in_dim", "iota"):
        return {"shape": (size, *array_shape(eqn.outvars[0])[1:])}
    return {}


def reduction(eqn: JaxprEqn, combine: Callable[[Any, Any], Any]) -> PieceRule:
    def apply(args: Sequence[Any], bounds: Sequence[Bounds]) -> list[Any]:
        carries = [True] * len(args)
        partials = [_run(eqn, carries, args, start, stop)[0] for start, stop in pairwise(bounds[0])]
        with under_scope_of(eqn):
            return [reduce(combine, partials)]

    return PieceRule(
        lengths=(array_shape(eqn.invars[0])[0],), links=tuple(AxisLink(value=v) for v in eqn.invars), apply=apply
    )


def slices(eqn: JaxprEqn) -> PieceRule | None:
    operand, result, cut_at = eqn.invars[0], eqn.outvars[0], jp.slice_of(eqn)
    first = cut_at.starts[0]
    if cut_at.strides[0] != 1:
        return None
    same_rows = array_shape(result)[1:] == array_shape(operand)[1:]

    def apply(args: Sequence[Any], bounds: Sequence[Bounds]) -> list[Any]:
        cut = _within(bounds[0], first, size_of(result))
        pieces: list[Any] = []
        for start, stop in pairwise(cut):
            with under_scope_of(eqn):
                piece = rows(args[0], first + start, first + stop)
                piece = piece if same_rows else filled(piece)
            if not same_rows:
                starts, limits = (0, *cut_at.starts[1:]), (stop - start, *cut_at.limits[1:])
                piece = bind_equation(eqn, [piece], {"start_indices": starts, "limit_indices": limits})[0]
            pieces.append(piece)
        with under_scope_of(eqn):
            return [piecewise(cut, pieces)]

    links = (AxisLink(value=operand), AxisLink(value=result, offset=first))
    return PieceRule(lengths=(array_shape(operand)[0],), links=links, apply=apply)


def split(eqn: JaxprEqn) -> PieceRule | None:
    if jp.dimensions_of(eqn) != (0,):
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

    return _joined(eqn.invars[0], eqn.outvars, offsets, apply)


def concatenate(eqn: JaxprEqn) -> PieceRule | None:
    if jp.dimensions_of(eqn) != (0,):
        return independent(eqn)
    offsets = _offsets(eqn.invars)

    def piece(args: Sequence[Any], start: int, stop: int) -> Any:
        taken = [
            rows(arg, max(start, offset) - offset, min(stop, offset + arg_size) - offset)
            for arg, offset, arg_size in zip(args, offsets, map(size_of, eqn.invars))
            if arg_size and offset < stop and start < offset + arg_size
        ]
        return taken[0] if len(taken) == 1 else lax.concatenate([filled(x) for x in taken], 0)

    def apply(args: Sequence[Any], bounds: Sequence[Bounds]) -> list[Any]:
        with under_scope_of(eqn):
            return [piecewise(bounds[0], [piece(args, start, stop) for start, stop in pairwise(bounds[0])])]

    return _joined(eqn.outvars[0], eqn.invars, offsets, apply)


def _joined(
    axis: Any,
    parts: Sequence[Any],
    offsets: Sequence[int],
    apply: Apply,
) -> PieceRule:
    """The rule of an equation whose axis is one value's, made of consecutive parts."""
    links = (AxisLink(value=axis), *(AxisLink(value=v, offset=o) for v, o in zip(parts, offsets)))
    return PieceRule(lengths=(array_shape(axis)[0],), links=links, apply=apply)


def _offsets(values: Sequence[Any]) -> list[int]:
    return [0, *accumulate(array_shape(v)[0] for v in values)][:-1]


def _within(bounds: Bounds, offset: int, size: int | None) -> Bounds:
    """The bounds that fall into `[offset, offset + size]`, counted from there, with both ends."""
    assert size is not None
    return (0, *(b - offset for b in bounds if offset < b < offset + size), size)


def stack(eqn: JaxprEqn) -> PieceRule | None:
    if jp.dimensions_of(eqn) != (0,):
        return independent(eqn)

    def apply(args: Sequence[Any], bounds: Sequence[Bounds]) -> list[Any]:
        with under_scope_of(eqn):
            layers = [whole(x) for x in args]
        pieces = [bind_equation(eqn, layers[start:stop])[0] for start, stop in pairwise(bounds[0])]
        with under_scope_of(eqn):
            return [piecewise(bounds[0], pieces)]

    return PieceRule(lengths=(len(eqn.invars),), links=(AxisLink(value=eqn.outvars[0]),), apply=apply)


def unstack(eqn: JaxprEqn) -> PieceRule | None:
    if jp.dimensions_of(eqn) != (0,):
        return independent(eqn)

    def apply(args: Sequence[Any], bounds: Sequence[Bounds]) -> list[Any]:
        layers: list[Any] = []
        for start, stop in pairwise(bounds[0]):
            with under_scope_of(eqn):
                piece = filled(rows(args[0], start, stop))
            layers += bind_equation(eqn, [piece])
        return layers

    return PieceRule(lengths=(len(eqn.outvars),), links=(AxisLink(value=eqn.invars[0]),), apply=apply)


def pad(eqn: JaxprEqn) -> PieceRule | None:
    operand, fill = eqn.invars
    result, (along_rows, *along_others) = eqn.outvars[0], jp.padding_of(eqn)
    low, high, interior = along_rows
    if low < 0 or high < 0 or interior:
        return None
    zero = isinstance(fill, Literal) and not fill.val
    last = low + array_shape(operand)[0]

    def piece(args: Sequence[Any], start: int, stop: int) -> Any:
        first, end = max(start, low), min(stop, last)
        shape = (stop - start, *array_shape(result)[1:])
        with under_scope_of(eqn):
            if first >= end:
                return Zeros(shape=shape, dtype=dtype_of(result)) if zero else jnp.broadcast_to(args[1], shape)
            inner = rows(args[0], first - low, end - low)
            if inner.shape == shape:
                return inner
            inner = filled(inner)
        config = ((first - start, stop - end, 0), *along_others)
        return bind_equation(eqn, [inner, args[1]], {"padding_config": config})[0]

    def apply(args: Sequence[Any], bounds: Sequence[Bounds]) -> list[Any]:
        pieces = [piece(args, start, stop) for start, stop in pairwise(bounds[0])]
        with under_scope_of(eqn):
            return [piecewise(bounds[0], pieces)]

    return _joined(result, [operand], [low], apply)


def reshape(eqn: JaxprEqn) -> PieceRule | None:
    operand, result = eqn.invars[0], eqn.outvars[0]
    if len(eqn.invars) != 1 or not array_shape(operand) or not array_shape(result) or not prod(array_shape(result)):
        return None
    # Rows of the result that one row of the operand fills.
    ratio = Fraction(prod(array_shape(operand)[1:]), prod(array_shape(result)[1:]))

    def apply(args: Sequence[Any], bounds: Sequence[Bounds]) -> list[Any]:
        cut = tuple(b for b in bounds[0] if (b / ratio).denominator == 1)
        pieces: list[Any] = []
        for start, stop in pairwise(cut):
            with under_scope_of(eqn):
                piece = filled(rows(args[0], int(start / ratio), int(stop / ratio)))
            sizes = (stop - start, *array_shape(result)[1:])
            pieces += bind_equation(eqn, [piece], {"new_sizes": sizes})
        with under_scope_of(eqn):
            return [piecewise(cut, pieces)]

    links = (AxisLink(value=operand, ratio=ratio), AxisLink(value=result))
    return PieceRule(lengths=(array_shape(result)[0],), links=links, apply=apply)


def barrier(eqn: JaxprEqn) -> PieceRule:
    """Every operand keeps its own pieces; one barrier still holds all of them together."""

    def apply(args: Sequence[Any], bounds: Sequence[Bounds]) -> list[Any]:
        with under_scope_of(eqn):
            cut = [[filled(rows(x, *span)) for span in pairwise(b)] if b else [x] for x, b in zip(args, bounds)]
        through = iter(bind_equation(eqn, [piece for pieces in cut for piece in pieces]))
        with under_scope_of(eqn):
            return [piecewise(b, [next(through) for _ in pieces]) for pieces, b in zip(cut, bounds)]

    links = [
        AxisLink(value=v, axis=i) for i, pair in enumerate(zip(eqn.invars, eqn.outvars)) for v in pair if size_of(v)
    ]
    return PieceRule(lengths=tuple(size_of(v) or 0 for v in eqn.invars), links=tuple(links), apply=apply)


def loop(eqn: JaxprEqn) -> PieceRule:
    """A scan runs over its pieces in turn: the carry goes through, each piece has its xs and ys."""
    scan = jp.scan_of(eqn)
    num_outer = scan.num_consts + scan.num_carry

    def apply(args: Sequence[Any], bounds: Sequence[Bounds]) -> list[Any]:
        spans = list(pairwise(bounds[0]))
        with under_scope_of(eqn):
            outer = [whole(x) for x in args[:num_outer]]
        consts, carry = outer[: scan.num_consts], outer[scan.num_consts :]
        pieces: list[Any] = []
        for start, stop in reversed(spans) if scan.reverse else spans:
            with under_scope_of(eqn):
                xs = [filled(rows(x, start, stop)) for x in args[num_outer:]]
            results = jp.bind_scan(eqn, [*consts, *carry, *xs], stop - start)
            carry = results[: scan.num_carry]
            pieces.append(results[scan.num_carry :])
        pieces = pieces[::-1] if scan.reverse else pieces
        with under_scope_of(eqn):
            return [*carry, *(piecewise(bounds[0], ys) for ys in zip(*pieces))]

    scanned = (*eqn.invars[num_outer:], *eqn.outvars[scan.num_carry :])
    return PieceRule(lengths=(scan.length,), links=tuple(AxisLink(value=v) for v in scanned), apply=apply)


def _broadcast(eqn: JaxprEqn) -> PieceRule | None:
    if len(eqn.invars) != 1:
        return None
    operand, result = eqn.invars[0], eqn.outvars[0]
    return independent(eqn, [jp.broadcast_dimensions(eqn)[:1] == (0,) and size_of(operand) == size_of(result)])


def _iota(eqn: JaxprEqn) -> PieceRule | None:
    return None if jp.dimensions_of(eqn) == (0,) or eqn.invars else independent(eqn)


def _tile(eqn: JaxprEqn) -> PieceRule | None:
    return independent(eqn) if jp.repetitions(eqn)[:1] == (1,) else None


def _transpose(eqn: JaxprEqn) -> PieceRule | None:
    return independent(eqn) if jp.permutation_of(eqn)[:1] == (0,) else None


def _dot(eqn: JaxprEqn) -> PieceRule | None:
    (left_contracted, right_contracted), (left_batch, right_batch) = jp.dot_dimensions(eqn)
    if left_batch:
        return independent(eqn) if left_batch[0] == right_batch[0] == 0 else None
    if (0, 0) in zip(left_contracted, right_contracted):
        return reduction(eqn, lax.add)
    if len(left_contracted) == len(array_shape(eqn.invars[0])):
        return independent(eqn, [False, True]) if 0 not in right_contracted else None
    return independent(eqn, [True, False]) if 0 not in left_contracted else None


_OTHERS: dict[str, Callable[[JaxprEqn], PieceRule | None]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": concatenate,
    "dot_general": _dot,
    "iota": _iota,
    "optimization_barrier": barrier,
    "pad": pad,
    "reshape": reshape,
    "scan": loop,
    "slice": slices,
    "split": split,
    "stack": stack,
    "tile": _tile,
    "transpose": _transpose,
    "unstack": unstack,
}
