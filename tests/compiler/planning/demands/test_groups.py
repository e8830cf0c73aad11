"""Plans for devices of several machines: stages of one machine each, with its own figures, and the results of jit."""

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import InvalidArgument, MemoryTooSmall, PlanMismatch
from autopar.hardware.machine import Link
from tests.small_steps import SEPARATE, sgd, tanh_loss

WIDTH, ROWS, LAYERS = 64, 512, 4


def cluster(memory_bytes=(1e9, 1e9), *, bandwidth=1e9):
    """Two devices, and two more that compute a third of it in the same time."""
    groups = [
        dataclasses.replace(
            SEPARATE,
            name=name,
            kind=name,
            devices_per_host=2,
            domain=2,
            dispatch_s=1e-6,
            kernel_s=1e-7,
            matmul_half_flops=0.0,
            memory_bytes=most,
            peak_flops={dtype: rate / times for dtype, rate in SEPARATE.peak_flops.items()},
            memory_bandwidth=SEPARATE.memory_bandwidth / times,
        )
        for name, times, most in zip(("fast", "slow"), (1, 3), memory_bytes)
    ]
    link = Link(latency_s=1e-6, bandwidth=bandwidth, ramp_bytes=0.0)
    return autopar.Cluster.of_groups([autopar.Cluster(num_devices=2, machine=each) for each in groups], link)


train_step = sgd(tanh_loss)


def arguments():
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    params = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys[1:]]
    return params, (jax.random.normal(keys[0], (ROWS, WIDTH)), jnp.zeros((ROWS, WIDTH)))


def planned(method, there, **options):
    return autopar.parallelize(train_step, method=method, cluster=there, **options).trace(*arguments()).plan()


def assert_equal_to_jit(planned):
    got, expected = planned.lower().compile()(*arguments()), jax.jit(train_step)(*arguments())
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def searched():
    """A search of which the best plan uses both machines: a pipeline, for lanes have another schedule."""
    return planned(autopar.Auto(num_microbatches=8, layers=4, schedule="zero-bubble"), cluster())


def test_a_search_gives_each_machine_its_share_of_the_layers(searched):
    layers = collections.Counter()
    for stage in searched.plan.stages:
        layers[searched.plan.meshes[stage.mesh].machine] += stage.layers[1] - stage.layers[0]
    assert layers["fast"] > layers["slow"] > 0
    alone = planned(autopar.Auto(num_microbatches=8, layers=4), cluster().groups[0])
    assert searched.simulate().step_time_s < alone.simulate().step_time_s
    certificate = searched.plan.certificate
    assert certificate.lower_bound_s <= certificate.step_time_s == pytest.approx(searched.simulate().step_time_s)


def test_a_plan_over_machines_computes_what_jit_does(searched):
    assert {mesh.machine for mesh in searched.plan.meshes} == {"fast", "slow"}
    report = searched.simulate()
    assert report.fits
    assert [mesh.machine for mesh in report.meshes] == [mesh.machine for mesh in searched.plan.meshes]
    assert "fast" in str(searched.plan)
    assert_equal_to_jit(searched)


def test_a_plan_keeps_the_machines_of_its_meshes(searched):
    plan = autopar.Plan.from_json(searched.plan.to_json())
    assert plan == searched.plan
    assert planned(plan, cluster()).plan == plan
    turned = autopar.Cluster.of_groups(cluster().groups[::-1])
    with pytest.raises(PlanMismatch, match=r"Mesh 0 was planned for devices .*, in this cluster they are of"):
        planned(plan, turned)


def test_machines_of_one_device_are_stages_of_a_pipeline_where_that_is_best():
    """A part of the cluster with fewer devices than stages has nothing to search, and must not end the search."""
    single = [autopar.Cluster.of_hosts(dataclasses.replace(g.machine, devices_per_host=1), 1) for g in cluster().groups]
    there = autopar.Cluster.of_groups(single, Link(latency_s=1e-6, bandwidth=1e9, ramp_bytes=0.0))
    by_hand = planned(autopar.PipelineParallel(num_stages=2, num_microbatches=8), there)
    pipeline = planned(autopar.Auto(num_microbatches=8, layers=4, kinds=("pipeline",)), there)
    assert pipeline.plan.num_stages == 2
    assert pipeline.simulate(there).step_time_s <= 1.001 * by_hand.simulate(there).step_time_s


def test_what_no_machine_holds_is_refused_with_what_is_missing_and_the_memory_of_every_kind():
    with pytest.raises(MemoryTooSmall) as caught:
        planned(autopar.Auto(num_microbatches=8, layers=4), cluster((2e4, 4e4)))
    assert re.search(r"needs? .* GiB", caught.value.shortage)
    kinds = r"groups 0 has 2 devices of fast with .*e-05 GiB each, 1 has 2 devices of slow with .*e-05 GiB each"
    assert re.search(kinds, caught.value.shortage)


@pytest.mark.parametrize(
    "method",
    [autopar.PipelineParallel(num_stages=2, num_microbatches=4), autopar.Megatron(pipeline=2, num_microbatches=4)],
    ids=lambda method: type(method).__name__,
)
def test_stages_by_hand_take_the_time_of_their_machine(method):
    found = planned(method, cluster())
    assert [mesh.machine for mesh in found.plan.meshes] == ["fast", "slow"]
    fast, slow = found.simulate().meshes
    assert slow.compute_s == pytest.approx(3 * fast.compute_s, rel=0.25)
    assert found.simulate(cluster(bandwidth=1e5)).step_time_s > 2 * found.simulate().step_time_s
    assert_equal_to_jit(found)


def test_a_mesh_of_several_machines_is_refused():
    with pytest.raises(InvalidArgument, match="A mesh has devices of 2 groups: fast from device 0 on, slow from"):
        planned(autopar.DataParallel(), cluster())
    with pytest.raises(InvalidArgument, match="The cluster has devices of 2 machines"):
        planned(autopar.Zero(stage=3), cluster())
    with pytest.raises(InvalidArgument, match=r"whose stages differ in size. Leave both to the search"):
        planned(autopar.Auto(num_stages=2), cluster())
