"""Hosts start work piece by piece, ahead of the devices: what is short waits for its start, what is long never does."""

import pytest

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
