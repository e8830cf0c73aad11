"""Which numbers of microbatches are tried, and in which order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from autopar.compiler.stage_ranges import StageProblem

_MOST_MICROBATCHES_PER_DEVICE = 8
_MICROBATCHES_PER_STAGE = 8
_SHARE_OF_WORK = 0.3
_SHARE_OF_TIME = 0.7
"""Of the time limit: as work and as time that passes, after which no further number of microbatches is tried."""


def time_for_counts(time_limit_s: float) -> Callable[[], bool]:
    """Whether there is time for another number of microbatches, asked from now on.

    Counted is the work of this process, so that a busy machine finds what a quiet one does, within the limit.
    """
    began_s, began_cpu_s = time.monotonic(), time.process_time()

    def in_time() -> bool:
        work_s, passed_s = time.process_time() - began_cpu_s, time.monotonic() - began_s
        return work_s < _SHARE_OF_WORK * time_limit_s and passed_s < _SHARE_OF_TIME * time_limit_s

    return in_time


def first_likely(is_likely: Callable[[int], bool], size: int, start: int) -> int:
    """The first place from `start` on that is likely to lead to a plan; `start` if none is."""
    return next((place for place in range(start, size) if is_likely(place)), start)


def descend(
    step_time_s: Callable[[int], float | None], size: int, start: int, in_time: Callable[[], bool], usual_size: int
) -> None:
    """Go up from a place as long as that helps, else down; from where nothing is possible, up and then down.

    A place has no step time where the batch cannot be split so, and an infinite one where nothing fits. Places from
    `usual_size` on are looked at only where memory is short: nothing fits at the start. When it is no longer `in_time`,
    what was found is enough.
    """

    def time_s(place: int) -> float:
        found = step_time_s(place)
        return math.inf if found is None else found

    best, at = time_s(start), start
    if math.isinf(best):
        if _fits_nowhere(step_time_s, size):
            return
        usual_size = size
    for direction in (1, -1):
        place = start + direction
        while 0 <= place < size and (math.isinf(best) or (place < usual_size and in_time())):
            here = time_s(place)
            if here >= best and not math.isinf(best):
                break
            best, at = min(best, here), place
            place += direction
        if at > start:
            return


def _fits_nowhere(step_time_s: Callable[[int], float | None], size: int) -> bool:
    """Whether neither the smallest microbatches that there can be fit, nor the whole batch."""
    smallest = next((found for place in reversed(range(size)) if (found := step_time_s(place)) is not None), math.inf)
    return math.isinf(smallest) and math.isinf(step_time_s(0) or math.inf)


def usual_place(problem: StageProblem, counts: Sequence[int], num_layers: int) -> int:
    """Where to begin: enough microbatches to fill a pipeline with a stage for every host, of at least two layers."""
    usual = _MICROBATCHES_PER_STAGE * max(1, min(problem.cluster.num_hosts, num_layers // 2))
    return min(range(len(counts)), key=lambda place: abs(math.log2(counts[place] / usual)))


def microbatch_counts(problem: StageProblem) -> list[int]:
    """The numbers of microbatches that may be tried: the one given, or powers of two that divide the batch."""
    if problem.method.num_microbatches is not None:
        return [problem.method.num_microbatches]
    trace = problem.trace
    if not trace.batch_inputs or trace.doubled is None:
        return [1]
    rows = trace.inputs[trace.batch_inputs[0]].aval.shape[0]
    return [count for count in (2**k for k in range(rows.bit_length())) if rows % count == 0]


def usual_size(problem: StageProblem, counts: Sequence[int]) -> int:
    """How many of the numbers are no larger than what is usual for so many devices."""
    return sum(count <= _MOST_MICROBATCHES_PER_DEVICE * problem.num_devices for count in counts)
