"""Tiles: what they make of numpy arrays is what the destination wants, and no byte crosses twice."""

import itertools
from collections import Counter

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.errors import InvalidArgument
from autopar.runtime.transfer.tiles import Box, DeviceLayout, TransferPlan, plan_transfer, scattered
from tests.runtime.random_layouts import random_layout, random_shape, some


def index(box: Box, within: Box | None = None) -> tuple[slice, ...]:
    origins = [start for start, _ in within] if within is not None else [0] * len(box)
    return tuple(slice(start - origin, stop - origin) for (start, stop), origin in zip(box, origins, strict=True))


def carried_out(plan: TransferPlan, whole: np.ndarray) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
    """The shards that the tiles and copies make, and how often each element was written."""
    held = {ordinal: whole[index(box)] for ordinal, box in plan.source_boxes.items()}
    made = {ordinal: np.full_like(whole[index(box)], -1) for ordinal, box in plan.destination_boxes.items()}
    writes = {ordinal: np.zeros(shard.shape, int) for ordinal, shard in made.items()}
    for tile in plan.tiles:
        there = index(tile.box, plan.destination_boxes[tile.destination])
        made[tile.destination][there] = held[tile.source][index(tile.box, plan.source_boxes[tile.source])]
        writes[tile.destination][there] += 1
    for copy in plan.copies:
        made[copy.destination][...] = made[copy.source]
        writes[copy.destination] += writes[copy.source]
    return made, writes


def crossing_elements(plan: TransferPlan, process_of: list[int], whole: np.ndarray) -> int:
    """Per process: what its destination devices want and its source devices do not hold, each element once."""
    count = 0
    for process in set(process_of):
        wanted = np.zeros(whole.shape, bool)
        for ordinal, box in plan.destination_boxes.items():
            wanted[index(box)] |= process_of[ordinal] == process
        for ordinal, box in plan.source_boxes.items():
            if process_of[ordinal] == process:
                wanted[index(box)] = False
        count += int(wanted.sum())
    return count


@pytest.mark.parametrize("seed", range(10))
def test_tiles_and_copies_make_exactly_the_destination_shards(seed):
    rng = np.random.default_rng(seed)
    for _ in range(40):
        rank, devices = int(rng.integers(0, 4)), list(range(rng.integers(1, 13)))
        layouts = [random_layout(rng, some(rng, devices), rank) for _ in range(2)]
        shape = random_shape(rng, layouts, rank)
        process_of = (rng.integers(0, 4, len(devices))).tolist()
        plan = plan_transfer(shape, 4, *layouts, process_of, dtype="int32")
        whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        made, writes = carried_out(plan, whole)
        for ordinal, box in plan.destination_boxes.items():
            np.testing.assert_array_equal(made[ordinal], whole[index(box)])
            assert (writes[ordinal] == 1).all()
        assert plan.wire_bytes == sum(plan.traffic.values()) == 4 * crossing_elements(plan, process_of, whole)
        assert all(process_of[copy.source] == process_of[copy.destination] for copy in plan.copies)


@pytest.mark.parametrize("seed", range(5))
def test_boxes_are_those_of_jax(seed):
    rng = np.random.default_rng(seed)
    for _ in range(20):
        rank = int(rng.integers(0, 4))
        layout = random_layout(rng, some(rng, list(range(8))), rank)
        shape = random_shape(rng, [layout], rank)
        grid = np.array([jax.devices()[ordinal] for ordinal in layout.devices]).reshape(layout.mesh_shape)
        indices = NamedSharding(Mesh(grid, layout.axis_names), layout.spec).devices_indices_map(shape)
        for ordinal, box in zip(layout.devices, layout.boxes(shape), strict=True):
            assert tuple(s.indices(dim)[:2] for s, dim in zip(indices[jax.devices()[ordinal]], shape)) == box


def line(first: int, count: int, spec: P) -> DeviceLayout:
    return DeviceLayout(devices=tuple(range(first, first + count)), mesh_shape=(count,), axis_names=("x",), spec=spec)


def test_replicas_of_the_source_share_the_work_of_sending():
    process_of = [0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 4]
    plan = plan_transfer((8, 4), 4, line(0, 4, P()), line(4, 8, P("x")), process_of, dtype="float32")
    assert plan.traffic == {(process, 4): 32 for process in range(4)}


def test_the_values_of_one_message_leave_from_different_replicas():
    sent: Counter[int] = Counter()
    for _ in range(4):
        plan_transfer((4,), 4, line(0, 4, P()), line(4, 1, P()), range(5), dtype="float32", sent_bytes=sent)
    assert sent == dict.fromkeys(range(4), 16)


def test_nothing_crosses_within_a_process_and_nothing_twice_into_one():
    # Devices 0 to 3 hold quarters; 4 and 5 want halves, in the process of 0 and 1; 6 and 7 both want all.
    process_of = [0, 0, 1, 1, 0, 0, 2, 2]
    halves = plan_transfer((8,), 4, line(0, 4, P("x")), line(4, 2, P("x")), process_of, dtype="float32")
    assert halves.traffic == {(1, 0): 16}
    wholes = plan_transfer((8,), 4, line(0, 4, P("x")), line(6, 2, P()), process_of, dtype="float32")
    assert wholes.traffic == {(0, 2): 16, (1, 2): 16}
    assert [(copy.source, copy.destination) for copy in wholes.copies] == [(6, 7)]


def test_a_scattered_layout_brings_every_byte_over_once_for_all_processes():
    process_of = [0, 0, 1, 2, 3, 4]
    source, wanted = line(0, 2, P("x")), line(2, 4, P())
    spread = scattered(wanted, (8, 12), process_of)
    assert spread is not None and spread.spec == P(None, "x")
    plans = [plan_transfer((8, 12), 4, source, to, process_of, dtype="float32") for to in (wanted, spread)]
    assert [plan.wire_bytes for plan in plans] == [4 * 8 * 12 * 4, 8 * 12 * 4]


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (line(0, 4, P("x")), (8, 3)),  # no axis is left
        (line(0, 4, P()), (7, 3)),  # no dimension can be cut in four
        (line(0, 4, P()), ()),
    ],
    ids=["sharded already", "indivisible", "scalar"],
)
def test_what_cannot_be_scattered_is_said_to_be_so(layout, shape):
    assert scattered(layout, shape, range(4)) is None


def test_axes_within_a_process_are_not_scattered():
    assert scattered(line(0, 4, P()), (8,), [0] * 4) is None


def test_a_dimension_that_does_not_divide_is_refused():
    with pytest.raises(InvalidArgument, match=r"shape \(6,\) into \(4,\) parts on the mesh \(x=4\)"):
        line(0, 4, P("x")).boxes((6,))


def test_plans_are_the_same_wherever_they_are_made():
    layouts = line(0, 4, P()), line(2, 8, P("x"))
    process_of = list(itertools.chain.from_iterable([p, p] for p in range(5)))
    plans = [
        plan_transfer((16,), 2, *layouts, where, dtype="int8") for where in (process_of, dict(enumerate(process_of)))
    ]
    assert plans[0] == plans[1]
