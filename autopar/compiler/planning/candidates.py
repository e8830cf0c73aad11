"""Search the pipeline of a step for one number of microbatches after another.

    StageProblem                ->  PipelineCandidate, ...     the fastest first
    PipelineCandidate, ...      ->  Certificate

For each number: the layers and their costs, the best ranges of them by the closed form of every schedule, and of these
the one whose schedule takes the least time when it is simulated.
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
from autopar.compiler.inter_op.stage_costs import Partition, Stage, StageCost, Timing
from autopar.compiler.inter_op.submeshes import Submesh, cluster_shape, place_submeshes, submesh_choices
from autopar.compiler.planning.constraints import pins_of_inputs
from autopar.compiler.planning.layer_classes import Layers
from autopar.compiler.planning.layer_costs import LayerCosts
from autopar.compiler.planning.stage_costs import KnownLayers, RangeCosts, StageProblem
from autopar.compiler.planning.virtual_stages import VirtualStage, make_virtual_stages, simulate_schedule_s
from autopar.errors import InvalidArgument, MemoryTooSmall, NotSplittable, Unsupported
from autopar.ir.clocks import Hosts
from autopar.ir.plan_sharding import Certificate
from autopar.ir.schedules import SCHEDULES, Schedule
from autopar.progress import tell, tell_best

_NUM_RUNNERS_UP = 5
_MOST_MICROBATCHES_PER_DEVICE = 8
_MICROBATCHES_PER_STAGE = 8
_SHARE_OF_WORK = 0.3
_SHARE_OF_TIME = 0.7
"""Of the time limit: as work and as time that passes, after which no further number of microbatches is tried."""
_LIKELY_SHARE = 0.9
"""Of the memory: stages that need no more, judged by the layers of other microbatches, are likely to fit."""
_WORTH_SPLITTING = 0.05
"""Of the step: less time than that is not worth looking at layers whose weight gradients are tasks of their own."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineCandidate:
    """The best stages for one number of microbatches, with the schedule under which they are the fastest."""

    layers: Layers
    timing: Timing
    """The schedule; the search has the layers of all virtual stages on a mesh as one stage."""
    remat: bool
    search: StageSearch
    virtual_stages: tuple[VirtualStage, ...]
    """Those of the best partition."""
    hosts: Hosts
    costs_gap: float

    @cached_property
    def step_time_s(self) -> float:
        """Simulated seconds of the best stages."""
        return self.simulate_s([stage.cost for stage in self.search.best.stages])

    def simulate_s(self, costs: Sequence[StageCost]) -> float:
        """Return the simulated seconds of a step for other costs of the meshes."""
        return simulate_schedule_s(self.timing, self.virtual_stages, costs, self.hosts)

    @property
    def gain_from_splitting(self) -> float:
        """The share of the step that splitting off weight gradients can gain.

        Where forward, input and weight gradients take equal times, that is two thirds of what fills the pipeline.
        """
        warmups_s = [stage.cost.forward_s + stage.cost.backward_s for stage in self.search.best.stages]
        return 2 / 3 * (sum(warmups_s) - max(warmups_s)) / self.step_time_s


