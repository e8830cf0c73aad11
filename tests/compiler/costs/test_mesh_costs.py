"""Time of collectives along the axes of a mesh, by the machine whose devices it is over."""

import dataclasses

import pytest

from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.sharding.layout import LogicalMesh
from autopar.errors import InvalidArgument
from autopar.hardware.collectives import wire_bytes
from autopar.hardware.machine import Link, Machine
from tests.compiler.planned_steps import GRID, chosen_machine, mesh_costs

FAST = Link(latency_s=1.0, bandwidth=8.0, ramp_bytes=0.0)
SLOW = Link(latency_s=3.0, bandwidth=2.0, ramp_bytes=0.0)


@pytest.mark.parametrize(
    ("kind", "nbytes"),
    [("all-reduce", 150.0), ("all-gather", 75.0), ("reduce-scatter", 75.0), ("all-to-all", 75.0)],
)
def test_bytes_on_the_wire_are_those_of_a_ring(kind, nbytes):
    assert wire_bytes(kind, 4, 100.0) == nbytes
    assert wire_bytes(kind, 1, 100.0) == 0


def test_seconds_of_a_collective_are_its_steps_and_its_bytes():
    chosen = mesh_costs(GRID, latency_s=1.0, bandwidth=10.0)
    assert chosen.collective_s("all-gather", (1,), 40.0) == 3 + 30 / 10
    assert chosen.collective_s("all-reduce", (0, 1), 80.0) == 2 * 7 + 2 * 70 / 10
    assert chosen.collective_s("collective-permute", (1,), 80.0) == 1 + 80 / 10


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # Of the eight links of the ring two leave a domain; four devices share the ways out, so that none is slower.
        ("all-gather", 7 * (6 * 1 + 2 * 3) / 8 + 28 / 8),
        ("all-reduce", 2 * (7 * (6 * 1 + 2 * 3) / 8 + 28 / 8)),
        # Half of what a device has stays with its own device of the slow axis.
        ("all-to-all", (3 + 12 / 8) + (3 + 16 / 2)),
        ("collective-permute", 3 + 32 / 2),
    ],
)
def test_levels_of_the_network_are_one_ring(kind, expected):
    chosen = mesh_costs(GRID, intra=FAST, inter=SLOW, domain=4)
    assert chosen.collective_s(kind, (0, 1), 32.0) == expected


def test_one_device_alone_sends_nothing():
    assert mesh_costs(GRID, latency_s=1.0).collective_s("all-reduce", (), 1e9) == 0


@pytest.mark.parametrize(
    ("kind", "expected"), [("all-gather", 0.05 * 3 + 30 / 10), ("all-to-all", 3 + 30 / 10), ("all-reduce", 0.3 + 6)]
)
def test_collectives_of_the_update_share_their_latency_where_the_compiler_combines_them(kind, expected):
    chosen = mesh_costs(GRID, latency_s=1.0, bandwidth=10.0).combined()
    assert chosen.collective_s(kind, (1,), 40.0) == pytest.approx(expected)


def test_a_combined_sum_takes_a_ring_or_a_tree_by_the_size_of_the_whole_message():
    trees = dataclasses.replace(SLOW, tree_share=0.5)
    whole = mesh_costs(GRID, intra=FAST, inter=trees, domain=1)
    ring, tree = (2 * (7 * 3 + 7 / 8 * 20 / 2), 2 * (3 * 3 + 20 / 1))
    assert whole.collective_s("all-reduce", (0, 1), 20.0) == min(ring, tree) == tree
    # Twenty such sums are sent together: for these the ring is faster.
    assert whole.combined().collective_s("all-reduce", (0, 1), 20.0) == pytest.approx(2 * (0.05 * 21 + 7 / 8 * 10))


@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize("nbytes", [0.0, 1e3, 3e5, 1e8, 1e11])
@pytest.mark.parametrize("kind", ["all-reduce", "all-gather"])
def test_a_collective_takes_the_least_of_its_lines(kind, nbytes, combined):
    chosen = MeshCosts(machine=Machine.named("p4d.24xlarge"), mesh=grid(16, 8))
    chosen = chosen.combined() if combined else chosen
    least = min(fixed + per_byte * nbytes for fixed, per_byte in chosen.lines(kind, (0, 1)))
    assert least == pytest.approx(chosen.collective_s(kind, (0, 1), nbytes))
    assert len(set(chosen.lines(kind, (0, 1)))) == (2 if kind == "all-reduce" else 1)


def test_collectives_of_parameters_and_gradients_are_hidden_where_the_compiler_makes_them_asynchronous():
    shown = mesh_costs(GRID, latency_s=1.0, bandwidth=10.0)
    hidden = dataclasses.replace(shown, machine=dataclasses.replace(shown.machine, hidden_share=0.7))
    assert hidden.collective_s("all-gather", (1,), 40.0) == shown.collective_s("all-gather", (1,), 40.0)
    assert hidden.combined().collective_s("all-gather", (1,), 40.0) == pytest.approx(0.05 * 3 + 0.3 * 30 / 10)
    assert hidden.combined().collective_s("all-to-all", (1,), 40.0) == 3 + 30 / 10


