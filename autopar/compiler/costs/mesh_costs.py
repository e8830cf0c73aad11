"""Price collectives along the axes of a mesh of a machine's devices, in row-major order.

A fast domain has D devices. Along an axis of stride s and size k a collective stays inside one domain if s k <= D;
otherwise it joins m devices of each of k/m domains, m the largest divisor of k with s m <= D. Where the devices of a
mesh do not follow each other, m is the largest for which blocks of m along every axis, those of the last axes first,
lie in one domain. All axes of a collective together make two levels of the network, inside the domains and between
them (`NetworkLevel`); `hardware/collectives.py` has the cost of each.

A hierarchical all-reduce is a reduce-scatter inside the domains, an all-reduce across, an all-gather inside. Over n
devices, m in each domain, with bandwidths a inside and c across, b bytes take

    one ring      2 (n-1)/n b / min(a, m c)
    in levels     2 (m-1)/m b / a  +  2 (n/m-1)/(n/m) (b/m) / c         less where n c < a

Which of the two is faster does not depend on the array. So it is decided once for each mesh (`MeshCosts.links`), and
the plan keeps it.

Collectives of parameters and of gradients are combined by XLA: they share their latency. A part of their bytes is sent
while the device computes, where XLA makes them asynchronous by itself (`Machine.hidden_share`). Where XLA has no
reduce-scatters (`Machine.scatters_sums`), such sums are all-reduces, and nothing is hidden.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.compiler.sharding.layout import Axes, LogicalMesh, Reach
from autopar.hardware.collectives import CollectiveCost, CollectiveTime, collective_cost, collective_costs
from autopar.hardware.machine import Machine
from autopar.ir.axis_links import SLOWNESS_UNIT, AxisLinks, Ring

# The kinds that XLA combines with others of theirs, where many stand together.
_COMBINED = ("all-reduce", "all-gather", "reduce-scatter")
_SUMS = ("all-reduce", "reduce-scatter")
# Latency of a collective of the update: XLA combines many into one.
_COMBINED_LATENCY_SHARE = 0.05
# Of the time of one ring, that sums in levels may take: they are three collectives, and equal links make both equal.
_IN_LEVELS_SHARE = 0.99
_FEW_BYTES, _MANY_BYTES = 1.0, 2.0**50


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

    def collective_s(self, kind: str, axes: Iterable[int], nbytes: float, reach: Reach = "all") -> float:
        """Return the seconds of one collective over `axes`, or of a level of them; `nbytes` as in `wire_bytes`."""
        return self._time(kind, axes, nbytes, reach).total_s

    def lines(self, kind: str, axes: Iterable[int], reach: Reach = "all") -> tuple[tuple[float, float], ...]:
        """Return what a collective of few bytes and one of many take: seconds without bytes, and for each of them.

        The two differ where small sums take other ways than large ones. The lesser is what any takes.
        """
        times = {nbytes: self._time(kind, axes, nbytes, reach) for nbytes in (_FEW_BYTES, _MANY_BYTES)}
        return tuple((time.latency_s, time.transfer_s / nbytes) for nbytes, time in times.items())

    def group(self, axes: Iterable[int], reach: Reach = "all") -> tuple[int, int]:
        """Return how many devices of one domain a collective joins, and of how many domains."""
        spans = [self._span(axis) for axis in axes if self.mesh.shape[axis] > 1]
        inside, across = math.prod(size for size, _ in spans), math.prod(size for _, size in spans)
        return inside if reach != "across" else 1, across if reach != "inside" else 1

    def group_time(self, kind: str, inside: int, across: int, nbytes: float) -> CollectiveTime:
        """Return the time of a collective over so many devices of each of some domains; `nbytes` as in `wire_bytes`."""
        pairs = ((self.machine.intra, inside), (self.machine.inter, across))
        levels = [link.level(size) for link, size in pairs if size > 1]
        if not levels:
            return CollectiveTime(0.0, 0.0)
        is_whole_sum = kind in _SUMS and not self.machine.scatters_sums
        kind = "all-reduce" if is_whole_sum else kind
        cost = self._cost_of.get(kind) or collective_cost(kind)
        if kind not in _COMBINED:
            return cost(levels, nbytes)
        # A part of a combined message, which decides by its own size how it is summed.
        whole = cost(levels, nbytes / self.latency_share)
        shown = self.latency_share * (1.0 if is_whole_sum else self.transfer_share)
        return CollectiveTime(whole.latency_s * self.latency_share, whole.transfer_s * shown)

    def _time(self, kind: str, axes: Iterable[int], nbytes: float, reach: Reach) -> CollectiveTime:
        return self.group_time(kind, *self.group(axes, reach), nbytes)

    @functools.cached_property
    def _cost_of(self) -> dict[str, CollectiveCost]:
        return dict(self.registered)

    def ring_bandwidth(self, axes: Iterable[int]) -> float:
        """Return the bytes/s at which a ring along axes sends."""
        spans = [self._span(axis) for axis in axes]
        inside, across = math.prod(size for size, _ in spans), math.prod(size for _, size in spans)
        intra, inter = self.machine.intra.bandwidth_of(inside), self.machine.inter.bandwidth_of(across)
        return intra if across == 1 else inter if inside == 1 else min(intra, inside * inter)

    def is_part_of(self, whole: MeshCosts) -> bool:
        """Return whether a mesh is like some axes of another one, whose links are all the same.

        What runs on it may run there as well, with the other axes idle, and takes as long.
        """
        mine, theirs = (Counter(size for size in each.mesh.shape if size > 1) for each in (self, whole))
        return self.machine == whole.machine and mine <= theirs and whole.mesh.num_devices <= whole.machine.domain

    def links(self) -> AxisLinks | None:
        """Return what a plan says of the links of the mesh; None if its rings are equally fast, and none has levels."""
        numbers = [axis for axis, size in enumerate(self.mesh.shape) if size > 1]
        several = [axes for n in range(1, len(numbers) + 1) for axes in itertools.combinations(numbers, n)]
        inside = {axes: math.prod(self._span(axis)[0] for axis in axes) for axes in several}
        across = {axes: self.mesh.size(axes) // inside[axes] for axes in several}
        bandwidths = {
            axes: (self.machine.intra.bandwidth_of(inside[axes]), self.machine.inter.bandwidth_of(across[axes]))
            for axes in several
        }
        in_levels = {axes for axes in several if self._sums_in_levels(axes, inside[axes], across[axes])}
        fastest = max((self.ring_bandwidth(axes) for axes in several), default=1.0)
        fastest = max((fastest, *(bandwidths[axes][0] for axes in in_levels)))

        def slowness(bandwidth: float) -> int:
            return max(1, round(SLOWNESS_UNIT * fastest / bandwidth))

        rings = tuple(
            Ring(
                axes,
                slowness(self.ring_bandwidth(axes)),
                slowness(bandwidths[axes][across[axes] > 1]),
                tuple(map(slowness, bandwidths[axes])) if axes in in_levels else (),
            )
            for axes in several
        )
        if all(ring.by_pairs == ring.slowness == SLOWNESS_UNIT and not ring.levels for ring in rings):
            return None
        return AxisLinks(inside=tuple(self._span(axis)[0] for axis in range(len(self.mesh.shape))), rings=rings)

    def _sums_in_levels(self, axes: Axes, inside: int, across: int) -> bool:
        """Return whether large all-reduces along axes take less time in levels than along one ring."""
        # Of the devices along an axis, every `inside` are in one domain only where domains begin with them.
        whole = self.mesh.order is not None or all(
            self.machine.domain % (math.prod(self.mesh.shape[axis + 1 :]) * size) == 0
            for axis in axes
            if (size := self._span(axis)[0]) > 1
        )
        if inside == 1 or across == 1 or not whole:
            return False
        inside_s = sum(
            self.collective_s(kind, axes, _MANY_BYTES, "inside") for kind in ("reduce-scatter", "all-gather")
        )
        across_s = self.collective_s("all-reduce", axes, _MANY_BYTES / inside, "across")
        return inside_s + across_s < _IN_LEVELS_SHARE * self.collective_s("all-reduce", axes, _MANY_BYTES)

    def _span(self, axis: int) -> tuple[int, int]:
        """Return how many devices of a group are in one domain, and in how many domains the group is."""
        size, stride = self.mesh.shape[axis], math.prod(self.mesh.shape[axis + 1 :])
        domain = self.machine.domain
        if self.mesh.order is not None:
            inside = _inside_domains(self.mesh.shape, self.mesh.order, domain)[axis]
            return inside, size // inside
        inside = max(part for part in range(1, size + 1) if size % part == 0 and (part == 1 or stride * part <= domain))
        return inside, size // inside


@functools.lru_cache(maxsize=1024)
def _inside_domains(shape: tuple[int, ...], order: tuple[int, ...], domain: int) -> tuple[int, ...]:
    """Return by axis the devices next to each other in one domain, for devices in any order."""
    domains = (np.array(order) // domain).reshape(shape)
    inside = [1] * len(shape)
    for axis in reversed(range(len(shape))):
        parts = (part for part in range(shape[axis], 0, -1) if shape[axis] % part == 0)
        inside[axis] = next(
            part for part in parts if _blocks_are_inside(domains, [*inside[:axis], part, *inside[axis + 1 :]])
        )
    return tuple(inside)


def _blocks_are_inside(domains: np.ndarray, block: list[int]) -> bool:
    """Return whether every block of so many devices by axis is in one domain."""
    rank = len(block)
    split = domains.reshape([n for size, part in zip(domains.shape, block, strict=True) for n in (size // part, part)])
    blocks = split.transpose([*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)]).reshape(-1, math.prod(block))
    return bool((blocks == blocks[:, :1]).all())


def with_links(mesh: LogicalMesh, machine: Machine) -> LogicalMesh:
    """Return a mesh of a machine's devices with its links, which decide the steps of reshardings on it."""
    return replace(mesh, links=_links_of(MeshCosts(machine=machine, mesh=mesh)))


@functools.lru_cache(maxsize=1024)
def _links_of(mesh_costs: MeshCosts) -> AxisLinks | None:
    return mesh_costs.links()
