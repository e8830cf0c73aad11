"""A collective's cost of one's own: switches that add up what passes through them, so that one pass sums up."""

from collections.abc import Iterator, Sequence

import pytest

import autopar
from autopar.hardware.collectives import CollectiveTime, NetworkLevel, collective_cost, register_collective_cost
from autopar.hardware.machine import Machine
from benchmarks.models.mlp import mlp

MODEL = mlp(layers=2, width=256, hidden=1024, batch=4096)
H100 = autopar.Cluster.parse("1x dgx-h100")


def summed_by_switches(levels: Sequence[NetworkLevel], nbytes: float) -> CollectiveTime:
    """Every device sends its array once and receives the sum once, both at a time, through a switch of each level."""
    latency_s = sum(level.start_s + 2 * level.step_s for level in levels)
    return CollectiveTime(latency_s, nbytes / min(level.bandwidth for level in levels))


@pytest.fixture
def switches() -> Iterator[None]:
    before = collective_cost("all-reduce")
    register_collective_cost("all-reduce", summed_by_switches)
    yield
    register_collective_cost("all-reduce", before)


def planned(method: autopar.Auto):
    step = autopar.parallelize(MODEL.step, method=method, cluster=H100)
    return step.trace(MODEL.abstract_state, MODEL.abstract_batch).plan()


def test_a_machine_takes_the_cost_that_is_registered(switches):
    machine = Machine.named("dgx-h100")
    start_s = 7 / 8 * machine.intra.ramp_bytes / machine.intra.bandwidth
    expected = start_s + 2 * machine.intra.latency_s + 1e9 / machine.intra.bandwidth
    assert machine.collective_s("all-reduce", 1e9, 8) == pytest.approx(expected)


def test_a_step_is_searched_simulated_and_run_by_a_cost_of_ones_own(switches):
    found = planned(autopar.Auto(mesh_shape=(8,)))
    sharding = found.plan.sharding
    summed = [each for each in sharding.collectives if each.kind == "all-reduce"]
    assert summed
    for each in summed:
        level = H100.machine.intra.level(8)
        latency_s, transfer_s = summed_by_switches([level], each.nbytes)
        assert each.seconds / each.times == pytest.approx(latency_s + transfer_s, abs=latency_s)
    assert found.simulate().step_time_s == pytest.approx(sharding.step_time_s)
    assert found.verify(MODEL.create_state(), MODEL.create_batch())


def test_the_search_minds_the_cost():
    ring_s = planned(autopar.Auto(mesh_shape=(8,))).plan.sharding.step_time_s
    before = collective_cost("all-reduce")
    register_collective_cost("all-reduce", lambda levels, nbytes: CollectiveTime(0.0, 0.0))
    try:
        free = planned(autopar.Auto(mesh_shape=(8,))).plan.sharding
    finally:
        register_collective_cost("all-reduce", before)
    assert free.step_time_s < ring_s
    assert "reduce-scatter" not in {each.kind for each in free.collectives}
