"""What a value of the full-batch step is to one microbatch: shared, a slice, a summand, or its own statistic.

    Invariant    the same for every microbatch
    Batched      the microbatch has a contiguous slice along `axis`
    Partial      the full value is the sum (max, min, and, or) of the microbatches' values
    Local        each microbatch has its own approximation of one value (statistics per microbatch)
    Whole        known at the full size only: it must have no part in what depends on the state

A state carries a trail of where the value comes from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce

SUM = "sum"


@dataclass(frozen=True, kw_only=True)
class Trail:
    """Where a value comes from. Sets are bits of an int: a train step has tens of thousands of equations."""

    stateful: bool = False
    """Depends on an input that is neither of the batch, nor a random key, nor a small integer (a counter)."""
    round: int = 0
    """How many accumulations over the microbatches precede it."""
    rows: int = 0
    """The batched, stateful values from which it is computed without an accumulation between."""
    sums: int = 0
    """The batched, stateful values behind the accumulations from which it is computed."""
    origins: int = 0
    """The reductions over the batch behind `sums`."""
    repeated: int = 0
    """The equations that compute it again for every microbatch, because their other results vary."""

    def __or__(self, other: Trail) -> Trail:
        return Trail(
            stateful=self.stateful or other.stateful,
            round=max(self.round, other.round),
            rows=self.rows | other.rows,
            sums=self.sums | other.sums,
            origins=self.origins | other.origins,
            repeated=self.repeated | other.repeated,
        )


@dataclass(frozen=True, kw_only=True)
class Invariant:
    """The same for every microbatch; `zero` where it is known to be all zeros."""

    trail: Trail = Trail()
    zero: bool = False


@dataclass(frozen=True, kw_only=True)
class Batched:
    """A contiguous slice of rows along `axis`."""

    axis: int
    trail: Trail = Trail()


@dataclass(frozen=True, kw_only=True)
class Partial:
    """A summand (`kind` sum), or what takes part in a maximum, minimum, conjunction or disjunction."""

    kind: str
    trail: Trail = Trail()


@dataclass(frozen=True, kw_only=True)
class Local:
    """A statistic of the microbatch that stands for the one of the batch."""

    trail: Trail = Trail()


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A value of the full batch that has no slice for a microbatch."""

    trail: Trail = Trail()


State = Invariant | Batched | Partial | Local | Whole


def trails(states: Iterable[State]) -> Trail:
    """Everything that values in these states come from."""
    return reduce(lambda a, b: a | b, (s.trail for s in states), Trail())


def completed(state: State) -> Invariant:
    """The state after accumulation over all microbatches: rows have become sums, one round later."""
    trail = state.trail
    sums = trail.sums if isinstance(state, Local) else trail.sums | trail.rows
    return Invariant(trail=replace(trail, round=trail.round + 1, rows=0, sums=sums, repeated=0))


def joined(a: State, b: State) -> State | None:
    """The state that holds for either value, as in a loop's carry; None if there is none."""
    trail = a.trail | b.trail
    match a, b:
        case (Invariant(), Invariant()):
            return Invariant(trail=trail, zero=a.zero and b.zero)
        case (Batched(), Batched()) if a.axis == b.axis:
            return Batched(axis=a.axis, trail=trail)
        case (Partial(), Partial()):
            return Partial(kind=a.kind, trail=trail) if a.kind == b.kind else None
        case (Partial(), Invariant() | Local()) | (Invariant() | Local(), Partial()):
            kind = a.kind if isinstance(a, Partial) else b.kind if isinstance(b, Partial) else SUM
            return Partial(kind=kind, trail=trail)
        case (Local() | Invariant(), Local() | Invariant()):
            return Local(trail=trail)
        case _:
            return None


def use_as(state: State, wanted: State) -> str:
    """How a value in `state` takes the place of one in `wanted`: see `Step.uses`."""
    match state, wanted:
        case (Invariant(zero=False), Partial(kind="sum")):
            return "first"
        case (Local(), Partial(kind="sum")):
            return "share"
        case _:
            return "keep"
