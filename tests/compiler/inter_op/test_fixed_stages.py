"""A given number of equal stages: the cuts are the best of all."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from autopar.compiler.inter_op.fixed_stages import search_fixed_stages
from autopar.compiler.inter_op.stage_costs import StageCost, Timing
from autopar.compiler.inter_op.submeshes import Submesh
from autopar.errors import InvalidArgument, MemoryTooSmall
from autopar.ir.schedules import SCHEDULES, get_schedule
from autopar.plain_text import size_words

SUBMESH = Submesh(num_hosts=1, devices_per_host=2)


def costs_of(rng, num_layers):
    """One way per range; the update takes no time, for it does not move the cuts."""
    return {
        (j, k): StageCost(
            forward_s=(forward := rng.random() * (k - j)),
            backward_s=2 * forward,
            weight_s=0.8 * forward,
            state_bytes=rng.random() * (k - j),
            activation_bytes=rng.random(),
        )
        for j, k in itertools.combinations(range(num_layers + 1), 2)
    }


def brute_force(num_layers, num_stages, costs, links, timing, memory_bytes):
    best = float("inf")
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        cuts = (0, *inner, num_layers)
        stages = [costs[a, b] for a, b in itertools.pairwise(cuts)]
        in_flight = [
            timing.num_in_flight(stages_behind=num_stages - 1 - s, num_stages=num_stages) for s in range(num_stages)
        ]
        if all(stage.peak_bytes(n) <= memory_bytes for stage, n in zip(stages, in_flight)):
            best = min(best, timing.step_time_s(stages, [links[cut] for cut in inner]))
    return best


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_cuts_are_those_of_brute_force(schedule):
    infeasible = 0
    for seed in range(40):
        rng = random.Random(seed)
        num_layers, num_stages = rng.randint(2, 6), rng.randint(1, 4)
        costs, links = costs_of(rng, num_layers), [rng.random() / 4 for _ in range(num_layers)]
        timing = Timing(schedule=get_schedule(schedule), num_microbatches=rng.choice([1, 2, 8]))
        memory_bytes = rng.choice([3.0, 8.0, 100.0])
        want = brute_force(num_layers, num_stages, costs, links, timing, memory_bytes)

        def search(num_layers=num_layers, num_stages=num_stages, costs=costs, links=links, **given):
            return search_fixed_stages(
                num_layers,
                num_stages,
                SUBMESH,
                lambda j, k, submesh: [costs[j, k]],
                lambda cut, source, target: links[cut],
                **given,
            )

        if want == float("inf"):
            infeasible += 1
            with pytest.raises((MemoryTooSmall, InvalidArgument)) as caught:
                search(timing=timing, memory_bytes=memory_bytes)
            if isinstance(caught.value, MemoryTooSmall):
                least_bytes = caught.value.least_share * memory_bytes
                for share, there_is_one in ((1 + 1e-9, True), (1 - 1e-9, False)):
                    found = brute_force(num_layers, num_stages, costs, links, timing, share * least_bytes)
                    assert math.isfinite(found) is there_is_one
                assert f"they need {size_words(least_bytes)} at least" in str(caught.value)
        else:
            result = search(timing=timing, memory_bytes=memory_bytes)
            assert result.step_time_s == pytest.approx(want)
            assert len(result.best.stages) == num_stages
            assert result.lower_bound_s == pytest.approx(want)
    assert infeasible > 0


def test_the_next_best_cuts_are_there_as_well():
    rng = random.Random(0)
    costs, timing = costs_of(rng, 5), Timing(schedule=get_schedule("1f1b"), num_microbatches=4)

    def search(**given):
        return search_fixed_stages(
            5,
            3,
            SUBMESH,
            lambda j, k, submesh: [costs[j, k]],
            lambda cut, source, target: 0.0,
            timing=timing,
            memory_bytes=100.0,
            **given,
        )

    cuts = [(0, *inner, 5) for inner in itertools.combinations(range(1, 5), 2)]
    times = sorted(timing.step_time_s([costs[j, k] for j, k in itertools.pairwise(each)], [0.0] * 2) for each in cuts)
    found = search(top=100)
    assert [each.step_time_s for each in (found.best, *found.runners_up)] == pytest.approx(times)
    assert len(search().runners_up) <= 5 and search(top=0).runners_up == ()


def test_of_several_ways_the_best_is_near_and_the_bound_below():
    for seed in range(20):
        rng = random.Random(seed)
        num_layers, num_stages = 5, rng.randint(1, 3)
        links = [rng.random() / 4 for _ in range(num_layers)]
        costs = {
            key: [replace(way, update_s=rng.random() / 10) for way in (costs_of(rng, num_layers)[key], cost)]
            for key, cost in costs_of(rng, num_layers).items()
        }
        timing = Timing(schedule=get_schedule("1f1b"), num_microbatches=4)
        want = min(
            brute_force(num_layers, num_stages, dict(zip(costs, ways)), links, timing, 100.0)
            for ways in itertools.islice(itertools.product(*costs.values()), 0, None, 31)
        )
        result = search_fixed_stages(
            num_layers,
            num_stages,
            SUBMESH,
            lambda j, k, submesh, costs=costs: costs[j, k],
            lambda cut, source, target, links=links: links[cut],
            timing=timing,
            memory_bytes=100.0,
        )
        assert result.lower_bound_s <= want
        assert result.lower_bound_s <= result.step_time_s <= result.lower_bound_s + 0.1


def test_more_stages_than_layers_are_refused():
    with pytest.raises(InvalidArgument, match="3 stages were asked for, the step has 2 layers"):
        search_fixed_stages(
            2,
            3,
            SUBMESH,
            lambda j, k, submesh: [StageCost(forward_s=1.0, backward_s=1.0)],
            lambda cut, source, target: 0.0,
            timing=Timing(schedule=get_schedule("1f1b"), num_microbatches=2),
            memory_bytes=1.0,
        )