def search_pipelines(problem: StageProblem) -> list[PipelineCandidate]:
    """Return the best candidate for every number of microbatches that was tried, the fastest first.

    Raises `MemoryTooSmall` where nothing fits, and `InvalidArgument` for pins that no plan can keep.
    """
    in_time = time_for_counts(problem.method.time_limit_s)
    pins_of_inputs(problem.trace, problem.method.pins)
    known = KnownLayers.of(problem)
    counts = microbatch_counts(problem)
    candidates: dict[int, PipelineCandidate] = {}
    shortages: dict[int, MemoryTooSmall] = {}
    unsplittable: set[int] = set()

    def time_s(place: int) -> float | None:
        """Return the step time for a place in `counts`; infinity where nothing fits, None for no such split."""
        count = counts[place]
        if count not in candidates and count not in shortages and count not in unsplittable:
            tell(f"{count} microbatches")
            try:
                candidates[count] = _search_count(problem, known, count)
            except MemoryTooSmall as error:
                shortages[count] = error
            except (NotSplittable, Unsupported):
                if problem.method.num_microbatches is not None:
                    raise
                unsplittable.add(count)
        if count in candidates:
            return candidates[count].step_time_s
        return None if count in unsplittable else math.inf

    def is_likely(place: int) -> bool:
        return _fits_by_hosts(problem, known, counts[place], counts[usual:])

    usual = usual_place(problem, counts, known.num_layers)
    start = first_likely(is_likely, len(counts), usual)
    # Where memory is short, smaller microbatches leave room for faster layouts.
    most = usual_size(problem, counts) if start == usual else len(counts)
    descend(time_s, len(counts), start, in_time, most)
    if candidates:
        return sorted(candidates.values(), key=lambda each: each.step_time_s)
    if shortages:
        raise shortages[max(shortages)]
    raise Unsupported(
        f"The search over stages tried {sorted(unsplittable)} microbatches, and the step can be split into none of "
        "them. Use num_stages=1."
    )


def lower_bound_s(ranked: Sequence[PipelineCandidate]) -> float:
    """Return the seconds that no stages take less than, by the closed forms of the schedules that were tried."""
    return min(each.search.lower_bound_s * (1 - each.costs_gap) for each in ranked)


def certificate_of(ranked: Sequence[PipelineCandidate], bound_s: float) -> Certificate:
    """Certify the first candidate, the fastest, beside the next best of all by the closed form of the schedule."""
    step_time_s = ranked[0].step_time_s
    others = [(each, each.search.best) for each in ranked[1:]]
    others += [(each, partition) for each in ranked for partition in each.search.runners_up]
    others = sorted(
        (other for other in others if other[1].step_time_s >= step_time_s), key=lambda other: other[1].step_time_s
    )
    return Certificate(
        step_time_s=step_time_s,
        lower_bound_s=min(bound_s, step_time_s),
        tried=tuple(sorted({each.timing.num_microbatches for each in ranked})),
        runners_up=tuple(
            (_words(each, partition), partition.step_time_s) for each, partition in others[:_NUM_RUNNERS_UP]
        ),
    )


def _words(candidate: PipelineCandidate, partition: Partition) -> str:
    timing = candidate.timing
    stages = " | ".join(f"{stage.stop - stage.start} layers on {stage.submesh}" for stage in partition.stages)
    virtual = f" x {timing.virtual_stages}" if timing.virtual_stages > 1 else ""
    return f"{timing.num_microbatches} microbatches, {timing.schedule.name}{virtual}: {stages}"


def time_for_counts(time_limit_s: float) -> Callable[[], bool]:
    """Return a function that is true while there is time for another number of microbatches, from now on.

    Counted is the work of this process, so that a busy machine finds what a quiet one does, within the limit.
    """
    began_s, began_cpu_s = time.monotonic(), time.process_time()

    def in_time() -> bool:
        work_s, passed_s = time.process_time() - began_cpu_s, time.monotonic() - began_s
        return work_s < _SHARE_OF_WORK * time_limit_s and passed_s < _SHARE_OF_TIME * time_limit_s

    return in_time


def first_likely(is_likely: Callable[[int], bool], size: int, start: int) -> int:
    """Return the first place from `start` on that is likely to lead to a plan; `start` if none is."""
    return next((place for place in range(start, size) if is_likely(place)), start)


