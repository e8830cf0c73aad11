"""Plan the tiles that bring a value from one mesh to another: ranges of indices, cut where both layouts cut.

    box of a device   a range [start, stop) per dimension: the part of the value that its layout puts there
    tile              box of a source device  ∩  box of a destination device
    copy              a box that is whole on one device, to another one of the same process

The boxes of one layout are equal or disjoint, so the tiles of a box are exactly its bytes, each once. Within a
process one device receives each box and the others copy from it, so a byte enters a process once:

    wire bytes  =  Σ over destination processes  |union of its boxes  −  what its own devices hold of the source|

A box that several processes want is sent to each of them. Where their links to the source are slow and those among
them fast, `scattered` gives a layout to send to instead, of which an all-gather among them makes the wanted one:
then every byte crosses the slow links once.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from jax.sharding import PartitionSpec

from autopar.errors import InvalidArgument
from autopar.ir.instructions import spec_axes, spec_parts

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class DeviceLayout:
    """The layout of a value over a mesh: ordinals of devices, row-major over `mesh_shape`, and a spec."""

    devices: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    spec: PartitionSpec

    def boxes(self, shape: Sequence[int]) -> tuple[Box, ...]:
        """The box of every device, in the order of `devices`."""
        parts = self.parts(shape)
        places = np.indices(self.mesh_shape).reshape(len(self.mesh_shape), -1)
        place_on = dict(zip(self.axis_names, places, strict=True))
        sizes = dict(zip(self.axis_names, self.mesh_shape, strict=True))
        none = np.zeros(len(self.devices), int)
        starts: list[list[int]] = []
        for dimension, (entry, count) in enumerate(itertools.zip_longest(self.spec, parts)):
            number = none
            for axis in spec_axes(entry):  # the first axis is the major one
                number = number * sizes[axis] + place_on[axis]
            starts.append((number * (shape[dimension] // count)).tolist())
        steps = [dim // count for dim, count in zip(shape, parts, strict=True)]
        if not starts:
            return ((),) * len(self.devices)
        return tuple(tuple((start, start + step) for start, step in zip(row, steps)) for row in zip(*starts))

    def parts(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Into how many equal parts each dimension is cut."""
        sizes = dict(zip(self.axis_names, self.mesh_shape, strict=True))
        counts = spec_parts(self.spec, sizes)
        if len(counts) > len(shape) or any(dim % count for dim, count in zip(shape, counts)):
            mesh = ", ".join(f"{name}={size}" for name, size in sizes.items())
            raise InvalidArgument(
                f"The spec {self.spec} cuts shape {tuple(shape)} into {counts} parts on the mesh ({mesh}). "
                "Every dimension must be a multiple of its parts; leave the others whole."
            )
        return (*counts, *(1,) * (len(shape) - len(counts)))


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A range of the whole value that goes from one device to another."""

    source: int
    destination: int
    box: Box


@dataclass(frozen=True, kw_only=True)
class TileCopy:
    """A device takes over the box of another one of its process, when that is complete."""

    source: int
    destination: int


@dataclass(frozen=True, kw_only=True)
class TransferPlan:
    """The tiles of one value in the order of both ends, and the copies after them."""

    shape: tuple[int, ...]
    dtype: str
    source: DeviceLayout
    destination: DeviceLayout
    tiles: tuple[Tile, ...]
    copies: tuple[TileCopy, ...]
    # Bytes from process to process, other than within one.
    traffic: Mapping[tuple[int, int], int] = field(repr=False)

    @property
    def wire_bytes(self) -> int:
        """Bytes that leave a process."""
        return sum(self.traffic.values())

    @cached_property
    def source_boxes(self) -> Mapping[int, Box]:
        """The range that each source device holds."""
        return dict(zip(self.source.devices, self.source.boxes(self.shape), strict=True))

    @cached_property
    def destination_boxes(self) -> Mapping[int, Box]:
        """The range that each destination device shall hold."""
        return dict(zip(self.destination.devices, self.destination.boxes(self.shape), strict=True))


def plan_transfer(
    shape: Sequence[int],
    item_bytes: int,
    source: DeviceLayout,
    destination: DeviceLayout,
    process_of: Mapping[int, int] | Sequence[int],
    *,
    dtype: str,
    sent_bytes: Counter[int] | None = None,
) -> TransferPlan:
    """The cheapest tiles: from the process itself if it has them, else from the replica that has sent least so far.

    `sent_bytes` counts what each device has sent by plans before this one, and is added to, so that the values of one
    message do not all leave from the first replica.
    """
    shape = tuple(shape)
    load = Counter[int]() if sent_bytes is None else sent_bytes
    holders = _by_box(source, shape)
    targets = _by_box(destination, shape)
    received: Counter[int] = Counter()
    tiles: list[Tile] = []
    copies: list[TileCopy] = []
    for wanted, ordinals in targets.items():
        for process, group in _by_process(ordinals, process_of).items():
            leader = min(group, key=lambda ordinal: (ordinal not in holders.get(wanted, ()), received[ordinal]))
            received[leader] += _size(wanted)
            copies += [TileCopy(source=leader, destination=other) for other in group if other != leader]
            for box in _overlaps(wanted, source, shape):
                part = _intersection(wanted, box)
                sender = _sender(holders[box], leader, process, process_of, load)
                load[sender] += _size(part) * item_bytes * (process_of[sender] != process)
                tiles.append(Tile(source=sender, destination=leader, box=part))
    return TransferPlan(
        shape=shape,
        dtype=dtype,
        source=source,
        destination=destination,
        tiles=tuple(tiles),
        copies=tuple(copies),
        traffic=_traffic(tiles, item_bytes, process_of),
    )


def scattered(
    layout: DeviceLayout, shape: Sequence[int], process_of: Mapping[int, int] | Sequence[int]
) -> DeviceLayout | None:
    """The layout with the axes over which processes hold the same boxes laid onto dimensions; None if there are none.

    An all-gather over these axes makes `layout` of it. A dimension takes an axis that divides what is left of it, the
    largest dimension first.
    """
    free = [axis for axis in layout.axis_names if axis not in {a for e in layout.spec for a in spec_axes(e)}]
    entries = [spec_axes(entry) for entry in layout.spec] + [()] * (len(shape) - len(layout.spec))
    sizes = dict(zip(layout.axis_names, layout.mesh_shape, strict=True))
    left = [dim // count for dim, count in zip(shape, layout.parts(shape), strict=True)]
    for axis in free:
        if sizes[axis] == 1 or not _crosses_processes(layout, axis, process_of):
            continue
        fitting = [d for d, dim in enumerate(left) if dim and dim % sizes[axis] == 0]
        if fitting:
            dimension = max(fitting, key=lambda d: left[d])
            entries[dimension] = (*entries[dimension], axis)
            left[dimension] //= sizes[axis]
    spec = PartitionSpec(*(entry if len(entry) > 1 else (*entry, None)[0] for entry in entries))
    changed = replace(layout, spec=spec)
    return None if changed.parts(shape) == layout.parts(shape) else changed


def _by_box(layout: DeviceLayout, shape: tuple[int, ...]) -> Mapping[Box, list[int]]:
    groups: dict[Box, list[int]] = defaultdict(list)
    for ordinal, box in zip(layout.devices, layout.boxes(shape), strict=True):
        groups[box].append(ordinal)
    return groups


def _by_process(ordinals: Sequence[int], process_of: Mapping[int, int] | Sequence[int]) -> Mapping[int, list[int]]:
    groups: dict[int, list[int]] = defaultdict(list)
    for ordinal in ordinals:
        groups[process_of[ordinal]].append(ordinal)
    return groups


def _overlaps(wanted: Box, source: DeviceLayout, shape: tuple[int, ...]) -> Iterator[Box]:
    """The boxes of the source that share elements with the wanted one; none if that is empty."""
    if not _size(wanted):
        return iter(())
    steps = [dim // count for dim, count in zip(shape, source.parts(shape), strict=True)]
    return itertools.product(
        *(
            [(start, start + step) for start in range(low // step * step, high, step)]
            for (low, high), step in zip(wanted, steps, strict=True)
        )
    )


def _sender(
    holders: Sequence[int],
    leader: int,
    process: int,
    process_of: Mapping[int, int] | Sequence[int],
    load: Counter[int],
) -> int:
    if len(holders) == 1:
        return holders[0]
    by_process: Counter[int] = Counter()
    for ordinal in holders:
        by_process[process_of[ordinal]] += load[ordinal]

    def cost(ordinal: int) -> tuple[bool, bool, int, int, int]:
        there = process_of[ordinal]
        return there != process, ordinal != leader, by_process[there], load[ordinal], ordinal

    return min(holders, key=cost)


def _crosses_processes(layout: DeviceLayout, axis: str, process_of: Mapping[int, int] | Sequence[int]) -> bool:
    grid = np.array([process_of[ordinal] for ordinal in layout.devices]).reshape(layout.mesh_shape)
    along = np.moveaxis(grid, layout.axis_names.index(axis), 0)
    return bool((along != along[0]).any())


def _traffic(
    tiles: Sequence[Tile], item_bytes: int, process_of: Mapping[int, int] | Sequence[int]
) -> Mapping[tuple[int, int], int]:
    table: Counter[tuple[int, int]] = Counter()
    for tile in tiles:
        link = process_of[tile.source], process_of[tile.destination]
        if link[0] != link[1]:
            table[link] += _size(tile.box) * item_bytes
    return dict(sorted(table.items()))


def _intersection(one: Box, other: Box) -> Box:
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def _size(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)
