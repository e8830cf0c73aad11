"""Completed stages tell what others take: those on as many devices, those of another schedule, steps as a whole."""

import dataclasses
import math

import pytest

import autopar
from autopar.compiler.inter_op.stage_costs import Stage, StageCost
from autopar.compiler.inter_op.submeshes import Submesh, cluster_shape
from autopar.compiler.planning.search.best_first import _Search  # pyright: ignore[reportPrivateUsage]
from autopar.compiler.planning.search.candidates import stage_candidates
from autopar.compiler.planning.search.learned_times import LearnedTimes, StageSetting
from autopar.compiler.planning.search.space import Completion, Space, Stages
from autopar.compiler.planning.stages.pipeline_candidate import PipelineCandidate
from autopar.compiler.planning.stages.sharded_plan import shard_candidate
from autopar.compiler.planning.stages.stage_costs import KnownLayers
from autopar.compiler.planning.stages.stage_layouts import StagesTooSlow
from autopar.compiler.planning.stages.stage_problem import StageProblem
from autopar.compiler.planning.stages.virtual_stages import VirtualStage
from autopar.compiler.planning.step_bounds import step_bounds
from tests.compiler.planning.search.test_free_search import arguments, train_step


@pytest.fixture(scope="module")
def problem() -> StageProblem:
    cluster = autopar.Cluster.parse("1x dgx-h100").with_devices(4)
    traced = autopar.parallelize(train_step, cluster=cluster).trace(*arguments(4096, 1024))
    return StageProblem(trace=traced.trace, method=autopar.Auto(), hardware=cluster, cache_directory=None)


@pytest.fixture(scope="module")
def candidates(problem) -> list[PipelineCandidate]:
    return stage_candidates(problem, KnownLayers.of(problem), 1, (2, 3), math.inf)


def test_what_is_learned_of_stages_is_expected_of_others_on_their_devices(candidates):
    first, learned = candidates[0], LearnedTimes()
    assert learned.least_s(first) < 0.9 * first.step_time_s
    learned.learn_stages(first, dict(enumerate(stage.cost.in_time(0.95) for stage in first.stages)), gap=0.0)
    assert learned.least_s(first) == pytest.approx(0.995 * 0.95 * first.step_time_s, rel=1e-2)
    there = {stage.submesh for stage in first.stages}
    for other in candidates:
        if {stage.submesh for stage in other.stages} <= there:
            assert 0.93 * other.step_time_s <= learned.least_s(other) <= 0.96 * other.step_time_s


def test_the_same_stages_trade_alike_for_other_microbatches(problem):
    """Time of the update that becomes time of microbatches hides what is sent, though all take as long as before."""
    known, learned, untraded = KnownLayers.of(problem), LearnedTimes(), LearnedTimes()
    few, many = (stage_candidates(problem, known, count, (2, 3), math.inf) for count in (2, 4))
    of_few = {each.whatever_microbatches: each for each in few}
    other = next(each for each in many if each.whatever_microbatches in of_few)
    one = of_few[other.whatever_microbatches]
    slow = tuple(dataclasses.replace(stage, link_s=5e-5) for stage in other.virtual_stages)
    other = dataclasses.replace(other, virtual_stages=slow)
    wholes = [_with_less_update(stage.cost, 2) for stage in one.stages]
    for each in (learned, untraded):
        each.learn_stages(one, dict(enumerate(wholes)), gap=0.0)
    untraded.trades.clear()
    assert learned.least_s(other) < 0.99 * untraded.least_s(other)
    assert learned.least_s(one) == untraded.least_s(one)  # of as many microbatches, the stages are known
    stage_s = max(stage.cost.step_s(4) for stage in other.stages)
    assert learned.least_s(other) > 0.9 * stage_s


def _with_less_update(cost: StageCost, num_microbatches: int) -> StageCost:
    """The cost if microbatches took all but a tenth of the update's time."""
    share = 1 + 0.9 * cost.update_s / (cost.step_s(num_microbatches) - cost.update_s)
    return dataclasses.replace(cost.in_time(share), update_s=cost.update_s / 10)


