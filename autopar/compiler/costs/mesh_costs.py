"""Price collectives along the axes of a mesh over consecutive devices of a machine, row-major.

An axis of stride s and size k stays in a fast domain of D devices iff s k <= D. Else m of its devices are in each of
k/m domains, m the largest divisor of k with s m <= D. All axes of a collective together are one level of the network
inside the domains and one between them: `NetworkLevel`s, whose costs are in `hardware/collectives.py`.

Collectives of parameters and gradients, which XLA combines with others of theirs, share their latency, and a share of
their bytes is sent behind compute where XLA makes them asynchronous by itself (`Machine.hidden_share`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from autopar.compiler.sharding.layout import LogicalMesh
from autopar.hardware.collectives import CollectiveCost, NetworkLevel, collective_cost, collective_costs
from autopar.hardware.machine import Link, Machine

# The kinds that XLA combines with others of theirs, where many stand together.
_COMBINED = ("all-reduce", "all-gather", "reduce-scatter")
# Latency of a collective of the update: XLA combines many into one.
_COMBINED_LATENCY_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class MeshCosts:
    """Seconds of collectives on a mesh of a machine's devices; the machine knows what other work takes."""

    machine: Machine
    mesh: LogicalMesh
    latency_share: float = 1.0
    """Share of its latency that a collective costs which the compiler combines with many others."""
    transfer_share: float = 1.0
    """Share of its transfer that is not hidden behind compute."""
    registered: tuple[tuple[str, CollectiveCost], ...] = field(default_factory=collective_costs, repr=False)
    """The costs of collectives when this was made, so that what is cached by it is never another one's."""

    def combined(self) -> MeshCosts:
        """Return the costs of collectives that the compiler combines, as of gradients: in part behind compute."""
        return replace(self, latency_share=_COMBINED_LATENCY_SHARE, transfer_share=1.0 - self.machine.hidden_share)

    def collective_s(self, kind: str, axes: Iterable[int], nbytes: float) -> float:
        """Return the seconds of one collective over `axes`; `nbytes` as in `wire_bytes`."""
        levels = self._levels([axis for axis in axes if self.mesh.shape[axis] > 1])
        if not levels:
            return 0.0
        time = (self._cost_of.get(kind) or collective_cost(kind))(levels, nbytes)
        if kind not in _COMBINED:
            return time.total_s
        return time.latency_s * self.latency_share + time.transfer_s * self.transfer_share

    @functools.cached_property
    def _cost_of(self) -> dict[str, CollectiveCost]:
        return dict(self.registered)

    def axis_bandwidth(self, axis: int) -> float:
        """Return the bytes/s at which a ring along an axis sends."""
        inside, across = self._span(axis)
        intra, inter = self.machine.intra.bandwidth_of(inside), self.machine.inter.bandwidth_of(across)
        return intra if across == 1 else inter if inside == 1 else min(intra, inside * inter)

    def _levels(self, axes: list[int]) -> list[NetworkLevel]:
        spans = [self._span(axis) for axis in axes]
        inside, across = [size for size, _ in spans if size > 1], [size for _, size in spans if size > 1]
        pairs = ((self.machine.intra, inside), (self.machine.inter, across))
        return [_level(link, sizes) for link, sizes in pairs if sizes]

    def _span(self, axis: int) -> tuple[int, int]:
        """Return how many devices of a group are in one domain, and in how many domains the group is."""
        size, stride = self.mesh.shape[axis], math.prod(self.mesh.shape[axis + 1 :])
        domain = self.machine.domain
        inside = max(part for part in range(1, size + 1) if size % part == 0 and (part == 1 or stride * part <= domain))
        return inside, size // inside


def _level(link: Link, sizes: list[int]) -> NetworkLevel:
    """Return the ring over axes of these sizes; each starts it, at once."""
    start_s = max(link.level(size).start_s for size in sizes)
    return link.level(math.prod(sizes))._replace(start_s=start_s)
