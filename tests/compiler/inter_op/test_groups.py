"""Stages on devices of several kinds: the search finds what enumeration finds."""

import itertools
import math
import random

import pytest

from autopar.compiler.inter_op.stage_costs import StageCost, Timing
from autopar.compiler.inter_op.submeshes import Submesh, place_in_groups, submesh_choices
from autopar.errors import InvalidArgument, MemoryTooSmall
from autopar.ir.schedules import get_schedule
from tests.compiler.inter_op.stage_problems import search


def brute_force_s(problem):
    """The least time of all partitions on all submeshes in all orders that fit; infinity if none does."""
    num_layers, best_s = problem["num_layers"], math.inf
    timing = Timing(schedule=get_schedule(problem["schedule"]), num_microbatches=problem["num_microbatches"])
    for count in range(1, num_layers + 1):
        for cuts in itertools.combinations(range(1, num_layers), count - 1):
            ranges = list(itertools.pairwise([0, *cuts, num_layers]))
            for submeshes in itertools.product(problem["submeshes"], repeat=count):
                used = [
                    sum(m.num_devices for m in submeshes if m.group == g) for g in range(len(problem["num_devices"]))
                ]
                if any(n > most for n, most in zip(used, problem["num_devices"])):
                    continue
                links = [problem["transfers"][c, a, b] for c, (a, b) in zip(cuts, itertools.pairwise(submeshes))]
                fronts = [problem["costs"][(*each, m)] for each, m in zip(ranges, submeshes)]
                for costs in itertools.product(*fronts):
                    held = [timing.num_in_flight(stages_behind=count - 1 - s, num_stages=count) for s in range(count)]
                    memory = [problem["memory_bytes"][m.group] for m in submeshes]
                    if all(c.peak_bytes(n) <= most for c, n, most in zip(costs, held, memory)):
                        best_s = min(best_s, timing.step_time_s(costs, links))
    return best_s


def random_problem(seed):
    """Two or three kinds of one or two devices; memory is often too small, links between kinds often slow."""
    draw = random.Random(seed)
    num_layers, kinds = draw.randint(2, 4), draw.choice([2, 2, 3])
    num_devices = [draw.randint(1, 2) for _ in range(kinds)]
    speed = [draw.choice([1.0, 2.0, 3.0]) for _ in range(kinds)]
    submeshes = [m for g, n in enumerate(num_devices) for m in submesh_choices(n, 2, group=g)]
    work = [draw.uniform(0.5, 2.0) for _ in range(num_layers)]
    costs = {
        (i, k, m): [
            StageCost(
                forward_s=sum(work[i:k]) / m.num_devices / speed[m.group] * draw.uniform(0.9, 1.2),
                backward_s=2 * sum(work[i:k]) / m.num_devices / speed[m.group],
                update_s=draw.choice([0.0, draw.random()]),
                state_bytes=(k - i) * draw.uniform(1, 2) / m.num_devices,
                activation_bytes=(k - i) * draw.choice([0.2, 0.5]),
            )
            for _ in range(draw.choice([1, 1, 2]))
        ]
        for i, k in itertools.combinations(range(num_layers + 1), 2)
        for m in submeshes
    }
    slow = draw.choice([0.0, 0.2, 1.0])
    transfers = {
        (cut, m, n): draw.random() * slow * (3 if m.group != n.group else 1)
        for cut in range(1, num_layers)
        for m in submeshes
        for n in submeshes
    }
    return {
        "num_layers": num_layers,
        "num_devices": num_devices,
        "submeshes": submeshes,
        "costs": costs,
        "transfers": transfers,
        "num_microbatches": draw.choice([1, 2, 4, 8]),
        "schedule": draw.choice(["1f1b", "1f1b", "gpipe", "eager-1f1b", "zero-bubble"]),
        "memory_bytes": [draw.choice([2.0, 4.0, 8.0, 100.0]) for _ in range(kinds)],
    }


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_the_best_order_of_kinds_is_the_one_that_enumeration_finds(first):
    for seed in range(first, first + 20):
        problem = random_problem(seed)
        expected_s = brute_force_s(problem)
        if math.isinf(expected_s):
            with pytest.raises(MemoryTooSmall, match="GiB are missing"):
                search(problem)
            continue
        found = search(problem)
        assert found.step_time_s == pytest.approx(expected_s), seed
        assert found.gap == 0.0, seed


def two_kinds():
    """Eight layers, the last two twice as heavy; A is twice as fast as B and has twice the memory."""
    work, speed = [1.0] * 6 + [2.0] * 2, [2.0, 1.0]
    submeshes = [m for group in range(2) for m in submesh_choices(2, 2, group=group)]
    costs = {
        (i, k, m): [
            StageCost(
                forward_s=sum(work[i:k]) / speed[m.group] / m.num_devices,
                backward_s=0.0,
                state_bytes=float(k - i),
                activation_bytes=0.5 * (k - i) / m.num_devices,
            )
        ]
        for i, k in itertools.combinations(range(9), 2)
        for m in submeshes
    }
    return {
        "num_layers": 8,
        "num_devices": [2, 2],
        "submeshes": submeshes,
        "costs": costs,
        "transfers": {(cut, m, n): 0.0 for cut in range(1, 8) for m in submeshes for n in submeshes},
        "num_microbatches": 8,
        "schedule": "1f1b",
        "memory_bytes": [16.0, 8.0],
    }


def test_slow_devices_come_first_where_that_is_best():
    found = search(two_kinds())
    assert found.step_time_s == pytest.approx(15.5)
    assert [(s.start, s.stop, s.submesh.group) for s in found.best.stages] == [(0, 3, 1), (3, 8, 0)]
    assert search(two_kinds(), num_devices=[2, 0]).best.num_devices == 2


def test_what_is_missing_is_said_of_the_kind_that_lacks_it():
    with pytest.raises(MemoryTooSmall, match=r"fits into .* and .* GiB per device.*GiB are missing"):
        search(two_kinds(), memory_bytes=[3.0, 2.0])


def test_submeshes_are_placed_among_the_devices_of_their_group():
    a, b = Submesh(num_hosts=1, devices_per_host=2), Submesh(num_hosts=1, devices_per_host=2, group=1)
    clusters = [Submesh(num_hosts=1, devices_per_host=4), Submesh(num_hosts=1, devices_per_host=2, group=1)]
    assert place_in_groups([b, a, a], clusters) == ((4, 5), (0, 1), (2, 3))
    assert place_in_groups([b, b], clusters) is None


def test_a_search_needs_memory_of_every_group():
    with pytest.raises(InvalidArgument, match="memory of 1 groups"):
        search(two_kinds(), memory_bytes=16.0)