def test_some_stages_that_are_known_tell_what_a_step_takes(candidates):
    first, learned = candidates[0], LearnedTimes()
    assert learned.least_with_s(first, {}) == learned.least_s(first)
    slow = {0: first.stages[0].cost.in_time(2.0)}
    assert learned.least_with_s(first, slow) > 1.2 * learned.least_s(first)
    assert not learned.wholes and learned.least_with_s(first, slow) < learned.least_with_s(
        first, {**slow, 1: first.stages[1].cost.in_time(2.0)}
    )


def test_the_slowest_stages_are_the_first_and_may_be_enough(problem, candidates):
    one = max(candidates, key=lambda each: len({_task_s(stage.cost) for stage in each.stages}))
    slowest = max(range(len(one.stages)), key=lambda number: _task_s(one.stages[number].cost))
    with pytest.raises(StagesTooSlow) as slow:
        shard_candidate(problem, one, are_too_slow=lambda known: True)
    assert slow.value.known.keys() == {slowest}
    whole = shard_candidate(problem, one)
    assert len(whole.costs) == len(one.stages) and whole.costs[slowest] == slow.value.known[slowest].cost


def _task_s(cost: StageCost) -> float:
    return cost.forward_s + cost.backward_s


def test_what_was_simulated_last_bounds_what_is_expected(candidates):
    learned = LearnedTimes()
    for share, each in zip([0.97, 0.9, 1.1, 0.95, 0.85], candidates, strict=False):
        for other in candidates:
            assert learned.bound_s(other) <= learned.least_s(other) == learned.bound_s(other)
        learned.learn_stages(each, dict(enumerate(stage.cost.in_time(share) for stage in each.stages)), gap=0.01)
        bounds = {other: learned.bound_s(other) for other in candidates}
        assert all(0 < bound <= learned.least_s(other) for other, bound in bounds.items())
        learned.learn_step(each, share * each.step_time_s)


def test_what_stages_pay_for_want_of_memory_is_expected_of_no_others(candidates):
    first, learned = candidates[0], LearnedTimes()
    learned.learn_stages(first, dict(enumerate(stage.cost.in_time(1.2) for stage in first.stages)), gap=0.0)
    learned.learn_step(first, 1.2 * first.step_time_s)
    assert learned.least_s(first) == pytest.approx(0.995 * 1.2 * unseen_share(first) * first.step_time_s, rel=1e-2)
    assert not learned.on and learned.step_share == learned.least_share == 0.85
    roomy = LearnedTimes(is_roomy=True)  # where there is room for all, it was not for want of memory
    roomy.learn_stages(first, dict(enumerate(stage.cost.in_time(1.2) for stage in first.stages)), gap=0.0)
    assert {*roomy.on.values()} == {1.03}


def test_a_stage_of_one_layer_tells_nothing_of_stages_with_borders(candidates):
    learned = LearnedTimes()
    for each in candidates:
        learned.learn_stages(each, dict(enumerate(stage.cost for stage in each.stages)), gap=0.0)
    bordered = {
        StageSetting.of(stage, each.layers.num_microbatches)
        for each in candidates
        for stage in each.stages
        if stage.stop - stage.start > 1
    }
    assert bordered and learned.on.keys() == bordered


def test_one_microbatch_tells_nothing_of_several_unless_either_will_do():
    two, four = (Submesh(num_hosts=1, devices_per_host=number) for number in (2, 4))
    learned = LearnedTimes(
        on={StageSetting(four, True): 0.97, StageSetting(four, False): 0.9, StageSetting(two, True): 0.98}
    )
    assert [learned.share_on(four, several=several) for several in (True, False, None)] == [0.97, 0.9, 0.9]
    assert [learned.share_on(two, several=several) for several in (True, False, None)] == [0.98, 0.9, 0.98]
    assert LearnedTimes(on={StageSetting(four, True): 0.97}).share_on(four, several=False) == 0.85


