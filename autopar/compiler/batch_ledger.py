"""What an analysis remembers across equations: which reductions over the batch met their examples again."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.compiler.batch_states import State, Trail
from autopar.compiler.jaxprs import compat as jc
from autopar.errors import NotSplittable

Place = tuple[object, ...]
"""Where an equation stands: its number, behind the numbers and roles of the equations around it."""


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """A reduction over the batch: its equation, and the batched values it was computed from."""

    place: Place
    eqn: jc.JaxprEqn
    rows: int


class Unfinished(NotSplittable):
    """A sum over the batch is needed inside a loop or rematerialised region that began outside of it."""


@dataclass(kw_only=True)
class Ledger:
    """One analysis: its options, and what is found on the way."""

    num_microbatches: int
    exact: bool
    draw_per_microbatch: bool
    local: frozenset[Place] = frozenset()
    """Reductions to be taken within each microbatch."""
    found: set[Place] = field(default_factory=set[Place])
    apart: frozenset[Place] = frozenset()
    """Equations to take apart, because a result that is the same for every microbatch is wanted once."""
    repeating: dict[int, Place] = field(default_factory=dict[int, Place])
    bits: dict[Place, int] = field(default_factory=dict[Place, int])
    reductions: dict[int, Reduction] = field(default_factory=dict[int, Reduction])

    def bit(self, place: Place) -> int:
        """The bit that stands for an equation in a trail."""
        return self.bits.setdefault(place, 1 << len(self.bits))

    def reduction(self, place: Place, eqn: jc.JaxprEqn, trail: Trail) -> int:
        """Register a reduction; its bit in the `origins` of a trail."""
        bit = self.bit((*place, "reduction"))
        self.reductions[bit] = Reduction(place=place, eqn=eqn, rows=trail.rows)
        return bit

    def repeats(self, place: Place) -> int:
        """Register an equation that computes a shared value for every microbatch; its bit."""
        bit = self.bit((*place, "repeats"))
        self.repeating[bit] = place
        return bit

    def origins(self, trail: Trail) -> list[Reduction]:
        """The reductions behind a value, by order of appearance."""
        return [r for bit, r in self.reductions.items() if trail.origins & bit]

    def check_crossing(self, eqn: jc.JaxprEqn, states: list[State]) -> None:
        """Refuse (or note) a sum over the batch that is combined with examples it was computed from."""
        for i, one in enumerate(states):
            for j, other in enumerate(states):
                if i != j and one.trail.sums & other.trail.rows:
                    rows = other.trail.rows
                    behind = [r for r in self.origins(one.trail) if r.rows & rows]
                    self.crossed(eqn, behind)

    def crossed(self, eqn: jc.JaxprEqn, behind: list[Reduction]) -> None:
        """What to do about reductions whose results are wanted before the other microbatches are known."""
        if not self.exact:
            self.found.update(r.place for r in behind)
            return
        names = "; ".join(jc.describe(r.eqn) for r in behind) or "a reduction"
        raise NotSplittable(
            f"The reduction over the batch {names} depends on the parameters, and its result is combined "
            f"again with single examples in {jc.describe(eqn)}, as batch normalisation does. The gradient of "
            "one microbatch would need the activations of all others. Use "
            'batch_statistics="per_microbatch" (the usual approximation: each microbatch its own '
            "statistics), a normalisation within each example, or num_microbatches=1."
        )