def test_sums_that_are_not_scattered_are_all_reduces_that_nothing_hides():
    shown = mesh_costs(GRID, latency_s=1.0, bandwidth=10.0)
    machine = dataclasses.replace(shown.machine, hidden_share=0.7, scatters_sums=False)
    whole = dataclasses.replace(shown, machine=machine)
    for kind in ("all-reduce", "reduce-scatter"):
        assert whole.collective_s(kind, (1,), 40.0) == shown.collective_s("all-reduce", (1,), 40.0)
        assert whole.combined().collective_s(kind, (1,), 40.0) == shown.combined().collective_s(
            "all-reduce", (1,), 40.0
        )
    assert whole.collective_s("all-gather", (1,), 40.0) == shown.collective_s("all-gather", (1,), 40.0)


def test_a_collective_without_a_cost_is_an_error_that_says_which_have_one():
    with pytest.raises(InvalidArgument, match=r"no cost of the collective 'gossip'; there is one of all-reduce, .*add"):
        mesh_costs(GRID).collective_s("gossip", (0,), 1.0)


# --- of machines ------------------------------------------------------------------------------------------------

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


def grid(*shape: int) -> LogicalMesh:
    return LogicalMesh(shape=shape, axis_names=tuple("xyz"[: len(shape)]))


@pytest.mark.parametrize(
    ("shape", "axis", "group", "hosts"),
    [
        ((8,), 0, 8, 1),
        ((4, 8), 1, 8, 1),  # consecutive devices: one host
        ((4, 8), 0, 4, 4),  # every eighth device: one of each host
        ((8, 4), 1, 4, 1),
        ((8, 4), 0, 8, 4),  # every fourth device: two of each host
        ((2, 16), 1, 16, 2),
        ((2, 16), 0, 2, 2),
        ((32,), 0, 32, 4),
        ((2, 4, 4), 1, 4, 2),
        ((3, 3), 0, 3, 3),  # strides that do not divide a host: none of two is surely in the same
        ((1, 8), 0, 1, 1),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["dgx-h100", "p3.16xlarge"])
def test_an_axis_takes_what_the_machine_says_for_its_part_of_the_network(name, kind, shape, axis, group, hosts):
    machine = Machine.named(name)
    chosen = MeshCosts(machine=machine, mesh=grid(*shape))
    for nbytes in (0.0, 1e5, 1e9):
        expected = machine.collective_s(kind, nbytes, group, hosts)
        assert chosen.collective_s(kind, (axis,), nbytes) == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(4, 8), (8, 4), (2, 16)])
def test_all_axes_together_move_the_bytes_of_the_whole_group(kind, shape):
    machine = Machine.named("dgx-h100")
    chosen = MeshCosts(machine=machine, mesh=grid(*shape))
    # What starts a ring differs a little: that of two axes is that of the larger one.
    sent, expected = (
        seconds(2e9) - seconds(1e9)
        for seconds in (
            lambda nbytes: chosen.collective_s(kind, (0, 1), nbytes),
            lambda nbytes: machine.collective_s(kind, nbytes, 32, 4),
        )
    )
    assert sent == pytest.approx(expected)


def test_an_axis_sends_at_the_bandwidth_of_its_links():
    machine = chosen_machine(intra=FAST, inter=SLOW, domain=8)
    assert [MeshCosts(machine=machine, mesh=grid(8, 8)).ring_bandwidth((axis,)) for axis in (0, 1)] == [2.0, 8.0]
    assert MeshCosts(machine=machine, mesh=grid(1, 8)).ring_bandwidth((0,)) == 8.0
    # Eight devices of a domain share the ways out of it.
    assert MeshCosts(machine=machine, mesh=grid(16)).ring_bandwidth((0,)) == 8.0
    assert (
        MeshCosts(machine=chosen_machine(intra=FAST, inter=SLOW, domain=2), mesh=grid(16)).ring_bandwidth((0,)) == 4.0
    )


def test_a_rack_of_nvlink_is_one_domain():
    machine = Machine.named("gb200-nvl72")
    chosen = MeshCosts(machine=machine, mesh=grid(9, 8))
    assert [chosen.ring_bandwidth((axis,)) for axis in (0, 1)] == [machine.intra.bandwidth_of(size) for size in (9, 8)]


def test_equal_machines_and_meshes_have_equal_costs():
    machine = Machine.named("dgx-h100")
    ours = MeshCosts(machine=machine, mesh=grid(8))
    assert ours == MeshCosts(machine=Machine.from_json(machine.to_json()), mesh=grid(8))
    assert ours != ours.combined()
    assert ours != MeshCosts(machine=dataclasses.replace(machine, domain=4), mesh=grid(8))
