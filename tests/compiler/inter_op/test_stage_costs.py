"""The closed forms are the simulated times where they claim to be, and within their bounds elsewhere."""

import random

import pytest

from autopar.compiler.inter_op.stage_costs import StageCost, Timing
from autopar.compiler.planning.virtual_stages import VirtualStage, simulate_schedule_s
from autopar.errors import InvalidArgument
from autopar.ir.schedules import SCHEDULES, get_schedule, peak_in_flight, schedule_tasks

SHAPES = [("gpipe", 1), ("1f1b", 1), ("eager-1f1b", 1), ("zero-bubble", 1), ("interleaved", 2), ("interleaved", 3)]
SIZES = [(1, 3), (2, 4), (3, 3), (4, 8), (5, 20)]


def simulated_s(timing: Timing, costs: list[StageCost], transfers_s: list[float]) -> float:
    """Of virtual stages that share their mesh's time evenly; from the last mesh to the first nothing takes time."""
    stages = [
        VirtualStage(mesh=mesh, layers=(0, 1), share=1 / timing.virtual_stages, link_s=link_s / 2)
        for _ in range(timing.virtual_stages)
        for mesh, link_s in enumerate([*transfers_s, 0.0])
    ]
    return simulate_schedule_s(timing, stages, costs)


def timing_of(name: str, virtual: int, num_microbatches: int) -> Timing:
    return Timing(schedule=get_schedule(name), num_microbatches=num_microbatches, virtual_stages=virtual)


def random_costs(draw: random.Random, num_stages: int) -> list[StageCost]:
    return [
        StageCost(forward_s=draw.uniform(0.5, 2), backward_s=draw.uniform(1.5, 4), weight_s=draw.uniform(0.2, 1))
        for _ in range(num_stages)
    ]


@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
@pytest.mark.parametrize(("f", "b", "w"), [(1, 2, 1), (2, 3, 1), (1, 4, 2)])
@pytest.mark.parametrize(("name", "virtual"), SHAPES)
def test_equal_stages_take_the_closed_form(name, virtual, f, b, w, num_stages, num_microbatches) -> None:
    if name == "interleaved" and (num_stages == 1 or num_microbatches % num_stages):
        num_stages, num_microbatches = 2, 6
    timing = timing_of(name, virtual, num_microbatches)
    costs = [StageCost(forward_s=f, backward_s=b, weight_s=w)] * num_stages
    free = [0.0] * (num_stages - 1)
    assert timing.step_time_s(costs, free) == pytest.approx(simulated_s(timing, costs, free), rel=1e-12)


@pytest.mark.parametrize("name", ["gpipe", "eager-1f1b"])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
def test_transfers_hide_behind_equal_stages(name, num_stages, num_microbatches) -> None:
    timing = timing_of(name, 1, num_microbatches)
    costs = [StageCost(forward_s=1.0, backward_s=1.0)] * num_stages
    slow = [0.75] * (num_stages - 1)
    assert timing.step_time_s(costs, slow) == pytest.approx(simulated_s(timing, costs, slow), rel=1e-12)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("slow", [0.0, 1.0])
def test_unequal_stages_stay_within_the_bounds(seed, slow) -> None:
    draw = random.Random(seed)
    num_stages, rounds = draw.randint(2, 5), draw.randint(1, 4)
    costs = random_costs(draw, num_stages)
    transfers_s = [slow * draw.random() for _ in range(num_stages - 1)]
    pass_s = sum(cost.forward_s + cost.backward_s for cost in costs) + sum(transfers_s)
    m = rounds * num_stages
    for name in ("gpipe", "1f1b"):
        timing = timing_of(name, 1, m)
        actual_s, formula_s = simulated_s(timing, costs, transfers_s), timing.step_time_s(costs, transfers_s)
        stages_s = [cost.forward_s + cost.backward_s for cost in costs]
        halves_s = max(cost.forward_s for cost in costs) + max(cost.backward_s for cost in costs) - max(stages_s)
        above_s = (m - 1) * halves_s if name == "gpipe" else 0.0
        below_s = pass_s + (m - 1) * max(transfers_s) if name == "1f1b" else 0.0
        assert formula_s - below_s - 1e-9 <= actual_s <= formula_s + above_s + 1e-9


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("name", "virtual"), [("eager-1f1b", 1), ("zero-bubble", 1), ("interleaved", 2)])
def test_other_schedules_stay_within_one_pass_of_a_microbatch(name, virtual, seed) -> None:
    draw = random.Random(seed)
    num_stages = draw.randint(2, 5)
    timing = timing_of(name, virtual, num_stages * draw.randint(1, 4))
    costs = random_costs(draw, num_stages)
    free = [0.0] * (num_stages - 1)
    pass_s = sum(cost.forward_s + cost.backward_s for cost in costs)
    assert simulated_s(timing, costs, free) == pytest.approx(timing.step_time_s(costs, free), abs=pass_s)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
@pytest.mark.parametrize(("name", "virtual"), SHAPES)
def test_microbatches_in_flight_are_those_of_the_order(name, virtual, num_stages, num_microbatches) -> None:
    if name == "interleaved":
        num_stages = max(2, num_stages)
        num_microbatches = 2 * num_stages
    timing = timing_of(name, virtual, num_microbatches)
    order = schedule_tasks(name, stage_mesh=list(range(num_stages)) * virtual, num_microbatches=num_microbatches)
    peaks = [peak / virtual for peak in peak_in_flight(order)]  # a virtual stage holds its share of a stage
    formula = [timing.num_in_flight(stages_behind=num_stages - 1 - s, num_stages=num_stages) for s in range(num_stages)]
    assert peaks == pytest.approx(formula)


@pytest.mark.parametrize(("name", "virtual"), SHAPES)
def test_more_stages_never_hold_fewer_microbatches(name, virtual) -> None:
    timing = timing_of(name, virtual, 12)
    for behind in range(8):
        counts = [timing.num_in_flight(stages_behind=behind, num_stages=total) for total in range(behind + 1, 12)]
        assert counts == sorted(counts)
        deeper = timing.num_in_flight(stages_behind=behind + 1, num_stages=12)
        assert timing.num_in_flight(stages_behind=behind, num_stages=12) <= deeper


def test_every_schedule_has_its_formulas_tested() -> None:
    assert {name for name, _ in SHAPES} == set(SCHEDULES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_microbatches": 0}, r"at least 1 microbatch and 1 virtual stage per mesh; it was given 0 and 1"),
        ({"virtual_stages": 0}, r"it was given 2 and 0"),
        ({"virtual_stages": 2}, r'2 with schedule="1f1b", which has one stage per mesh.*use schedule="interleaved"'),
    ],
)
def test_a_timing_that_cannot_be_is_refused(changes, message) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Timing(**({"schedule": get_schedule("1f1b"), "num_microbatches": 2} | changes))
