"""Find the dimensions that carry the batch in every value of a program, by the same program on another batch.

They are those of another size there.
"""

from __future__ import annotations

from collections.abc import Iterable
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
            batch_axes(v.aval, w.aval)
            for v, w in zip((*eqn.invars, *eqn.outvars), (*twin.invars, *twin.outvars), strict=True)
        )
        for eqn, twin in zip(mine, theirs, strict=True)
    }


def batch_axes(aval: Any, at_other_batch: Any) -> tuple[int, ...]:
    """Return the axes along which a value grows with the batch, by its type and that at another batch."""
    shape, other = getattr(aval, "shape", ()), getattr(at_other_batch, "shape", ())
    if shape == other:
        return ()
    return tuple(axis for axis, sizes in enumerate(zip(shape, other, strict=True)) if sizes[0] != sizes[1])
