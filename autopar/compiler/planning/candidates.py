"""Search the stages of a step for one number of microbatches after another.

    StageProblem  ->  StagesFound, ...     the fastest first

For each number: the layers and what they cost, the best ranges of them by the formula of every schedule, and of these
the one that takes the least time when its schedule is played through.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.compiler.inter_op.fixed_stages import search_fixed_stages
from autopar.compiler.inter_op.search import StageSearch, search_stages
from autopar.compiler.inter_op.stage_costs import Partition, StageCost, Timing
from autopar.compiler.inter_op.submeshes import Submesh, cluster_shape, place, submesh_choices
from autopar.compiler.planning.constraints import pins_of_inputs
from autopar.compiler.planning.layer_classes import Layers
from autopar.compiler.planning.layer_costs import LayerCosts
from autopar.compiler.planning.stage_costs import SPLITTING, KnownLayers, RangeCosts, StageProblem
from autopar.compiler.planning.virtual_stages import StagePart, parts_of, played_s
from autopar.errors import InvalidArgument, MemoryTooSmall, NotSplittable, Unsupported
from autopar.ir.plan_sharding import Certificate
from autopar.progress import tell, tell_best

# --- What the search over stages found for a number of microbatches, and how good the best of that is ---
# StagesFound, StagesFound, ...  ->  Certificate

_RUNNERS_UP = 5


@dataclass(frozen=True, kw_only=True, eq=False)
class StagesFound:
    """The outcome of the search for one number of microbatches."""

    layers: Layers
    schedule: str
    virtual_stages: int
    """Stages on each mesh; the search has their layers as one stage."""
    remat: bool
    search: StageSearch
    parts: tuple[StagePart, ...]
    """The stages of the best partition."""
    costs_gap: float

    @cached_property
    def step_time_s(self) -> float:
        """Seconds of the best stages, their schedule played through."""
        return self.played_s([stage.cost for stage in self.search.best.stages])

    def played_s(self, costs: Sequence[StageCost]) -> float:
        """The same for other costs of the meshes."""
        return played_s(self.timing, self.parts, costs)

    @property
    def timing(self) -> Timing:
        """The schedule with its numbers."""
        return Timing(
            schedule=self.schedule,
            num_microbatches=self.layers.num_microbatches,
            virtual_stages=self.virtual_stages,
        )

    @property
    def gain_from_splitting(self) -> float:
        """What of the step putting off weight gradients can gain: where forward, input and weight gradients take equal
        times, two thirds of what fills the pipeline.
        """
        fills_s = [stage.cost.forward_s + stage.cost.backward_s for stage in self.search.best.stages]
        return 2 / 3 * (sum(fills_s) - max(fills_s)) / self.step_time_s


def lower_bound_s(ranked: Sequence[StagesFound]) -> float:
    """Seconds that no stages take less than by the formulas of the schedules that were tried."""
    return min(each.search.lower_bound_s * (1 - each.costs_gap) for each in ranked)


def certificate_of(ranked: Sequence[StagesFound], bound_s: float) -> Certificate:
    """How good the first one is, the fastest, with the next best of all by the schedule's formula."""
    step_time_s = ranked[0].step_time_s
    others = [(each, each.search.best) for each in ranked[1:]]
    others += [(each, partition) for each in ranked for partition in each.search.runners_up]
    others = sorted(
        (other for other in others if other[1].step_time_s >= step_time_s), key=lambda other: other[1].step_time_s
    )
    return Certificate(
        step_time_s=step_time_s,
        lower_bound_s=min(bound_s, step_time_s),
        tried=tuple(sorted({each.layers.num_microbatches for each in ranked})),
        runners_up=tuple((_words(each, partition), partition.step_time_s) for each, partition in others[:_RUNNERS_UP]),
    )


def _words(found: StagesFound, partition: Partition) -> str:
    stages = " | ".join(f"{stage.stop - stage.start} layers on {stage.submesh}" for stage in partition.stages)
    virtual = f" x {found.virtual_stages}" if found.virtual_stages > 1 else ""
    return f"{found.layers.num_microbatches} microbatches, {found.schedule}{virtual}: {stages}"


# --- Which numbers of microbatches are tried, and in which order ---

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


