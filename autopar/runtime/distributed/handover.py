"""Hand values from the processes of one world to those of the next, through the memory of their hosts.

    gather    every shard once, from a process that still holds it    into Ray's object store, on its own host
    place     into the layouts of another plan                        every process reads what its devices need

The driver holds references alone. What a process held that was lost is taken from another one that has a copy; where
no process has one, nothing is gathered, and a checkpoint is needed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from autopar.runtime.distributed.array import DistributedArray
from autopar.runtime.distributed.host import Host
from autopar.runtime.distributed.host_inputs import Values, assembled, sharding_on
from autopar.runtime.distributed.messages import ShardRequest
from autopar.runtime.distributed.pieces import Placed
from autopar.runtime.transfer.tiles import Box
from autopar.runtime.unfinished import words_of

if TYPE_CHECKING:
    from autopar.runtime.distributed.session import RaySession

_SAY_S = 10.0
"""Seconds in which a process has to say what it holds: one that died is known at once, a stopped one says nothing."""


@dataclass(frozen=True, kw_only=True)
class HandedValue:
    """A value between two worlds: its shape, its dtype as programs name it, and references to its parts, by range."""

    shape: tuple[int, ...]
    dtype: str
    parts: dict[Box, Any]


# In a process.


def shards_here(host: Host, numbers: Sequence[int]) -> list[list[ShardRequest]]:
    """Return by value which of its shards this process holds and has computed."""
    return [_shards_of(host, number) for number in numbers]


def _shards_of(host: Host, number: int) -> list[ShardRequest]:
    ordinals = {host.world.devices[ordinal]: ordinal for ordinal in host.world.ordinals}
    found: list[ShardRequest] = []
    for place, array in enumerate(host.kept(number)):
        for shard in () if array is None else array.addressable_shards:
            if words_of(shard.data).is_ready():  # what was under way with a process that is lost, is never
                found.append(ShardRequest(piece=place, ordinal=ordinals[shard.device]))
    return found


def give_shards(host: Host, wanted: Sequence[tuple[int, ShardRequest]]) -> Any:
    """Return the bytes of shards by their values' numbers, each an object of its own."""
    arrays = [shard for number, request in wanted for [shard] in host.fetch([number], [[request]])]
    return arrays[0] if len(arrays) == 1 else arrays


def take_values(
    host: Host, items: Sequence[tuple[int, Placed]], boxes: Sequence[Sequence[Box]], *parts: np.ndarray[Any, Any]
) -> None:
    """Keep values in their places: `boxes` are the ranges of each that `parts` are, in this order."""
    rest = iter(parts)
    for (number, placed), ranges in zip(items, boxes, strict=True):
        there = list(zip(ranges, rest, strict=False))
        host.put(number, _pieces(host, placed, there))


def _pieces(host: Host, placed: Placed, parts: Sequence[tuple[Box, np.ndarray[Any, Any]]]) -> Values:
    world, pieces = host.world, list[Any]()
    for piece in placed.pieces:
        own = {o: box for o, box in piece.device_boxes().items() if o in world.ordinals}
        cuts = [_cut(box, parts) for box in own.values()]
        sharding, devices = sharding_on(piece.layout, world.devices), [world.devices[o] for o in own]
        pieces.append(assembled(piece.shape, placed.dtype, sharding, cuts, devices) if own else None)
    return pieces


def _cut(box: Box, parts: Sequence[tuple[Box, np.ndarray[Any, Any]]]) -> np.ndarray[Any, Any]:
    """A range of a value from the parts that it lies in."""
    first, rank = parts[0][1], len(box)
    found = np.empty((*(stop - start for start, stop in box), *first.shape[rank:]), first.dtype)
    for there, array in parts:
        common = overlap(box, there)
        if common is not None:
            inside = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(common, box))
            outside = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(common, there))
            found[inside] = array[outside]
    return found


