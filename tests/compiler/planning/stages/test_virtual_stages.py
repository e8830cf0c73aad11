"""Virtual stages share the layers of a mesh, and their schedule takes as long as its program."""

import math
import random
from dataclasses import replace
from itertools import accumulate

import pytest

from autopar.compiler.inter_op.stage_costs import StageCost, Timing
from autopar.compiler.planning.stages.virtual_stages import VirtualStage, assign_layers, least_part, simulate_schedule_s
from autopar.errors import InvalidArgument, InvalidProgram
from autopar.ir.clocks import Hosts
from autopar.ir.program import Executable, Program, Run, Task
from autopar.ir.schedules import SCHEDULES, GPipe, get_schedule, schedule_tasks, warmed_up
from autopar.ir.task_order import linear_order, peak_in_flight
from autopar.runtime.simulator import simulate
from tests.schedule_programs import program_of


class TaskTimes:
    """The durations of the tasks and transfers of virtual stages, for the simulation of a program."""

    def __init__(self, timing: Timing, stages: list[VirtualStage], costs: list[StageCost]) -> None:
        self.splits, self.stages, self.costs = timing.schedule.splits_weight_gradients, stages, costs

    def run_time_s(self, executable: Executable, task: Task) -> float:
        stage = self.stages[task.stage]
        cost = self.costs[stage.mesh]
        if task.kind == "U":
            return cost.update_s
        weight_s = cost.weight_s if self.splits else 0.0
        return stage.share * {"F": cost.forward_s, "B": cost.backward_s - weight_s, "W": weight_s}[task.kind]

    def transfer_time_s(self, num_bytes: int, source: int, destination: int) -> float:
        return self.stages[0].link_s


