"""Search the stages of a step for one number of microbatches after another.

    StageProblem  ->  StagesFound, ...     the fastest first

For each number: the layers and what they cost, the best ranges of them by the formula of every schedule, and of these
the one that takes the least time when its schedule is played through.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from autopar.compiler.inter_op.fixed_stages import search_fixed_stages
from autopar.compiler.inter_op.search import StageSearch, search_stages
from autopar.compiler.inter_op.stage_costs import StageCost, Timing
from autopar.compiler.inter_op.submeshes import Submesh, cluster_shape, place, submesh_choices
from autopar.compiler.known_layers import SPLITTING, KnownLayers
from autopar.compiler.layer_classes import Layers
from autopar.compiler.layer_costs import LayerCosts
from autopar.compiler.microbatch_counts import (
    descend,
    first_likely,
    microbatch_counts,
    time_for_counts,
    usual_place,
    usual_size,
)
from autopar.compiler.search_wishes import pins_of_inputs
from autopar.compiler.stage_parts import parts_of
from autopar.compiler.stage_ranges import RangeCosts, StageProblem
from autopar.compiler.stages_found import StagesFound
from autopar.errors import InvalidArgument, MemoryTooSmall, NotSplittable, Unsupported
from autopar.progress import tell, tell_best

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
