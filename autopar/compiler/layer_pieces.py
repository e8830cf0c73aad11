"""A value held in consecutive pieces along axis 0, so that every pipeline stage can own its layers' piece.

    whole      [ 0  1  2  3  4 ]
    Pieces     [ 0  1 ][ 2  3  4 ]       bounds (0, 2, 5)

A piece that is known to be zero (the gradient of layers that a slice left out) is a `Zeros`: it costs nothing
until an equation reads it. `rows` takes any range out of any value, so pieces of other bounds are never an
error, only slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

__all__ = ["Pieces", "Zeros", "filled", "piecewise", "rows", "whole"]


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
    """The rows `[start, stop)` along axis 0: a piece as it is where the bounds fit, else cut or joined."""
    if not isinstance(value, Pieces):
        return _cut(value, start, stop)
    found = [
        _cut(piece, max(start, first) - first, min(stop, last) - first)
        for first, last, piece in zip(value.bounds, value.bounds[1:], value.values)
        if first < stop and start < last
    ]
    if all(isinstance(piece, Zeros) for piece in found):
        return Zeros(shape=(stop - start, *found[0].shape[1:]), dtype=found[0].dtype)
    return found[0] if len(found) == 1 else lax.concatenate([filled(piece) for piece in found], 0)


def whole(value: Any) -> Any:
    """The value as one array."""
    return filled(rows(value, 0, value.bounds[-1])) if isinstance(value, Pieces) else filled(value)


def _cut(piece: Any, start: int, stop: int) -> Any:
    if start == 0 and stop == piece.shape[0]:
        return piece
    if isinstance(piece, Zeros):
        return Zeros(shape=(stop - start, *piece.shape[1:]), dtype=piece.dtype)
    return lax.slice_in_dim(piece, start, stop)
