"""Keep what a search has learned of numbers of microbatches, so that it looks at the most promising ones first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.compiler.planning.pipeline_candidate import PipelineCandidate
from autopar.compiler.planning.space import Stages

_MUCH_WAITING = 0.05
"""Of a step: if stages waited so much longer for fewer microbatches, which need more memory, others come first."""


@dataclass(kw_only=True, eq=False)
class LearnedNumbers:
    """By numbers of stages, what stages for some numbers of microbatches take by their layers."""

    times_of: dict[tuple[int, int], dict[int, float]] = field(default_factory=dict[tuple[int, int], dict[int, float]])
    """By number of microbatches, the least seconds of those that were searched."""
    best_of: dict[tuple[int, int], PipelineCandidate] = field(default_factory=dict[tuple[int, int], PipelineCandidate])
    """The best of these, for whichever number of microbatches."""
    short_below: int = 0
    """The microbatches of the best plan, if it needs nearly all memory; else 0."""

    def learn(self, region: Stages, found: Sequence[PipelineCandidate], below_s: float) -> None:
        """Keep the time of the best stages for a number of microbatches, or what they take no less than."""
        key, before = region.num_stages, self.best_of.get(region.num_stages)
        self.times_of.setdefault(key, {})[region.num_microbatches] = found[0].step_time_s if found else below_s
        if found and (before is None or found[0].step_time_s < before.step_time_s):
            self.best_of[key] = found[0]

    def is_larger(self, region: Stages) -> bool:
        """Return whether memory is short for the microbatches of the best plan, and those of a region are larger.

        So where it has one stage, or where its stages would wait so much longer for the first one that they rarely take
        less.
        """
        best, count = self.best_of.get(region.num_stages), region.num_microbatches
        if best is None or count >= self.short_below:
            return count < self.short_below
        more = best.timing.num_microbatches / count - 1
        return more * best.waiting_share / best.timing.virtual_stages > _MUCH_WAITING