_LIKELY = 0.9
"""Of the memory, what stages judged by the layers of another number of microbatches are to need at most."""
_SCHEDULES = ("1f1b", "eager-1f1b", "gpipe")
_WORTH_SPLITTING = 0.05
"""Of the step: less time than that is not worth looking at layers whose weight gradients are tasks of their own."""
_VIRTUAL_STAGES = (2, 4)
"""Stages on a mesh that the interleaved schedule is tried with."""


def search_all(problem: StageProblem) -> list[StagesFound]:
    """The best stages for every number of microbatches that was tried, the fastest first.

    Raises `MemoryTooSmall` where nothing fits, and `InvalidArgument` for pins that no plan can keep.
    """
    in_time = time_for_counts(problem.method.time_limit_s)
    pins_of_inputs(problem.trace, problem.method.pins)
    known = KnownLayers.of(problem)
    counts = microbatch_counts(problem)
    found: dict[int, StagesFound] = {}
    shortages: dict[int, MemoryTooSmall] = {}
    whole: set[int] = set()

    def time_s(place: int) -> float | None:
        """With the microbatches of a place; infinite where nothing fits, None where the batch cannot be split."""
        count = counts[place]
        if count not in found and count not in shortages and count not in whole:
            tell(f"{count} microbatches")
            try:
                found[count] = _search(problem, known, count)
            except MemoryTooSmall as error:
                shortages[count] = error
            except (NotSplittable, Unsupported):
                if problem.method.num_microbatches is not None:
                    raise
                whole.add(count)
        if count in found:
            return found[count].step_time_s
        return None if count in whole else math.inf

    def is_likely(place: int) -> bool:
        return _fits_by_hosts(problem, known, counts[place], counts[usual:])

    usual = usual_place(problem, counts, known.num_layers)
    start = first_likely(is_likely, len(counts), usual)
    # Where memory is short, smaller microbatches leave room for faster layouts.
    most = usual_size(problem, counts) if start == usual else len(counts)
    descend(time_s, len(counts), start, in_time, most)
    if found:
        return sorted(found.values(), key=lambda each: each.step_time_s)
    if shortages:
        raise shortages[max(shortages)]
    raise Unsupported(
        f"The search over stages tried {sorted(whole)} microbatches, and the step can be split into none of them. Use "
        "num_stages=1."
    )


def _search(problem: StageProblem, known: KnownLayers, num_microbatches: int) -> StagesFound:
    """The best schedule, without recomputation if that fits."""

    def found(remat: bool, *, splits: bool = False) -> StagesFound:
        layers, costs = known(num_microbatches, remat, splits=splits)
        schedules = [(SPLITTING, 1)] if splits else list(_schedules(problem, len(layers.class_of)))
        return _search_layers(problem, layers, costs, remat, schedules)

    shortage: MemoryTooSmall | None = None
    for remat in _remats(problem):
        try:
            best = found(remat)
        except MemoryTooSmall as error:
            shortage = error
            continue
        if problem.method.schedule is None and best.gain_from_splitting > _WORTH_SPLITTING:
            with suppress(MemoryTooSmall):
                best = _fastest([best, found(remat, splits=True)])
        return best
    assert shortage is not None
    raise shortage


def _fits_by_hosts(problem: StageProblem, known: KnownLayers, num_microbatches: int, counts: Sequence[int]) -> bool:
    """Whether a stage for every host is likely to do, judged by the layers of the first number that splits the batch:
    much less to find out than what the best stages are.
    """
    cluster = problem.cluster
    if problem.num_stages is not None or problem.method.num_microbatches is not None:
        return True
    for remat in _remats(problem):
        first = known.of_first(counts, remat)
        if first is None:
            return True
        layers, costs = first
        if len(layers.class_of) < cluster.num_hosts:
            return True
        ranges, rows = RangeCosts(problem, layers, costs), layers.num_microbatches / num_microbatches
        share = 1.0 if rows == 1 else _LIKELY
        try:
            search_fixed_stages(
                len(layers.class_of),
                cluster.num_hosts,
                Submesh(num_hosts=1, devices_per_host=cluster.devices_per_host),
                lambda start, stop, submesh: [cost.with_rows(rows) for cost in ranges(start, stop, submesh)],  # noqa: B023
                lambda cut, source, target: rows * ranges.transfer_s(cut, source, target),  # noqa: B023
                timing=Timing(schedule=problem.method.schedule or "1f1b", num_microbatches=num_microbatches),
                memory_bytes=share * problem.expected_bytes,
            )
        except MemoryTooSmall:
            continue
        return True
    return False


