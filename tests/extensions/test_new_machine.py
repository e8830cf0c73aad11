"""A machine of one's own: its figures as a value or a JSON file, by which steps are planned and simulated."""

from dataclasses import replace

import pytest

import autopar
from autopar.hardware.cluster import Cluster
from autopar.hardware.machine import Link, Machine, machines, register_machine
from benchmarks.models.mlp import mlp

ETHERNET = Link(latency_s=5e-5, bandwidth=1e9, ramp_bytes=1e6)
GARAGE = replace(
    Machine.named("p3.16xlarge"),
    name="garage-8",
    kind="garage gpu",
    devices_per_host=8,
    domain=1,
    intra=ETHERNET,
    inter=ETHERNET,
    sources={"intra": "estimate: what a cable carries"},
)
MODEL = mlp(layers=2, width=256, hidden=1024, batch=256)


def planned(cluster: Cluster):
    step = autopar.parallelize(MODEL.step, method=autopar.Auto(mesh_shape=(2, 4)), cluster=cluster)
    return step.trace(MODEL.abstract_state, MODEL.abstract_batch).plan()


def from_file(directory) -> Cluster:
    GARAGE.save(directory / "garage.json")
    return Cluster.parse(f"1x {directory / 'garage.json'}")


@pytest.mark.parametrize(
    "cluster", [lambda directory: Cluster(num_devices=8, machine=GARAGE), from_file], ids=["value", "file"]
)
def test_a_step_is_searched_simulated_and_run_for_a_machine_of_ones_own(cluster, tmp_path):
    found = planned(cluster(tmp_path))
    assert found.plan.sharding.figures == "garage-8"
    assert found.simulate().step_time_s == pytest.approx(found.plan.sharding.step_time_s)
    # A wire a hundred times slower than NVLink: sending takes longer, and as little is sent as can be.
    known = planned(Cluster.parse("1x p3.16xlarge"))
    assert found.plan.sharding.step_time_s > known.plan.sharding.step_time_s
    assert found.verify(MODEL.create_state(), MODEL.create_batch())


def test_a_registered_machine_goes_by_its_name_and_by_what_jax_calls_its_devices(own_machines):
    register_machine(GARAGE)
    assert "garage-8" in machines()
    assert Cluster.parse("2x garage-8").num_devices == 16
    assert Cluster(num_devices=8, kind="Acme Garage GPU 24GB").machine == GARAGE
