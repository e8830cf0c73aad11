"""The closed forms are what the simulation takes where they claim to be, and within their bounds elsewhere."""

import random
from dataclasses import dataclass

import pytest

from autopar.compiler.inter_op.stage_costs import SCHEDULES, StageCost, Timing, in_flight, step_time_s
from autopar.compiler.pipeline.schedules import peak_in_flight, schedule_tasks
from autopar.errors import InvalidArgument
from autopar.ir.program import Executable, Task
from autopar.runtime.simulator import simulate
from tests.schedule_programs import program_of

SHAPES = [("gpipe", 1), ("1f1b", 1), ("eager-1f1b", 1), ("zero-bubble", 1), ("interleaved", 2), ("interleaved", 3)]
SIZES = [(1, 3), (2, 4), (3, 3), (4, 8), (5, 20)]


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Durations of each mesh's tasks (a virtual stage takes its share), and of the transfers behind each mesh."""

    costs: list[StageCost]
    transfers_s: list[float]
    split: bool
    virtual: int

    def run_time_s(self, executable: Executable, task: Task) -> float:
        cost = self.costs[task.stage % len(self.costs)]
        weight_s = cost.weight_s if self.split else 0.0
        whole = {"F": cost.forward_s, "B": cost.backward_s - weight_s, "W": weight_s}
        return whole[task.kind] / self.virtual

    def transfer_time_s(self, num_bytes: int, source: int, destination: int) -> float:
        """Half of the transfer in each direction; none between the last mesh and the first."""
        near = abs(source - destination) == 1
        return self.transfers_s[min(source, destination)] / 2 if near else 0.0


def simulated_s(timing: Timing, costs: list[StageCost], transfers_s: list[float]) -> float:
    meshes, virtual = len(costs), timing.virtual_stages
    stage_mesh = list(range(meshes)) * virtual
    order = schedule_tasks(
        timing.schedule,
        num_stages=len(stage_mesh),
        num_meshes=meshes,
        num_microbatches=timing.num_microbatches,
        stage_mesh=stage_mesh,
    )
    times = StageTimes(costs=costs, transfers_s=transfers_s, split=timing.schedule == "zero-bubble", virtual=virtual)
    return simulate(program_of(order, stage_mesh, timing.num_microbatches), times).makespan_s


def timing_of(name: str, virtual: int, num_microbatches: int) -> Timing:
    return Timing(schedule=name, num_microbatches=num_microbatches, virtual_stages=virtual)


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
    assert step_time_s(timing, costs, free) == pytest.approx(simulated_s(timing, costs, free), rel=1e-12)


@pytest.mark.parametrize("name", ["gpipe", "eager-1f1b"])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
def test_transfers_hide_behind_equal_stages(name, num_stages, num_microbatches) -> None:
    timing = timing_of(name, 1, num_microbatches)
    costs = [StageCost(forward_s=1.0, backward_s=1.0)] * num_stages
    slow = [0.75] * (num_stages - 1)
    assert step_time_s(timing, costs, slow) == pytest.approx(simulated_s(timing, costs, slow), rel=1e-12)


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
        found_s, formula_s = simulated_s(timing, costs, transfers_s), step_time_s(timing, costs, transfers_s)
        stages_s = [cost.forward_s + cost.backward_s for cost in costs]
        halves_s = max(cost.forward_s for cost in costs) + max(cost.backward_s for cost in costs) - max(stages_s)
        above_s = (m - 1) * halves_s if name == "gpipe" else 0.0
        below_s = pass_s + (m - 1) * max(transfers_s) if name == "1f1b" else 0.0
        assert formula_s - below_s - 1e-9 <= found_s <= formula_s + above_s + 1e-9


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("name", "virtual"), [("eager-1f1b", 1), ("zero-bubble", 1), ("interleaved", 2)])
def test_other_schedules_stay_within_one_pass_of_a_microbatch(name, virtual, seed) -> None:
    draw = random.Random(seed)
    num_stages = draw.randint(2, 5)
    timing = timing_of(name, virtual, num_stages * draw.randint(1, 4))
    costs = random_costs(draw, num_stages)
    free = [0.0] * (num_stages - 1)
    pass_s = sum(cost.forward_s + cost.backward_s for cost in costs)
    assert simulated_s(timing, costs, free) == pytest.approx(step_time_s(timing, costs, free), abs=pass_s)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
@pytest.mark.parametrize(("name", "virtual"), SHAPES)
def test_microbatches_in_flight_are_those_of_the_order(name, virtual, num_stages, num_microbatches) -> None:
    if name == "interleaved":
        num_stages = max(2, num_stages)
        num_microbatches = 2 * num_stages
    timing = timing_of(name, virtual, num_microbatches)
    stage_mesh = list(range(num_stages)) * virtual
    order = schedule_tasks(
        name,
        num_stages=len(stage_mesh),
        num_meshes=num_stages,
        num_microbatches=num_microbatches,
        stage_mesh=stage_mesh,
    )
    peaks = [peak / virtual for peak in peak_in_flight(order)]  # a virtual stage holds its share of a stage
    counted = [in_flight(timing, stages_behind=num_stages - 1 - s, num_stages=num_stages) for s in range(num_stages)]
    assert peaks == pytest.approx(counted)


@pytest.mark.parametrize("name", SCHEDULES)
def test_more_stages_never_hold_fewer_microbatches(name) -> None:
    timing = timing_of(name, 2, 12)
    for behind in range(8):
        counts = [in_flight(timing, stages_behind=behind, num_stages=total) for total in range(behind + 1, 12)]
        assert counts == sorted(counts)
        deeper = in_flight(timing, stages_behind=behind + 1, num_stages=12)
        assert in_flight(timing, stages_behind=behind, num_stages=12) <= deeper


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "2f2b"}, r"'2f2b' is unknown. Use one of: 1f1b, eager-1f1b"),
        ({"num_microbatches": 0}, r"at least 1 microbatch and 1 virtual stage per mesh; it was given 0 and 1"),
        ({"virtual_stages": 0}, r"it was given 2 and 0"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(changes, message) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Timing(**({"schedule": "1f1b", "num_microbatches": 2} | changes))
