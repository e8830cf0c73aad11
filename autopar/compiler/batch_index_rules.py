"""Which slices, gathers and scatters leave the examples of a batch apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from autopar.compiler.batch_own_rows import is_own_rows
from autopar.compiler.batch_sites import Reduced, Rows, Site, Verdict, refuse


def static_slice(site: Site) -> Verdict:
    (axis,) = (a for a in site.axes if a is not None)
    p, size = site.eqn.params, site.shape(0)[axis]
    strides = p["strides"] or (1,) * len(site.shape(0))
    if (p["start_indices"][axis], p["limit_indices"][axis], strides[axis]) != (0, size, 1):
        refuse(site.eqn, "takes some of the batch's examples by position")
    return Rows()


def dynamic_slice(site: Site) -> Verdict:
    axis = site.axes[0]
    if axis is None or site.eqn.params["slice_sizes"][axis] != site.shape(0)[axis]:
        refuse(site.eqn, "takes some of the batch's examples by position")
    return Rows()


def dynamic_update_slice(site: Site) -> Verdict:
    axis, update = site.axes[:2]
    if axis is None:
        refuse(site.eqn, "writes the batch's examples into a value that has no batch axis")
    if update != axis or site.shape(0)[axis] != site.shape(1)[axis]:
        refuse(site.eqn, "overwrites some of the batch's examples by position")
    return Rows()


def gather(site: Site) -> Verdict:
    numbers, (axis, rows) = site.eqn.params["dimension_numbers"], site.axes
    if axis is None:
        return Rows()
    if axis in numbers.operand_batching_dims:
        paired = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(axis)]
        return Rows() if rows == paired else _picks_examples(site)
    if axis in numbers.start_index_map:
        return Rows(own_column=_own_column(site, axis, numbers.start_index_map))
    if axis in numbers.collapsed_slice_dims or site.eqn.params["slice_sizes"][axis] != site.shape(0)[axis]:
        _picks_examples(site)
    if rows is not None:
        refuse(site.eqn, "combines pairs of the batch's examples")
    return Rows()


def scatter(kind: str | None) -> Callable[[Site], Verdict]:
    """`kind`: how updates of several rows meet in a value without a batch axis; None: their order counts."""

    def rule(site: Site) -> Verdict:
        numbers, (axis, rows, updates) = site.eqn.params["dimension_numbers"], site.axes
        if axis is None:
            if kind is None or rows is None or updates in numbers.update_window_dims:
                refuse(site.eqn, "writes the batch's examples into a value that has no batch axis")
            return Reduced(kind=kind, summands=(0,))
        if axis in numbers.operand_batching_dims:
            paired = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(axis)]
            return Rows() if rows == paired and updates is not None else _picks_examples(site)
        if axis in numbers.scatter_dims_to_operand_dims:
            return Rows(own_column=_own_column(site, axis, numbers.scatter_dims_to_operand_dims))
        if rows is not None or updates is None or site.shape(2)[updates] != site.shape(0)[axis]:
            refuse(site.eqn, "combines pairs of the batch's examples")
        return Rows()

    return rule


def _own_column(site: Site, axis: int, index_map: tuple[int, ...]) -> int:
    """The column of indices that selects along the batch, if each row selects itself: `x[arange(B), y]`."""
    column, rows = index_map.index(axis), site.axes[1]
    if rows is None or site.shape(1)[rows] != site.shape(0)[axis]:
        _picks_examples(site)
    if not is_own_rows(site.eqn.invars[1], rows, column, site.producers, site.constants):
        _picks_examples(site)
    return column


def _picks_examples(site: Site) -> NoReturn:
    refuse(site.eqn, "picks examples of the batch by index")
