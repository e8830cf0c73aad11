"""Keep what a search has learned of numbers of microbatches, so that it looks at the most promising ones first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.compiler.planning.search.candidates import likely_times_s, microbatch_counts
from autopar.compiler.planning.search.space import Space, Stages
from autopar.compiler.planning.stages.pipeline_candidate import PipelineCandidate
from autopar.compiler.planning.stages.stage_costs import KnownLayers


@dataclass(kw_only=True, eq=False)
class LearnedNumbers:
    """The seconds of stages by their layers, for numbers of stages and of microbatches."""

    times_of: dict[tuple[int, int], dict[int, float]] = field(default_factory=dict[tuple[int, int], dict[int, float]])
    """The least seconds of the stages that were searched, by range of their number, then by number of microbatches."""
    best_of: dict[tuple[int, int], PipelineCandidate] = field(default_factory=dict[tuple[int, int], PipelineCandidate])
    """The best of these, for whichever number of microbatches."""
    saving: dict[tuple[int, int], set[int]] = field(default_factory=dict[tuple[int, int], set[int]])
    """The numbers of microbatches of which some of the best stages save memory, or are computed again."""

    def learn(self, region: Stages, found: Sequence[PipelineCandidate], below_s: float) -> None:
        """Keep the time of the best stages for a number of microbatches, or what they take no less than."""
        key, before = region.num_stages, self.best_of.get(region.num_stages)
        self.times_of.setdefault(key, {})[region.num_microbatches] = found[0].step_time_s if found else below_s
        if found and not all(stage.cost.choice.is_fastest for stage in found[0].stages):
            self.saving.setdefault(key, set()).add(region.num_microbatches)
        if found and (before is None or found[0].step_time_s < before.step_time_s):
            self.best_of[key] = found[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class ToldNumbers:
    """The times of stages for some numbers of microbatches, told by the layers of others whose layouts are solved."""

    space: Space
    times_by: dict[tuple[KnownLayers, int, int, int], dict[int, float]] = field(
        default_factory=dict[tuple[KnownLayers, int, int, int], dict[int, float]]
    )
    """The times by the number of equal stages. Keys: layers, their number of microbatches, that of the layers whose
    costs were taken, and on how many submeshes these were known."""

    def equal_s(self, region: Stages) -> float:
        """Return the time of equal stages that is least by the layers of the nearest microbatches with known costs.

        Infinity where neither so many equal stages fit, nor the next fewer and more: those between need as much memory.
        Microbatches with fewer rows than a stage has devices tell nothing of larger ones: their layers are not split.
        """
        known = self.space.known_of(region.num_stages)
        (few, most), count, nearest = region.num_stages, region.num_microbatches, self._likes(region)
        least_s: dict[int, float] = {}
        for solved_alone in (True, False):
            for like in nearest if solved_alone else nearest[:1]:
                for number, seconds in self._times_by_layers(known, count, like).items():
                    if not solved_alone or self.space.is_solved(known, like, number):
                        least_s.setdefault(number, seconds)
        if not least_s:
            return region.by_others_s
        fewer, more = (n for n in least_s if n <= few), [n for n in least_s if n >= most]
        if not more and max(least_s) < few:
            return region.by_others_s  # fewer and larger stages tell nothing of more and smaller ones
        near = range(max(fewer, default=few), min(more, default=most) + 1)
        return max(region.by_others_s, min((least_s[number] for number in near if number in least_s), default=math.inf))

    def _likes(self, region: Stages) -> list[int]:
        """Return the numbers of microbatches whose layers tell of those of a region, the nearest first."""
        few, count = region.num_stages[0], region.num_microbatches
        solved = self.space.known_of(region.num_stages).solved
        telling = [n for n in solved if n <= count or self._has_rows_for_all(n, few)]
        return sorted(telling, key=lambda like: (abs(math.log2(like / count)), like))

    def is_of_all(self, region: Stages) -> bool:
        """Return whether layers of a region tell of all others: of so many stages, the most that have a row for all."""
        few = region.num_stages[0]
        telling = [n for n in microbatch_counts(self.space.cuttable) if self._has_rows_for_all(n, few)]
        return region.num_microbatches == max(telling, default=0)

    def _has_rows_for_all(self, num_microbatches: int, num_stages: int) -> bool:
        return self.space.rows >= num_microbatches * self.space.part(num_stages)

    def _times_by_layers(self, known: KnownLayers, count: int, like: int) -> dict[int, float]:
        """Return the times of equal stages by the layers of another number of microbatches, by their number."""
        key = known, count, like, known.num_solved(like)
        if key not in self.times_by:
            self.times_by[key] = likely_times_s(known.problem, known, count, like)
        return self.times_by[key]
