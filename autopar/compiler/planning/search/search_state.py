"""Keep the state of a search: the regions that are open, what it has learned, and which region is next by that.

open regions, the best plan so far, what was learned  ->  the region that is most likely to hold a better one
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from autopar.compiler.inter_op.submeshes import divides_as_well
from autopar.compiler.planning.search.candidates import microbatch_counts
from autopar.compiler.planning.search.learned_memory import LearnedMemory
from autopar.compiler.planning.search.learned_numbers import LearnedNumbers, ToldNumbers
from autopar.compiler.planning.search.learned_times import LearnedTimes
from autopar.compiler.planning.search.space import Completion, Lanes, OneProgram, Region, Space, Stages
from autopar.compiler.planning.stages.pipeline_candidate import PipelineCandidate
from autopar.ir.plan import Plan

_WORTH_LOOKING = 0.999
"""Share of the best plan's time: what is unlikely to undercut it is not looked at, though the bound counts it."""
_MUCH_LESS = 0.8
"""Share of the time of the best plan: what takes no more leaves less to be looked at."""
_LANES_SHARE = 0.9
"""Factor on the least multiple of their bound that lanes were found to take: others rarely take less."""
_NOT_YET_CUT = 1.03
"""Factor on the time of stages for a number of microbatches whose layers are not cut yet: others come first."""
_RISES = 1.002
"""Multiple of the least time of stages for any number of microbatches. Where another number takes more, those that lie
beyond it, seen from the best, rarely take less."""


