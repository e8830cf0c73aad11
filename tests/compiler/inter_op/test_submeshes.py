"""Submeshes are parts of hosts or whole hosts, and lie in the cluster without overlap."""

import itertools
import random

import pytest

from autopar.compiler.inter_op.submeshes import Submesh, always_fits, cluster_shape, place_submeshes, submesh_choices
from autopar.errors import InvalidArgument


def part(devices: int) -> Submesh:
    return Submesh(num_hosts=1, devices_per_host=devices)


@pytest.mark.parametrize(
    ("num_devices", "per_host", "arguments", "expected"),
    [
        (3, 8, {}, "1x1 1x2 1x3"),
        (7, 8, {}, "1x1 1x2 1x4 1x7"),
        (12, 6, {}, "1x1 1x2 1x3 1x4 1x6 2x6"),
        (12, 12, {}, "1x1 1x2 1x3 1x4 1x6 1x8 1x12"),
        (32, 8, {}, "1x1 1x2 1x4 1x8 2x8 3x8 4x8"),
        (160, 8, {}, "1x1 1x2 1x4 1x8 2x8 4x8 5x8 8x8 10x8 16x8 20x8"),
        (32, 8, {"any_host_count": False}, "1x1 1x2 1x4 1x8 2x8 4x8"),
    ],
)
def test_choices_are_parts_of_a_host_and_whole_hosts(num_devices, per_host, arguments, expected) -> None:
    assert " ".join(map(str, submesh_choices(num_devices, per_host, **arguments))) == expected


@pytest.mark.parametrize(
    ("num_devices", "per_host", "expected"),
    [(64, 8, "8x8"), (5, 8, "1x5"), (12, 8, "3x4"), (20, 8, "5x4"), (11, 8, "11x1"), (10, 4, "5x2")],
)
def test_hosts_that_are_not_all_full_are_cut_into_equal_parts(num_devices, per_host, expected) -> None:
    assert str(cluster_shape(num_devices, per_host)) == expected


def fits_by_enumeration(sizes: list[int], num_hosts: int, capacity: int) -> bool:
    return any(
        all(sum(size for size, at in zip(sizes, hosts) if at == host) <= capacity for host in range(num_hosts))
        for hosts in itertools.product(range(num_hosts), repeat=len(sizes))
    )


@pytest.mark.parametrize("per_host", [1, 2, 4, 6, 7, 8, 12])
def test_placed_submeshes_are_disjoint_and_within_hosts_and_fail_only_where_none_fits(per_host) -> None:
    draw = random.Random(per_host)
    for _ in range(80):
        cluster = Submesh(num_hosts=draw.randint(1, 3), devices_per_host=per_host)
        choices = submesh_choices(cluster.num_devices, per_host)
        submeshes: list[Submesh] = []
        while (more := draw.choice(choices)).num_devices + sum(m.num_devices for m in submeshes) <= cluster.num_devices:
            submeshes.append(more)
            if len(submeshes) == 8:
                break
        placed = place_submeshes(submeshes, cluster)
        if placed is None:
            assert not always_fits(choices, cluster)
            whole = [m for m in submeshes if m.devices_per_host == per_host]
            hosts = cluster.num_hosts - sum(m.num_hosts for m in whole)
            parts = [m.num_devices for m in submeshes if m not in whole]
            assert not fits_by_enumeration(parts, hosts, per_host)
            continue
        used = [device for devices in placed for device in devices]
        assert len(used) == len(set(used)) and set(used) <= set(range(cluster.num_devices))
        for submesh, devices in zip(submeshes, placed):
            assert len(devices) == submesh.num_devices
            assert len({device // per_host for device in devices}) == submesh.num_hosts


def test_parts_are_packed_although_largest_first_does_not_fit() -> None:
    cluster = Submesh(num_hosts=2, devices_per_host=12)
    sizes = [6, 4, 4, 4, 3, 3]
    placed = place_submeshes([part(n) for n in sizes], cluster)
    assert placed is not None
    assert sorted(device for devices in placed for device in devices) == list(range(24))


def test_what_fits_by_number_only_is_not_placed() -> None:
    assert place_submeshes([part(5)] * 3, Submesh(num_hosts=2, devices_per_host=8)) is None
    assert place_submeshes([Submesh(num_hosts=3, devices_per_host=8)], Submesh(num_hosts=2, devices_per_host=8)) is None


@pytest.mark.parametrize(
    ("choices", "expected"), [((1, 2, 4, 8), True), ((1, 3), False), ((2, 4), True), ((3, 2), False)]
)
def test_parts_that_divide_each_other_always_fit(choices, expected) -> None:
    assert always_fits([part(n) for n in choices], Submesh(num_hosts=2, devices_per_host=8)) is expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Submesh(num_hosts=0, devices_per_host=4), r"0x4 has no devices"),
        (
            lambda: place_submeshes([part(9)], Submesh(num_hosts=2, devices_per_host=8)),
            r"1x9 are neither whole hosts of 2x8",
        ),
    ],
)
def test_submeshes_that_cannot_be_are_refused(call, message) -> None:
    with pytest.raises(InvalidArgument, match=message):
        call()
