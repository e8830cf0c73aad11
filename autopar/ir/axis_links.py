"""The links along the axes of a mesh, as far as they decide which collectives a program runs.

A plan keeps them where they are not all equal, so that what is emitted is what was priced, whatever the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from autopar.checks import is_whole
from autopar.errors import PlanMismatch

SLOWNESS_UNIT = 10
"""The slowness of the fastest ring of a mesh; one of 25 takes two and a half times as long for the same bytes."""


class Ring(NamedTuple):
    """The devices along some axes: how slow the ring through all of them is, and where there is no ring.

    With `levels` an all-reduce along them is hierarchical: a reduce-scatter inside of every fast domain, an all-reduce
    of the parts across the domains, an all-gather inside. These are the slowness of the rings inside and across.
    """

    axes: tuple[int, ...]
    slowness: int
    by_pairs: int
    """The slowness where pairs send to each other, as in all-to-alls: that of the slowest link by itself."""
    levels: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AxisLinks:
    """The rings along every choice of axes of a mesh that has slower links between fast domains than inside of them."""

    inside: tuple[int, ...]
    """The number of devices along each axis, next to each other, that are in one fast domain."""
    rings: tuple[Ring, ...]

    def ring(self, axes: tuple[int, ...]) -> Ring:
        """Return the ring along some axes, in any order; along none of more than one device it is as fast as any."""
        wanted = tuple(sorted(axes))
        return next((ring for ring in self.rings if ring.axes == wanted), Ring(wanted, SLOWNESS_UNIT, SLOWNESS_UNIT))

    def to_data(self) -> dict[str, Any]:
        """Return the links as JSON data."""
        rings = [[list(ring.axes), ring.slowness, ring.by_pairs, list(ring.levels)] for ring in self.rings]
        return {"inside": list(self.inside), "rings": rings}

    @staticmethod
    def from_data(what: str, raw: Any, num_axes: int) -> AxisLinks:
        """Return the links that `to_data` wrote for a mesh of so many axes; `PlanMismatch` if it is something else."""
        try:
            fields = cast(Mapping[str, Any], raw)
            inside = tuple(fields["inside"])
            rings = tuple(Ring(tuple(a), slowness, pairs, tuple(own)) for a, slowness, pairs, own in fields["rings"])
            counts = [*inside, *(n for ring in rings for n in (ring.slowness, ring.by_pairs, *ring.levels))]
            known = all(is_whole(axis) and 0 <= axis < num_axes for ring in rings for axis in ring.axes)
            if not known or not all(is_whole(n) and n > 0 for n in counts) or len(inside) != num_axes:
                raise ValueError(f"a mesh of {num_axes} axes has no such rings: {raw!r}")
            if any(len(ring.levels) not in (0, 2) for ring in rings):
                raise ValueError("a ring has two levels, or none")
            return AxisLinks(inside=inside, rings=rings)
        except (TypeError, KeyError, ValueError) as error:
            raise PlanMismatch(
                f"The links of {what} cannot be read: {type(error).__name__}: {error}. They must be as Plan.save wrote "
                "them: make the plan again, or correct the file."
            ) from None