def descend(
    step_time_s: Callable[[int], float | None], size: int, start: int, in_time: Callable[[], bool], usual_size: int
) -> None:
    """Go up from a place as long as that helps, else down; from where nothing is possible, up and then down.

    A place has no step time where the batch cannot be split so, and an infinite one where nothing fits. Places from
    `usual_size` on are looked at only where memory is short: nothing fits at the start. The search ends when it is no
    longer `in_time`.
    """

    def time_s(place: int) -> float:
        seconds = step_time_s(place)
        return math.inf if seconds is None else seconds

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
    """Return whether neither the smallest microbatches that there can be fit, nor the whole batch."""
    smallest = next((s for place in reversed(range(size)) if (s := step_time_s(place)) is not None), math.inf)
    return math.isinf(smallest) and math.isinf(step_time_s(0) or math.inf)


def usual_place(problem: StageProblem, counts: Sequence[int], num_layers: int) -> int:
    """Return the place to begin: enough microbatches for a stage on every host, of at least two layers each."""
    usual = _MICROBATCHES_PER_STAGE * max(1, min(problem.cluster.num_hosts, num_layers // 2))
    return min(range(len(counts)), key=lambda place: abs(math.log2(counts[place] / usual)))


def microbatch_counts(problem: StageProblem) -> list[int]:
    """Return the numbers of microbatches to try: the one given, or powers of two that divide the batch."""
    if problem.method.num_microbatches is not None:
        return [problem.method.num_microbatches]
    trace = problem.trace
    if not trace.batch_inputs or trace.at_other_batch is None:
        return [1]
    rows = trace.inputs[trace.batch_inputs[0]].aval.shape[0]
    return [count for count in (2**k for k in range(rows.bit_length())) if rows % count == 0]


def usual_size(problem: StageProblem, counts: Sequence[int]) -> int:
    """Return how many of the numbers are no larger than what is usual for so many devices."""
    return sum(count <= _MOST_MICROBATCHES_PER_DEVICE * problem.num_devices for count in counts)


def _fits_by_hosts(problem: StageProblem, known: KnownLayers, num_microbatches: int, counts: Sequence[int]) -> bool:
    """Return whether a stage for every host is likely to fit, by the layers of the first number that splits the batch.

    That takes much less work than a search.
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
        share = 1.0 if rows == 1 else _LIKELY_SHARE
        try:
            search_fixed_stages(
                len(layers.class_of),
                cluster.num_hosts,
                Submesh(num_hosts=1, devices_per_host=cluster.devices_per_host),
                lambda start, stop, submesh: [cost.with_rows(rows) for cost in ranges(start, stop, submesh)],  # noqa: B023
                lambda cut, source, target: rows * ranges.transfer_s(cut, source, target),  # noqa: B023
                timing=Timing(schedule=problem.first_schedule, num_microbatches=num_microbatches),
                memory_bytes=share * problem.expected_bytes,
            )
        except MemoryTooSmall:
            continue
        return True
    return False


def _search_count(problem: StageProblem, known: KnownLayers, num_microbatches: int) -> PipelineCandidate:
    """Return the best candidate for a number of microbatches, without recomputation if that fits."""
    given = problem.given_schedule
    tried = list(SCHEDULES.values()) if given is None else [given]
    by_split = [[each for each in tried if each.splits_weight_gradients == splits] for splits in (False, True)]
    schedules, splitting = by_split if by_split[0] else reversed(by_split)

    def best_of(schedules: Sequence[Schedule], remat: bool) -> PipelineCandidate:
        layers, costs = known(num_microbatches, remat, splits=schedules[0].splits_weight_gradients)
        return _search_layers(problem, layers, costs, remat, schedules)

    shortage: MemoryTooSmall | None = None
    for remat in _remats(problem):
        try:
            best = best_of(schedules, remat)
        except MemoryTooSmall as error:
            shortage = error
            continue
        if splitting and best.gain_from_splitting > _WORTH_SPLITTING:
            with suppress(MemoryTooSmall):
                best = _fastest([best, best_of(splitting, remat)])
        return best
    assert shortage is not None
    raise shortage


def _remats(problem: StageProblem) -> tuple[bool, ...]:
    return (False, True) if problem.method.remat == "auto" else (bool(problem.method.remat),)


def _search_layers(
    problem: StageProblem, layers: Layers, costs: LayerCosts, remat: bool, schedules: Sequence[Schedule]
) -> PipelineCandidate:
    """Return the best stages with the schedule whose simulation takes the least time."""
    ranges = RangeCosts(problem, layers, costs)
    candidates: list[PipelineCandidate] = []
    shortage: MemoryTooSmall | None = None
    for timing in _timings(problem, layers, schedules):
        try:
            search = _partitioned(problem, layers, ranges, timing)
        except MemoryTooSmall as error:
            shortage = error
            continue
        candidates.append(
            PipelineCandidate(
                layers=layers,
                timing=timing,
                remat=remat,
                search=search,
                virtual_stages=make_virtual_stages(ranges, search.best.stages, timing.virtual_stages),
                hosts=_hosts_of(problem, search.best.stages),
                costs_gap=costs.gap,
            )
        )
    if not candidates:
        assert shortage is not None
        raise shortage
    best = _fastest(candidates)
    tell_best(best.step_time_s)
    return best


def _hosts_of(problem: StageProblem, stages: Sequence[Stage]) -> Hosts:
    devices = place_submeshes([stage.submesh for stage in stages], problem.cluster)
    assert devices is not None
    return Hosts.of_devices(devices, problem.machine)


def _fastest(candidates: Sequence[PipelineCandidate]) -> PipelineCandidate:
    """Return the fastest, with a bound that holds for all."""
    best = min(candidates, key=lambda each: each.step_time_s)
    bound_s = min(each.search.lower_bound_s for each in candidates)
    return replace(best, search=replace(best.search, lower_bound_s=bound_s))


def _timings(problem: StageProblem, layers: Layers, schedules: Sequence[Schedule]) -> Iterator[Timing]:
    """Yield the schedules to try, each with its numbers of stages on a mesh.

    Where the number of stages is given, each has a mesh of its own unless the schedule is given as well.
    """
    given = problem.given_schedule is not None
    meshes = problem.num_stages or 2  # of which each needs a layer for every stage
    for schedule in schedules:
        counts = [count for count in schedule.virtual_stages if len(layers.class_of) >= meshes * count] or [1]
        if schedule.virtual_stages == (1,) or given or problem.method.num_stages is None:
            for count in counts:
                yield Timing(schedule=schedule, num_microbatches=layers.num_microbatches, virtual_stages=count)


def _partitioned(problem: StageProblem, layers: Layers, ranges: RangeCosts, timing: Timing) -> StageSearch:
    """Return the best stages of any sizes, or of one size if their number or their mesh is given.

    With several stages on a mesh, the layers of each mesh are priced as one range.
    """
    cluster, method = problem.cluster, problem.method
    num_layers, virtual_stages = len(layers.class_of), timing.virtual_stages
    count = problem.num_stages

    def costs(start: int, stop: int, submesh: Submesh) -> Sequence[StageCost]:
        allowed = problem.allows is None or problem.allows(start, stop, num_layers)
        return ranges(start, stop, submesh) if allowed and stop - start >= virtual_stages else ()

    if count is not None:
        return search_fixed_stages(
            num_layers,
            count,
            _equal_part(cluster, count),
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
        timing=timing,
        max_stages=None if virtual_stages == 1 else num_layers // virtual_stages,
        memory_bytes=problem.expected_bytes,
        time_limit_s=method.time_limit_s,
        can_place=lambda submeshes: place_submeshes(submeshes, cluster) is not None,
    )


def _equal_part(cluster: Submesh, count: int) -> Submesh:
    """Return one of `count` equal parts of the cluster."""
    size, rest = divmod(cluster.num_devices, count)
    if rest:
        raise InvalidArgument(
            f"{cluster.num_devices} devices do not divide into {count} equal stages. Use a number of stages that "
            "divides them, or leave it to the search."
        )
    return cluster_shape(size, cluster.devices_per_host)
