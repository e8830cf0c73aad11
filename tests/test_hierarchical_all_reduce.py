"""All-reduces over slow links between hosts: inside of hosts first, as planned, priced, compiled and simulated."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar.hardware.collectives import wire_bytes
from autopar.hardware.machine import Link
from autopar.plain_text import as_text
from tests.small_steps import adam, adam_state, draw, mlp_loss

WIDTH, ROWS = 256, 2048
H100 = autopar.Cluster(num_devices=8, kind="h100").machine


def hosts_of_four(slower: float) -> autopar.Cluster:
    """Two hosts of four devices, whose links between hosts are so many times slower than inside."""
    machine = dataclasses.replace(
        H100,
        devices_per_host=4,
        domain=4,
        intra=Link(latency_s=1e-6, bandwidth=1e11, ramp_bytes=0.0),
        inter=Link(latency_s=1e-5, bandwidth=1e11 / slower, ramp_bytes=0.0),
    )
    return autopar.Cluster(num_devices=8, machine=machine)


def arguments():
    params = [{"w": draw(n, WIDTH, WIDTH), "b": draw(9 + n, WIDTH)} for n in range(2)]
    return adam_state(params), (draw(20, ROWS, WIDTH), draw(21, ROWS, WIDTH))


STEP = adam(mlp_loss)
METHODS = {
    "data parallel": autopar.DataParallel(),
    "one axis": autopar.Auto(mesh_shape=(8,), pins={"batch": PartitionSpec("data")}),
    "two axes": autopar.Auto(mesh_shape=(2, 4), pins={"batch": PartitionSpec(("data", "model"))}),
    "an axis over both": autopar.Auto(mesh_shape=(4, 2), pins={"batch": PartitionSpec(("data", "model"))}),
    "microbatches": autopar.DataParallel(num_microbatches=2),
    "degrees": autopar.Megatron(data=8),
}


def planned(method, cluster):
    return autopar.parallelize(STEP, method=method, cluster=cluster).trace(*arguments()).plan()


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_step_with_hierarchical_all_reduces_is_compiled_as_planned_and_equals_plain_jit(method):
    found = planned(method, hosts_of_four(slower=100))
    report = found.verify(*arguments())
    assert report, str(report)
    state_elements = 2 * (WIDTH * WIDTH + WIDTH)
    across = [
        c for c in found.plan.planned_collectives if c.reach == "across" or (c.reach == "all" and "data" in c.axes)
    ]
    assert {(c.kind, c.group_size) for c in across} == {("all-reduce", 2)}
    if method.num_microbatches == 1:  # with more, accumulators are scattered
        # Every gradient crosses once, a quarter of it from each device: 2 (N-1)/N M/4 bytes. So does the loss.
        sent = sum(c.times * wire_bytes(c.kind, c.group_size, c.nbytes) for c in across)
        least = 2 * (2 - 1) / 2 * 4 * state_elements / 4
        assert least <= sent <= least + 64
    assert "hierarchical, 4 devices in each of 2 hosts" in str(found.plan)
    assert "inside hosts" in as_text(found.plan.collectives())
    assert autopar.Plan.from_json(found.plan.to_json()) == found.plan


def test_where_links_between_hosts_are_quick_an_all_reduce_is_one_ring():
    found = planned(METHODS["data parallel"], hosts_of_four(slower=2))
    assert {c.reach for c in found.plan.planned_collectives} == {"all"}
    assert "hierarchical" not in str(found.plan)


def test_bytes_between_hosts_are_those_of_the_formula_in_the_compiled_program():
    cluster = hosts_of_four(slower=100)
    lowered = planned(METHODS["two axes"], cluster).lower()
    state, batch = arguments()
    step = autopar.parallelize(STEP, method=METHODS["two axes"], cluster=cluster)
    new_state, loss = step(state, batch)
    plain_state, plain_loss = jax.jit(STEP)(state, batch)
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), new_state, plain_state)
    report = lowered.verify()
    assert report, str(report)
    pairs = [each for each in report.collectives.kinds if (each.kind, each.group_size) == ("all-reduce", 2)]
    assert [each.compiled_bytes for each in pairs] == [each.planned_bytes for each in pairs]
