"""Seconds of collectives, one formula per kind: `register_collective_cost` adds one or takes the place of one.

    levels of the network, bytes  ->  CollectiveTime

A level is a ring of devices that are equally far from each other; the levels come with the fastest first. Over n
devices of one level a ring takes n - 1 steps (Thakur, Rabenseifner & Gropp 2005, section 4), in each of which every
device sends the n-th part of b, the whole of what one device holds before a reduction, or after a gather:

    all-gather, reduce-scatter, all-to-all      start +   (n-1) step +   (n-1)/n b / bandwidth     =: ring(b, n)
    all-reduce                                2 start + 2 (n-1) step + 2 (n-1)/n b / bandwidth
    collective-permute                          start +         step +           b / bandwidth

Several levels are one ring, too: it goes through the devices of one domain, then on to the next, as NCCL lays rings.
Every link passes the same bytes, so that the slowest counts. m devices of a domain share the ways out of it; of the n
links of m·h devices, h leave a domain:

    bandwidth = min(intra.bandwidth, m inter.bandwidth)     step = ((n-h) intra.step + h inter.step) / n

Where the machine's library sums along double binary trees of domains, too (Sanders, Speck & Träff 2009), an all-reduce
takes the lesser time of a ring and of a tree, as NCCL chooses (src/graph/tuning.cc): a chain inside of each domain and
ceil(log2 h) steps across, up and down, at `tree_share` of the ring's bandwidth. So small sums over many domains take
trees, and large ones rings:

    all-reduce     2 start + 2 ((m-1) intra.step + ceil(log2 h) inter.step) + 2 b / (tree_share bandwidth)

So do sums inside of one domain whose switches add (NVLink SHARP): above them each byte goes once, at a share above 1.

All-to-alls and permutes have no ring: pairs send for themselves, so that the slowest count (`exchange_bandwidth`). Of
what a device sends to all, a level takes what stays on one device of all slower ones:

    all-to-all                intra.ring(b/h, m) + inter.ring(b, h)
    collective-permute        inter alone
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from autopar.errors import InvalidArgument

PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "collective-permute": 1}
"""Times that the bytes of a collective go around the ring."""


class NetworkLevel(NamedTuple):
    """Devices that are equally far from each other."""

    size: int
    start_s: float
    """Time of a collective that does not depend on its bytes, nor on how many steps it takes."""
    step_s: float
    """Latency of one message to a neighbour."""
    bandwidth: float
    """Bytes/s that one device sends along a ring, all of them sending."""
    exchange_bandwidth: float
    """Bytes/s that one device sends to all others at once, all of them sending."""
    tree_share: float = 0.0
    """The share of a ring's bandwidth that a sum along a tree reaches; 0: there are no trees."""


class CollectiveTime(NamedTuple):
    """Seconds of a collective: what it takes without any bytes, and what the bytes take, in proportion to them."""

    latency_s: float
    transfer_s: float

    @property
    def total_s(self) -> float:
        """Return both together, in seconds."""
        return self.latency_s + self.transfer_s


CollectiveCost = Callable[[Sequence[NetworkLevel], float], CollectiveTime]
"""The time of a collective over some levels (each of two devices or more, the fastest first) of so many bytes."""


def wire_bytes(kind: str, group: int, nbytes: float) -> float:
    """Bytes that each of `group` devices sends; `nbytes` is the larger of its operand and its result."""
    return PASSES[kind] * nbytes * (group - 1) / group


def _rings(levels: Sequence[NetworkLevel], nbytes: float, *, passes: int) -> CollectiveTime:
    return _ring(functools.reduce(_joined, levels), nbytes, passes)


def _sums(levels: Sequence[NetworkLevel], nbytes: float) -> CollectiveTime:
    ring = _rings(levels, nbytes, passes=2)
    return min(ring, _tree(levels, nbytes), key=lambda time: time.total_s) if levels[-1].tree_share else ring


def _tree(levels: Sequence[NetworkLevel], nbytes: float) -> CollectiveTime:
    *inside, outer = levels
    steps_s = sum((level.size - 1) * level.step_s for level in inside) + (outer.size - 1).bit_length() * outer.step_s
    ring = functools.reduce(_joined, levels)
    return CollectiveTime(2 * (ring.start_s + steps_s), 2 * nbytes / (outer.tree_share * ring.bandwidth))


def _joined(inner: NetworkLevel, outer: NetworkLevel) -> NetworkLevel:
    """Return the ring through all devices of two levels."""
    size = inner.size * outer.size
    return NetworkLevel(
        size=size,
        start_s=inner.start_s + outer.start_s,
        step_s=((size - outer.size) * inner.step_s + outer.size * outer.step_s) / size,
        bandwidth=min(inner.bandwidth, inner.size * outer.bandwidth),
        exchange_bandwidth=min(inner.exchange_bandwidth, outer.exchange_bandwidth),
    )


def _all_to_all(levels: Sequence[NetworkLevel], nbytes: float) -> CollectiveTime:
    latency_s = transfer_s = 0.0
    slower = math.prod(level.size for level in levels)
    for level in levels:
        slower //= level.size
        ring = _ring(level._replace(bandwidth=level.exchange_bandwidth), nbytes / slower, 1)
        latency_s, transfer_s = latency_s + ring.latency_s, transfer_s + ring.transfer_s
    return CollectiveTime(latency_s, transfer_s)


def _permute(levels: Sequence[NetworkLevel], nbytes: float) -> CollectiveTime:
    slowest = levels[-1]
    # The start of a ring of n devices is that of an n-th of a message, n - 1 times.
    start_s = slowest.start_s * slowest.size / (slowest.size - 1)
    return CollectiveTime(start_s + slowest.step_s, nbytes / min(slowest.bandwidth, slowest.exchange_bandwidth))


def _ring(level: NetworkLevel, nbytes: float, passes: int) -> CollectiveTime:
    latency_s = (level.start_s + (level.size - 1) * level.step_s) * passes
    return CollectiveTime(latency_s, passes * nbytes * (level.size - 1) / level.size / level.bandwidth)


_COSTS: dict[str, CollectiveCost] = {
    "all-reduce": _sums,
    "all-gather": functools.partial(_rings, passes=1),
    "reduce-scatter": functools.partial(_rings, passes=1),
    "all-to-all": _all_to_all,
    "collective-permute": _permute,
}


def register_collective_cost(kind: str, cost: CollectiveCost) -> None:
    """Have plans made from now on, and times modelled from now on, use this cost for a kind of collective."""
    _COSTS[kind] = cost


def collective_costs() -> tuple[tuple[str, CollectiveCost], ...]:
    """Return the cost of every kind as it is now."""
    return tuple(_COSTS.items())


def collective_cost(kind: str) -> CollectiveCost:
    """Return the cost of a kind; raise `InvalidArgument` for a kind that has none."""
    if kind not in _COSTS:
        raise InvalidArgument(
            f"There is no cost of the collective {kind!r}; there is one of {', '.join(_COSTS)}. Choose one of these, "
            "or add it with autopar.hardware.collectives.register_collective_cost."
        )
    return _COSTS[kind]


def collective_time(kind: str, levels: Sequence[NetworkLevel], nbytes: float) -> CollectiveTime:
    """Return the time of a collective over some levels of the network, those of one device left out."""
    cost, levels = collective_cost(kind), [level for level in levels if level.size > 1]
    return cost(levels, nbytes) if levels else CollectiveTime(0.0, 0.0)
