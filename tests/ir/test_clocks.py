"""Hosts start work piece by piece, ahead of the devices: what is short waits for its start, what is long never does."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.hardware.cluster import Cluster
from autopar.hardware.machine import Machine
from autopar.ir.clocks import Clocks, Hosts

ONE_HOST = Hosts(of_mesh=(frozenset({0}), frozenset({0})), dispatch_s={0: 1.0, 1: 1.0})
A_HOST_EACH = Hosts(of_mesh=(frozenset({0}), frozenset({1})), dispatch_s={0: 1.0, 1: 1.0})


@pytest.mark.parametrize(("duration_s", "expected_s"), [(0.25, 4.25), (1.0, 5.0), (3.0, 15.0)])
def test_work_waits_for_its_start_or_for_the_work_before_it(duration_s, expected_s):
    clocks = Clocks(1, ONE_HOST)
    stops_s = [clocks.run(0, duration_s)[1] for _ in range(5)]
    assert stops_s[-1] == expected_s


def test_the_first_start_of_a_host_takes_no_time():
    assert Clocks(1, ONE_HOST).run(0, 3.0) == (0.0, 3.0)


def test_meshes_of_one_host_share_its_time_and_those_of_others_do_not():
    for hosts, expected_s in ((ONE_HOST, 7.0), (A_HOST_EACH, 3.0)):
        clocks = Clocks(2, hosts)
        for _ in range(4):
            clocks.run(0, 0.0), clocks.run(1, 0.0)
        assert max(clocks.mesh_s) == expected_s


def test_a_transfer_takes_the_hosts_at_both_ends_for_every_value():
    clocks = Clocks(2, A_HOST_EACH)
    clocks.run(0, 0.0), clocks.run(1, 0.0)
    delivery = clocks.send(0, 1, 0.5, num_values=3)
    assert (delivery.made_s, delivery.arrival_s) == (3.0, 3.5)
    assert clocks.run(1, 0.0) == (4.0, 4.0)


def test_a_copy_goes_beside_the_work_of_its_mesh_each_way_on_a_link_of_its_own():
    clocks = Clocks(1)
    clocks.run(0, 1.0)
    first, second = clocks.copy(0, "device", 2.0), clocks.copy(0, "device", 2.0)
    assert [(each.start_s, each.arrival_s) for each in (first, second)] == [(1.0, 3.0), (3.0, 5.0)]
    assert clocks.run(0, 1.0) == (1.0, 2.0)
    back = clocks.copy(0, "host", 2.0)
    assert (back.start_s, back.arrival_s) == (2.0, 4.0)
    clocks.receive(0, first)
    assert (clocks.mesh_s, clocks.exposed_s) == ([3.0], [1.0])


def test_a_copy_waits_for_its_start():
    clocks = Clocks(1, ONE_HOST)
    clocks.run(0, 0.0)
    assert clocks.copy(0, "device", 1.0, num_values=2).start_s == 2.0


def test_without_hosts_nothing_takes_time_to_be_started():
    clocks = Clocks(1)
    assert [clocks.run(0, 1.0)[1] for _ in range(3)] == [1.0, 2.0, 3.0]


def test_every_executable_but_the_first_takes_what_one_more_takes_where_the_host_is_ahead_as_well():
    clocks = Clocks(2, replace(ONE_HOST, execution_s=(0.5, 0.25)))
    assert [clocks.run(0, 1.5), clocks.run(1, 1.0)] == [(0.0, 1.5), (1.0, 2.25)]
    assert [clocks.run(1, 2.0), clocks.run(0, 2.0)] == [(2.25, 4.5), (3.0, 5.5)]
    assert clocks.send(1, 0, 1.0).arrival_s == 5.5


# --- hosts whose devices share their compute ---------------------------------------------------------------------


def sharing(*devices: int, concurrent: float = 2.0, num_hosts: int = 1) -> Hosts:
    """Return the hosts of meshes of so many devices each, one after another, of eight to a host."""
    machine = replace(Machine.named("dgx-h100"), concurrent_devices=concurrent, dispatch_s=0.0)
    firsts = [sum(devices[:n]) for n in range(len(devices))]
    meshes = [range(first, first + size) for first, size in zip(firsts, devices, strict=True)]
    return Hosts.of_devices(meshes, Cluster.of_hosts(machine, num_hosts))


def test_only_devices_that_share_their_host_have_shares():
    assert sharing(4, 4, concurrent=0).shares == ()
    assert sharing(4, 2, 1, 1).shares == ({0: 1.0}, {0: 1.0}, {0: 0.5}, {0: 0.5})
    assert sharing(16, num_hosts=2).shares == ({0: 1.0, 1: 1.0},)


def test_fewer_devices_that_share_take_less_for_an_executable():
    machine = replace(Machine.named("dgx-h100"), concurrent_devices=2, execution_s=0.8)
    meshes = [range(4), range(4, 6), range(6, 7)]
    assert Hosts.of_devices(meshes, Cluster.of_hosts(machine, 1)).execution_s == pytest.approx((0.4, 0.2, 0.2))
    assert sharing(4, 4).execution_s == ()


def test_meshes_that_take_a_whole_host_take_turns_and_smaller_ones_run_at_once():
    clocks = Clocks(2, sharing(4, 4))
    assert [clocks.run(0, 2.0), clocks.run(1, 3.0), clocks.run(0, 1.0)] == [(0.0, 2.0), (2.0, 5.0), (5.0, 6.0)]
    clocks = Clocks(3, sharing(1, 1, 4))
    assert [clocks.run(0, 2.0), clocks.run(1, 3.0)] == [(0.0, 2.0), (0.0, 3.0)]
    # Half of the host is free from the second second on, all of it from the third.
    assert clocks.run(2, 1.0) == (2.0, 3.5)


def test_work_fills_what_is_left_before_work_that_was_given_earlier():
    clocks = Clocks(2, sharing(4, 4))
    late = clocks.send(0, 1, 5.0)
    clocks.receive(1, late)
    assert clocks.run(1, 2.0) == (5.0, 7.0)
    assert clocks.run(0, 6.0) == (0.0, 8.0)


def test_a_mesh_over_hosts_goes_at_the_pace_of_the_busiest():
    clocks = Clocks(3, sharing(4, 4, 8, num_hosts=2))
    clocks.run(0, 3.0)
    assert clocks.run(2, 1.0) == (0.0, 1.0)
    clocks = Clocks(2, replace(sharing(8, 8, num_hosts=2), shares=({0: 1.0}, {0: 1.0, 1: 1.0})))
    clocks.run(0, 3.0)
    assert clocks.run(1, 1.0) == (3.0, 4.0)


def test_the_least_time_of_work_is_that_of_the_busiest_host_with_its_executables():
    assert sharing(4, 4).least_shared_s([2.0, 3.0], 10) == 5.0
    assert sharing(1, 1).least_shared_s([2.0, 3.0], 10) == 2.5
    assert sharing(4, 4, concurrent=0).least_shared_s([2.0, 3.0], 10) == 0.0
    assert sharing(8, 8, num_hosts=2).least_shared_s([2.0, 3.0], 10) == 3.0
    assert replace(sharing(4, 4), execution_s=(0.5, 0.25)).least_shared_s([2.0, 3.0], 2) == 6.5


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0.01, 5.0)), min_size=1, max_size=30))
def test_no_work_is_lost_and_none_takes_less_than_alone(tasks):
    """The host is busy at least as long as all work needs of it, and never longer than if all took turns."""
    hosts = sharing(4, 2, 1, concurrent=4.0)
    clocks, share = Clocks(3, hosts), [hosts.shares[mesh][0] for mesh in range(3)]
    for mesh, duration_s in tasks:
        start_s, stop_s = clocks.run(mesh, duration_s)
        assert stop_s - start_s >= duration_s * (1 - 1e-9)
    of_meshes = [sum(duration_s for each, duration_s in tasks if each == mesh) for mesh in range(3)]
    least_s = sum(map(math.prod, zip(share, of_meshes, strict=True)))
    assert hosts.least_shared_s(of_meshes, 4) == pytest.approx(least_s)
    assert least_s * (1 - 1e-9) <= max(clocks.mesh_s) <= sum(duration_s for _, duration_s in tasks) * (1 + 1e-9)
