"""Advance the clocks of meshes and of the links between them: the one event simulation, of programs and of schedules.

run       a mesh is busy for a duration
send      costs the sender nothing, and occupies the link to another mesh, one transfer at a time:
              made = clock of the source;  start = max(made, link);  arrival = link = start + duration
receive   a mesh waits for an arrival:
              clock = max(clock, arrival);  exposed = arrival - max(clock, made), where that is positive
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """Values on their way: when they were made, when the link took them, and when they are there."""

    made_s: float
    start_s: float
    arrival_s: float


class Clocks:
    """The seconds at which every mesh has done, and every link has carried, all that it was given so far."""

    def __init__(self, num_meshes: int) -> None:
        self.mesh_s = [0.0] * num_meshes
        self.exposed_s = [0.0] * num_meshes
        """Per mesh, the seconds in which it waited for values that were already made, and on their way."""
        self._link_s: defaultdict[tuple[int, int], float] = defaultdict(float)

    def run(self, mesh: int, duration_s: float) -> tuple[float, float]:
        """Return when work of a mesh starts and stops."""
        start_s = self.mesh_s[mesh]
        self.mesh_s[mesh] = start_s + duration_s
        return start_s, self.mesh_s[mesh]

    def send(self, source: int, to: int, duration_s: float) -> Delivery:
        """Return when what a mesh has made by now reaches another one."""
        made_s = self.mesh_s[source]
        start_s = max(made_s, self._link_s[source, to])
        self._link_s[source, to] = start_s + duration_s
        return Delivery(made_s=made_s, start_s=start_s, arrival_s=start_s + duration_s)

    def receive(self, mesh: int, delivery: Delivery) -> None:
        """Let a mesh wait for a delivery."""
        now_s = self.mesh_s[mesh]
        self.exposed_s[mesh] += max(0.0, delivery.arrival_s - max(now_s, delivery.made_s))
        self.mesh_s[mesh] = max(now_s, delivery.arrival_s)
