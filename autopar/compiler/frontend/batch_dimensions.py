"""Find the dimensions that carry the batch in every value of a program, by the same program on another batch.

They are those of another size there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from autopar.compiler.jaxprs import compat as jc

BatchDims = tuple[tuple[int, ...], ...]
"""The dimensions of each operand and result of an equation that carry the batch."""


def equation_batch_dims(closed: jc.ClosedJaxpr, others: Iterable[jc.JaxprEqn]) -> dict[int, BatchDims] | None:
    """Return by equation, at any depth, the dimensions of another size in its twin; None if the two do not match."""
    mine, theirs = list(jc.all_equations(closed)), list(others)
    if [eqn.primitive.name for eqn in mine] != [eqn.primitive.name for eqn in theirs]:
        return None
    return {
        id(eqn): tuple(
            differing_dims(_shape(v), _shape(w))
            for v, w in zip((*eqn.invars, *eqn.outvars), (*twin.invars, *twin.outvars), strict=True)
        )
        for eqn, twin in zip(mine, theirs, strict=True)
    }


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def differing_dims(shape: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions in which two shapes of one rank differ."""
    return tuple(d for d, (size, other_size) in enumerate(zip(shape, other, strict=True)) if size != other_size)
