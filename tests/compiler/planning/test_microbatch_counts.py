"""Numbers of microbatches are tried upwards as long as that helps; unusual ones only where memory is short."""

import math

import pytest

from autopar.compiler.planning.candidates import descend, first_likely, time_for_counts


@pytest.mark.parametrize(
    ("times", "start", "tried"),
    [
        ([5, 4, 3, 2, 3], 1, [1, 2, 3, 4]),
        ([3, 2, 4, 5, 6], 2, [2, 3, 1, 0]),
        ([math.inf, math.inf, math.inf, 4, 5], 1, [1, 4, 2, 3]),
        ([math.inf] * 5, 1, [1, 4, 0]),
        ([math.inf, math.inf, 4, None, None], 1, [1, 4, 3, 2]),
        ([math.inf, math.inf, math.inf, 2, None], 1, [1, 4, 3, 2]),
        ([None, 3, 2, None, None], 0, [0, 4, 3, 2, 1]),
    ],
)
def test_what_helps_is_tried(times, start, tried):
    found: dict[int, float] = {}
    descend(lambda place: found.setdefault(place, times[place]), len(times), start, lambda: True, len(times))
    assert [*found] == tried


@pytest.mark.parametrize(("first", "last_tried"), [(1.0, 2), (math.inf, 4)])
def test_unusual_numbers_are_looked_at_only_where_memory_is_short(first, last_tried):
    times = [first, first, first * 0.9, 0.5, 0.4]
    found: dict[int, float] = {}
    descend(lambda place: found.setdefault(place, times[place]), len(times), 1, lambda: True, usual_size=3)
    assert max(found) == last_tried


@pytest.mark.parametrize(("times", "tried"), [([5, 4, 3, 2], [1]), ([math.inf, math.inf, math.inf, 4], [1, 3, 2])])
def test_when_the_time_is_over_what_was_found_is_enough(times, tried):
    found: dict[int, float] = {}
    descend(lambda place: found.setdefault(place, times[place]), len(times), 1, lambda: False, len(times))
    assert [*found] == tried


def test_the_time_for_counts_is_a_part_of_the_limit():
    assert time_for_counts(1e6)()
    assert not time_for_counts(1e-9)()


def test_the_search_begins_where_a_plan_is_likely():
    assert first_likely(lambda place: place >= 3, 5, 1) == 3
    assert first_likely(lambda place: False, 5, 1) == 1
