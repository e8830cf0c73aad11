"""Shares of lanes are the best of all divisions; there is an error for times that fall and for too little room."""

import itertools
import random

import pytest

from autopar import InvalidArgument, MemoryTooSmall
from autopar.compiler.inter_op.uneven_shares import minmax_split


def table(draw: random.Random, most: int) -> list[float]:
    """A lane that starts for a while, computes in tiles, and gets slower by and by."""
    start, each, tile, slower = draw.uniform(0, 3), draw.uniform(0.1, 2), draw.randint(1, 4), draw.choice([0, 0.01])
    return [0.0, *(start + each * -(-n // tile) * tile + slower * n * n for n in range(1, most + 1))]


@pytest.mark.parametrize("seed", range(10))
def test_no_division_is_faster(seed):
    draw = random.Random(seed)
    for _ in range(30):
        lanes = [table(draw, draw.randint(1, 8)) for _ in range(draw.randint(1, 4))]
        total = draw.randint(1, sum(len(each) - 1 for each in lanes))
        every = (s for s in itertools.product(*(range(len(each)) for each in lanes)) if sum(s) == total)
        shares = minmax_split(lanes, total)
        assert sum(shares) == total
        best = min(max(each[n] for each, n in zip(lanes, division)) for division in every)
        assert max(each[n] for each, n in zip(lanes, shares)) == best


@pytest.mark.parametrize(("gigabytes", "shares", "seconds"), [((32, 16), (32, 16), 2.038), ((32, 12), (40, 8), 2.548)])
def test_two_kinds_with_memory_that_ends_the_share_of_the_slower_one(gigabytes, shares, seconds):
    speeds = (15.7, 9.3)  # of two kinds of devices, with 8 GB and half a GB for each of 48 examples
    lanes = [[n / speed for n in range(int((memory - 8) / 0.5) + 1)] for speed, memory in zip(speeds, gigabytes)]
    assert minmax_split(lanes, 48) == shares
    assert max(lane[n] for lane, n in zip(lanes, shares)) == pytest.approx(seconds, abs=1e-3)


def test_a_lane_that_is_too_slow_gets_nothing():
    assert minmax_split([[0.0, 1.0, 2.0], [0.0, 9.0, 9.1]], 2) == (2, 0)


def test_too_little_room_says_how_much_is_missing():
    with pytest.raises(MemoryTooSmall, match=r"room for \[2, 1\] microbatches, 3 in all, and there are 5. 2 more"):
        minmax_split([[0.0, 1.0, 2.0], [0.0, 1.0]], 5)


def test_times_that_fall_are_refused():
    with pytest.raises(InvalidArgument, match="Lane 1 takes"):
        minmax_split([[0.0, 1.0], [0.0, 2.0, 1.0]], 2)