def _remats(problem: StageProblem) -> tuple[bool, ...]:
    return (False, True) if problem.method.remat == "auto" else (bool(problem.method.remat),)


def _search_layers(
    problem: StageProblem, layers: Layers, costs: LayerCosts, remat: bool, schedules: Sequence[tuple[str, int]]
) -> StagesFound:
    """The best stages, by the schedule under which they take the least time when it is played through."""
    ranges = RangeCosts(problem, layers, costs)
    found: list[StagesFound] = []
    shortage: MemoryTooSmall | None = None
    for schedule, virtual_stages in schedules:
        try:
            search = _partitioned(problem, layers, ranges, schedule, virtual_stages)
        except MemoryTooSmall as error:
            shortage = error
            continue
        found.append(
            StagesFound(
                layers=layers,
                schedule=schedule,
                virtual_stages=virtual_stages,
                remat=remat,
                search=search,
                parts=parts_of(ranges, search.best.stages, virtual_stages),
                costs_gap=costs.gap,
            )
        )
    if not found:
        assert shortage is not None
        raise shortage
    best = _fastest(found)
    tell_best(best.step_time_s)
    return best


def _fastest(found: Sequence[StagesFound]) -> StagesFound:
    """The fastest, with a bound that holds for all."""
    best = min(found, key=lambda each: each.step_time_s)
    bound_s = min(each.search.lower_bound_s for each in found)
    return replace(best, search=replace(best.search, lower_bound_s=bound_s))


def _schedules(problem: StageProblem, num_layers: int) -> Iterator[tuple[str, int]]:
    """Schedules to try, each with its number of stages on a mesh: one if the number of stages is given."""
    method = problem.method
    if method.schedule != "interleaved":
        yield from ((each, 1) for each in ((method.schedule,) if method.schedule else _SCHEDULES))
    if method.schedule == "interleaved" or (method.schedule is None and method.num_stages is None):
        meshes = problem.num_stages or 2  # of which each needs a layer for every stage
        fitting = [count for count in _VIRTUAL_STAGES if num_layers >= meshes * count]
        yield from (("interleaved", count) for count in fitting or [1])


def _partitioned(
    problem: StageProblem, layers: Layers, ranges: RangeCosts, schedule: str, virtual_stages: int
) -> StageSearch:
    """The best stages of any sizes, or of one size if their number or their mesh is given.

    With several stages on a mesh, the layers of each mesh are priced as one range.
    """
    cluster, method = problem.cluster, problem.method
    num_layers = len(layers.class_of)
    timing = Timing(schedule=schedule, num_microbatches=layers.num_microbatches, virtual_stages=virtual_stages)
    count = problem.num_stages

    def costs(start: int, stop: int, submesh: Submesh) -> Sequence[StageCost]:
        allowed = problem.allows is None or problem.allows(start, stop, num_layers)
        return ranges(start, stop, submesh) if allowed and stop - start >= virtual_stages else ()

    if count is not None:
        return search_fixed_stages(
            num_layers,
            count,
            _part(cluster, count),
            costs,
            ranges.transfer_s,
            timing=timing,
            memory_bytes=problem.expected_bytes,
        )
    return search_stages(
        num_layers,
        cluster.num_devices,
        submesh_choices(cluster.num_devices, cluster.devices_per_host, any_host_count=False),
        costs,
        ranges.transfer_s,
        num_microbatches=layers.num_microbatches,
        schedule=schedule,
        virtual_stages=virtual_stages,
        max_stages=None if virtual_stages == 1 else num_layers // virtual_stages,
        memory_bytes=problem.expected_bytes,
        time_limit_s=method.time_limit_s,
        can_place=lambda submeshes: place(submeshes, cluster) is not None,
    )


def _part(cluster: Submesh, count: int) -> Submesh:
    """One of `count` equal parts of the cluster."""
    size, rest = divmod(cluster.num_devices, count)
    if rest:
        raise InvalidArgument(
            f"{cluster.num_devices} devices do not divide into {count} equal stages. Use a number of stages that "
            "divides them, or leave it to the search."
        )
    return cluster_shape(size, cluster.devices_per_host)
