"""Expect which stages have no room as a whole, by their layers and by the stages that were completed before.

    PipelineCandidate, the shares of its memory that each stage needs as a whole  ->  LearnedMemory    is there room?

Stages as a whole may need more than their layers do. Those in the same place of as many stages are taken to need as
much more, once one there did not fit: a place decides how many microbatches it holds, and of which layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.compiler.planning.stages.pipeline_candidate import PipelineCandidate
from autopar.compiler.planning.stages.stage_problem import StageProblem

_NEXT_SHARE = 0.97
"""Largest share of the memory of one search that the next one may use."""
_SHARE_ALONE = 1.5
"""Multiple of its memory that a stage alone may need by its layers. Its forward and backward pass are one task, which
frees what layers keep on the way: a GPT's layers said 1.3 times what it needed on eight devices."""


def usual_share(num_stages: int) -> float:
    """Return the share of the memory that the sum over a stage's layers may reach, as long as nothing else is known."""
    return _SHARE_ALONE if num_stages == 1 else 1.0


class _Position(NamedTuple):
    """A stage among others."""

    num_stages: int
    recomputes: bool
    """True if some of the stages are computed again."""
    number: int


@dataclass(frozen=True, kw_only=True, eq=False)
class LearnedMemory:
    """How much less stages need by their layers than as a whole; only its own methods change it."""

    problem: StageProblem
    shares: dict[_Position, float] = field(default_factory=dict[_Position, float])
    """The largest share of what they need as a whole that stages need by their layers, where some did not fit."""

    def learn(self, candidate: PipelineCandidate, wholes: Sequence[float]) -> bool:
        """Keep what share of its memory each stage needs as a whole; return whether that tells of others."""
        seen = [
            (place, by_layers, whole)
            for (place, by_layers), whole in zip(self._by_layers(candidate), wholes, strict=True)
            if whole > 1 or place in self.shares
        ]
        for place, by_layers, whole in seen:
            self.shares[place] = max(min(usual_share(place.num_stages), by_layers / whole), self.shares.get(place, 0.0))
        return bool(seen)

    def exceeded_share(self, candidate: PipelineCandidate) -> float | None:
        """Return the share of the memory that a stage may need by its layers, and needs more of; None if none does.

        Of several such stages, the largest.
        """
        needed = [
            (by_layers, self.shares.get(place, usual_share(place.num_stages)))
            for place, by_layers in self._by_layers(candidate)
        ]
        return max((share for by_layers, share in needed if by_layers > share), default=None)

    def next_share(self, candidate: PipelineCandidate, wholes: Sequence[float], share: float) -> float:
        """Return the share of the memory by layers for other stages than a candidate that was found with a `share`.

        They are expected to need as much more than their layers as the fullest of its stages.
        """
        if len(candidate.stages) == 1:  # it may have been given much more than it needs
            share = min(share, *candidate.peak_shares(self.problem))
        return share * min(_NEXT_SHARE, 1 / max(wholes))

    def is_as_large(self, other: PipelineCandidate, candidate: PipelineCandidate, number: int) -> bool:
        """Return whether another candidate needs as much as one whose stage of this number did not fit."""
        theirs, mine = other.peak_shares(self.problem), candidate.peak_shares(self.problem)
        return theirs[number] >= mine[number] if len(theirs) == len(mine) else max(theirs) >= max(mine)

    def _by_layers(self, candidate: PipelineCandidate) -> Iterator[tuple[_Position, float]]:
        again = any(stage.cost.choice.remat for stage in candidate.stages)
        for number, share in enumerate(candidate.peak_shares(self.problem)):
            yield _Position(len(candidate.stages), again, number), share
