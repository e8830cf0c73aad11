"""Clusters: so many hosts of a machine, by name, by file or by the devices that are here."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.errors import GenericFiguresWarning, InvalidArgument
from autopar.hardware.cluster import Cluster, DeviceKind
from autopar.hardware.machine import Machine


@pytest.mark.parametrize(
    ("text", "num_devices", "num_hosts", "machine"),
    [
        ("8x p3.16xlarge", 64, 8, "p3.16xlarge"),
        ("4x dgx-h100", 32, 4, "dgx-h100"),
        ("p3.16xlarge", 8, 1, "p3.16xlarge"),
        (" 2 x DGX-H100 ", 16, 2, "dgx-h100"),
        ("18x gb200-nvl72", 72, 18, "gb200-nvl72"),
    ],
)
def test_a_cluster_is_read_from_words(text, num_devices, num_hosts, machine):
    cluster = Cluster.parse(text)
    assert (cluster.num_devices, cluster.num_hosts) == (num_devices, num_hosts)
    assert cluster.machine == Machine.named(machine)
    assert cluster.kind == cluster.machine.kind


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0x p3.16xlarge", "number of hosts 'p3.16xlarge' is 0.*Give 1 or more"),
        ("8x p3.16xlrge", "Did you mean 'p3.16xlarge'"),
        ("", "The cluster is ''. Write how many hosts of which machine"),
        ("8 x", "The cluster is '8 x'"),
        ("-1x dgx-h100", "The cluster is '-1x dgx-h100'"),
    ],
)
def test_words_that_are_no_cluster_are_refused(text, message):
    with pytest.raises(InvalidArgument, match=message):
        Cluster.parse(text)


def test_a_kind_finds_its_machine_when_it_is_asked_for():
    cluster = Cluster(num_devices=60, kind="NVIDIA H100 80GB HBM3")
    assert (cluster.machine.name, cluster.num_hosts) == ("dgx-h100", 8)
    unknown = Cluster(num_devices=8, kind="abacus")
    with pytest.warns(GenericFiguresWarning, match="no figures for devices of kind 'abacus'"):
        assert unknown.machine.name == "generic"


def test_a_machine_of_ones_own_says_the_kind():
    machine = Machine.named("dgx-a100-80")
    cluster = Cluster(num_devices=4, machine=machine)
    assert (cluster.kind, cluster.machine, cluster.num_hosts) == ("a100", machine, 1)
    assert cluster.with_devices(16) == Cluster(num_devices=16, machine=machine) != cluster


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_devices": 0, "kind": "h100"}, "has 0 devices"),
        ({"num_devices": 8}, "neither a kind nor a machine"),
    ],
)
def test_clusters_of_nothing_are_refused(fields, message):
    with pytest.raises(InvalidArgument, match=message):
        Cluster(**fields)


@pytest.mark.parametrize("text", ["2x p4d.24xlarge", "cpu"])
def test_a_file_gives_back_the_cluster(text, tmp_path):
    cluster = Cluster.parse(text)
    cluster.save(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == cluster


def test_a_file_of_a_machine_is_one_host_of_it_or_several(tmp_path):
    machine = Machine.named("dgx-b200")
    machine.save(tmp_path / "mine.json")
    assert Cluster.load(tmp_path / "mine.json") == Cluster(num_devices=8, machine=machine)
    assert Cluster.parse(f"3x {tmp_path / 'mine.json'}") == Cluster(num_devices=24, machine=machine)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.pop("kind"), r"The cluster lacks the keys \['kind'\]"),
        (lambda raw: raw.update(kind=8), "kind of the cluster is 8"),
        (lambda raw: raw.update(num_devices=8.0), "num_devices of the cluster is 8.0"),
        (lambda raw: raw["machine"].pop("domain"), r"The machine lacks the keys \['domain'\]"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_its_field(change, message):
    raw = json.loads(Cluster.parse("p3.16xlarge").to_json())
    change(raw)
    with pytest.raises(InvalidArgument, match=message):
        Cluster.from_json(json.dumps(raw))


def test_planning_takes_the_figures_of_the_machine_that_was_given():
    def step(params, x):
        return params - jnp.tanh(x @ params).sum() * 1e-3

    def step_time_s(cluster: Cluster) -> float:
        method = autopar.Auto(mesh_shape=(2, 8), memory="off")
        arguments = jax.ShapeDtypeStruct((4096, 4096), jnp.float32), jax.ShapeDtypeStruct((1024, 4096), jnp.float32)
        sharding = autopar.parallelize(step, method=method, cluster=cluster).trace(*arguments).plan().plan.sharding
        assert sharding is not None
        return sharding.step_time_s

    by_kind, by_name = (step_time_s(Cluster(num_devices=16, kind=kind)) for kind in ("a100", "p4d.24xlarge"))
    assert by_kind == by_name == step_time_s(Cluster.parse("2x p4d.24xlarge"))
    assert step_time_s(Cluster.parse("2x dgx-h100")) < by_kind


# --- several machines ---------------------------------------------------------------------------------------------

MIXED = Cluster.parse("2x p4d.24xlarge + 1x p3.16xlarge @ 25 Gbit/s")


def test_groups_are_numbered_one_after_another():
    assert (MIXED.num_devices, MIXED.num_hosts, MIXED.first_devices) == (24, 3, (0, 16))
    assert str(MIXED) == "16 devices of p4d.24xlarge + 8 devices of p3.16xlarge"
    assert [MIXED.machine_of([device]).kind for device in (0, 15, 16, 23)] == ["a100", "a100", "v100", "v100"]
    assert MIXED.hosts_of(range(8, 16)).keys() == {1}
    assert MIXED.hosts_of(range(16, 24)).keys() == {2}
    assert Cluster.of_groups([Cluster.parse("p3.16xlarge")]) == Cluster.parse("p3.16xlarge")


def test_a_message_takes_the_link_that_joins_two_meshes():
    a100, v100 = (group.machine for group in MIXED.groups)
    assert MIXED.joining_link(range(4), range(4, 8)) == a100.intra
    assert MIXED.joining_link(range(8), range(8, 16)) == a100.inter
    assert MIXED.joining_link(range(16, 20), range(20, 24)) == v100.intra
    assert MIXED.joining_link([0], [16]).bandwidth == 25e9 / 8 / 8
    assert MIXED.transfer_s(1e9, [0], [16]) > MIXED.transfer_s(1e9, [0], [8])
    slower = Cluster.parse("p4d.24xlarge + p3.16xlarge").joining_link([0], [8])
    assert slower.bandwidth == v100.inter.bandwidth < a100.inter.bandwidth


def test_several_machines_come_back_from_a_file(tmp_path):
    MIXED.save(tmp_path / "mixed.json")
    assert Cluster.load(tmp_path / "mixed.json") == MIXED
    assert Cluster.load(tmp_path / "mixed.json") != Cluster.parse("2x p4d.24xlarge + 1x p3.16xlarge")


def test_devices_of_several_kinds_are_groups_in_their_order():
    cluster = Cluster.of_kinds([DeviceKind("NVIDIA A100-SXM4-40GB")] * 3 + [DeviceKind("Tesla V100-SXM2-16GB")])
    assert [group.num_devices for group in cluster.groups] == [3, 1]
    assert cluster.kind == "NVIDIA A100-SXM4-40GB + Tesla V100-SXM2-16GB"


def device(kind: str, limit: float | None, process: int = 0) -> SimpleNamespace:
    """A device of JAX; those of other processes refuse to tell of their memory."""

    def memory_stats() -> dict[str, float] | None:
        if process:
            raise RuntimeError("a device of another process was asked")
        return None if limit is None else {"bytes_limit": limit}

    return SimpleNamespace(device_kind=kind, process_index=process, memory_stats=memory_stats)


def test_memory_is_what_jax_may_take_of_it_on_every_device():
    h100, gib = "NVIDIA H100 80GB HBM3", 2.0**30
    cluster = Cluster.from_devices([device(h100, 59.5 * gib), device(h100, 59 * gib), device(h100, None, process=1)])
    assert cluster.machine.memory_bytes == 59 * gib and cluster.with_devices(9).machine.memory_bytes == 59 * gib
    assert cluster.jax_limit == "JAX may take 59 GiB of 80 GiB; of a GPU, XLA_PYTHON_CLIENT_MEM_FRACTION says how much"
    assert Cluster.from_json(cluster.to_json()).machine == cluster.machine
    silent = Cluster.from_devices([device(h100, None)])
    assert silent.machine is Machine.of_kind(h100) and not silent.jax_limit
    mixed = Cluster.from_devices([device(h100, 70 * gib), device("Tesla V100-SXM2-16GB", 12 * gib)])
    assert [group.machine.memory_bytes / gib for group in mixed.groups] == [70, 12]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: MIXED.machine,
            "has devices of 2 machines, 16 devices of p4d.24xlarge.*Auto, PipelineParallel or Megatron",
        ),
        (lambda: MIXED.with_devices(8), "has devices of 2 machines"),
        (
            lambda: MIXED.machine_of(range(12, 20)),
            "A mesh has devices of 2 groups: p4d.24xlarge from device 0 on, p3.16xl",
        ),
        (lambda: Cluster.parse("2x p3.16xlarge @ 25 Gbit/s"), 'Behind "@" stands the network between several machines'),
        (lambda: Cluster.parse("p3.16xlarge + dgx-h100 @ fast"), 'Behind "@" stands the network'),
        (lambda: Cluster.parse("p3.16xlarge + "), "Write how many hosts of which machine"),
        (lambda: Cluster.of_groups([]), "was made of 0 groups"),
        (
            lambda: Cluster.of_groups(MIXED.groups, {}),
            r"need a link for each of the pairs \[\(0, 1\)\]; there are links for \[\]",
        ),
    ],
)
def test_what_a_mixed_cluster_cannot_hold_is_refused(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.pop("links"), r"lacks the keys \['links'\]"),
        (lambda raw: raw.update(links=[]), "need a link for each of the pairs"),
        (lambda raw: raw.update(groups=8), "groups and links of the cluster must be lists"),
        (lambda raw: raw["links"][0].update(groups=[0]), r"groups of the link 0 of the cluster is \[0\]"),
        (lambda raw: raw["links"][0].pop("latency_s"), r"link 0 of the cluster lacks the keys \['latency_s'\]"),
    ],
)
def test_a_file_of_several_machines_that_does_not_fit_is_refused_by_its_field(change, message):
    raw = json.loads(MIXED.to_json())
    change(raw)
    with pytest.raises(InvalidArgument, match=message):
        Cluster.from_json(json.dumps(raw))