def test_stages_whose_layers_save_memory_gain_apart_from_others(candidates):
    """Each layer saves as much as it can, and a stage as a whole no more than it has to: it may gain more."""
    first, learned = candidates[0], LearnedTimes()
    saves = dataclasses.replace(first, stages=tuple(_saving(stage) for stage in first.stages))
    learned.learn_stages(first, dict(enumerate(stage.cost for stage in first.stages)), gap=0.0)
    assert learned.least_s(first) > 0.98 * first.step_time_s > 1.1 * learned.least_s(saves)
    learned.learn_stages(saves, dict(enumerate(stage.cost.in_time(0.9) for stage in saves.stages)), gap=0.0)
    several = [stage for stage in saves.stages if stage.stop - stage.start > 1]
    shares = [learned.share_on(stage.submesh, stage.stop - stage.start, saves=True) for stage in several]
    assert shares == pytest.approx([0.9] * len(several)) and several
    assert {learned.share_on(stage.submesh, saves=False) for stage in saves.stages} == {1.0}


def _saving(stage: Stage) -> Stage:
    choice = stage.cost.choice._replace(memory_multiplier=10.0)
    return dataclasses.replace(stage, cost=dataclasses.replace(stage.cost, choice=choice))


def test_stages_take_as_long_by_another_schedule(candidates):
    """Their time of the update that became time of microbatches, which shares of the whole do not tell."""
    splits = next(each for each in candidates if each.timing.schedule.splits_weight_gradients)
    other = dataclasses.replace(splits, layers=dataclasses.replace(splits.layers))
    wholes = [_with_less_update(stage.cost, 1) for stage in splits.stages]
    learned = LearnedTimes()
    learned.learn_stages(splits, dict(enumerate(wholes)), gap=0.0)
    assert (
        not set(other.stage_keys) & learned.wholes.keys() and set(other.scheduled_otherwise) <= learned.of_stages.keys()
    )
    split = [dataclasses.replace(whole, weight_s=whole.backward_s / 4) for whole in wholes]
    quarter = dataclasses.replace(other, stages=tuple(_with_weights(stage, 0.25) for stage in other.stages))
    assert learned.least_s(quarter) == pytest.approx(
        0.995 * unseen_share(quarter) * quarter.simulate_s(split), rel=1e-6
    )


def _with_weights(stage: Stage, share: float) -> Stage:
    cost = dataclasses.replace(stage.cost, weight_s=share * stage.cost.backward_s)
    return dataclasses.replace(stage, cost=cost)


def test_stages_that_gain_are_told_for_one_microbatch_and_for_several_apart():
    four = Submesh(num_hosts=1, devices_per_host=4)
    assert not LearnedTimes().gains(several=False)
    learned = LearnedTimes(on={StageSetting(four, True): 0.97, StageSetting(four, False): 0.995})
    assert learned.gains(several=True) and not learned.gains(several=False)


def test_stages_are_found_by_what_they_take_as_a_whole(problem, candidates):
    """Where stages on other submeshes gain much, these are the best."""
    fastest = min(candidates, key=lambda each: each.step_time_s)
    before = {stage.submesh for stage in fastest.stages}
    gaining = dataclasses.replace(problem, time_share=lambda submesh, _: 1.0 if submesh in before else 0.25)
    known = dataclasses.replace(KnownLayers.of(problem), problem=gaining)
    found = stage_candidates(gaining, known, 1, (2, 3), math.inf)

    def whole_s(candidate: PipelineCandidate) -> float:
        shares = [1.0 if stage.submesh in before else 0.25 for stage in candidate.stages]
        return candidate.simulate_s([s.cost.in_time(share) for s, share in zip(candidate.stages, shares, strict=True)])

    best = min(found, key=whole_s)
    assert not before & {stage.submesh for stage in best.stages}
    assert whole_s(best) < whole_s(fastest) < best.step_time_s
    # What a candidate says is by its layers all the same.
    assert best.step_time_s == pytest.approx(best.simulate_s([stage.cost for stage in best.stages]))


