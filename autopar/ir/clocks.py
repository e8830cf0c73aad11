"""Advance the clocks of hosts, meshes and links: the one event simulation, of programs and of schedules.

dispatch  a host starts the work of its meshes piece by piece, ahead of the devices; a transfer has a host at each end:
              host = host + dispatch_s;  ready = the latest of its hosts
run       a mesh is busy for a duration, and with every executable of a step but the first for what one more takes:
              start = max(clock, ready);  clock = start + execution_s + duration
          where devices share their host's compute, so do meshes there: one takes what work that was given to others
          before leaves of its share, and is busy until it has had as much as it needs
send      costs the sender's devices nothing, and occupies the link to another mesh, one transfer at a time:
              made = clock of the source;  start = max(made, ready, link);  arrival = link = start + duration
receive   a mesh waits for an arrival:
              clock = max(clock, arrival);  exposed = arrival - max(clock, made), where that is positive
copy      as a send, on the mesh's own link to its hosts or the one back

The first dispatch of a host is free: while a step runs, the host starts the next one.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from autopar.hardware.cluster import Cluster
from autopar.ir.instructions import Memory


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts that start the work of meshes, one process on each."""

    of_mesh: tuple[frozenset[int], ...]
    dispatch_s: Mapping[int, float]
    """The seconds to start one executable, or to send or take one value, by host."""
    shares: tuple[Mapping[int, float], ...] = ()
    """The share of a host's compute that a mesh takes alone, by mesh and host, of hosts whose devices share it."""
    execution_s: tuple[float, ...] = ()
    """The seconds of its devices that one executable more takes besides its work, by mesh; empty where none does."""

    @classmethod
    def of_devices(cls, devices: Sequence[Sequence[int]], cluster: Cluster) -> Hosts:
        """Return the hosts of meshes over these devices of a cluster, which are numbered host by host."""
        each = [cluster.hosts_of(mine) for mine in devices]
        dispatch_s = {host: seconds for hosts in each for host, seconds in hosts.items()}
        shares = tuple(
            {
                host: share
                for host, count in cluster.devices_by_host(mine).items()
                if (share := machine.share_of_host(count))
            }
            for mine in devices
            for machine in [cluster.groups[cluster.group_of(mine)].machine]
        )
        execution_s = tuple(cluster.machine_of(mine).execution_s for mine in devices)
        return cls(
            of_mesh=tuple(map(frozenset, each)),
            dispatch_s=dispatch_s,
            shares=shares if any(shares) else (),
            execution_s=execution_s if any(execution_s) else (),
        )

    def least_shared_s(self, works_s: Sequence[float], num_executables: int) -> float:
        """Return the seconds that hosts need at least for meshes that work so long alone; 0 where none share compute.

        Work adds up there, by the share of its mesh, and what executables take besides: so many of each mesh and one.
        """
        executions_s = self.execution_s or (0.0,) * len(works_s)
        of_host = defaultdict[int, float](float)
        for shares, work_s, execution_s in zip(self.shares, works_s, executions_s, strict=bool(self.shares)):
            for host, share in shares.items():
                of_host[host] += share * (work_s + num_executables * execution_s)
        return max(of_host.values(), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """Values on their way: when they were made, when the link took them, and when they are there."""

    made_s: float
    start_s: float
    arrival_s: float


class Clocks:
    """The seconds at which every mesh has done, and every link has carried, all that it was given so far.

    Without `hosts` nothing takes time to be started.
    """

    def __init__(self, num_meshes: int, hosts: Hosts | None = None) -> None:
        self.mesh_s = [0.0] * num_meshes
        self.exposed_s = [0.0] * num_meshes
        """Per mesh, the seconds in which it waited for values that were already made, and on their way."""
        self._link_s: defaultdict[Hashable, float] = defaultdict(float)
        self._hosts = hosts
        self._host_s: dict[int, float] = {}
        shares = hosts.shares if hosts is not None else ()
        self._executables = Executables(hosts)
        self._compute = {host: SharedCompute() for each in shares for host in each}

    def run(self, mesh: int, duration_s: float) -> tuple[float, float]:
        """Return when work of a mesh that takes so long alone starts and stops."""
        start_s = max(self.mesh_s[mesh], self._dispatch([mesh], 1))
        duration_s += self._executables.next_s(mesh)
        stop_s = start_s + duration_s
        if self._hosts is not None and self._compute:
            needs = [(self._compute[host], share) for host, share in self._hosts.shares[mesh].items()]
            start_s, stop_s = take_compute(needs, start_s, duration_s)
        self.mesh_s[mesh] = stop_s
        return start_s, stop_s

    def send(self, source: int, to: int, duration_s: float, num_values: int = 1) -> Delivery:
        """Return when values that a mesh has made by now reach another one."""
        return self._carry((source, to), [source, to], duration_s, num_values)

    def copy(self, mesh: int, to: Memory, duration_s: float, num_values: int = 1) -> Delivery:
        """Return when values that a mesh has by now are in its other memory.

        Memory of a device is there for them when the work that was given to the mesh before has ended.
        """
        return self._carry((mesh, to), [mesh], duration_s, num_values)

    def _carry(self, link: Hashable, meshes: Sequence[int], duration_s: float, num_values: int) -> Delivery:
        made_s = max(self.mesh_s[meshes[0]], self._dispatch(meshes, num_values))
        start_s = max(made_s, self._link_s[link])
        self._link_s[link] = start_s + duration_s
        return Delivery(made_s=made_s, start_s=start_s, arrival_s=start_s + duration_s)

    def receive(self, mesh: int, delivery: Delivery) -> None:
        """Let a mesh wait for a delivery."""
        now_s = self.mesh_s[mesh]
        self.exposed_s[mesh] += max(0.0, delivery.arrival_s - max(now_s, delivery.made_s))
        self.mesh_s[mesh] = max(now_s, delivery.arrival_s)

    def _dispatch(self, meshes: Sequence[int], count: int) -> float:
        """Return when the last host of the meshes has started so many more pieces of work."""
        if self._hosts is None:
            return 0.0
        hosts = frozenset[int]().union(*(self._hosts.of_mesh[mesh] for mesh in meshes))
        for host in hosts:
            dispatch_s = self._hosts.dispatch_s[host]
            self._host_s[host] = self._host_s.get(host, -dispatch_s) + count * dispatch_s
        return max(self._host_s[host] for host in hosts)


class Executables:
    """The seconds that the executables of a step take besides their work, one after another."""

    def __init__(self, hosts: Hosts | None) -> None:
        self._execution_s = () if hosts is None else hosts.execution_s
        self._has_begun = False

    def next_s(self, mesh: int) -> float:
        """Return the seconds of a mesh that its next executable takes; the first of all takes none."""
        is_one_more, self._has_begun = self._has_begun, True
        return self._execution_s[mesh] if is_one_more and self._execution_s else 0.0


_NONE_LEFT = 1e-9
"""Share of a host's compute: less than that is what rounding leaves."""


class SharedCompute:
    """The share of one host's compute that is taken, from each of some times to the next, and none after the last."""

    def __init__(self) -> None:
        self.times_s = [0.0]
        self.taken = [0.0]

    def at(self, time_s: float) -> tuple[float, float]:
        """Return the share that is free at a time, and until when."""
        place = bisect.bisect_right(self.times_s, time_s) - 1
        until_s = self.times_s[place + 1] if place + 1 < len(self.times_s) else math.inf
        return 1.0 - self.taken[place], until_s

    def take(self, start_s: float, stop_s: float, share: float) -> None:
        """Take a share from one time to another, throughout which it is free."""
        first, behind = self._split(start_s), self._split(stop_s)
        for place in range(first, behind):
            self.taken[place] += share

    def _split(self, time_s: float) -> int:
        """Return the place of a time, which is made one of those listed."""
        place = bisect.bisect_left(self.times_s, time_s)
        if place == len(self.times_s) or self.times_s[place] != time_s:
            self.times_s.insert(place, time_s)
            self.taken.insert(place, self.taken[place - 1])
        return place


def take_compute(
    needs: Sequence[tuple[SharedCompute, float]], start_s: float, duration_s: float
) -> tuple[float, float]:
    """Return when work that takes so long with all the shares that it needs starts and stops, and take them.

    It goes on with as much of each as is free, at the pace of the scarcest.
    """
    now_s, left_s, first_s = start_s, duration_s, math.inf
    while left_s > 0 and needs:
        free = [(compute.at(now_s), share) for compute, share in needs]
        until_s = min(until_s for (_, until_s), _ in free)
        pace = min(1.0, *(left / share for (left, _), share in free))
        if pace > _NONE_LEFT:
            first_s = min(first_s, now_s)
            stop_s = min(until_s, now_s + left_s / pace)
            left_s = 0.0 if stop_s < until_s else left_s - pace * (stop_s - now_s)
            for compute, share in needs:
                compute.take(now_s, stop_s, pace * share)
            now_s = stop_s
        else:
            now_s = until_s
    return (first_s, now_s) if first_s <= now_s else (start_s, start_s + left_s)
