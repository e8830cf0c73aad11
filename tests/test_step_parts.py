"""Parts of a step add up to its simulated time, along a path without gaps, and price it on other machines."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.hardware.machine import Machine
from autopar.runtime.critical_path import critical_path
from autopar.runtime.timeline import Event
from autopar.step_parts import StepParts
from tests.reports.test_chakra import METHODS
from tests.reports.test_description import arguments, deep_loss
from tests.small_steps import sgd

CLUSTER = autopar.Cluster.parse("1x dgx-h100")


@pytest.fixture(scope="module", params=METHODS)
def plan(request):
    step = autopar.parallelize(sgd(deep_loss), method=METHODS[request.param], cluster=CLUSTER)
    return step.trace(*arguments()).plan()


def test_the_steps_of_a_critical_path_follow_each_other(plan):
    timeline = plan.simulate().timeline
    path = critical_path(timeline)
    took_s = sum(step.stop_s - step.start_s for step in path.steps)
    assert took_s + path.waited_s == pytest.approx(timeline.makespan_s)
    assert all(before.stop_s <= after.start_s * (1 + 1e-9) for after, before in zip(path.steps, path.steps[1:]))
    assert isinstance(path.steps[-1], Event)


def test_parts_take_as_long_as_the_step_also_as_data(plan):
    parts = plan.parts()
    assert parts.step_s(CLUSTER.machine) == pytest.approx(plan.simulate().step_time_s, rel=1e-4)
    assert StepParts.from_data(json.loads(json.dumps(parts.to_data()))) == parts


def test_parts_are_priced_on_machines_with_other_figures(plan):
    parts, machine = plan.parts(), CLUSTER.machine
    whole_s = parts.step_s(machine)
    slower = replace(machine, kernel_s=2 * machine.kernel_s)
    assert whole_s < parts.step_s(slower) <= 2 * whole_s
    links = {name: replace(getattr(machine, name), latency_s=0.0, ramp_bytes=0.0) for name in ("intra", "inter")}
    assert parts.step_s(replace(machine, **links)) <= whole_s
    halves = {"product": 0.5, "memory": 0.5}
    assert whole_s < parts.step_s(machine, **halves) <= 2 * whole_s
    assert parts.step_s(machine, vector=0.5) >= whole_s >= parts.step_s(machine, vector=2.0)
    later_s = parts.step_s(machine, task_s=lambda _, device_s: device_s + 1.0)
    assert later_s == pytest.approx(whole_s + sum(task.runs for task in parts.tasks))


@pytest.mark.parametrize(
    ("method", "copies"), [(autopar.DataParallel(), 3), (autopar.Zero(stage=3), 0), (autopar.Auto(), 3)]
)
def test_a_step_takes_the_time_of_the_state_that_it_copies_and_is_planned_to_copy_none(method, copies):
    tpu = Machine.named("tpu-v5p")
    width, rows = 1024, 65_536
    given = [jax.ShapeDtypeStruct((width, width), "float32")] * 3, jax.ShapeDtypeStruct((rows, width), "float32")

    def loss(params, batch):
        for w in params:
            batch = jnp.tanh(batch @ w)
        return jnp.mean(batch**2)

    machines = (replace(tpu, copies_state=does) for does in (True, False))
    copying, writing = (autopar.Cluster(num_devices=8, machine=machine) for machine in machines)
    step = autopar.parallelize(sgd(loss), method=method, cluster=writing, donate_argnums=(0,)).trace(*given)
    plan = step.plan()
    written_over_s, copied_s = (plan.simulate(cluster).step_time_s for cluster in (writing, copying))
    one_s = 4 * 4 * width**2 / tpu.memory_bandwidth  # the old and the new are read and written
    # All gradients are transposed behind their sum. In front of it, or of one in parts, they are products' own results.
    assert copied_s - written_over_s == pytest.approx(copies * one_s, rel=1e-3)
    assert plan.parts(copying).step_s(copying.machine) == pytest.approx(copied_s, rel=1e-4)
    aware = step.on_cluster(copying).plan()
    assert aware.simulate().step_time_s == pytest.approx(written_over_s, rel=1e-3)
    assert aware.plan.sharding.lower_bound_s <= aware.plan.sharding.step_time_s == aware.simulate().step_time_s