def test_stages_gain_at_the_borders_within_them(candidates):
    of_two = next(
        dataclasses.replace(each, stages=tuple(dataclasses.replace(s, start=0, stop=2) for s in each.stages))
        for each in candidates
    )
    learned = LearnedTimes()
    learned.learn_stages(of_two, dict(enumerate(stage.cost.in_time(0.96) for stage in of_two.stages)), gap=0.0)
    shares = [learned.share_on(of_two.stages[0].submesh, number) for number in (1, 2, 3, 4, 1000)]
    assert shares == pytest.approx([0.96, 0.96, 1 - 0.08 * 2 / 3, 0.94, 0.92], abs=1e-3)


def test_one_device_without_layouts_tells_nothing_of_several():
    one, two, four = (Submesh(num_hosts=1, devices_per_host=number) for number in (1, 2, 4))
    learned = LearnedTimes(on={StageSetting(one, True): 1.02})
    assert [learned.share_on(each) for each in (one, two, four)] == [1.02, 0.85, 0.85]
    learned.on[StageSetting(two, True)] = 0.95
    assert [learned.share_on(each) for each in (one, two, four)] == pytest.approx([1.02, 0.95, 0.95 * 0.95])


def unseen_share(candidate: PipelineCandidate) -> float:
    """The share that a plan is expected to take before any of as many stages is simulated."""
    return 1 - 0.25 * (1 - candidate.share_without_links)


def in_more_stages(candidate: PipelineCandidate) -> PipelineCandidate:
    """The same in twice as many stages."""
    return dataclasses.replace(candidate, stages=candidate.stages * 2)


def test_until_as_many_stages_are_simulated_layouts_may_save_some_of_what_they_send(candidates):
    two, learned = candidates[0], LearnedTimes()
    four = in_more_stages(two)
    assert 0.5 < two.share_without_links < 1 and learned.simulated_share(two) == unseen_share(two) < 1
    learned.learn_simulated(two, 1.05)
    # What it took longer, it took for the layouts of what it sends, which are others in other plans.
    assert [learned.simulated_share(each) for each in (two, four)] == [1.0, unseen_share(four)]
    learned.learn_simulated(two, 0.9)
    assert [learned.simulated_share(each) for each in (two, four)] == [0.9, 0.9]


def test_what_single_devices_send_tells_nothing_of_layouts_on_several(candidates):
    several, learned = candidates[0], LearnedTimes()
    single = Submesh(num_hosts=1, devices_per_host=1)
    alone = dataclasses.replace(
        several, stages=tuple(dataclasses.replace(stage, submesh=single) for stage in several.stages)
    )
    learned.learn_simulated(alone, 0.99)
    assert learned.simulated_share(several) == unseen_share(several) and not learned.unlike


def test_stages_of_another_schedule_are_known(candidates):
    def splits(candidate):
        return candidate.timing.schedule.splits_weight_gradients

    pairs = [
        (one, other)
        for one in candidates
        for other in candidates
        if splits(one) and not splits(other) and one.scheduled_otherwise == other.scheduled_otherwise
    ]
    assert pairs
    for one, other in pairs:
        learned = LearnedTimes()
        learned.learn_stages(one, dict(enumerate(stage.cost.in_time(0.9) for stage in one.stages)), gap=0.0)
        assert learned.least_s(other) == pytest.approx(0.995 * 0.9 * unseen_share(other) * other.step_time_s, rel=1e-2)


def test_stages_of_equal_layers_are_known_wherever_they_lie(candidates):
    one = next(each for each in candidates if len(each.virtual_stages) == 2 and each.stages[0] != each.stages[1])
    layers = dataclasses.replace(one.layers, class_of=(0,) * len(one.layers.class_of))
    first, second = (stop - start for start, stop in (each.layers for each in one.virtual_stages))
    here, there = ([(0, cut), (cut, first + second)] for cut in (first, second))
    one = dataclasses.replace(one, layers=layers, virtual_stages=placed(one, here))
    other = dataclasses.replace(one, virtual_stages=placed(one, there), stages=one.stages[::-1])
    learned, seconds = LearnedTimes(), other.simulate_s([stage.cost.in_time(0.9) for stage in other.stages])
    learned.learn_stages(one, dict(enumerate(stage.cost.in_time(0.9) for stage in one.stages)), gap=0.0)
    assert learned.least_s(other) == pytest.approx(0.995 * learned.simulated_share(other) * seconds)
    learned.learn_simulated(one, 1.0)
    assert learned.least_s(other) == pytest.approx(0.998 * seconds)


