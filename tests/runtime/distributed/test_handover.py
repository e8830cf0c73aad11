"""Values go from the processes of one world to those of the next in any layout; a part that nobody has is noticed."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autopar.ir.program import Window
from autopar.runtime.distributed.handover import (
    HandedValue,
    give_shards,
    holders,
    needed_parts,
    overlap,
    shards_here,
    take_values,
)
from autopar.runtime.distributed.host import Host
from autopar.runtime.distributed.messages import ShardRequest
from autopar.runtime.distributed.pieces import Piece, Placed
from autopar.runtime.distributed.world import World
from autopar.runtime.transfer.exchange import Exchange
from autopar.runtime.transfer.tiles import DeviceLayout

SHAPE = (8, 12)


@pytest.fixture(scope="module")
def host() -> Host:
    """A process with all devices."""
    made, devices = Host(), jax.devices()
    process_of = (0,) * len(devices)
    exchange = Exchange(0, process_of, dict(enumerate(devices)), None)
    made._world = World(process=0, devices=devices, process_of=process_of, node_of=("here",), exchange=exchange)
    return made


def on(
    devices: range, mesh: tuple[int, ...], spec: P, shape: tuple[int, ...] = SHAPE, start: int | None = None
) -> Piece:
    layout = DeviceLayout(devices=tuple(devices), mesh_shape=mesh, axis_names=("x", "y")[: len(mesh)], spec=spec)
    window = None if start is None else Window(axis=0, start=start, stop=start + shape[0])
    return Piece(layout=layout, shape=shape, window=window)


def placed(*pieces: Piece, shape: tuple[int, ...] = SHAPE, dtype: str = "float32") -> Placed:
    return Placed(shape=shape, dtype=dtype, pieces=pieces)


PLACES = {
    "replicated": placed(on(range(8), (8,), P())),
    "rows": placed(on(range(8), (8,), P("x"))),
    "columns": placed(on(range(4), (2, 2), P(None, ("x", "y")))),
    "both": placed(on(range(2, 6), (2, 2), P("y", "x"))),
    "stages": placed(on(range(4), (4,), P("x"), (4, 12), 0), on(range(4, 8), (4,), P(None, "x"), (4, 12), 4)),
    "one device": placed(on(range(7, 8), (1,), P())),
}


def put(host: Host, number: int, there: Placed, words: Any) -> None:
    """Keep a value that one process has whole."""
    take_values(host, [(number, there)], [[tuple((0, size) for size in there.shape)]], words)


def held_by(host: Host, number: int, processes: int) -> dict[int, list[list[ShardRequest]]]:
    """Return what each of several processes would hold, if the devices were divided among them."""
    [requests] = shards_here(host, [number])
    return {p: [[r for r in requests if r.ordinal * processes // 8 == p]] for p in range(processes)}


def move(host: Host, there: Placed, to: Placed, processes: tuple[int, int]) -> None:
    """Value 1, which lies there, becomes value 2."""
    chosen = holders([there], held_by(host, 1, processes[0]))
    assert chosen is not None
    requests = [request for _, request in chosen[0].values()]
    given = give_shards(host, [(1, request) for request in requests])
    parts = dict(zip(chosen[0], [given] if len(requests) == 1 else given, strict=True))
    value = HandedValue(shape=there.shape, dtype=there.dtype, parts=parts)
    process_of = [n * processes[1] // 8 for n in range(8)]
    needed = [needed_parts(value, to, process, process_of) for process in range(processes[1])]
    boxes = list(dict.fromkeys(box for share in needed for box in share))
    take_values(host, [(2, to)], [boxes], *[parts[box] for box in boxes])


def assert_holds(host: Host, there: Placed, whole: np.ndarray[Any, Any]) -> None:
    """Every device of the layout has its range of value 2, and no other device has any."""
    seen = 0
    for piece, array in zip(there.pieces, host.pieces(2), strict=True):
        boxes = piece.device_boxes()
        for shard in array.addressable_shards:
            box = boxes[list(host.world.devices).index(shard.device)]
            data = jax.random.key_data(shard.data) if there.dtype.startswith("key") else shard.data
            np.testing.assert_array_equal(data, whole[tuple(slice(*part) for part in box)])
            seen += 1
    assert seen == sum(len(piece.layout.devices) for piece in there.pieces)


@pytest.mark.parametrize("source", PLACES)
@pytest.mark.parametrize("target", PLACES)
def test_value_arrives_in_any_layout_of_any_number_of_processes(host, source, target):
    whole = np.arange(96, dtype=np.float32).reshape(SHAPE)
    for processes in ((2, 4), (4, 1)):
        put(host, 1, PLACES[source], whole)
        move(host, PLACES[source], PLACES[target], processes)
        assert_holds(host, PLACES[target], whole)


@pytest.mark.parametrize("kind", ["scalar", "empty", "keys"])
def test_scalars_empty_arrays_and_random_keys_arrive_too(host, kind):
    keys = jax.random.key_data(jax.random.split(jax.random.key(1), 8))
    there, whole = {
        "scalar": (placed(on(range(8), (8,), P(), ()), shape=()), np.float32(3.5)),
        "empty": (placed(on(range(8), (8,), P("x"), (0, 3)), shape=(0, 3)), np.zeros((0, 3), np.float32)),
        "keys": (placed(on(range(4), (4,), P("x"), (8,)), shape=(8,), dtype="key<fry>"), keys),
    }[kind]
    put(host, 1, there, np.asarray(whole))
    move(host, there, there, (2, 4))
    assert_holds(host, there, np.asarray(whole))


def test_part_that_no_process_holds_is_noticed_and_copies_are_found(host):
    for name, is_whole in (("replicated", True), ("rows", False), ("one device", True)):
        put(host, 1, PLACES[name], np.ones(SHAPE, np.float32))
        held = held_by(host, 1, 4)
        del held[0]
        assert (holders([PLACES[name]], held) is not None) == is_whole
    assert shards_here(host, [99]) == [[]]


def test_ranges_overlap_where_both_are():
    assert overlap(((0, 4), (2, 6)), ((3, 8), (0, 3))) == ((3, 4), (2, 3))
    assert overlap(((0, 4),), ((4, 8),)) is None
    assert overlap((), ()) == ()
