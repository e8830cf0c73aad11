"""Sums go around one ring of all devices while plans are made for Sailor's simulator, and as ever before and after."""

from dataclasses import replace

import pytest
from jax.sharding import PartitionSpec as P

from autopar import MeshPlan, Plan, StagePlan
from autopar.hardware.machine import Link, Machine
from benchmarks.published_clusters import BLOCKS
from benchmarks.sailor_simulator import SUMMED, rings_without_hosts, stages_of


def test_rings_without_hosts_pass_every_device_at_the_rate_of_one():
    link = Link(latency_s=1e-3, bandwidth=2e9, ramp_bytes=0.0)
    machine = replace(Machine.named("p4d.24xlarge"), inter=link)
    usual_s = machine.collective_s("all-reduce", SUMMED, 64, 8)
    alone_s = machine.collective_s("all-reduce", SUMMED, 8)
    with rings_without_hosts([machine]):
        assert machine.collective_s("all-reduce", SUMMED, 64, 8) == pytest.approx(2 * 63 * (1e-3 + SUMMED / 64 / 2e9))
        assert machine.collective_s("all-gather", SUMMED, 64, 8) == pytest.approx(63 * (1e-3 + SUMMED / 64 / 2e9))
        assert machine.collective_s("all-reduce", SUMMED, 8) == alone_s
        assert machine.collective_s("reduce-scatter", SUMMED, 8) > 10 * alone_s
    assert machine.collective_s("all-reduce", SUMMED, 64, 8) == usual_s


def test_what_divides_most_of_the_weights_is_tensor_parallelism_whatever_divides_the_rest():
    meshes = tuple(
        MeshPlan(devices=tuple(range(at, at + 8)), shape=(2, 4), axis_names=("data", "model"), machine="a100-40")
        for at in (0, 8)
    )
    divided = {f"state.params.h_{block}.mlp.{name}": P("model") for block in range(12) for name in ("up", "down")}
    plan = Plan(
        fingerprint="",
        method="Auto",
        meshes=meshes,
        stages=(StagePlan(layers=(0, 12), mesh=0), StagePlan(layers=(12, BLOCKS + 1), mesh=1)),
        cuts=tuple(range(1, BLOCKS + 1)),
        num_microbatches=2,
        schedule="1f1b",
        input_specs=divided | {"batch.tokens": P(("data", "model"))},
    )
    first, second = stages_of(plan)
    assert (first.replicas, first.tensor, first.layers) == (2, 4, list(range(13)))
    assert (second.replicas, second.tensor, second.layers) == (8, 1, list(range(13, 26)))