def placed(candidate: PipelineCandidate, layers: list[tuple[int, int]]) -> tuple[VirtualStage, ...]:
    pairs = zip(candidate.virtual_stages, layers, strict=True)
    return tuple(dataclasses.replace(each, layers=mine) for each, mine in pairs)


def test_fewer_devices_gain_no_more_and_more_devices_may():
    few, many = cluster_shape(2, 8), cluster_shape(4, 8)
    learned = LearnedTimes(on={StageSetting(few, True): 0.96})
    assert learned.share_on(few) == 0.96
    assert learned.share_on(many) == pytest.approx(0.95 * 0.96)
    assert LearnedTimes(on={StageSetting(many, True): 0.96}).share_on(few) == 0.96
    assert LearnedTimes(on={StageSetting(many, True): 0.5}).share_on(few) == LearnedTimes().share_on(few) == 0.85


def test_more_stages_take_no_smaller_share_when_they_are_simulated(candidates):
    two, learned = candidates[0], LearnedTimes(simulated={2: 0.97, 4: 1.1})
    assert learned.simulated_share(two) == learned.simulated_share(in_more_stages(two)) == 0.97


def test_plans_that_take_what_their_stages_take_tell_of_others_of_no_more_stages(candidates):
    one = next(candidate for candidate in candidates if len(candidate.stages) == 2)
    more = in_more_stages(one)
    for share, least in ((1.0, 0.998), (1.004, 0.992), (1.05, 0.98)):
        learned = LearnedTimes()
        learned.learn_simulated(more, share)
        links = max(unseen_share(one), 1 - 2 * (share - 1))  # what more stages send tells of what fewer do
        assert learned.simulated_share(one) == pytest.approx(links)
        assert learned.least_simulated_share(one) == pytest.approx(least * links)
        learned = LearnedTimes()
        learned.learn_simulated(one, share)
        assert learned.least_simulated_share(more) == pytest.approx(0.98 * unseen_share(more))


def test_one_completed_step_tells_of_others(candidates):
    learned = LearnedTimes()
    assert learned.step_share == learned.least_share == 0.85
    learned.learn_step(candidates[0], candidates[0].step_time_s)
    assert learned.step_share == learned.least_share == 0.97


def test_with_enough_memory_slow_steps_tell_of_others_too(candidates):
    several = next(each for each in candidates if any(stage.submesh.num_devices > 1 for stage in each.stages))
    for is_roomy, least in ((False, 0.85), (True, 0.97)):
        learned = LearnedTimes(is_roomy=is_roomy)
        learned.learn_step(several, 1.2 * several.step_time_s)
        assert learned.step_share == learned.least_share == least


def test_stages_are_searched_as_if_they_gained_as_much_as_usual_until_some_are_completed(problem, candidates):
    plan = (
        autopar.parallelize(train_step, cluster=problem.hardware)
        .trace(*arguments(4096, 1024))
        .plan(autopar.DataParallel())
        .plan
    )

    def searched(learned, **changes):
        state = _Search.of(problem, lambda plan: math.inf)
        state.learned, state.best, state.best_s = learned, plan, candidates[0].step_time_s
        region = next(each for each in state.open if isinstance(each, Stages) and each.num_stages == (2, 2))
        region = dataclasses.replace(region, **changes)
        state.open = [region]
        if not (region.searched and state.is_done(region)):
            state.open = []
            state.search_stages(region)
        again = [each for each in state.open if isinstance(each, Stages)]
        return state, again, [each.candidate.step_time_s for each in state.open if isinstance(each, Completion)]

    state, (again,), few = searched(LearnedTimes())
    assert again.searched is not None and again.searched[0] == 0.97 and math.isinf(state.closed_s)
    known = LearnedTimes()
    known.learn_stages(candidates[0], {0: candidates[0].stages[0].cost}, gap=0.0)
    state, none, every = searched(known)
    assert not none and set(few) <= set(every) and math.isfinite(state.closed_s)
    known.learn_step(candidates[0], 0.9 * candidates[0].step_time_s)
    _, none, many = searched(known, searched=again.searched)  # they gain more than that
    assert not none and set(many) <= set(every) and min(many) == min(every)
    known.steps[:] = [1.0]
    state, none, nothing_new = searched(known, searched=again.searched)
    assert not none and not nothing_new and state.closed_s >= again.searched[1]


