"""Advance the clocks of hosts, meshes and links: the one event simulation, of programs and of schedules.

dispatch  a host starts the work of its meshes piece by piece, ahead of the devices; a transfer has a host at each end:
              host = host + dispatch_s;  ready = the latest of its hosts
run       a mesh is busy for a duration:
              start = max(clock, ready);  clock = start + duration
send      costs the sender's devices nothing, and occupies the link to another mesh, one transfer at a time:
              made = clock of the source;  start = max(made, ready, link);  arrival = link = start + duration
receive   a mesh waits for an arrival:
              clock = max(clock, arrival);  exposed = arrival - max(clock, made), where that is positive
copy      as a send, on the mesh's own link to its hosts or the one back

The first dispatch of a host is free: while a step runs, the host starts the next one.
"""

from __future__ import annotations

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
    """By host, the seconds to start one executable, or to send or take one value."""

    @classmethod
    def of_devices(cls, devices: Sequence[Sequence[int]], cluster: Cluster) -> Hosts:
        """Return the hosts of meshes over these devices of a cluster, which are numbered host by host."""
        each = [cluster.hosts_of(mine) for mine in devices]
        dispatch_s = {host: seconds for hosts in each for host, seconds in hosts.items()}
        return cls(of_mesh=tuple(map(frozenset, each)), dispatch_s=dispatch_s)


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

    def run(self, mesh: int, duration_s: float) -> tuple[float, float]:
        """Return when work of a mesh starts and stops."""
        start_s = max(self.mesh_s[mesh], self._dispatch([mesh], 1))
        self.mesh_s[mesh] = start_s + duration_s
        return start_s, self.mesh_s[mesh]

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
