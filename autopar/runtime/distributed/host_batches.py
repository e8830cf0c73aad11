"""Values that are brought to their place before a step is called: every process gets, or loads, its own boxes.

driver     places and values  ->  `Brought`, one list per process, with the boxes of its devices
process    box  ->  array on each device  ->  one array per piece, kept under the value's number
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar.errors import InvalidArgument
from autopar.runtime.distributed.array import DistributedArray
from autopar.runtime.distributed.host import Host
from autopar.runtime.distributed.host_inputs import Values, assembled, sharding_on
from autopar.runtime.distributed.pieces import Placed
from autopar.runtime.distributed.session import Session
from autopar.runtime.executables import KEY_IMPLEMENTATIONS
from autopar.runtime.inputs import own_copy
from autopar.runtime.transfer.tiles import Box

Load = Callable[[tuple[slice, ...]], Any]


@dataclass(frozen=True, kw_only=True)
class Brought:
    """One value for one process: its number and place, and its boxes, or what loads them."""

    number: int
    name: str
    placed: Placed
    source: Mapping[Box, np.ndarray[Any, Any]] | Load


def bring(
    session: Session, names: Sequence[str], places: Sequence[Placed], values: Sequence[Any]
) -> list[DistributedArray]:
    """Put values where they are wanted; a value is an array of the driver (of keys: their words), or loads itself."""
    numbers = session.next_numbers(len(values))
    items = list(zip(numbers, names, places, values, strict=True))
    messages = [
        ([Brought(number=n, name=name, placed=at, source=_own(session, at, v, p)) for n, name, at, v in items],)
        for p in range(session.num_processes)
    ]
    # The handles are made first, so that what has been put is dropped if a process fails.
    handles = [DistributedArray(session, n, at, session.number_of_layout(at)) for n, _, at, _ in items]
    session.run_each(put_values, messages, timeout_s=session.step_timeout_s)
    return handles


def _own(session: Session, placed: Placed, value: Any, process: int) -> Mapping[Box, np.ndarray[Any, Any]] | Load:
    if callable(value):
        return value
    boxes = [
        box for piece in placed.pieces for o, box in piece.device_boxes().items() if session.process_of[o] == process
    ]
    return {box: np.ascontiguousarray(value[_index(box)]) for box in dict.fromkeys(boxes)}


def put_values(host: Host, brought: Sequence[Brought]) -> None:
    """Put every value's boxes on their devices, in a process."""
    for item in brought:
        host.put(item.number, _pieces(host, item))


def _pieces(host: Host, item: Brought) -> Values:
    world = host.world
    known: dict[Box, np.ndarray[Any, Any]] = {}
    pieces: Values = []
    for piece in item.placed.pieces:
        own = {o: box for o, box in piece.device_boxes().items() if world.process_of[o] == world.process}
        if not own:
            pieces.append(None)
            continue
        for box in own.values():
            if box not in known:
                known[box] = _box(item, box)
        sharding = sharding_on(piece.layout, world.devices)
        devices = [world.devices[o] for o in own]
        parts = [known[box] for box in own.values()]
        pieces.append(assembled(piece.shape, item.placed.dtype, sharding, parts, devices))
    return pieces


def _box(item: Brought, box: Box) -> np.ndarray[Any, Any]:
    if not callable(item.source):
        return item.source[box]
    return loaded(item.source, _index(box), tuple(stop - start for start, stop in box), item.placed.dtype, item.name)


def loaded(load: Load, index: tuple[slice, ...], shape: tuple[int, ...], dtype: str, name: str) -> np.ndarray[Any, Any]:
    """Return the range that a function loads, as the step takes it. Raises `InvalidArgument` for another shape."""
    try:
        array = own_copy(load(index))
    except Exception as error:
        raise InvalidArgument(
            f"The function for {name} raised {type(error).__name__} for the index {index}: {error}. It is called in "
            "every process of the cluster, and must find its files there."
        ) from error
    if array.shape != shape or dtype in KEY_IMPLEMENTATIONS:
        raise InvalidArgument(
            f"The function for {name} returned {array.dtype}{list(array.shape)} for the index {index}, where "
            f"{dtype}{list(shape)} is required. Return just the range that it is called with."
        )
    return array.astype(jnp.dtype(dtype), copy=False)


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*part) for part in box)