def overlap(one: Box, other: Box) -> Box | None:
    """Return the range that two have in common; None if that is empty."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


# On the driver.


def gather(session: RaySession, values: Sequence[DistributedArray]) -> list[HandedValue] | None:
    """Return the values in the memory of the hosts that hold them; None if a part of one is nowhere.

    The session may have lost processes, if the others were told to stay (`RayHosts.survivors_stay`).
    """
    if any(value.is_deleted() or value.owner is not session for value in values):
        return None
    ray, actors = session.hosts.ray, session.hosts.actors
    numbers = [value.identity for value in values]
    lost = session.replies.lost_processes
    asked = {a.run_beside.remote(shards_here, numbers): n for n, a in enumerate(actors) if n not in lost}
    places = [value.placed for value in values]
    held: dict[int, list[list[ShardRequest]]] = {}
    chosen, waiting, deadline = None, list(asked), time.monotonic() + _SAY_S
    while chosen is None and waiting:
        ready, waiting = ray.wait(waiting, timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            break
        for ref in ready:
            with suppress(ray.exceptions.RayError):  # it died
                held[asked[ref]] = ray.get(ref)
        chosen = holders(places, held)
    if chosen is None:
        return None
    return [
        HandedValue(shape=value.shape, dtype=value.placed.dtype, parts=parts)
        for value, parts in zip(values, _given(session, numbers, chosen))
    ]


def holders(
    places: Sequence[Placed], held: Mapping[int, Sequence[Sequence[ShardRequest]]]
) -> list[dict[Box, tuple[int, ShardRequest]]] | None:
    """Return one process that holds each value's range, by value and range; None if a range has none."""
    chosen: list[dict[Box, tuple[int, ShardRequest]]] = []
    for number, placed in enumerate(places):
        boxes = [piece.device_boxes() for piece in placed.pieces]
        choice: dict[Box, tuple[int, ShardRequest]] = {}
        for process, values in sorted(held.items()):
            for request in values[number]:
                choice.setdefault(boxes[request.piece][request.ordinal], (process, request))
        if set(choice) != {box for piece in boxes for box in piece.values()}:
            return None
        chosen.append(choice)
    return chosen


def _given(
    session: RaySession, numbers: Sequence[int], chosen: Sequence[dict[Box, tuple[int, ShardRequest]]]
) -> list[dict[Box, Any]]:
    """Let each process put its share into the memory of its host; the references, by value and range."""
    by_process: dict[int, list[tuple[int, Box, ShardRequest]]] = {}
    for place, choice in enumerate(chosen):
        for box, (process, request) in choice.items():
            by_process.setdefault(process, []).append((place, box, request))
    found: list[dict[Box, Any]] = [{} for _ in numbers]
    refs: list[Any] = []
    for process, share in by_process.items():
        give = session.hosts.actors[process].run_beside.options(num_returns=len(share))
        given = give.remote(give_shards, [(numbers[place], request) for place, _, request in share])
        for (place, box, _), ref in zip(share, [given] if len(share) == 1 else given, strict=True):
            found[place][box] = ref
            refs.append(ref)
    # What is in the store stays there when its process ends.
    session.hosts.ray.wait(refs, num_returns=len(refs), fetch_local=False)
    return found


def place(session: RaySession, values: Sequence[HandedValue], places: Sequence[Placed]) -> list[DistributedArray]:
    """Return the values in these places of another world. Raises `ClusterFailed` if a host took its part with it."""
    numbers = session.next_numbers(len(places))
    items = list(zip(numbers, places, strict=True))
    arguments: list[tuple[Any, ...]] = []
    for process in range(session.num_processes):
        needed = [needed_parts(value, placed, process, session.process_of) for value, placed in zip(values, places)]
        refs = itertools.chain.from_iterable(
            [value.parts[box] for box in boxes] for value, boxes in zip(values, needed)
        )
        arguments.append((items, needed, *refs))
    session.run_each(take_values, arguments)
    return [DistributedArray(session, n, placed, session.number_of_layout(placed)) for n, placed in items]


def needed_parts(value: HandedValue, placed: Placed, process: int, process_of: Sequence[int]) -> list[Box]:
    """Return the ranges of a value that the devices of a process need something of."""
    wanted = {box for piece in placed.pieces for o, box in piece.device_boxes().items() if process_of[o] == process}
    found = [part for part in value.parts if any(overlap(part, box) is not None for box in wanted)]
    return found or list(value.parts)[: bool(wanted)]  # of an empty array one part says the dtype