def with_updates(program: Program) -> Program:
    """The program with an update behind the tasks of every mesh."""
    name = next(iter(program.executables))
    runs = [
        Run(task=Task(kind="U", stage=number), executable=name, inputs=(), outputs=())
        for number in range(len(program.meshes))
    ]
    meshes = [
        replace(mesh, instructions=(*mesh.instructions, run)) for mesh, run in zip(program.meshes, runs, strict=True)
    ]
    return replace(program, meshes=tuple(meshes))


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_takes_as_long_as_its_program(name, seed):
    draw = random.Random(seed)
    num_meshes, virtual = draw.randint(2, 4), draw.choice(SCHEDULES[name].virtual_stages)
    timing = Timing(schedule=SCHEDULES[name], num_microbatches=draw.randint(1, 9), virtual_stages=virtual)
    link_s = draw.choice([0.0, 0.3, 2.0])
    stages = [
        VirtualStage(mesh=mesh, layers=(0, 1), share=draw.random(), link_s=link_s)
        for _ in range(virtual)
        for mesh in range(num_meshes)
    ]
    costs = [
        StageCost(
            forward_s=draw.uniform(0.5, 2),
            backward_s=draw.uniform(1.5, 4),
            weight_s=draw.choice([0.0, draw.uniform(0.2, 1)]),
            update_s=draw.uniform(0.0, 1),
        )
        for _ in range(num_meshes)
    ]
    stage_mesh = [stage.mesh for stage in stages]
    order = tuple(
        tuple(task for task in tasks if task.kind != "W" or cost.weight_s)
        for tasks, cost in zip(
            schedule_tasks(name, stage_mesh=stage_mesh, num_microbatches=timing.num_microbatches), costs, strict=True
        )
    )
    program = with_updates(program_of(order, stage_mesh, timing.num_microbatches))
    times = TaskTimes(timing, stages, costs)
    expected_s = simulate(program, times).makespan_s
    assert simulate_schedule_s(timing, stages, costs) == pytest.approx(expected_s, rel=1e-12)
    hosts = Hosts(
        of_mesh=tuple(frozenset({mesh // 2}) for mesh in range(num_meshes)),
        dispatch_s=dict.fromkeys(range(num_meshes), 0.1),
    )
    expected_s = simulate(program, times, hosts=hosts).makespan_s
    assert simulate_schedule_s(timing, stages, costs, hosts) == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_takes_no_less_than_its_part_of_what_it_takes_with_other_costs(name):
    draw = random.Random(name)
    for _ in range(40):
        num_meshes, virtual = draw.randint(1, 4), draw.choice(SCHEDULES[name].virtual_stages)
        timing = Timing(schedule=SCHEDULES[name], num_microbatches=draw.randint(1, 9), virtual_stages=virtual)
        stages = [
            VirtualStage(mesh=mesh, layers=(0, 1), share=draw.random(), link_s=draw.choice([0.0, 0.3, 2.0]))
            for mesh in timing.schedule.meshes_of_stages(num_meshes, virtual)
        ]
        hosts = Hosts(
            of_mesh=tuple(frozenset({mesh // 2, draw.randint(0, 1)}) for mesh in range(num_meshes)),
            dispatch_s={0: draw.choice([0.0, 0.1]), 1: draw.choice([0.0, 1.0])},
            execution_s=draw.choice([(), (0.1,) * num_meshes]),
        )
        known = [
            StageCost(
                forward_s=draw.uniform(0, 2),
                backward_s=draw.uniform(1, 4),
                weight_s=draw.choice([0.0, 0.5]),
                update_s=draw.choice([0.0, 3.0]),
            )
            for _ in range(num_meshes)
        ]
        shares = [draw.uniform(0.5, 1.2) for _ in known]
        costs = [cost.in_time(share) for cost, share in zip(known, shares, strict=True)]
        part = least_part(costs, known, timing)
        assert part == pytest.approx(min(1.0, *shares))
        known_s, found_s = (simulate_schedule_s(timing, stages, each, hosts) for each in (known, costs))
        assert found_s >= (1 - 1e-12) * part * known_s
        slower = [replace(cost, backward_s=2 * cost.backward_s) for cost in known]
        assert least_part(slower, known, timing) == 1.0
        assert simulate_schedule_s(timing, stages, slower, hosts) >= known_s
        faster = [replace(cost, forward_s=0.3 * cost.forward_s) for cost in known]
        assert least_part(faster, known, timing) == pytest.approx(0.3)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zero-bubble"])
def test_on_one_host_that_all_share_a_schedule_takes_what_its_work_takes(name, seed):
    """Where one stage alone takes the whole host, others that idle cost nothing."""
    draw = random.Random(seed)
    num_meshes, count = draw.randint(2, 4), draw.randint(1, 9)
    timing = Timing(schedule=SCHEDULES[name], num_microbatches=count)
    stages = [VirtualStage(mesh=mesh, layers=(0, 1), share=1.0, link_s=0.0) for mesh in range(num_meshes)]
    costs = [
        StageCost(forward_s=draw.uniform(0.5, 2), backward_s=draw.uniform(1.5, 4), weight_s=draw.uniform(0.2, 1))
        for _ in range(num_meshes)
    ]
    work_s = count * sum(cost.forward_s + cost.backward_s for cost in costs)
    hosts = Hosts(of_mesh=(frozenset({0}),) * num_meshes, dispatch_s={0: 0.0}, shares=({0: 1.0},) * num_meshes)
    order = schedule_tasks(name, stage_mesh=range(num_meshes), num_microbatches=count)
    program = program_of(order, range(num_meshes), count)
    assert simulate_schedule_s(timing, stages, costs, hosts) == pytest.approx(work_s)
    assert simulate(program, TaskTimes(timing, stages, costs), hosts=hosts).makespan_s == pytest.approx(work_s)
    taxed, tasks = replace(hosts, execution_s=(0.1,) * num_meshes), sum(len(each) for each in order)
    taxed_s = simulate(program, TaskTimes(timing, stages, costs), hosts=taxed).makespan_s
    assert taxed_s == pytest.approx(work_s + 0.1 * (tasks - 1))
    # The updates are executables as well, which are not in the program.
    assert simulate_schedule_s(timing, stages, costs, taxed) == pytest.approx(taxed_s + 0.1 * num_meshes)
    halves = Hosts(of_mesh=hosts.of_mesh, dispatch_s=hosts.dispatch_s, shares=({0: 0.5},) * num_meshes)
    unshared_s = simulate_schedule_s(timing, stages, costs)
    found_s = simulate_schedule_s(timing, stages, costs, halves)
    assert max(unshared_s, work_s / 2) <= found_s * (1 + 1e-9) and found_s <= work_s
    if num_meshes == 2:  # half of a host for each
        assert found_s == pytest.approx(unshared_s)


@pytest.mark.parametrize(("name", "expected_s"), [("1f1b", 201.0), ("1f1b+1+1", 141.0), ("1f1b+2+2+0+0", 111.0)])
def test_more_forward_tasks_ahead_hide_a_slow_link(name, expected_s):
    """Four stages of 1 forward and 2 backward, 32 microbatches; behind the second a microbatch takes 3."""
    timing = Timing(schedule=get_schedule(name), num_microbatches=32)
    links_s = [0.0, 3.0, 0.0, 0.0]
    stages = [VirtualStage(mesh=n, layers=(n, n + 1), share=1.0, link_s=link_s) for n, link_s in enumerate(links_s)]
    costs = [StageCost(forward_s=1.0, backward_s=2.0)] * 4
    assert simulate_schedule_s(timing, stages, costs) == pytest.approx(expected_s)
    held = peak_in_flight(schedule_tasks(name, stage_mesh=range(4), num_microbatches=32))
    assert held == tuple(timing.num_in_flight(stages_behind=3 - n, num_stages=4) for n in range(4))
    assert max(held) == {"1f1b": 4, "1f1b+1+1": 5, "1f1b+2+2+0+0": 6}[name]


@pytest.mark.parametrize(("slowest_s", "below", "above"), [(1.5, 0.85, 1.0), (3.0, 0.85, 1.09)])
def test_slow_links_of_500_pipelines_are_hidden_as_the_closed_form_says(slowest_s, below, above):
    """With 2c / t forward tasks ahead for every link; longer than half of t, the first of them queue on a link."""
    draw, ratios = random.Random(2), list[float]()
    for _ in range(500):
        num_stages, num_microbatches = draw.choice([2, 3, 4, 5, 6]), draw.choice([16, 32, 64])
        forward_s = [draw.uniform(0.6, 1.2) for _ in range(num_stages)]
        links_s = [slowest_s * draw.choice([0, 0, 0.1, 1 / 3, 1]) for _ in range(num_stages - 1)]
        extra = [sum(math.ceil(2 * c / (3 * max(forward_s))) for c in links_s[n:]) for n in range(num_stages)]
        timing = Timing(schedule=warmed_up(extra), num_microbatches=num_microbatches)
        stages = [VirtualStage(mesh=n, layers=(n, n + 1), share=1.0, link_s=c) for n, c in enumerate([*links_s, 0.0])]
        costs = [StageCost(forward_s=each, backward_s=2 * each) for each in forward_s]
        form_s = timing.step_time_s(costs, [2 * c for c in links_s])
        ratios.append(simulate_schedule_s(timing, stages, costs) / form_s)
    assert below <= min(ratios) and max(ratios) <= above * (1 + 1e-9)


@pytest.mark.parametrize("name", ["1f1b+", "1f1b+-1", "1f1b+2+x", "gpipe+2"])
def test_what_is_no_number_of_tasks_ahead_is_refused(name):
    with pytest.raises(InvalidArgument, match="Choose one of '1f1b'"):
        get_schedule(name)


def test_no_stage_runs_further_ahead_than_what_feeds_it():
    assert warmed_up([0, 3, 1]).name == "1f1b+0+1+1"
    draw = random.Random(0)
    for _ in range(100):
        extra = [draw.randrange(6) for _ in range(draw.randint(2, 6))]
        order = schedule_tasks(warmed_up(extra), stage_mesh=range(len(extra)), num_microbatches=draw.choice([1, 4, 16]))
        assert sum(1 for _ in linear_order(order, len(extra))) == sum(map(len, order)), extra


class _Circle(GPipe):
    """Every stage runs its backward tasks first."""

    def stage_tasks(self, stage, num_stages, num_microbatches):
        return tuple(reversed(super().stage_tasks(stage, num_stages, num_microbatches)))


def test_tasks_that_wait_in_a_circle_are_refused():
    stages = [VirtualStage(mesh=mesh, layers=(mesh, mesh + 1), share=1.0, link_s=0.0) for mesh in range(2)]
    timing = Timing(schedule=_Circle(name="circle"), num_microbatches=2)
    with pytest.raises(InvalidProgram, match="Deadlock: mesh 0 at"):
        simulate_schedule_s(timing, stages, [StageCost(forward_s=1.0, backward_s=2.0)] * 2)


def test_a_stage_that_would_wait_without_end_is_refused():
    with pytest.raises(InvalidArgument, match=r"Give each stage at most one more than the one before it: '1f1b\+0\+1'"):
        get_schedule("1f1b+0+3")


@pytest.mark.parametrize("counts", [[1], [3, 2], [4, 5, 6]])
@pytest.mark.parametrize(
    ("name", "virtual"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble-v", 2)]
)
def test_every_layer_is_assigned_once_and_in_order(counts, name, virtual):
    stage_mesh = get_schedule(name).meshes_of_stages(len(counts), virtual)
    draw = random.Random(name)
    before_s = [list(accumulate((draw.uniform(0.2, 2) for _ in range(sum(counts))), initial=0.0)) for _ in counts]
    assigned = assign_layers(counts, stage_mesh, before_s)
    assert [mesh for mesh, _ in assigned] == stage_mesh
    assert [layer for _, layers in assigned for layer in range(*layers)] == list(range(sum(counts)))
    for mesh, count in enumerate(counts):
        assert sum(stop - start for owner, (start, stop) in assigned if owner == mesh) == count


@pytest.mark.parametrize(("virtual", "parts"), [(3, [1, 1, 2]), (2, [1, 3])])
def test_a_small_last_layer_joins_the_last_visit(virtual, parts):
    """Twelve layers and a head on four meshes: only the last mesh has four, and no visit to it is slow but for that."""
    counts, stage_mesh = [3, 3, 3, 4], list(range(4)) * virtual
    before_s = [list(accumulate([*[1.0] * 12, 0.2], initial=0.0))] * 4
    assigned = assign_layers(counts, stage_mesh, before_s)
    assert [stop - start for mesh, (start, stop) in assigned if mesh == 3] == parts
    visits = [assigned[first : first + 4] for first in range(0, len(assigned), 4)]
    slowest_s = [max(before_s[mesh][stop] - before_s[mesh][start] for mesh, (start, stop) in each) for each in visits]
    assert sum(slowest_s) == pytest.approx(3.2)


def test_the_first_visits_are_the_short_ones():
    """They fill the pipeline, and what they make is kept for longest."""
    assigned = assign_layers([3] * 4, [0, 1, 2, 3] * 2, [list(range(13))] * 4)
    assert [stop - start for _, (start, stop) in assigned] == [1] * 4 + [2] * 4
