"""Sharding rules of gather and scatter.

Three kinds of dimensions can be split. A window that covers a dimension of the array goes along with it. A dimension
of the indices is one of the result of a gather, or of a scatter's updates. An array that is split along a dimension
that the indices name has the rows wanted here and there:

    gather        wi,jx->ji sum(w)     a device takes the rows that are its own, and zeros for the others
    scatter-add   wi,jx,ji->wi sum(j)  a device drops the updates for rows of others, and adds those that it has
"""

from __future__ import annotations

from typing import Any

from autopar.compiler.intra_op.rule import Label, Rule, adds_up, rule_of_labels, shapes_of
from autopar.compiler.jaxprs import compat as jc


def gather(eqn: jc.JaxprEqn) -> Rule:
    """Slices of an array at indices."""
    array, indices = shapes_of(eqn.invars)
    (result,) = shapes_of(eqn.outvars)
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
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


def scatter(eqn: jc.JaxprEqn) -> Rule:
    """An array with updates written, or added, to slices of it; only what is added may come from several devices."""
    array, indices, updates = shapes_of(eqn.invars)
    numbers = eqn.params["dimension_numbers"]
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