@dataclass(kw_only=True, eq=False)
class SearchState:
    """The state of a search; only the search changes it."""

    space: Space
    told: ToldNumbers
    """The times of stages for some numbers of microbatches, told by the layers of others."""
    open: list[Region] = field(default_factory=list[Region])
    best: Plan | None = None
    best_s: float = math.inf
    learned: LearnedTimes = field(default_factory=LearnedTimes)
    """The times of stages as a whole, learned from those that were completed."""
    tight: set[tuple[int, int, int]] = field(default_factory=set[tuple[int, int, int]])
    """The meshes for which layouts that save memory were searched, by group, devices and number of microbatches."""
    lanes_share: float = 0.0
    """The least multiple of its bound that a plan of lanes was found to take; 0 for none yet."""
    numbers: LearnedNumbers = field(default_factory=LearnedNumbers)
    """The times of stages for some numbers of microbatches, learned from those that were searched."""
    memory: LearnedMemory
    """Which stages have no room as a whole, learned from those that did not fit."""

    def next_region(self) -> Region | None:
        """Return the first region of those that are likely to hold a better plan; None if there is none.

        Candidates are simulated with what was learned since only where a bound does not tell that others come first.
        Without a plan, numbers of microbatches that are not reached come where nothing else is left.
        """
        reached = [each for each in self.open if not isinstance(each, Stages) or self.is_reached(each)]
        queue: list[tuple[tuple[float, ...], int, Region]] = []
        for place, region in enumerate(reached if reached or self.best is not None else self.open):
            likely_s = self.likely_s(region, self.learned.bound_s)
            if self.best is None or likely_s < self.enough_s:
                queue.append((self.order(region, likely_s), place, region))
        heapq.heapify(queue)
        while queue:
            bound, place, region = heapq.heappop(queue)
            likely_s = self.likely_s(region)
            if self.best is not None and likely_s >= self.enough_s:
                continue
            if (order := self.order(region, likely_s)) <= bound:
                return region
            heapq.heappush(queue, (order, place, region))
        return None

    @property
    def enough_s(self) -> float:
        """The seconds that a region has to be likely to undercut to be looked at."""
        return _WORTH_LOOKING * self.best_s

    def order(self, region: Region, likely_s: float) -> tuple[float, ...]:
        """Return the sort key of a region: the time that is likely, of stages if even, then how usual they are.

        One program on one mesh is the first plan of all, against which the others are held; or where that takes too
        long to be planned, stages that are roughly the best, and on several machines those of a usual number of
        microbatches. On equal machines, the first stages that are found and faster than the best plan do not wait for
        what regions may hold: they tell how much stages gain as a whole. Nor do others that are much faster, nor one
        stage of a large step that may be, which takes little to look at. Stages that are no faster by their layers come
        in the order of their devices, the most first: what they gain tells of stages on no more devices. One program
        that has to save memory, which takes long, comes last.
        """
        first, mixed = self.best is None, self.space.problem.hardware.is_mixed
        match region:
            case Completion():
                if first and math.isfinite(likely_s):
                    return -1.0 if mixed else -3.0, likely_s
                by_layers_s = max(likely_s, region.candidate.step_time_s)
                teaches = not (self.learned.of_stages or mixed) and by_layers_s < self.best_s
                at_once = teaches or self.gains_much(by_layers_s)
                if by_layers_s >= self.best_s:
                    several = (each for each in region.candidate.stages if each.stop - each.start > 1)
                    return self.best_s, -max((each.submesh.num_devices for each in several), default=0), by_layers_s
                return (0.0 if at_once else by_layers_s), 0.0, by_layers_s
            case OneProgram(is_tight=True):
                return math.inf, likely_s
            case OneProgram():
                return (0.0 if first else likely_s), -1.0
            case Lanes(num_microbatches=count):
                if not self.lanes_share:  # nothing tells them apart yet
                    likely_s = min(each.bound_s for each in self.open if isinstance(each, Lanes))
                return likely_s, self.space.unusual(count)
            case Stages() if region.searched and not self.learned.of_stages:
                return (math.inf,)  # what is found is completed before
            case Stages() if first and self.space.is_large and not mixed:
                return -2.0, *self.space.rank(region)
            case Stages(num_stages=(1, 1), attempt=0, searched=None) if self.gains_much(likely_s):
                return -1.0, likely_s
            case Stages(num_microbatches=count, num_stages=(few, _), attempt=0) if self.space.is_large and mixed:
                usual = min(microbatch_counts(self.space.cuttable), key=self.space.unusual)
                return (-2.0, float(few)) if count == usual else (likely_s, self.space.unusual(count))
            case Stages(num_microbatches=count):
                # Until it is asked what layers tell of them, they come first; before any are known, equal work tells.
                usual_s = region.by_others_s or (region.likely_s if self.layers_tell else region.even_s)
                return max(likely_s, usual_s * (1.0 if self.is_cut(count) else _NOT_YET_CUT)), self.space.unusual(count)

    def gains_much(self, seconds: float) -> bool:
        """Return whether so many seconds are much less than the best plan takes, of a large step on equal machines."""
        is_large = self.space.is_large and not self.space.problem.hardware.is_mixed
        return is_large and seconds < _MUCH_LESS * self.best_s

    def likely_s(self, region: Region, least_s: Callable[[PipelineCandidate], float] | None = None) -> float:
        """Return the least seconds that a region's best plan is expected to take; `least_s` says it of candidates."""
        if isinstance(region, Lanes):
            return max(region.bound_s, _LANES_SHARE * self.lanes_share * region.bound_s)
        if isinstance(region, Stages):
            return max(region.likely_s, self.learned.step_share * region.by_others_s)
        if isinstance(region, OneProgram):
            unlikely = self.space.pads(region) or self.is_part_of_tight(region)
            return math.inf if unlikely and self.space.problem.method.effort != "thorough" else region.likely_s
        if region.estimated_s:
            return region.estimated_s
        candidate = region.candidate
        if self.memory.exceeded_share(candidate) is not None:
            return math.inf
        return max((least_s or self.learned.least_s)(candidate), region.region.bound_s)

    def is_part_of_tight(self, region: OneProgram) -> bool:
        """Return whether a program has to save memory, as on several times its devices, where that is known by now.

        There, each may do the same as here, or less.
        """
        group, devices, count = region.group, region.num_devices, region.num_microbatches
        return region.is_tight and any(
            (group, count) == (on, number) and most > devices and most % devices == 0 for on, most, number in self.tight
        )

    @property
    def layers_tell(self) -> bool:
        """True once the layouts of some layers are known, unless only bounds are to count."""
        known = self.space.known
        return known is not None and bool(known.solved) and self.space.problem.method.effort != "thorough"

    def is_reached(self, region: Stages) -> bool:
        """Return whether all numbers of microbatches from the best to a region's were looked at, and hardly take more.

        The time of stages falls and then rises with the number of microbatches. It may fall again where stages save
        memory, until they are computed again. Numbers of which the examples do not divide among the devices of a stage,
        as those of the best do, are none of them. As long as there is no best, one stage waits for the number that
        tells of all others.
        """
        times_s = self.times_s_of(region.num_stages)
        if not self.layers_tell or region.attempt:
            return True
        if region.num_stages not in self.numbers.best_of:
            return not self.is_told_soon(region)
        best, count, rows = self.numbers.best_of[region.num_stages], region.num_microbatches, self.space.rows
        least, largest = best.timing.num_microbatches, max(stage.submesh.num_devices for stage in best.stages)
        between = [
            each
            for each in microbatch_counts(self.space.cuttable)
            if min(least, count) < each < max(least, count) and divides_as_well(rows, each, least, largest)
        ]
        saving = self.numbers.saving.get(region.num_stages, ()) if self.space.problem.method.remat == "auto" else ()
        rises = any(times_s.get(n, math.inf) >= _RISES * best.step_time_s for n in between if n not in saving)
        return not rises and divides_as_well(rows, count, least, largest)

    def is_told_soon(self, region: Stages) -> bool:
        """Return whether a region of one stage waits for the one whose layers tell of all other microbatches.

        Fewer rows leave some devices without any, and how long layers take there tells nothing of more rows.
        """
        if self.best is None or region.num_stages != (1, 1):
            return False
        alike = [each for each in self.open if isinstance(each, Stages) and each.num_stages == region.num_stages]
        telling = [each for each in alike if each is not region and self.told.is_of_all(each) and not each.searched]
        return any(self.likely_s(each) < self.enough_s for each in telling)

    def times_s_of(self, num_stages: tuple[int, int]) -> dict[int, float]:
        """Return by number of microbatches the time by layers of stages that were searched, or that are not worth it.

        What is unlikely to be the best may still lie between the best of its stages and better ones.
        """
        unlikely = (
            each
            for each in self.open
            if isinstance(each, Stages) and each.num_stages == num_stages and self.likely_s(each) >= self.enough_s
        )
        put_off = {each.num_microbatches: each.by_others_s for each in unlikely if each.by_others_s}
        return put_off | self.numbers.times_of.get(num_stages, {})

    def is_cut(self, num_microbatches: int) -> bool:
        """Return whether the layers of a number of microbatches are cut already."""
        return any(count == num_microbatches for count, _, _ in self.space.cuttable.known)
