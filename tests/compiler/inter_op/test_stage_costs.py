"""The closed forms are the simulated times where they claim to be, and within their bounds elsewhere."""

import random
from dataclasses import replace

import pytest

from autopar.compiler.inter_op.stage_costs import StageCost, Timing
from autopar.compiler.planning.stages.virtual_stages import VirtualStage, simulate_schedule_s
from autopar.errors import InvalidArgument
from autopar.ir.schedules import SCHEDULES, get_schedule, schedule_tasks
from autopar.ir.task_order import peak_in_flight

EXACT = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("eager-1f1b", 1),
    ("zero-bubble", 1),
    ("zero-bubble-h2", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("interleaved-zero-bubble", 2),
    ("interleaved-zero-bubble", 4),
]
SHAPES = [*EXACT, ("zero-bubble-v", 2), ("dualpipe-v", 2)]
SIZES = [(1, 3), (2, 4), (3, 3), (4, 8), (5, 20)]


def simulated_s(timing: Timing, costs: list[StageCost], transfers_s: list[float]) -> float:
    """Of virtual stages that share their mesh's time evenly; from the last mesh to the first nothing takes time."""
    links_s = [*transfers_s, 0.0]
    stages = [
        VirtualStage(mesh=mesh, layers=(0, 1), share=1 / timing.virtual_stages, link_s=links_s[mesh] / 2)
        for mesh in timing.schedule.meshes_of_stages(len(costs), timing.virtual_stages)
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
@pytest.mark.parametrize(("name", "virtual"), EXACT)
def test_equal_stages_take_the_closed_form(name, virtual, f, b, w, num_stages, num_microbatches) -> None:
    if virtual > 1 and (num_stages == 1 or num_microbatches % num_stages):
        num_stages, num_microbatches = 2, 6
    if name == "zero-bubble-h2":
        num_microbatches = max(num_microbatches, 2 * num_stages)
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
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zero-bubble", "zero-bubble-h2"])
def test_unequal_stages_of_a_single_microbatch_take_the_closed_form(name, seed) -> None:
    draw = random.Random(seed)
    timing = timing_of(name, 1, 1)
    costs = [replace(each, update_s=draw.choice([0.0, draw.uniform(0, 5)])) for each in random_costs(draw, 4)]
    transfers_s = [draw.random() for _ in range(3)]
    assert simulated_s(timing, costs, transfers_s) == pytest.approx(timing.step_time_s(costs, transfers_s), rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("name", "virtual"), [shape for shape in SHAPES if shape[0] not in ("gpipe", "1f1b")])
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
    if virtual > 1:
        num_stages = max(2, num_stages)
        num_microbatches = 2 * num_stages
    timing = timing_of(name, virtual, num_microbatches)
    stage_mesh = timing.schedule.meshes_of_stages(num_stages, virtual)
    order = schedule_tasks(name, stage_mesh=stage_mesh, num_microbatches=num_microbatches)
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


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 4), (3, 6), (4, 16), (6, 12)])
def test_two_stages_on_a_mesh_there_and_back_leave_no_bubble(num_stages, num_microbatches) -> None:
    """With F, B and W of one time; meshes begin one after another, which is half of a forward task each."""
    timing = timing_of("zero-bubble-v", 2, num_microbatches)
    costs = [StageCost(forward_s=2.0, backward_s=4.0, weight_s=2.0)] * num_stages
    took_s = simulated_s(timing, costs, [0.0] * (num_stages - 1))
    assert took_s == 6 * num_microbatches + num_stages - 1 == timing.step_time_s(costs, [0.0] * (num_stages - 1))
    less_memory = timing.num_in_flight(stages_behind=num_stages - 1, num_stages=num_stages)
    one_stage = timing_of("zero-bubble", 1, num_microbatches)
    assert less_memory == one_stage.num_in_flight(stages_behind=num_stages - 1, num_stages=num_stages)
    assert took_s < one_stage.step_time_s(costs, [0.0] * (num_stages - 1))


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
