"""Find the stages that take longer than their share of a step, from when each instruction ran.

    ratio of a mesh in a process = seconds of its tasks / seconds that were expected
    straggler                    = a ratio above `SLOWER_BY` times the median of all

So a machine that is slower than its figures as a whole is no straggler. All processes of a mesh wait for the slowest
in their collectives: a straggler on such a mesh is one of its processes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from autopar.runtime.timeline import InstructionTime

SLOWER_BY = 1.5


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A mesh whose tasks take longer than those of the others, by what was expected of each."""

    mesh: int
    processes: tuple[int, ...]
    busy_s: float
    expected_s: float
    """The seconds that its tasks would take if it were as fast as the others."""

    @property
    def ratio(self) -> float:
        """The seconds that it takes, in multiples of the expected ones."""
        return self.busy_s / self.expected_s


def find_stragglers(times: Sequence[InstructionTime], expected: Sequence[float]) -> list[Straggler]:
    """Return the stragglers, the slowest first. `expected` are seconds of each mesh's tasks, or as many units."""
    busy: dict[tuple[int, int], float] = defaultdict(float)
    for time in times:
        if time.is_task:
            busy[time.mesh, time.process] += time.stop_s - time.start_s
    by_mesh: dict[int, dict[int, float]] = defaultdict(dict)
    for (mesh, process), seconds in busy.items():
        if expected[mesh] > 0:
            by_mesh[mesh][process] = seconds
    slowest = {mesh: max(processes.values()) for mesh, processes in by_mesh.items()}
    if len(slowest) < 2:
        return []
    usual = median_low(seconds / expected[mesh] for mesh, seconds in slowest.items())
    found = [
        Straggler(mesh=mesh, processes=tuple(sorted(by_mesh[mesh])), busy_s=seconds, expected_s=usual * expected[mesh])
        for mesh, seconds in slowest.items()
        if seconds > SLOWER_BY * usual * expected[mesh]
    ]
    return sorted(found, key=lambda straggler: -straggler.ratio)
