"""A schedule of one's own is one class and one call: it is then planned, searched, simulated and run by its name."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import pytest

import autopar
from autopar.errors import InvalidArgument, InvalidProgram
from autopar.ir.program import Run, Task
from autopar.ir.schedules import _GIVEN, SCHEDULES, schedule_tasks
from autopar.ir.task_order import backward_tasks, forward_tasks, peak_in_flight
from tests.small_steps import assert_same, mlp_batch, mlp_params, mlp_step


@dataclass(frozen=True, kw_only=True)
class DepthFirst(autopar.Schedule):
    """GPipe in groups: so many microbatches go forward, and then backward, the last one first."""

    group: int

    def stage_tasks(self, stage: int, num_stages: int, num_microbatches: int) -> Sequence[Task]:
        forward, backward = forward_tasks(stage, num_microbatches), backward_tasks(stage, num_microbatches)
        groups = [slice(first, first + self.group) for first in range(0, num_microbatches, self.group)]
        return [task for group in groups for task in (*forward[group], *reversed(backward[group]))]


PAIRS = DepthFirst(name="depth-first-2", group=2)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    autopar.register_schedule(PAIRS)
    yield
    del SCHEDULES[PAIRS.name]
    _GIVEN.clear()


def traced(method):
    return autopar.parallelize(mlp_step, method=method).trace(mlp_params(4), mlp_batch())


def orders(program):
    """Per mesh its forward and backward tasks."""
    runs = ([i.task for i in mesh.instructions if isinstance(i, Run)] for mesh in program.meshes)
    return [" ".join(str(task) for task in tasks if task.kind in "FB") for tasks in runs]


def test_its_tasks_are_in_its_order():
    order = schedule_tasks("depth-first-2", stage_mesh=[0, 1], num_microbatches=4)
    assert [" ".join(map(str, tasks)) for tasks in order] == [
        "F0.m0 F0.m1 B0.m1 B0.m0 F0.m2 F0.m3 B0.m3 B0.m2",
        "F1.m0 F1.m1 B1.m1 B1.m0 F1.m2 F1.m3 B1.m3 B1.m2",
    ]
    assert peak_in_flight(order) == (2, 2)
    assert PAIRS.num_in_flight(stages_behind=1, num_stages=2, num_microbatches=4) == 2.0


@pytest.mark.parametrize("schedule", ["depth-first-2", PAIRS], ids=["name", "value"])
def test_a_pipeline_by_hand_is_planned_kept_and_run_in_its_order(schedule):
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=4, schedule=schedule)
    planned = traced(method).plan()
    assert planned.plan.schedule == "depth-first-2"
    assert autopar.Plan.from_json(planned.plan.to_json()) == planned.plan
    lowered = planned.lower()
    assert orders(lowered.program)[0] == "F0.m0 F0.m1 B0.m1 B0.m0 F0.m2 F0.m3 B0.m3 B0.m2"
    expected = jax.jit(mlp_step)(mlp_params(4), mlp_batch())
    step = autopar.parallelize(mlp_step, method=method)
    assert_same(step(mlp_params(4), mlp_batch()), expected)


def test_a_search_plans_it_and_its_plan_is_simulated_and_run():
    method = autopar.Auto(num_stages=2, num_microbatches=4, schedule="depth-first-2")
    planned = traced(method).plan()
    assert (planned.plan.schedule, planned.plan.num_microbatches) == ("depth-first-2", 4)
    report = planned.simulate()
    tasks = [event.label for event in report.timeline.events if event.mesh == 0 and event.task.kind in "FB"]
    assert " ".join(tasks) == "F0.m0 F0.m1 B0.m1 B0.m0 F0.m2 F0.m3 B0.m3 B0.m2"
    assert planned.plan.certificate.step_time_s == pytest.approx(report.step_time_s, rel=0.2)
    expected = jax.jit(mlp_step)(mlp_params(4), mlp_batch())
    assert_same(autopar.parallelize(mlp_step, method=method)(mlp_params(4), mlp_batch()), expected)


def test_megatron_takes_it():
    plan = traced(autopar.Megatron(data=4, pipeline=2, num_microbatches=2, schedule=PAIRS)).plan().plan
    assert plan.schedule == "depth-first-2"


def test_a_name_that_is_not_registered_is_refused_with_those_that_are():
    with pytest.raises(InvalidArgument, match=r"schedule is 'depth-first-3'. Choose one of '1f1b',.*'depth-first-2'"):
        autopar.PipelineParallel(schedule="depth-first-3")


@pytest.mark.parametrize("method", [autopar.PipelineParallel, autopar.Auto])
def test_one_that_nobody_registered_is_planned_and_run_and_its_plan_refused_where_it_is_not_known(method):
    given = DepthFirst(name="depth-first-given", group=2)
    method = method(num_stages=2, num_microbatches=4, schedule=given)
    planned = traced(method).plan()
    assert planned.plan.schedule == "depth-first-given"
    assert orders(planned.lower().program)[0] == "F0.m0 F0.m1 B0.m1 B0.m0 F0.m2 F0.m3 B0.m3 B0.m2"
    expected = jax.jit(mlp_step)(mlp_params(4), mlp_batch())
    assert_same(autopar.parallelize(mlp_step, method=method)(mlp_params(4), mlp_batch()), expected)
    kept = planned.plan.to_json()
    assert autopar.Plan.from_json(kept) == planned.plan
    assert "depth-first-given" not in SCHEDULES  # no search for another step tries it
    del _GIVEN["depth-first-given"]  # as in another process
    with pytest.raises(InvalidArgument, match=r"'depth-first-given'. Choose .*is loaded .*call register_schedule"):
        autopar.Plan.from_json(kept)
    autopar.register_schedule(given)
    assert autopar.Plan.from_json(kept) == planned.plan
    del SCHEDULES["depth-first-given"]


def test_a_name_stands_for_one_schedule_that_is_given_too():
    autopar.PipelineParallel(schedule=DepthFirst(name="depth-first-once", group=2))
    with pytest.raises(InvalidArgument, match=r"of the name 'depth-first-once' already: DepthFirst.*group=2"):
        autopar.Auto(schedule=DepthFirst(name="depth-first-once", group=3))
    with pytest.raises(InvalidArgument, match=r"of the name 'depth-first-once' already: DepthFirst.*group=2"):
        autopar.register_schedule(DepthFirst(name="depth-first-once", group=3))
    with pytest.raises(InvalidArgument, match=r"of the name 'gpipe' already"):
        autopar.Megatron(schedule=DepthFirst(name="gpipe", group=3))


def test_a_name_stands_for_one_schedule():
    autopar.register_schedule(PAIRS)
    with pytest.raises(InvalidArgument, match=r"There is a schedule of the name 'depth-first-2' already: DepthFirst"):
        autopar.register_schedule(DepthFirst(name="depth-first-2", group=4))


def test_it_has_one_stage_on_a_mesh():
    with pytest.raises(InvalidArgument, match=r'2 with schedule="depth-first-2", which has one stage per mesh'):
        autopar.PipelineParallel(num_stages=2, schedule=PAIRS, virtual_stages=2)


@dataclass(frozen=True, kw_only=True)
class Broken(autopar.Schedule):
    """GPipe without its last backward task, or with all backward tasks in front."""

    forgets: bool

    def stage_tasks(self, stage: int, num_stages: int, num_microbatches: int) -> Sequence[Task]:
        forward, backward = forward_tasks(stage, num_microbatches), backward_tasks(stage, num_microbatches)
        return [*forward, *backward[:-1]] if self.forgets else [*backward, *forward]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Broken(name="forgets", forgets=True), r"Task B0.m3 is scheduled 0 times; it must be 1. Have"),
        (Broken(name="waits", forgets=False), r"Deadlock: mesh 0 at B0.m0, mesh 1 at B1.m0. .* Reorder"),
    ],
    ids=["forgets", "waits"],
)
def test_a_schedule_that_forgets_a_task_or_waits_forever_is_refused(schedule, message, monkeypatch):
    monkeypatch.setitem(SCHEDULES, schedule.name, schedule)
    planned = traced(autopar.PipelineParallel(num_stages=2, num_microbatches=4, schedule=schedule)).plan()
    with pytest.raises(InvalidProgram, match=message):
        planned.lower()
