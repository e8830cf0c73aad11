"""Numbers of microbatches that were searched tell which others are worth a search."""

import dataclasses
import math

import pytest

import autopar
from autopar.compiler.inter_op.submeshes import cluster_shape, divides_as_well
from autopar.compiler.planning.candidates import stage_candidates
from autopar.compiler.planning.layer_costs import LayoutChoice
from autopar.compiler.planning.search import _RISES, _Search  # pyright: ignore[reportPrivateUsage]
from autopar.compiler.planning.space import Space, Stages
from autopar.compiler.planning.stage_costs import KnownLayers, RangeCosts, StageProblem
from tests.compiler.planning.test_free_search import arguments, train_step


@pytest.fixture
def problem():
    cluster = autopar.Cluster.parse("1x dgx-h100").with_devices(4)
    traced = autopar.parallelize(train_step, cluster=cluster).trace(*arguments(1024, 96))
    return StageProblem(trace=traced.trace, method=autopar.Auto(), hardware=cluster, cache_directory=None)


def test_a_large_step_has_one_region_of_several_stages_for_a_number_of_microbatches(problem):
    space = Space.of(problem)
    assert [*space.numbers_of_stages()] == [(2, 2), (3, 4)]
    space.__dict__["is_large"] = True
    assert [*space.numbers_of_stages()] == [(1, 1), (2, 4)]


def test_numbers_beyond_one_that_takes_longer_are_not_reached(problem):
    state = _Search.of(problem, lambda plan: math.inf)
    assert state.space.known is not None
    found = stage_candidates(problem, state.space.known, 8, (2, 2), math.inf)
    best = min(found, key=lambda each: each.step_time_s)

    def reached(**changes):
        regions = [each for each in state.open if isinstance(each, Stages) and each.num_stages == (2, 2)]
        return [each.num_microbatches for each in regions if state.is_reached(dataclasses.replace(each, **changes))]

    every = reached()
    assert every == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96]
    region = next(each for each in state.open if isinstance(each, Stages) and each.num_microbatches == 8)
    state.learn_numbers(dataclasses.replace(region, num_stages=(2, 2)), [best], math.inf)
    assert reached() == [6, 8, 12]
    state.times_of[2, 2][12] = 0.99 * _RISES * best.step_time_s
    assert reached() == [6, 8, 12, 16]
    state.times_of[2, 2][6] = 1.01 * _RISES * best.step_time_s
    assert reached() == [6, 8, 12, 16]
    assert reached(attempt=1) == every


def test_numbers_that_are_unlikely_to_be_the_best_hide_none_beyond_them_whose_time_falls(problem):
    state = _Search.of(problem, lambda plan: math.inf)
    assert state.space.known is not None
    each = stage_candidates(problem, state.space.known, 8, (2, 2), math.inf)
    found = min(each, key=lambda candidate: candidate.step_time_s)
    state.learn_numbers(region_of(state, 8), [found], math.inf)
    last = region_of(state, 3)
    assert not state.is_reached(last)
    for share, reached in ((0.99, True), (1.01, False)):
        for number in (6, 4):
            put_off = dataclasses.replace(region_of(state, number), by_others_s=share * found.step_time_s)
            state.open[state.open.index(region_of(state, number))] = put_off
        state.best_s = found.step_time_s / 2
        assert state.is_reached(last) is reached
        state.best_s = 2 * found.step_time_s
        assert not state.is_reached(last)


def region_of(state, num_microbatches):
    (region,) = [
        each
        for each in state.open
        if isinstance(each, Stages) and (each.num_microbatches, each.num_stages) == (num_microbatches, (2, 2))
    ]
    return region


def test_parts_divide_among_devices_as_well_as_others():
    assert [n for n in (1, 2, 3, 4, 6, 8, 12, 24) if divides_as_well(96, n, 4, 8)] == [1, 2, 3, 4, 6, 12, 24]
    assert divides_as_well(96, 8, 32, 8) and divides_as_well(96, 8, 16, 5)


@pytest.mark.parametrize(("like", "count"), [(8, 4), (4, 8), (8, 6), (6, 8), (16, 2)])
def test_layers_of_other_numbers_bound_those_that_are_not_solved_for(problem, like, count):
    known, submesh, free = KnownLayers.of(problem), cluster_shape(2, 8), LayoutChoice(0.0)

    def whole_s(ranges):
        cost = ranges.cost(0, len(ranges.layers.class_of), submesh, free)
        return cost.forward_s + cost.backward_s

    by_work = RangeCosts(problem, *known(count, False, splits=False))
    assert not by_work.is_told(submesh)
    work_s = whole_s(by_work)
    other = RangeCosts(problem, *known(like, False, splits=False))
    other.solve({submesh})
    whole_s(other)
    told = RangeCosts(problem, *known(count, False, splits=False))
    assert told.is_told(submesh)
    told_s = whole_s(told)
    told.solve({submesh})
    assert work_s < told_s <= 1.01 * whole_s(told)


def test_one_microbatch_and_fewer_rows_than_devices_tell_nothing(problem):
    known, submesh = KnownLayers.of(problem), cluster_shape(2, 8)
    for like, count in ((1, 8), (8, 1), (96, 8)):
        other = RangeCosts(problem, *known(like, False, splits=False))
        other.solve({submesh})
        other.cost(0, 1, submesh, LayoutChoice(0.0))
        ranges = RangeCosts(problem, *known(count, False, splits=False))
        assert not ranges.is_told(submesh)
        del problem.known[like, False, False]
