"""The steps that take an array from one layout to another: each is one collective, or one local copy.

On a dimension split over the axes `a b` (a major), with `s` an axis that each device holds a summand along:

    Slice          [-]      -> [a]        a device keeps its part of what it has
    AllGather      [a b]    -> [a]        the minor axes of a dimension
    AllToAll       [a b, -] -> [a, b]     from the end of one dimension to the end of another
    Permute        [a b]    -> [b a]      every device sends what it has to another one
    ReduceScatter  [-] + s  -> [s]        add up, and keep a part
    AllReduce      [-] + s  -> [-]        add up; in levels where the links between fast domains are slow
    ToPartial        [-]      -> [-] + s    the first device along an axis keeps the array, the others take zeros
    PadToPartial            [a b]    -> [a] + b    a part among zeros is a summand of the whole

Axes join and leave a dimension at its minor end, where the parts are adjacent. What is split is padded first where it
does not divide; what is joined is cut to its size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, assert_never

from autopar.compiler.sharding.layout import Axes, Layout, LogicalMesh, Reach, part_size


@dataclass(frozen=True)
class Slice:
    """Split a dimension over axes along which all devices hold the same."""

    axes: Axes
    dim: int


@dataclass(frozen=True)
class AllGather:
    """Join the parts of a dimension along its minor axes."""

    axes: Axes
    dim: int


@dataclass(frozen=True)
class AllToAll:
    """Join the parts of dimension `source` along its minor axes, and split dimension `target` over them."""

    axes: Axes
    source: int
    target: int


@dataclass(frozen=True)
class Permute:
    """Exchange whole parts: from a split of the dimensions to another one into as many parts of the same shape."""

    source: tuple[Axes, ...]
    target: tuple[Axes, ...]

    @property
    def axes(self) -> Axes:
        """The axes along which parts move, in the order of the mesh."""
        changed = [axes for s, t in zip(self.source, self.target, strict=True) if s != t for axes in (s, t)]
        return tuple(sorted({axis for axes in changed for axis in axes}))


@dataclass(frozen=True)
class ReduceScatter:
    """Add up the summands along axes, and split a dimension over them."""

    axes: Axes
    dim: int


@dataclass(frozen=True)
class AllReduce:
    """Add up the summands along axes."""

    axes: Axes


@dataclass(frozen=True)
class ToPartial:
    """Make an array that all devices along axes hold a sum of one array and zeros."""

    axes: Axes


@dataclass(frozen=True)
class PadToPartial:
    """Make the parts of a dimension along its minor axes summands, each with zeros around it."""

    axes: Axes
    dim: int


ReshardStep = Slice | AllGather | AllToAll | Permute | ReduceScatter | AllReduce | ToPartial | PadToPartial


def after(layout: Layout, step: ReshardStep) -> Layout:
    """The layout that a step makes of one that it applies to."""
    dims, partial = list(layout.dims), layout.partial
    match step:
        case Slice(axes, dim):
            dims[dim] += axes
        case AllGather(axes, dim):
            dims[dim] = _without_last(dims[dim], axes)
        case AllToAll(axes, source, target):
            dims[source] = _without_last(dims[source], axes)
            dims[target] += axes
        case Permute(source, target):
            assert layout.dims == source, (layout, step)
            dims = list(target)
        case ReduceScatter(axes, dim):
            partial = _without(partial, axes)
            dims[dim] += axes
        case AllReduce(axes):
            partial = _without(partial, axes)
        case ToPartial(axes):
            partial = _with(partial, axes)
        case PadToPartial(axes, dim):
            dims[dim] = _without_last(dims[dim], axes)
            partial = _with(partial, axes)
        case _:
            assert_never(step)
    return Layout(tuple(dims), partial)


def collective_of(steps: Sequence[ReshardStep]) -> str:
    """The first collective among some steps; none if they send nothing."""
    return next((kind for step in steps if (kind := collective_kind(step)) is not None), "")


def collective_kind(step: ReshardStep) -> str | None:
    """The collective that a step is, as `PASSES` calls it; None if it sends nothing."""
    match step:
        case AllGather():
            return "all-gather"
        case AllToAll():
            return "all-to-all"
        case Permute():
            return "collective-permute"
        case ReduceScatter():
            return "reduce-scatter"
        case AllReduce():
            return "all-reduce"
        case Slice() | ToPartial() | PadToPartial():
            return None
        case _:
            assert_never(step)


class StepCollective(NamedTuple):
    """One collective of a step: its kind, between whom, and of how many parts of what the step moves it takes one."""

    kind: str
    reach: Reach
    parts: int = 1


def exchanges(step: ReshardStep, mesh: LogicalMesh) -> tuple[StepCollective, ...]:
    """Return the collectives of a step: one, or the three of a hierarchical all-reduce, or none."""
    kind = collective_kind(step)
    if kind is None:
        return ()
    if isinstance(step, AllReduce) and mesh.sums_in_levels(step.axes):
        return (
            StepCollective("reduce-scatter", "inside"),
            StepCollective("all-reduce", "across", mesh.reach(step.axes, "inside")),
            StepCollective("all-gather", "inside"),
        )
    return (StepCollective(kind, "all"),)


def moved_share(step: ReshardStep, layout: Layout, shape: Sequence[int], mesh_shape: Sequence[int]) -> float:
    """Return the share of an array in `layout` that the collective of a step has on one device, operand or result."""
    if collective_kind(step) is None:
        return 0.0
    moved, later = (_part(each, shape, mesh_shape) for each in (layout, after(layout, step)))
    group = math.prod(mesh_shape[axis] for axis in step.axes)
    # What is joined or divided has all parts of one size, whose padding is cut off after, or put in before.
    match step:
        case AllGather(_, dim):
            moved[dim] *= group
        case ReduceScatter(_, dim):
            moved[dim] = later[dim] * group
        case AllToAll(_, source, target):
            moved[source] *= group
            moved[target] = later[target]
        case _:
            pass
    return math.prod(moved) / math.prod(shape) if all(shape) else 1.0


def copied_share(step: ReshardStep, layout: Layout, shape: Sequence[int], mesh_shape: Sequence[int]) -> float:
    """Return the share of an array in `layout` that a step reads from and writes to memory besides its collective.

    Collectives work on the major dimension. On any other one the array is transposed before or after: read once,
    written once. So is one that is padded, or cut.
    """
    sizes, later = (_part(each, shape, mesh_shape) for each in (layout, after(layout, step)))
    whole = math.prod(shape) or 1
    held, left = math.prod(sizes) / whole, math.prod(later) / whole
    group = math.prod(mesh_shape[axis] for axis in step.axes)

    def moves(dim: int) -> bool:
        return math.prod(shape[:dim]) > 1 or max(sizes[dim], later[dim]) < group * min(sizes[dim], later[dim])

    match step:
        case Slice():
            return 2 * left
        case ToPartial():
            # Zeros are written without reading anything.
            return held
        case PadToPartial():
            return held + left
        case AllGather(_, dim):
            return 2 * left if moves(dim) else 0.0
        case ReduceScatter(_, dim):
            return 2 * held if moves(dim) else 0.0
        case AllToAll(_, source, target):
            return 2 * held * (moves(source) + moves(target))
        case AllReduce() | Permute():
            return 0.0
        case _:
            assert_never(step)


def _part(layout: Layout, shape: Sequence[int], mesh_shape: Sequence[int]) -> list[int]:
    return list(_part_shape(layout.dims, tuple(shape), tuple(mesh_shape)))


@functools.lru_cache(maxsize=1 << 14)
def _part_shape(dims: tuple[Axes, ...], shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one device's part; many steps lead from and to each layout."""
    counts = (math.prod(mesh_shape[axis] for axis in axes) for axes in dims)
    return tuple(part_size(size, count) for size, count in zip(shape, counts, strict=True))


def _without_last(axes: Axes, last: Axes) -> Axes:
    assert axes[-len(last) :] == last, (axes, last)
    return axes[: -len(last)]


def _without(axes: Axes, removed: Axes) -> Axes:
    assert set(removed) <= set(axes), (axes, removed)
    return tuple(axis for axis in axes if axis not in removed)


def _with(axes: Axes, added: Iterable[int]) -> Axes:
    return tuple(sorted((*axes, *added)))
