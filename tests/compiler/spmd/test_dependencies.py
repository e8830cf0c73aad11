"""Orders of what needs others."""

from autopar.compiler.spmd.dependencies import by_place, readers_of, walk

DIAMOND = [[], [0], [0], [2, 1]]


def test_readers_are_those_that_need_it_each_once():
    assert readers_of([[], [0, 0], [0, 1]]) == [[1, 2], [2], []]


def test_by_place_the_first_stands_first_if_all_that_it_needs_is_there():
    assert by_place(DIAMOND, [0, 2, 1, -1]) == [0, 2, 1, 3]
    assert by_place([[1], [0], []], [0, 0, 0]) == [2]  # those that need each other cannot stand


def test_a_walk_has_what_is_needed_just_before_in_the_order_of_the_needs():
    assert list(walk(DIAMOND, [3])) == [0, 2, 1, 3]
    assert list(walk(DIAMOND, [1, 3])) == [0, 1, 2, 3]
