"""Layouts: where the parts of an array are on a logical mesh, and which sums are still to be made.

A layout names mesh axes by number: per dimension of the array the axes that split it, the major one first, and apart
from them the axes over which every device holds a summand of the array only (a partial sum, in JAX's words
"unreduced"). An axis appears at most once. On a mesh (2, 4) an array of shape [8, 16] may have

    Layout(((0,), (1,)))       4 x 4 blocks, one for each device
    Layout(((0, 1), ()))       8 rows, one for each device
    Layout(((0,), ()), (1,))   rows split in two; the four devices of a row block hold summands of it

A dimension that its axes do not divide is padded, axis by axis: of n rows every part along an axis of k devices has
⌈n/k⌉, the last ones fewer, and behind these stands padding, which may hold anything. Ten rows on a mesh (2, 2):

    Layout(((0, 1), ()))       rows 0 1 2, 3 4 . | 5 6 7, 8 9 .
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jax.sharding import PartitionSpec

from autopar.checks import check_mesh_shape
from autopar.ir.axis_links import AxisLinks
from autopar.ir.instructions import spec_axes

Axes = tuple[int, ...]
"""Mesh axes by number."""
Reach = Literal["all", "inside", "across"]
"""The devices along some axes that exchange: all; those of a fast domain; one of each domain."""


class Layout(NamedTuple):
    """The axes that split each dimension, and those over which the array is a sum."""

    dims: tuple[Axes, ...]
    partial: Axes = ()


@dataclass(frozen=True, kw_only=True)
class LogicalMesh:
    """Sizes and names of the mesh axes; the devices themselves matter here for nothing but the links between them."""

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    links: AxisLinks | None = None
    """The links along the axes; None: all are equal."""
    order: Axes | None = None
    """The devices in the order of the mesh, row-major, where they do not follow each other."""

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` unless every axis has a size and a name of its own."""
        check_mesh_shape(self.shape, self.axis_names)

    @property
    def num_devices(self) -> int:
        """Number of devices: the product of the axis sizes."""
        return math.prod(self.shape)

    def size(self, axes: Iterable[int]) -> int:
        """Number of devices along `axes` together."""
        return _product(self.shape, tuple(axes))

    def reach(self, axes: Axes, reach: Reach) -> int:
        """Number of devices along `axes` that exchange with each other."""
        inside = 1 if self.links is None else math.prod(self.links.inside[axis] for axis in axes)
        return {"all": self.size(axes), "inside": inside, "across": self.size(axes) // inside}[reach]

    def sums_in_levels(self, axes: Axes) -> bool:
        """Return whether sums along `axes` are taken inside of fast domains first."""
        return self.links is not None and bool(self.links.ring(axes).levels)

    def names(self, axes: Iterable[int]) -> tuple[str, ...]:
        """The names of `axes`."""
        return tuple(self.axis_names[axis] for axis in axes)


@functools.lru_cache(maxsize=4096)
def _product(shape: tuple[int, ...], axes: Axes) -> int:
    return math.prod(shape[axis] for axis in axes)


def replicated(rank: int) -> Layout:
    """Every device holds the whole array."""
    return Layout(((),) * rank)


def used_axes(layout: Layout) -> frozenset[int]:
    """The axes that split the array."""
    return frozenset(axis for axes in layout.dims for axis in axes)


def num_shards(shape: tuple[int, ...], layout: Layout, mesh: LogicalMesh) -> float:
    """The size of the array in parts of one device, padding included."""
    return _num_shards(tuple(shape), layout.dims, mesh.shape)


@functools.lru_cache(maxsize=65_536)
def _num_shards(shape: tuple[int, ...], dims: tuple[Axes, ...], mesh_shape: tuple[int, ...]) -> float:
    sizes = zip(shape, dims, strict=True)
    return math.prod(num_parts(size, [mesh_shape[axis] for axis in axes]) for size, axes in sizes)


def local_shape(shape: tuple[int, ...], layout: Layout, mesh: LogicalMesh) -> tuple[int, ...]:
    """The shape of one device's part, padding included."""
    return tuple(part_size(size, mesh.size(axes)) for size, axes in zip(shape, layout.dims, strict=True))


def part_size(size: int, parts: int) -> int:
    """The size of the first of some parts of a dimension, which all others are padded to."""
    return -(-size // parts)


def num_parts(size: int, counts: Sequence[int]) -> float:
    """Return the size of a dimension in parts of it, split along axes of these sizes."""
    parts = math.prod(counts)
    return parts if size % parts == 0 else size / part_size(size, parts)


def can_split(size: int, counts: Sequence[int]) -> bool:
    """Return whether axes of these sizes may split a dimension: evenly, or each making the padded parts smaller."""
    parts = math.prod(counts)
    return size % parts == 0 or all(
        part_size(size, parts) < part_size(size, parts // count) for count in counts if count > 1
    )


@functools.cache
def split_like(size: int, mesh_shape: tuple[int, ...]) -> int:
    """Return the least size whose parts are the same shares of it on a mesh as those of a dimension of this size.

    That is its greatest common divisor with the number of devices, unless there are axes that split it unevenly.
    """
    real = [count for count in mesh_shape if count > 1]
    uneven = any(
        size % math.prod(counts) and can_split(size, counts)
        for length in range(1, len(real) + 1)
        for counts in itertools.combinations(real, length)
    )
    return size if uneven else math.gcd(size, math.prod(mesh_shape))


def fits(shape: tuple[int, ...], layout: Layout, mesh: LogicalMesh) -> bool:
    """Return whether every dimension divides by the axes that split it, as JAX wants it of arrays outside a program."""
    return not padded_dims(shape, layout, mesh)


def may_have(shape: tuple[int, ...], layout: Layout, mesh: LogicalMesh) -> bool:
    """Return whether the axes of every dimension may split it, with padding where they do not divide it."""
    return all(
        can_split(size, [mesh.shape[axis] for axis in axes]) for size, axes in zip(shape, layout.dims, strict=True)
    )


def padded_dims(shape: tuple[int, ...], layout: Layout, mesh: LogicalMesh) -> list[int]:
    """The dimensions whose parts have padding."""
    return [d for d, axes in enumerate(layout.dims) if axes and shape[d] % mesh.size(axes)]


@functools.cache
def all_layouts(shape: tuple[int, ...], mesh: LogicalMesh) -> tuple[Layout, ...]:
    """Every layout without partial sums, the axes of a dimension in mesh order; sorted.

    An axis of one device splits nothing: a layout that names it would be another one a second time.
    """
    splits = set[Layout]()
    dimensions = (None, *range(len(shape)))
    for owners in itertools.product(*(dimensions if size > 1 else (None,) for size in mesh.shape)):
        dims = tuple(tuple(a for a, owner in enumerate(owners) if owner == d) for d in range(len(shape)))
        if may_have(shape, Layout(dims), mesh):
            splits.add(Layout(dims))
    return tuple(sorted(splits))


@functools.cache
def even_layouts(shape: tuple[int, ...], mesh: LogicalMesh) -> tuple[Layout, ...]:
    """Return those of `all_layouts` whose parts are equal: the layouts that values outside of a program can have."""
    return tuple(layout for layout in all_layouts(shape, mesh) if fits(shape, layout, mesh))


def without_ones(layout: Layout, mesh: LogicalMesh) -> Layout:
    """The layout without mesh axes of size 1, and with the summed axes in order."""
    dims = (tuple(axis for axis in axes if mesh.shape[axis] > 1) for axes in layout.dims)
    return Layout(tuple(dims), tuple(sorted(axis for axis in layout.partial if mesh.shape[axis] > 1)))


def to_spec(layout: Layout, mesh: LogicalMesh) -> PartitionSpec:
    """The layout as JAX writes it. Partial sums have no place in a `PartitionSpec`: assert that there are none."""
    assert not layout.partial, layout
    entries = [mesh.names(axes) for axes in layout.dims]
    while entries and not entries[-1]:
        entries.pop()
    return PartitionSpec(*(None if not e else e[0] if len(e) == 1 else e for e in entries))


def from_spec(spec: PartitionSpec, rank: int, mesh: LogicalMesh) -> Layout:
    """The layout of an array of this rank under a spec whose axes the mesh has; those of one device split nothing."""
    numbers = {name: number for number, name in enumerate(mesh.axis_names)}
    dims = [tuple(numbers[name] for name in spec_axes(entry) if mesh.shape[numbers[name]] > 1) for entry in spec]
    return Layout((*dims, *((),) * (rank - len(dims))))


def describe_layout(layout: Layout, mesh: LogicalMesh) -> str:
    """Return it for tables: `[data, -, model]`, and `[data, -] + model` for a sum over `model` still to be made."""
    entries = ", ".join("*".join(mesh.names(axes)) or "-" for axes in layout.dims)
    return f"[{entries}]" + "".join(f" + {name}" for name in mesh.names(layout.partial))
