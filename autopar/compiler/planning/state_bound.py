"""Refuse at once a step whose state has no room on its devices, whatever the plan.

    Trace, Cluster  ->  StateBound, the share of its memory that some device needs at least

With memory m_d of device d, leaves of b_l bytes that are kept from step to step, and p_l the most equal parts that the
dimensions of a leaf have on so many devices, every plan has a device that needs at least

    max( Σ_l b_l / Σ_d m_d,  max_l b_l / (p_l max_d m_d) )

of its memory when a step begins: all leaves are there, each in one part at least, and parts are even. Gradients and
activations come on top. Nothing is solved for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.compiler.frontend.trace import Leaf, Trace
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.flops import aval_bytes
from autopar.compiler.planning.one_mesh import memory_limit
from autopar.errors import MemoryTooSmall
from autopar.hardware.cluster import Cluster
from autopar.plain_text import size_words

_NUM_NAMED = 4
_MOST_DEVICES = 1 << 16
"""The largest number of devices that is looked at."""
_DEPTH = 2
"""The number of parts of a leaf's name, `state.params` of `state.params.w`, by which leaves are summed up in words."""
_A_LITTLE = 1e-6
"""Relative excess of a share that still counts as fitting, so that rounding does not matter."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StateBound:
    """Leaves that devices hold from step to step, and the devices."""

    leaves: tuple[Leaf, ...]
    memory: float | str
    """The memory budget of a device, as methods have it."""
    cluster: Cluster

    @cached_property
    def limits(self) -> list[tuple[int, float]]:
        """The devices of every group, and the bytes that a plan may use on each."""
        return [(group.num_devices, memory_limit(self.memory, group.machine)) for group in self.cluster.groups]

    @cached_property
    def total_bytes(self) -> int:
        """The bytes of all leaves."""
        return sum(aval_bytes(leaf.aval) for leaf in self.leaves)

    @cached_property
    def limit_bytes(self) -> float:
        """The bytes that a plan may use on a device, of those with most memory."""
        return max(limit for _, limit in self.limits)

    @cached_property
    def coarsest(self) -> tuple[float, Leaf | None]:
        """The bytes of the largest part that a device has to hold, and its leaf; 0 where all have room as a whole."""
        parts = {leaf: max(even_parts(leaf.aval.shape, self.cluster.num_devices)) for leaf in self.large}
        each = [(aval_bytes(leaf.aval) / count, leaf) for leaf, count in parts.items()]
        return max(each, key=lambda found: found[0], default=(0.0, None))

    @property
    def large(self) -> list[Leaf]:
        """Leaves that have no room as a whole."""
        return [leaf for leaf in self.leaves if aval_bytes(leaf.aval) > self.limit_bytes]

    @property
    def share(self) -> float:
        """The share of its memory that some device needs at least; above 1 no plan fits."""
        together = self.total_bytes / sum(count * limit for count, limit in self.limits)
        return max(together, self.coarsest[0] / self.limit_bytes)

    @property
    def least_devices(self) -> int | None:
        """The fewest such devices that hold the leaves; None where a leaf has too few even parts on any number."""
        counts = [math.ceil(self.total_bytes / self.limit_bytes)]
        for leaf in self.large:
            nbytes = aval_bytes(leaf.aval)
            enough = [n for n in even_parts(leaf.aval.shape, _MOST_DEVICES) if nbytes <= n * self.limit_bytes]
            counts.append(min(enough, default=_MOST_DEVICES + 1))
        return None if max(counts) > _MOST_DEVICES else max(counts)

    def words(self, name: str) -> str:
        """Return what is missing for a step of this name."""
        each = self.total_bytes / self.cluster.num_devices
        part_bytes, leaf = self.coarsest
        coarse = ""
        if leaf is not None and part_bytes > self.limit_bytes:
            count = round(aval_bytes(leaf.aval) / part_bytes)
            parts = f"is in {count} even parts at most" if count > 1 else "does not divide evenly"
            coarse = f" {leaf.name} of shape {list(leaf.aval.shape)} {parts} there; padded, it may."
        if self.cluster.is_mixed:
            most, needed = "at most ", f"{self.share:.4g} times the memory is needed"
        else:
            count, most = self.least_devices, ""
            devices = "" if count is None else f"{count} such devices are needed, or "
            limit = f" ({self.cluster.jax_limit})" if self.cluster.jax_limit else ""
            needed = f"{devices}{size_words((self.share - 1) * self.limit_bytes)} more memory on each{limit}"
        return (
            f"{name} cannot run on {self.cluster.num_devices} devices with {most}{size_words(self.limit_bytes)} each, "
            f"however it is planned: what they hold from step to step takes {size_words(self.total_bytes)}, "
            f"{size_words(each)} of each if it is divided among all: {self.largest}.{coarse} At least {needed}, beside "
            "what gradients and activations take."
        )

    @property
    def largest(self) -> str:
        """The parts of the state that take most, in words."""
        nbytes = Counter[str]()
        for leaf in self.leaves:
            nbytes[".".join(leaf.name.split(".")[:_DEPTH])] += aval_bytes(leaf.aval)
        return ", ".join(f"{size_words(taken)} {part}" for part, taken in nbytes.most_common(_NUM_NAMED))


def refuse_too_large_a_state(
    trace: Trace, memory: float | str, cluster: Cluster, *, offloaded: Collection[str] = ()
) -> None:
    """Raise `MemoryTooSmall` where the state alone has no room, with its names and the least that is needed.

    `offloaded` is what is on the hosts between tasks (`methods.OFFLOADS`).
    """
    kept = kept_leaves(trace)
    bound = StateBound(leaves=_on_devices(trace, kept, offloaded), memory=memory, cluster=cluster)
    if bound.share <= 1 + _A_LITTLE:
        return
    words = bound.words(trace.name)
    if not offloaded:
        without = replace(bound, leaves=_on_devices(trace, kept, ("optimizer",)))
        if without.share <= 1:
            rest = size_words(bound.total_bytes - without.total_bytes)
            words += f' With offload="optimizer" {rest} of it are on the hosts.'
    raise MemoryTooSmall(words, least_share=bound.share)


def kept_leaves(trace: Trace) -> dict[int, Leaf]:
    """Return the inputs, by number, that a step begins with and is no batch, where it reads them or returns them."""
    jaxpr, _ = jc.open_jaxpr(trace.jaxpr)
    needed = {v for eqn in jaxpr.eqns for v in jc.operands(eqn)} | {v for v in jaxpr.outvars if isinstance(v, jc.Var)}
    return {
        number: leaf
        for number, (leaf, v) in enumerate(zip(trace.inputs, jaxpr.invars, strict=True))
        if v in needed and number not in trace.batch_inputs and leaf.name not in trace.host_state
    }


def even_parts(shape: Sequence[int], most: int) -> set[int]:
    """Return into how many even parts the dimensions of an array divide, up to so many.

    >>> sorted(even_parts((6, 5), 8)), sorted(even_parts((7, 5), 4))
    ([1, 2, 3, 5, 6], [1])
    """
    parts = {1}
    for size in shape:
        counts = [count for count in range(1, min(size, most) + 1) if size % count == 0]
        parts = {before * count for before in parts for count in counts if before * count <= most}
    return parts


def _on_devices(trace: Trace, kept: dict[int, Leaf], offloaded: Collection[str]) -> tuple[Leaf, ...]:
    """Return the leaves that stay on the devices: of the optimizer's state on hosts, those that microbatches read."""
    if not offloaded:
        return tuple(kept.values())
    if set(offloaded) != {"optimizer"}:
        return ()
    jaxpr, _ = jc.open_jaxpr(trace.jaxpr)
    read = {v for eqn in jaxpr.eqns if jc.ad_phase(eqn) is not None for v in jc.operands(eqn)}
    return tuple(leaf for number, leaf in kept.items() if jaxpr.invars[number] in read)
