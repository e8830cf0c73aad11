"""The world as one process sees it: all devices of the cluster, whose they are, and how values reach the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.runtime.interfaces import Device
from autopar.runtime.transfer.exchange import Exchange


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all; devices have ordinals, processes numbers."""

    process: int
    devices: Sequence[Device]
    process_of: Sequence[int]
    node_of: Sequence[str]
    """The node of every process: links within one are faster than links between two."""
    exchange: Exchange

    @cached_property
    def ordinals(self) -> frozenset[int]:
        """The devices of this process."""
        return frozenset(o for o, process in enumerate(self.process_of) if process == self.process)

    def is_here(self, ordinals: Sequence[int]) -> bool:
        """Return True if one of these devices belongs to this process."""
        return not self.ordinals.isdisjoint(ordinals)
