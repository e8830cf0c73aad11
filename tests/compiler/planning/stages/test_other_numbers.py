"""Numbers of microbatches that were searched tell which others are worth a search."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.inter_op.submeshes import cluster_shape, divides_as_well
from autopar.compiler.planning.search.best_first import _Search  # pyright: ignore[reportPrivateUsage]
from autopar.compiler.planning.search.candidates import stage_candidates
from autopar.compiler.planning.search.search_state import _RISES  # pyright: ignore[reportPrivateUsage]
from autopar.compiler.planning.search.space import Completion, Space, Stages
from autopar.compiler.planning.stages.layer_costs import LayoutChoice
from autopar.compiler.planning.stages.stage_costs import KnownLayers, RangeCosts
from autopar.compiler.planning.stages.stage_problem import StageProblem, submesh_mesh
from autopar.errors import MemoryTooSmall
from autopar.hardware.machine import Link, Machine
from tests.compiler.planning.search.test_free_search import arguments, train_step


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
    state.numbers.learn(dataclasses.replace(region, num_stages=(2, 2)), [best], math.inf)
    assert reached() == [6, 8, 12]
    state.numbers.times_of[2, 2][12] = 0.99 * _RISES * best.step_time_s
    assert reached() == [6, 8, 12, 16]
    state.numbers.times_of[2, 2][6] = 1.01 * _RISES * best.step_time_s
    assert reached() == [6, 8, 12, 16]
    assert reached(attempt=1) == every
    # Where stages save memory, it may take less once they are computed again.
    saving = dataclasses.replace(best, stages=tuple(_saving(stage) for stage in best.stages))
    state.numbers.learn(dataclasses.replace(region, num_microbatches=6), [saving], math.inf)
    state.numbers.times_of[2, 2][6] = 1.01 * _RISES * best.step_time_s
    assert reached() == [4, 6, 8, 12, 16]
    again = dataclasses.replace(problem, method=autopar.Auto(remat=True))
    state.space = dataclasses.replace(state.space, problem=again)
    assert reached() == [6, 8, 12, 16]


def _saving(stage):
    choice = stage.cost.choice._replace(memory_multiplier=0.3)
    return dataclasses.replace(stage, cost=dataclasses.replace(stage.cost, choice=choice))


def test_without_a_plan_numbers_that_are_not_reached_come_where_nothing_else_is_left(problem):
    state = _Search.of(problem, lambda plan: math.inf)
    assert state.space.known is not None
    found = stage_candidates(problem, state.space.known, 8, (2, 2), math.inf)
    state.numbers.learn(region_of(state, 8), found, math.inf)
    reached, later = region_of(state, 6), region_of(state, 1)
    state.open = [later, reached]
    assert state.next_region() is reached
    state.open = [later]
    assert state.next_region() is later
    state.best = object()
    assert state.next_region() is None


def test_numbers_that_are_unlikely_to_be_the_best_hide_none_beyond_them_whose_time_falls(problem):
    state = _Search.of(problem, lambda plan: math.inf)
    assert state.space.known is not None
    each = stage_candidates(problem, state.space.known, 8, (2, 2), math.inf)
    found = min(each, key=lambda candidate: candidate.step_time_s)
    state.numbers.learn(region_of(state, 8), [found], math.inf)
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


def test_of_one_stage_the_number_that_tells_of_all_others_is_looked_at_first(problem, monkeypatch):
    monkeypatch.setattr(Space, "is_large", True)
    state = _Search.of(problem, lambda plan: math.inf)
    state.space.known_of((1, 1))(8, False, splits=False)[1].solved.add(cluster_shape(4, 8))

    def waiting():
        return [each.num_microbatches for each in of_one_stage() if not state.is_reached(each)]

    def of_one_stage():
        return [each for each in state.open if isinstance(each, Stages) and each.num_stages == (1, 1)]

    assert not waiting()  # as long as there is no plan, any that may fit is welcome
    state.best_s, state.best = 1.0, object()
    (telling,) = (each for each in of_one_stage() if state.told.is_of_all(each))
    assert telling.num_microbatches == 24 and state.space.rows == 24 * 4
    assert waiting() == [1, 2, 3, 4, 6, 8, 12, 16, 32, 48, 96]
    for later in ({"searched": (0.97, 1.0)}, {"likely_s": 1.1}):
        before, state.open = state.open, [dataclasses.replace(e, **later) if e is telling else e for e in state.open]
        assert not waiting()
        state.open = before
    assert state.space.known is not None
    found = stage_candidates(problem, state.space.known, 8, (1, 1), math.inf)
    region = next(each for each in of_one_stage() if each.num_microbatches == 8)
    state.numbers.learn(region, found, math.inf)
    assert telling.num_microbatches in waiting()  # behind numbers that nothing is known of: none waits for it
    assert {6, 12}.isdisjoint(waiting())
    state.numbers.best_of.clear()
    state.open.remove(telling)
    assert not waiting()


def test_one_stage_of_a_large_step_is_tasks_where_it_has_several_microbatches(monkeypatch, tmp_path):
    monkeypatch.setattr(Space, "is_large", True)
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    params, batch = jax.tree.map(lambda a: jnp.full(a.shape, 0.01, a.dtype), arguments(64, 16384))
    expected = jax.jit(train_step)(params, batch)
    for memory, is_one_program in ((5_000_000, False), (500_000_000, True)):
        step = autopar.parallelize(train_step, method=autopar.Auto(num_stages=1, memory=memory))
        plan = step.trace(params, batch).plan().plan
        assert (plan.num_microbatches == 1) is is_one_program is (plan.sharding is not None)
        assert len(plan.meshes) == 1 and (plan.meshes[0].sharding is None) is is_one_program
        assert plan.choice().startswith("one program on" if is_one_program else "1 stage on")
        found = step(params, batch)
        for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)


def test_where_microbatches_do_not_fit_nor_do_they_joined(problem, monkeypatch):
    state = _Search.of(problem, lambda plan: math.inf)

    def too_large(region):
        raise MemoryTooSmall("none fits")

    monkeypatch.setattr(state, "search_stages", too_large)
    before = [*state.open]
    assert state.space.rows == 96 and not state.take(region_of(state, 48))  # of two rows, for up to four devices
    assert state.open == before
    assert not state.take(region_of(state, 24))
    assert [each.num_microbatches for each in state.open if isinstance(each, Stages) and each.num_stages == (2, 2)] == [
        *(16, 32, 48, 96)
    ]
    before = [*state.open]
    assert not state.take(dataclasses.replace(region_of(state, 96), share=0.5))
    assert state.open == before


def test_stages_that_are_likely_not_to_fit_stay_open_beside_a_search_for_smaller_ones(problem):
    state = _Search.of(problem, lambda plan: math.inf)
    region = region_of(state, 8)
    state.open = [region]
    state.take(region)
    found = [each for each in state.open if isinstance(each, Completion)]
    shares = [each.candidate.peak_shares(problem) for each in found]
    assert found and [*map(state.likely_s, found)] < [math.inf] * len(found)
    first, second = (0.99 * min(of_one) for of_one in zip(*shares))
    state.memory.shares.update({(2, False, 0): first, (2, False, 1): second})
    state.look_for_smaller(region)
    again = [each for each in state.open if isinstance(each, Stages) and each.attempt == 1]
    assert [(each.share, each.num_stages) for each in again] == [(max(first, second), (2, 2))]
    there = [each for each in state.open if isinstance(each, Completion)]
    assert [each.candidate for each in there] == [each.candidate for each in found]
    assert [*map(state.likely_s, there)] == [math.inf] * len(found)
    state.look_for_smaller(again[0])
    assert sum(isinstance(each, Stages) and each.attempt > 0 for each in state.open) == 1  # once is enough
    state.memory.shares.update({(2, False, 0): 1.0, (2, False, 1): 1.0})
    assert max(map(state.likely_s, there)) < math.inf


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


def test_on_one_device_layers_take_what_their_only_layouts_do(problem):
    layers, costs = KnownLayers.of(problem)(1, False, splits=False)
    one = cluster_shape(1, 8)
    ranges = RangeCosts(problem, layers, costs)
    mesh_costs = MeshCosts(machine=problem.machine_of(one), mesh=submesh_mesh(problem, one))
    for number, alone in enumerate(ranges._of_classes(one, LayoutChoice(0.0))):
        solved, least = costs.cost(number, mesh_costs, LayoutChoice(0.0)), costs.least(number, mesh_costs.machine, 1)
        assert alone.forward_s == pytest.approx(solved.forward_s) and alone.backward_s == pytest.approx(
            solved.backward_s
        )
        assert alone.update_s == pytest.approx(solved.update_s) and least.forward_s <= alone.forward_s * (1 + 1e-9)


def test_layers_take_no_less_on_fewer_devices_and_one_choice_is_none():
    """Where links are so slow that nothing is divided, one device tells what others take."""
    for link, width, is_known in (
        (Link(latency_s=10.0, bandwidth=1.0, ramp_bytes=0.0), 1024, True),
        (None, 4096, False),
    ):
        machine = Machine.named("dgx-h100")
        machine = machine if link is None else dataclasses.replace(machine, name="slow", intra=link)
        cluster = autopar.Cluster(machine=machine, num_devices=4)
        traced = autopar.parallelize(train_step, cluster=cluster).trace(*arguments(width, 512))
        problem = StageProblem(trace=traced.trace, method=autopar.Auto(), hardware=cluster, cache_directory=None)
        ranges = RangeCosts(problem, *KnownLayers.of(problem)(1, False, splits=False))
        few, many, free = cluster_shape(2, 8), cluster_shape(4, 8), LayoutChoice(0.0)
        by_work = ranges._of_classes(few, free)
        assert problem.is_roomy and not ranges.has_one_choice(few) and ranges.has_one_choice(cluster_shape(1, 8))
        ranges.solve({many})
        ranges._of_classes(many, free)
        assert ranges.has_one_choice(few) == is_known
        told = ranges._of_classes(few, free)
        ranges.solve({few})
        for work, bound, solved in zip(by_work, told, ranges._of_classes(few, free), strict=True):
            each_s = [cost.forward_s + cost.backward_s + cost.update_s for cost in (work, bound, solved)]
            assert each_s[0] <= each_s[1] * (1 + 1e-9) and each_s[1] <= 1.02 * each_s[2]


@pytest.mark.parametrize(("count", "is_told"), [(2, True), (24, True), (48, False)])
def test_where_memory_is_short_layers_on_fewer_devices_need_what_they_do_on_more(problem, count, is_told):
    problem = dataclasses.replace(problem, method=autopar.Auto(memory=2.0**20))
    ranges = RangeCosts(problem, *KnownLayers.of(problem)(count, False, splits=False))
    few, many, saving = cluster_shape(2, 8), cluster_shape(4, 8), LayoutChoice(10.0)
    names = "state_bytes", "activation_bytes", "temporary_bytes", "update_bytes"

    def nbytes(submesh, choice):
        return np.array([[getattr(cost, name) for name in names] for cost in ranges._of_classes(submesh, choice)])

    by_work = nbytes(few, LayoutChoice(0.0))
    ranges.solve({many})
    ranges.solve_for_memory({(many, saving)})
    told = nbytes(few, LayoutChoice(0.0))
    assert not problem.is_roomy and np.all(by_work <= told) and bool(np.any(by_work < told)) == is_told
    assert np.all(told[:, 2] <= nbytes(many, saving)[:, 2])
    ranges.solve({few})
    ranges.solve_for_memory({(few, saving)})
    assert np.all(told <= 1.01 * np.minimum(nbytes(few, LayoutChoice(0.0)), nbytes(few, saving)))


def test_layers_of_one_microbatch_tell_what_adding_to_totals_takes_of_several(problem):
    known, machine = KnownLayers.of(problem), problem.machine_of(cluster_shape(2, 8))
    (layers, one), (_, several) = known(1, False, splits=False), known(2, False, splits=False)
    for number in range(len(layers.classes)):
        alone, adding = one.least(number, machine, 2, begins=True), several.least(number, machine, 2, begins=True)
        assert one.adding(number, machine, 2) > 0
        assert alone.backward_s + one.adding(number, machine, 2) == pytest.approx(adding.backward_s, rel=0.1)
