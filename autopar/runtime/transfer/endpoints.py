"""The work of one process at either end of a message, as numbers: which shards, cuts, parcels, joins and copies.

Arrays on one device each are kept in a list while a message is worked on, and are called by their places in it:

    outgoing   shards of the values | tiles cut from them                           -> posts, and moves within
    incoming   tiles from here | tiles from others, by process | joins | copies | empties  -> shards of each value

Tiles are in the order (value, place in its plan) at both ends. Nothing here touches a device.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.ir.instructions import KEY_BYTES
from autopar.runtime.executables import jax_dtype
from autopar.runtime.interfaces import Parcel
from autopar.runtime.transfer.tiles import Box, Tile, TransferPlan

ProcessOf = Mapping[int, int] | Sequence[int]
WORD_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class ShardCut:
    """A range of the input-th shard, or a copy of all of it; random keys become words."""

    input: int
    box: Box | None
    is_key: bool


@dataclass(frozen=True, kw_only=True)
class ShardJoin:
    """A shard from tiles, each with its range in the shard; words become random keys."""

    boxes: tuple[Box, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Empty:
    """A shard without elements, which nobody sends."""

    shape: tuple[int, ...]
    dtype: str
    device: int


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """The work of a process on the values that it sends."""

    shards: tuple[tuple[int, int, int], ...]  # value, which of its shards here, device
    cuts: tuple[
        tuple[tuple[int, ...], tuple[ShardCut, ...]], ...
    ]  # per device: places of the shards, what is made of them
    posts: tuple[tuple[int, tuple[Parcel, ...], tuple[int, ...]], ...]  # process, parcels and their places
    moves: tuple[tuple[int, int], ...]  # place, device here


@dataclass(frozen=True, kw_only=True)
class Incoming:
    """The work of a process on the values that it receives."""

    moves: int  # how many tiles come from here
    pulls: tuple[tuple[int, tuple[Parcel, ...]], ...]
    joins: tuple[
        tuple[tuple[int, ...], tuple[ShardJoin, ...]], ...
    ]  # per device: places of the tiles, what they become
    copies: tuple[tuple[int, int], ...]  # place, device
    empties: tuple[Empty, ...]
    shards: tuple[tuple[int, ...], ...]  # per value: the places of its shards here


def outgoing(
    plans: Sequence[TransferPlan], process: int, process_of: ProcessOf, lasting: Collection[int] = ()
) -> Outgoing:
    """The sender's end; whole shards of values that do not last are copied before another process gets them."""
    tiles = [(v, tile) for v, plan in enumerate(plans) for tile in plan.tiles if process_of[tile.source] == process]
    shards = {shard: place for place, shard in enumerate(dict.fromkeys((v, tile.source) for v, tile in tiles))}
    wanted = [_cut(plans[v], v, tile, process_of[tile.destination] == process, lasting) for v, tile in tiles]
    by_device: dict[int, dict[tuple[int, Box | None], None]] = defaultdict(dict)
    for (value, tile), cut in zip(tiles, wanted, strict=True):
        if cut is not None:
            by_device[tile.source][value, cut.box] = None
    place = len(shards)
    places: dict[tuple[int, int, Box | None], int] = {}
    cuts: list[tuple[tuple[int, ...], tuple[ShardCut, ...]]] = []
    for device, pieces in by_device.items():
        values = list(dict.fromkeys(value for value, _ in pieces))
        made = [ShardCut(input=values.index(v), box=box, is_key=plans[v].dtype in KEY_BYTES) for v, box in pieces]
        cuts.append((tuple(shards[value, device] for value in values), tuple(made)))
        for value, box in pieces:
            places[value, device, box] = place
            place += 1
    at = [
        shards[v, tile.source] if cut is None else places[v, tile.source, cut.box]
        for (v, tile), cut in zip(tiles, wanted, strict=True)
    ]
    numbered = [(process_of[tile.destination], v, tile, p) for (v, tile), p in zip(tiles, at, strict=True)]
    return Outgoing(
        shards=tuple((v, _local(plans[v].source.devices, process, process_of).index(o), o) for v, o in shards),
        cuts=tuple(cuts),
        posts=tuple(
            (
                other,
                tuple(_parcel(plans[v], tile) for to, v, tile, _ in numbered if to == other),
                tuple(p for to, _, _, p in numbered if to == other),
            )
            for other in sorted({to for to, *_ in numbered} - {process})
        ),
        moves=tuple((p, tile.destination) for to, _, tile, p in numbered if to == process),
    )


