"""Offer groups of devices to a stage, and place such groups in the cluster.

A submesh is a part of one host, or several whole hosts:

    1 x 1, 1 x 2, ..., 1 x H, 2 x H, 3 x H, ...        (H devices per host)

Whole hosts fit wherever enough hosts are free. Parts of hosts are packed largest first, into the first host with
room. If every size divides the next larger one and the largest divides H, that never fails while the sizes sum up to
no more than there is: when a part of size n is placed, all that was placed before it, and H, are multiples of n, so
what is free in each host is a multiple of n too; a host with anything free has n free. Otherwise (H = 12: parts of 4
and 3) largest first can fail where another packing does not, or there is none; then all packings are tried.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autopar.errors import InvalidArgument

_ALL_HOST_COUNTS = 16  # up to so many hosts every number of whole hosts is a choice


@dataclass(frozen=True, kw_only=True, order=True)
class Submesh:
    """A rectangle of devices; a cluster is one, too."""

    num_hosts: int
    devices_per_host: int
    group: int = 0
    """The number of the cluster's group whose devices these are."""

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` if there is no device in it."""
        if self.num_hosts < 1 or self.devices_per_host < 1:
            raise InvalidArgument(f"A submesh of {self} has no devices. Give at least 1 host and 1 device per host.")

    @property
    def num_devices(self) -> int:
        """Devices of all hosts together."""
        return self.num_hosts * self.devices_per_host

    def __str__(self) -> str:
        of_group = f" of group {self.group}" if self.group else ""
        return f"{self.num_hosts}x{self.devices_per_host}{of_group}"


def cluster_shape(num_devices: int, devices_per_host: int) -> Submesh:
    """Return the whole cluster. If its last host is not full, hosts shrink to their largest common divisor with it.

    So every device has its place, and no part of a host lies on two.
    """
    if num_devices <= devices_per_host:
        return Submesh(num_hosts=1, devices_per_host=num_devices)
    per_host = math.gcd(num_devices, devices_per_host)
    return Submesh(num_hosts=num_devices // per_host, devices_per_host=per_host)


def submesh_choices(
    num_devices: int,
    devices_per_host: int,
    *,
    any_host_count: bool | None = None,
    group: int = 0,
) -> tuple[Submesh, ...]:
    """Return the submeshes of a group that a stage may get, smallest first.

    Inside a host: the divisors of its number of devices and the powers of two, into which most batches and layers
    divide, while a host may have lost a device. Across hosts: every count of whole hosts up to 16 hosts or with
    `any_host_count`, otherwise the divisors of their number and the powers of two.
    """
    cluster = cluster_shape(num_devices, devices_per_host)
    per_host, num_hosts = cluster.devices_per_host, cluster.num_hosts
    every = num_hosts <= _ALL_HOST_COUNTS if any_host_count is None else any_host_count
    parts = [n for n in range(1, per_host + 1) if _is_usual(n, per_host)]
    hosts = [n for n in range(2, num_hosts + 1) if every or _is_usual(n, num_hosts)]
    inside = [Submesh(num_hosts=1, devices_per_host=n, group=group) for n in parts]
    return tuple(inside + [Submesh(num_hosts=n, devices_per_host=per_host, group=group) for n in hosts])


def _is_usual(part: int, whole: int) -> bool:
    return whole % part == 0 or part & (part - 1) == 0


def place_submeshes(submeshes: Sequence[Submesh], cluster: Submesh) -> tuple[tuple[int, ...], ...] | None:
    """Return the device numbers of each submesh, none twice and no part of a host on two; None if they do not fit."""
    whole = [n for n, submesh in enumerate(submeshes) if submesh.devices_per_host == cluster.devices_per_host]
    parts = [n for n, submesh in enumerate(submeshes) if submesh.devices_per_host != cluster.devices_per_host]
    if any(submeshes[n].num_hosts > 1 or submeshes[n].devices_per_host > cluster.devices_per_host for n in parts):
        raise InvalidArgument(
            f"Submeshes {', '.join(map(str, submeshes))} are neither whole hosts of {cluster} nor parts of one. "
            "Take them from submesh_choices."
        )
    free_hosts = cluster.num_hosts - sum(submeshes[n].num_hosts for n in whole)
    if free_hosts < 0:
        return None
    hosts = _pack([submeshes[n].devices_per_host for n in parts], free_hosts, cluster.devices_per_host)
    if hosts is None:
        return None
    placed: dict[int, tuple[int, ...]] = {}
    first = 0
    for n in whole:
        placed[n] = tuple(range(first, first + submeshes[n].num_devices))
        first += submeshes[n].num_devices
    for host in hosts:
        at = first
        for part in host:
            placed[parts[part]] = tuple(range(at, at + submeshes[parts[part]].num_devices))
            at += submeshes[parts[part]].num_devices
        first += cluster.devices_per_host
    return tuple(placed[n] for n in range(len(submeshes)))


def place_in_groups(submeshes: Sequence[Submesh], clusters: Sequence[Submesh]) -> tuple[tuple[int, ...], ...] | None:
    """Return the device numbers of each submesh in its group, as `place_submeshes`; groups are numbered one by one."""
    placed: dict[int, tuple[int, ...]] = {}
    first = 0
    for group, cluster in enumerate(clusters):
        mine = [n for n, submesh in enumerate(submeshes) if submesh.group == group]
        places = place_submeshes([submeshes[n] for n in mine], cluster)
        if places is None:
            return None
        placed |= {n: tuple(first + device for device in place) for n, place in zip(mine, places, strict=True)}
        first += cluster.num_devices
    return tuple(placed[n] for n in range(len(submeshes)))


def always_fits(submeshes: Sequence[Submesh], cluster: Submesh) -> bool:
    """Return whether any submeshes of these choices can be placed as soon as there are devices enough."""
    parts = sorted({submesh.devices_per_host for submesh in submeshes} | {cluster.devices_per_host})
    return all(large % small == 0 for small, large in pairwise(parts))


def _pack(sizes: list[int], num_hosts: int, capacity: int) -> list[list[int]] | None:
    """For each host the positions in `sizes` of its parts, or None if there is no packing."""
    hosts = _first_fit(sizes, num_hosts, capacity)
    if hosts is not None or sum(sizes) > num_hosts * capacity:
        return hosts
    kinds = tuple(sorted(set(sizes), reverse=True))
    counts = tuple(Counter(sizes)[kind] for kind in kinds)
    fillings = _search(kinds, counts, num_hosts, capacity, set())
    if fillings is None:
        return None
    waiting = {kind: [n for n, size in enumerate(sizes) if size == kind] for kind in kinds}
    return [[waiting[kind].pop() for kind, count in zip(kinds, filling) for _ in range(count)] for filling in fillings]


def _first_fit(sizes: list[int], num_hosts: int, capacity: int) -> list[list[int]] | None:
    hosts: list[list[int]] = [[] for _ in range(num_hosts)]
    free = [capacity] * num_hosts
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        host = next((host for host in range(num_hosts) if free[host] >= sizes[n]), None)
        if host is None:
            return None
        hosts[host].append(n)
        free[host] -= sizes[n]
    return hosts


def _search(
    kinds: tuple[int, ...], counts: tuple[int, ...], num_hosts: int, capacity: int, failed: set[tuple[int, ...]]
) -> list[tuple[int, ...]] | None:
    """Fill host after host, each so that no part that is left would still fit in: the counts per host."""
    if not any(counts):
        return []
    left = sum(kind * count for kind, count in zip(kinds, counts))
    # The number of hosts left is that of all hosts less the depth, but fewer hosts can only be worse.
    if left > num_hosts * capacity or (*counts, num_hosts) in failed:
        return None
    for filling in _fillings(kinds, counts, capacity):
        rest = tuple(count - used for count, used in zip(counts, filling))
        others = _search(kinds, rest, num_hosts - 1, capacity, failed)
        if others is not None:
            return [filling, *others]
    failed.add((*counts, num_hosts))
    return None


def _fillings(kinds: tuple[int, ...], counts: tuple[int, ...], capacity: int) -> Iterator[tuple[int, ...]]:
    """The maximal ways to fill a host, those with the largest parts first."""
    if not kinds:
        yield ()
        return
    for used in range(min(counts[0], capacity // kinds[0]), -1, -1):
        room = capacity - used * kinds[0]
        for rest in _fillings(kinds[1:], counts[1:], room):
            free = room - sum(kind * count for kind, count in zip(kinds[1:], rest))
            if used == counts[0] or free < kinds[0]:
                yield (used, *rest)


def divides_as_well(rows: int, one: int, other: int, num_devices: int) -> bool:
    """Return whether a batch in `one` number of parts divides among devices, if in the other number it does.

    A part does if it has a multiple of the devices as rows, or a divisor of them.
    """
    one_does, other_does = (
        math.gcd(rows // count, num_devices) == min(rows // count, num_devices) for count in (one, other)
    )
    return one_does or not other_does
