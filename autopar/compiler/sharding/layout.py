"""Layouts: where the parts of an array are on a logical mesh, and which sums are still to be made.

A layout names mesh axes by number: per dimension of the array the axes that split it, the major one first, and apart
from them the axes over which every device holds a summand of the array only (a partial sum, in JAX's words
"unreduced"). An axis appears at most once. On a mesh (2, 4) an array of shape [8, 16] may have

    Layout(((0,), (1,)))       4 x 4 blocks, one for each device
    Layout(((0, 1), ()))       8 rows, one for each device
    Layout(((0,), ()), (1,))   rows split in two; the four devices of a row block hold summands of it
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from jax.sharding import PartitionSpec

from autopar.checks import check_mesh_shape
from autopar.ir.instructions import spec_axes

Axes = tuple[int, ...]
"""Mesh axes by number."""


class Layout(NamedTuple):
    """The axes that split each dimension, and those over which the array is a sum."""

    dims: tuple[Axes, ...]
    partial: Axes = ()


@dataclass(frozen=True, kw_only=True)
class LogicalMesh:
    """Sizes and names of the mesh axes; the devices themselves do not matter here."""

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` unless every axis has a size and a name of its own."""
        check_mesh_shape(self.shape, self.axis_names)

    @property
    def num_devices(self) -> int:
        """Number of devices: the product of the axis sizes."""
        return math.prod(self.shape)

    def size(self, axes: Iterable[int]) -> int:
        """Number of devices along `axes` together."""
        return math.prod(self.shape[axis] for axis in axes)

    def names(self, axes: Iterable[int]) -> tuple[str, ...]:
        """The names of `axes`."""
        return tuple(self.axis_names[axis] for axis in axes)


def replicated(rank: int) -> Layout:
    """Every device holds the whole array."""
    return Layout(((),) * rank)


def used_axes(layout: Layout) -> frozenset[int]:
    """The axes that split the array."""
    return frozenset(axis for axes in layout.dims for axis in axes)


def num_shards(layout: Layout, mesh: LogicalMesh) -> int:
    """Into how many different parts the array is split."""
    return mesh.size(axis for axes in layout.dims for axis in axes)


def local_shape(shape: tuple[int, ...], layout: Layout, mesh: LogicalMesh) -> tuple[int, ...]:
    """The shape of one device's part."""
    return tuple(size // mesh.size(axes) for size, axes in zip(shape, layout.dims, strict=True))


def fits(shape: tuple[int, ...], layout: Layout, mesh: LogicalMesh) -> bool:
    """Return whether every dimension divides by the axes that split it."""
    return all(size % mesh.size(axes) == 0 for size, axes in zip(shape, layout.dims, strict=True))


@functools.cache
def all_layouts(shape: tuple[int, ...], mesh: LogicalMesh) -> tuple[Layout, ...]:
    """Every layout without partial sums whose parts are equal, the axes of a dimension in mesh order; sorted."""
    splits = set[Layout]()
    for owners in itertools.product((None, *range(len(shape))), repeat=len(mesh.shape)):
        dims = tuple(tuple(a for a, owner in enumerate(owners) if owner == d) for d in range(len(shape)))
        if fits(shape, Layout(dims), mesh):
            splits.add(Layout(dims))
    return tuple(sorted(splits))


def to_spec(layout: Layout, mesh: LogicalMesh) -> PartitionSpec:
    """The layout as JAX writes it. Partial sums have no place in a `PartitionSpec`: assert that there are none."""
    assert not layout.partial, layout
    entries = [mesh.names(axes) for axes in layout.dims]
    while entries and not entries[-1]:
        entries.pop()
    return PartitionSpec(*(None if not e else e[0] if len(e) == 1 else e for e in entries))


def from_spec(spec: PartitionSpec, rank: int, mesh: LogicalMesh) -> Layout:
    """The layout of an array of this rank under a spec whose axes the mesh has."""
    numbers = {name: number for number, name in enumerate(mesh.axis_names)}
    dims = [tuple(numbers[name] for name in spec_axes(entry)) for entry in spec]
    return Layout((*dims, *((),) * (rank - len(dims))))


def describe_layout(layout: Layout, mesh: LogicalMesh) -> str:
    """For tables: `[data, -, model]`, and `[data, -] + model` for a sum over `model` still to be made."""
    entries = ", ".join("*".join(mesh.names(axes)) or "-" for axes in layout.dims)
    return f"[{entries}]" + "".join(f" + {name}" for name in mesh.names(layout.partial))