def incoming(plans: Sequence[TransferPlan], process: int, process_of: ProcessOf) -> Incoming:
    """The receiver's end."""
    tiles = [(v, tile) for v, p in enumerate(plans) for tile in p.tiles if process_of[tile.destination] == process]
    # Stable: within a process the tiles stay in their order.
    tiles.sort(key=lambda item: (process_of[item[1].source] != process, process_of[item[1].source]))
    sources = sorted({process_of[tile.source] for _, tile in tiles} - {process})
    shards, joins = _joined(plans, tiles)
    place = len(tiles) + sum(len(made) for _, made in joins)
    copies: list[tuple[int, int]] = []
    empties: list[Empty] = []
    for value, plan in enumerate(plans):
        for copy in plan.copies:
            if process_of[copy.destination] == process and (value, copy.source) in shards:
                shards[value, copy.destination] = place + len(copies)
                copies.append((shards[value, copy.source], copy.destination))
    for value, plan in enumerate(plans):
        for device in _local(plan.destination.devices, process, process_of):
            if (value, device) not in shards:
                shards[value, device] = place + len(copies) + len(empties)
                shape = tuple(stop - start for start, stop in plan.destination_boxes[device])
                empties.append(Empty(shape=shape, dtype=plan.dtype, device=device))
    return Incoming(
        moves=sum(process_of[tile.source] == process for _, tile in tiles),
        pulls=tuple(
            (other, tuple(_parcel(plans[v], tile) for v, tile in tiles if process_of[tile.source] == other))
            for other in sources
        ),
        joins=tuple(joins),
        copies=tuple(copies),
        empties=tuple(empties),
        shards=tuple(
            tuple(shards[value, device] for device in _local(plan.destination.devices, process, process_of))
            for value, plan in enumerate(plans)
        ),
    )


def _joined(
    plans: Sequence[TransferPlan], tiles: Sequence[tuple[int, Tile]]
) -> tuple[dict[tuple[int, int], int], list[tuple[tuple[int, ...], tuple[ShardJoin, ...]]]]:
    """The places of the shards that tiles make, by (value, device), and the joins that those of several tiles need."""
    parts: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))  # device -> value -> places
    for place, (value, tile) in enumerate(tiles):
        parts[tile.destination][value].append(place)
    shards: dict[tuple[int, int], int] = {}
    joins: list[tuple[tuple[int, ...], tuple[ShardJoin, ...]]] = []
    place = len(tiles)
    for device, values in parts.items():
        inputs: list[int] = []
        made: list[ShardJoin] = []
        for value, places in values.items():
            if len(places) == 1 and plans[value].dtype not in KEY_BYTES:
                shards[value, device] = places[0]
                continue
            whole = plans[value].destination_boxes[device]
            made.append(
                ShardJoin(boxes=tuple(_within(tiles[p][1].box, whole) for p in places), dtype=plans[value].dtype)
            )
            inputs += places
            shards[value, device] = place
            place += 1
        if made:
            joins.append((tuple(inputs), tuple(made)))
    return shards, joins


def _cut(plan: TransferPlan, value: int, tile: Tile, stays: bool, lasting: Collection[int]) -> ShardCut | None:
    """Return what is made of a shard for a tile; None if the shard itself is sent."""
    whole = plan.source_boxes[tile.source]
    is_key = plan.dtype in KEY_BYTES
    box = None if tile.box == whole else _within(tile.box, whole)
    shared = tile.source == tile.destination if stays else value not in lasting
    return ShardCut(input=0, box=box, is_key=is_key) if box is not None or is_key or shared else None


def _parcel(plan: TransferPlan, tile: Tile) -> Parcel:
    shape = tuple(stop - start for start, stop in tile.box)
    dtype: Any = jax_dtype(plan.dtype)
    if plan.dtype in KEY_BYTES:
        shape, dtype = (*shape, KEY_BYTES[plan.dtype] // WORD_BYTES), np.dtype(np.uint32)
    return Parcel(source=tile.source, destination=tile.destination, shape=shape, dtype=dtype)


def _within(box: Box, whole: Box) -> Box:
    return tuple((start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, whole, strict=True))


def _local(devices: Sequence[int], process: int, process_of: ProcessOf) -> list[int]:
    return [ordinal for ordinal in devices if process_of[ordinal] == process]
