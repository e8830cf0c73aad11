"""One exchange between devices, as reshardings plan it, costs price it and programs make it."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.compiler.sharding.layout import Axes, Reach


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One exchange between the devices along `axes`."""

    kind: str
    axes: Axes
    nbytes: float
    """The larger of one device's operand and result, as in `wire_bytes`."""
    reach: Reach = "all"