def test_before_any_layouts_are_known_what_may_fit_is_first():
    cluster = autopar.Cluster.parse("2x p3.16xlarge")
    traced = autopar.parallelize(train_step, cluster=cluster).trace(*arguments(4096, 4096))

    def first(memory):
        method = autopar.Auto(memory=memory, remat=False)
        space = Space.of(StageProblem(trace=traced.trace, method=method, hardware=cluster, cache_directory=None))
        return min(space.stages(), key=space.rank)

    made = step_bounds(traced.trace, cluster, batch_statistics="exact", random="full_batch")
    tight = (made.state_bytes + (made.whole_bytes - made.state_bytes) / 20) / cluster.num_devices
    assert first("off").num_microbatches < first(tight).num_microbatches


def test_the_first_stages_that_are_faster_than_the_best_plan_are_completed_before_regions_are_searched(candidates):
    cluster = autopar.Cluster.parse("1x dgx-h100").with_devices(4)
    traced = autopar.parallelize(train_step, cluster=cluster).trace(*arguments(4096, 1024))
    problem = StageProblem(trace=traced.trace, method=autopar.Auto(), hardware=cluster, cache_directory=None)
    searching = _Search.of(problem, lambda plan: math.inf)
    seconds = min(each.step_time_s for each in candidates)
    region = Stages(num_microbatches=2, num_stages=(2, 2), bound_s=0.0, likely_s=seconds / 2, even_s=seconds / 2)
    searching.open = [region, *(Completion(candidate=each, region=region) for each in candidates)]
    searching.best = traced.plan(autopar.DataParallel()).plan
    searching.best_s = 1.02 * seconds
    first = searching.next_region()  # as long as nothing tells how much stages gain
    assert isinstance(first, Completion) and first.candidate.step_time_s == seconds
    searching.learned.of_stages[first.candidate.scheduled_otherwise[0]] = first.candidate.stages[0].cost
    assert searching.next_region() is region
    searching.open[0] = dataclasses.replace(region, searched=(0.97, seconds))
    assert searching.next_region() is searching.open[0]
    searching.learned.of_stages.clear()
    searching.best_s = seconds
    assert searching.next_region() is first


def test_of_stages_that_would_have_to_gain_those_on_most_devices_are_completed_first(problem, candidates):
    searching = _Search.of(problem, lambda plan: math.inf)
    region = Stages(num_microbatches=1, num_stages=(2, 2), bound_s=0.0, likely_s=0.0, even_s=0.0)
    searching.best = autopar.parallelize(train_step, cluster=problem.hardware).trace(*arguments(4096, 1024)).plan().plan
    searching.best_s = 0.999 * min(each.step_time_s for each in candidates)
    two = cluster_shape(2, 8)
    first = next(each for each in candidates if any(stage.stop - stage.start > 1 for stage in each.stages))
    on = {
        number: dataclasses.replace(
            first,
            stages=tuple(
                dataclasses.replace(stage, submesh=cluster_shape(number, 8) if stage.stop - stage.start > 1 else two)
                for stage in first.stages
            ),
        )
        for number in (2, 4, 1)
    }
    regions = [Completion(candidate=each, region=region) for each in on.values()]
    regions.sort(key=lambda each: searching.order(each, searching.likely_s(each)))
    assert [each.candidate for each in regions] == [on[number] for number in (4, 2, 1)]
