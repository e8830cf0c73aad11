"""Tell indices that count rows: `arange(B)` in `logits[arange(B), labels]`.

Such a gather looks as if it picked rows from anywhere, yet row i reads row i only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp


def are_identity_indices(
    atom: Any,
    axis: int,
    column: int,
    producers: Mapping[jc.Var, jc.JaxprEqn],
    constants: Mapping[jc.Var, Any],
) -> bool:
    """Return whether `atom[..., column]` is the number i at position i along `axis`.

    The walk goes from the indices back to the `iota`, through what JAX puts between: conversions, broadcasts, the
    column-wise concatenation, and the wrapping of negative indices `select_n(i < 0, i, i + B)`, which never wraps here.
    """
    if not isinstance(atom, jc.Var):
        return False
    if atom in constants:
        columns = np.moveaxis(np.asarray(constants[atom]), axis, 0)[..., column]
        return bool((np.arange(len(columns)) == columns.T).all())
    eqn = producers.get(atom)
    while eqn is not None:
        step = _column_source(eqn, column)
        if step is None:
            return _counts(eqn.outvars[0], axis, producers, constants)
        source, column = step
        if source in constants:
            return are_identity_indices(source, axis, column, producers, constants)
        eqn = producers.get(source)
    return False


def _column_source(eqn: jc.JaxprEqn, column: int) -> tuple[Any, int] | None:
    """The operand and its column from which this column comes; None where the columns begin."""
    if eqn.primitive.name == "concatenate" and jp.dimensions_of(eqn) == (len(_shape(eqn.outvars[0])) - 1,):
        for operand in eqn.invars:
            width = _shape(operand)[-1]
            if column < width:
                return operand, column
            column -= width
    if eqn.primitive.name == "convert_element_type" and _shape(eqn.outvars[0])[-1] > 1:
        return eqn.invars[0], column
    return None


def _counts(atom: Any, axis: int, producers: Mapping[jc.Var, jc.JaxprEqn], constants: Mapping[jc.Var, Any]) -> bool:
    """Return whether every entry at position i along `axis` is the number i."""
    if not isinstance(atom, jc.Var):
        return False
    if atom in constants:
        rows = np.moveaxis(np.asarray(constants[atom]), axis, 0)
        return bool((np.arange(len(rows)) == rows.reshape(len(rows), -1).T).all())
    eqn = producers.get(atom)
    if eqn is None:
        return False
    match eqn.primitive.name:
        case "iota":
            return jp.dimensions_of(eqn) == (axis,)
        case "convert_element_type" | "copy" | "optimization_barrier" if len(eqn.invars) == 1:
            return _counts(eqn.invars[0], axis, producers, constants)
        case "broadcast_in_dim":
            dims = jp.broadcast_dimensions(eqn)
            if axis not in dims or _shape(eqn.invars[0])[dims.index(axis)] != _shape(atom)[axis]:
                return False
            return _counts(eqn.invars[0], dims.index(axis), producers, constants)
        case "reshape":
            source = _same_axis(eqn, axis)
            return source is not None and _counts(eqn.invars[0], source, producers, constants)
        case "select_n":
            never = producers.get(eqn.invars[0]) if isinstance(eqn.invars[0], jc.Var) else None
            wraps = never is not None and never.primitive.name == "lt" and _is_zero(never.invars[1])
            return (
                wraps
                and never is not None
                and _counts(never.invars[0], axis, producers, constants)
                and _counts(eqn.invars[1], axis, producers, constants)
            )
        case _:
            return False


def _same_axis(eqn: jc.JaxprEqn, axis: int) -> int | None:
    """The operand's axis that a reshape (adding or dropping dimensions of size 1) made into `axis`."""
    source, result = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    if [n for n in source if n != 1] != [n for n in result if n != 1] or result[axis] == 1:
        return None
    rank = sum(n != 1 for n in result[:axis])
    return [i for i, n in enumerate(source) if n != 1][rank]


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, jc.Literal) and not np.any(atom.val)


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)
