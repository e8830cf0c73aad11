"""Search the stages of a step for one number of microbatches.

    StageProblem, number of microbatches, of stages  ->  PipelineCandidate, ...

The layers and their costs, the best ranges of them by the closed form of every schedule, and of these the time of the
schedule when it is simulated. The layouts of layers are solved for only on submeshes that can be in a partition: the
others are taken to need nothing but their work, as long as a partition without them is better.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial

import numpy as np

from autopar.compiler.inter_op.fixed_stages import search_fixed_stages
from autopar.compiler.inter_op.search import MOST_LABELS, StageSearch, search_stages
from autopar.compiler.inter_op.stage_costs import Partition, RangeTable, Stage, TabledCosts, Timing
from autopar.compiler.inter_op.submeshes import Submesh, cluster_shape, place_in_groups, submesh_choices
from autopar.compiler.pipeline.prepare import waits_for_statistics
from autopar.compiler.planning.demands.scope_demands import is_of_kind
from autopar.compiler.planning.search.colocated import colocated_stages
from autopar.compiler.planning.search.learned_memory import usual_share
from autopar.compiler.planning.stages.layer_classes import Layers
from autopar.compiler.planning.stages.layer_costs import SAVED_FOR_NOTHING
from autopar.compiler.planning.stages.pipeline_candidate import WHOLE_SHARE, PipelineCandidate
from autopar.compiler.planning.stages.stage_costs import KnownLayers, RangeCosts
from autopar.compiler.planning.stages.stage_problem import StageProblem, TimeShare
from autopar.compiler.planning.stages.virtual_stages import make_virtual_stages, schedule_for_slow_links
from autopar.errors import InvalidArgument, MemoryTooSmall
from autopar.ir.clocks import Hosts
from autopar.ir.schedule import Schedule
from autopar.ir.schedules import SCHEDULES, WarmedUp, warmed_up

_WORTH_SPLITTING = 0.05
"""Least gain, as a share of a step, for which layers whose weight gradients are tasks of their own are looked at."""
_WORTH_RECOMPUTING = 0.02
"""Least loss for want of memory, as a share of a step, for which stages that are computed again are looked at."""
_HARDLY_LINKS = 0.02
"""Share of a step: if links take no more, stages in another order have to be near the best ones found."""
_UNEQUAL_SHARE = 0.9
"""Share of the time of equal stages that others rarely undercut, nor the time if the equal ones' work were the same."""
_FORMULA_SHARE = 0.95
"""Share of the time by a schedule's formula that unequal stages rarely undercut when they are simulated."""
_HIDDEN_SHARE = 0.6
"""Share of the other stages' time for one microbatch that the slowest hides if it is first; formulas add all of it."""
_ROOM_OF_ONE = 1.5
"""Multiple of the memory that one microbatch may need by the layers of several, as if all were in proportion."""
_NUM_RUNNERS_UP = 5
"""The next best stages by a schedule's formula that are simulated."""


def microbatch_counts(problem: StageProblem) -> list[int]:
    """Return the numbers of microbatches to try: the one given, or all that divide the batch."""
    if problem.method.num_microbatches is not None:
        return [problem.method.num_microbatches]
    if not problem.trace.batch_inputs:
        return [1]
    rows = problem.trace.num_rows
    small = [count for count in range(1, math.isqrt(rows) + 1) if rows % count == 0]
    return sorted({*small, *(rows // count for count in small)})


def worth_splitting(problem: StageProblem, num_microbatches: int) -> bool:
    """Return whether several microbatches may save memory or time, if their number is not given.

    They do neither where they wait for statistics of the whole batch, and there are none where the step has no other
    batch. To know takes a trace of it, so that it is asked for the first such number that is to be tried.
    """
    trace, method = problem.trace, problem.method
    if method.num_microbatches is not None:
        return True
    if trace.at_batch_of(trace.num_rows // num_microbatches)[0] is None and trace.at_other_batch is None:
        return False
    options = {"batch_statistics": method.batch_statistics, "random": method.random}
    return not waits_for_statistics(trace, num_microbatches, **options)


def likely_times_s(problem: StageProblem, known: KnownLayers, num_microbatches: int, like: int) -> dict[int, float]:
    """Return the seconds of a step by about so many stages, by the layers of another number of microbatches.

    That takes much less work than a search: these of equal stages tell, and how unequal their work is. Infinity where
    they do not fit by these layers. On several machines the stages are those of one search, whatever their number.
    """
    rows, times_s = like / num_microbatches, dict[int, float]()
    if problem.hardware.is_mixed:
        least_s = _UNEQUAL_SHARE * _least_on_machines_s(problem, known, num_microbatches, like)
        return dict.fromkeys(range(1, known.num_layers + 1), least_s)
    cluster = problem.cluster
    schedules = _schedules(problem, num_microbatches, known.num_layers)
    for remat in _remats(problem):
        if times_s and all(map(math.isfinite, times_s.values())):
            break
        layers, costs = known(like, remat, splits=problem.first_schedule.splits_weight_gradients)
        ranges = RangeCosts(problem, layers, costs)
        for count in equal_counts(problem, 1, len(layers.class_of)):
            if math.isfinite(times_s.get(count, math.inf)):
                continue
            times_s[count] = math.inf
            room = _ROOM_OF_ONE if num_microbatches == 1 else usual_share(count)
            with suppress(MemoryTooSmall):
                found = search_fixed_stages(
                    len(layers.class_of),
                    count,
                    _equal_part(cluster, count),
                    TabledCosts(table=partial(ranges.with_rows, factor=rows)),
                    lambda cut, source, target: rows * ranges.transfer_s(cut, source, target),  # noqa: B023
                    timing=Timing(schedule=problem.first_schedule, num_microbatches=num_microbatches),
                    memory_bytes=room * problem.expected_bytes[cluster.group],
                    top=_NUM_RUNNERS_UP if num_microbatches == 1 else 0,
                )
                times_s[count] = min(
                    max(
                        max(_UNEQUAL_SHARE, _evenness(each)) * _least_of_schedules_s(each, num_microbatches, schedules),
                        _least_on_hosts_s(problem, each, num_microbatches),
                    )
                    for each in (found.best, *found.runners_up)
                )
    return times_s


def _least_on_hosts_s(problem: StageProblem, found: Partition, num_microbatches: int) -> float:
    """Return the seconds that given stages, and any others, need of hosts whose devices share their compute; else 0."""
    devices = place_in_groups([stage.submesh for stage in found.stages], problem.clusters)
    assert devices is not None
    works_s = [
        num_microbatches * (stage.cost.forward_s + stage.cost.backward_s) + stage.cost.update_s
        for stage in found.stages
    ]
    return Hosts.of_devices(devices, problem.hardware).least_shared_s(works_s, 2 * num_microbatches)


def _evenness(found: Partition) -> float:
    """Return the share of the time of the slowest stage that all take in the mean."""
    each_s = [stage.cost.forward_s + stage.cost.backward_s for stage in found.stages]
    return sum(each_s) / len(each_s) / max(each_s) if max(each_s) > 0 else 1.0


def _formula_share(num_microbatches: int, num_stages: int) -> float:
    """Return the least share of their time by a formula that so many stages of any sizes are likely to take.

    Formulas add the time of all stages for a microbatch to that of the slowest one for the others, which hides it only
    where it has more microbatches than there are stages.
    """
    hidden = _HIDDEN_SHARE * (num_stages - 1) if num_microbatches > num_stages else 0.0
    return min(_FORMULA_SHARE, num_microbatches / (num_microbatches + hidden))


def _least_of_schedules_s(found: Partition, num_microbatches: int, schedules: Sequence[Schedule]) -> float:
    """Return the least seconds of given stages by the formula of any schedule, as if no link took time.

    Half of a backward pass is taken to be the weight gradient, which is as much as schedules can make use of. The other
    half and the forward pass of a microbatch are one after another in any case.
    """
    costs = [replace(stage.cost, weight_s=stage.cost.backward_s / 2) for stage in found.stages]
    timings = [
        Timing(schedule=schedule, num_microbatches=num_microbatches, virtual_stages=virtual)
        for schedule in schedules
        for virtual in schedule.virtual_stages
        if all(stage.stop - stage.start >= virtual for stage in found.stages)
    ]
    links_s = [0.0] * (len(costs) - 1)
    chain_s = sum(cost.forward_s + cost.backward_s - cost.weight_s for cost in costs)
    return max(chain_s, min([found.step_time_s, *(timing.step_time_s(costs, links_s) for timing in timings)]))


def _least_on_machines_s(problem: StageProblem, known: KnownLayers, num_microbatches: int, like: int) -> float:
    """Return the least seconds of a step whose links are hidden, by layers whose layouts are solved for."""
    rows, timing = like / num_microbatches, Timing(schedule=warmed_up([]), num_microbatches=num_microbatches)
    choices = [
        choice
        for each in problem.clusters
        for choice in submesh_choices(each.num_devices, each.devices_per_host, any_host_count=False, group=each.group)
    ]
    for remat in _remats(problem):
        ranges = RangeCosts(problem, *known(like, remat, splits=False))
        num_layers = len(ranges.layers.class_of)
        with suppress(MemoryTooSmall, InvalidArgument):
            return search_stages(
                num_layers,
                [each.num_devices for each in problem.clusters],
                [choice for choice in choices if choice in ranges.solved],
                TabledCosts(table=partial(ranges.with_rows, factor=rows)),
                lambda cut, source, target: rows * ranges.transfer_s(cut, source, target),  # noqa: B023
                timing=timing,
                memory_bytes=problem.expected_bytes,
            ).step_time_s
    return math.inf


def stage_candidates(
    problem: StageProblem,
    known: KnownLayers,
    num_microbatches: int,
    num_stages: tuple[int, int],
    below_s: float,
    whole_share: float = WHOLE_SHARE,
) -> list[PipelineCandidate]:
    """Return the best stages of every schedule, from the first to the second number of them.

    None that by its formula takes much longer than `below_s` is searched to its end, nor than others that are found
    and, as a whole, take no less than `whole_share` of their time by layers. Any of the stages may be computed
    again where none fit without, or where these take longer than if memory had no end. Raises `MemoryTooSmall` where
    none fit at all, `NotSplittable` and `Unsupported` for batches that cannot be split so.
    """
    tried = _schedules(problem, num_microbatches, num_stages[1])
    by_split = [[each for each in tried if each.splits_weight_gradients == splits] for splits in (False, True)]
    schedules, splitting = by_split if by_split[0] else reversed(by_split)
    most_gain = 2 / 3 * (num_stages[1] - 1) / (num_stages[1] - 1 + num_microbatches)
    ranges_of = partial(RangeCosts.of, problem, known, num_microbatches, bool(by_split[0]))

    def best_of(schedules: Sequence[Schedule], remats: Sequence[bool], limit_s: float) -> list[PipelineCandidate]:
        ranges = ranges_of(schedules[0].splits_weight_gradients, remats)
        found: list[PipelineCandidate] = []
        some_fit, shortage = False, None
        for timing in _timings(problem, ranges.layers, schedules):
            try:
                found += _candidates(
                    problem, ranges, timing, num_stages, _near_s(found, limit_s, whole_share), whole_share
                )
                some_fit = True
            except MemoryTooSmall as error:
                shortage = error
        if not some_fit and shortage is not None:
            raise shortage
        return found

    def best_with(remats: Sequence[bool], limit_s: float = below_s) -> list[PipelineCandidate]:
        found = best_of(schedules, remats, limit_s)
        # Where none is found because they all take too long, those that split weight gradients off may still not.
        worth = any(_is_worth_splitting(each, below_s) for each in found) if found else most_gain > _WORTH_SPLITTING
        if splitting and worth:
            with suppress(MemoryTooSmall):
                found += best_of(splitting, remats, _in_other_order_s(found, limit_s, whole_share))
        return found

    remats = _remats(problem)
    try:
        found = best_with(remats[:1])
    except MemoryTooSmall:
        if len(remats) == 1:
            raise
        found = []
    if len(remats) == 1 or (problem.stage_meshes and found):
        return found
    plain, roomy = ranges_of(schedules[0].splits_weight_gradients, remats[:1]), replace(problem, share=math.inf)
    endless = RangeCosts(roomy, plain.layers, plain.costs)
    share = _formula_share(num_microbatches, num_stages[0])
    bound_s = share * _least_by_formula_s(roomy, endless, schedules, num_stages, below_s / share)
    found_s = min((each.bound_s for each in found), default=math.inf)
    if bound_s >= below_s or found_s <= (1 + _WORTH_RECOMPUTING) * bound_s:
        return [replace(each, bound_s=min(each.bound_s, bound_s)) for each in found]
    with suppress(MemoryTooSmall) if found else nullcontext():
        found += best_with(remats, _in_other_order_s(found, below_s, whole_share))
        found += best_with(remats[1:], _in_other_order_s(found, below_s, whole_share))  # which need the least memory
    return found


def _schedules(problem: StageProblem, num_microbatches: int, most_stages: int) -> list[Schedule]:
    """Return the schedules to try."""
    given = problem.given_schedule
    if given is not None:
        return [given]
    if most_stages == 1 and not problem.offloads:
        return [problem.first_schedule]  # one stage has nothing to wait for
    # Between machines, links may take longer than stages.
    slow_links = [warmed_up([])] if problem.hardware.is_mixed and not problem.stage_meshes else []
    tried = [*SCHEDULES.values(), *slow_links]
    if num_microbatches > 1:
        return tried
    # With one microbatch, a stage has nothing to order but its weight gradient.
    return [problem.first_schedule, *[each for each in tried if each.splits_weight_gradients][:1]]


def _least_by_formula_s(
    problem: StageProblem,
    ranges: RangeCosts,
    schedules: Sequence[Schedule],
    num_stages: tuple[int, int],
    below_s: float,
) -> float:
    """Return the seconds by formula that the best stages would take without updates; 0 where that is not known.

    Of stages that take no less than `below_s`, any number that is no less.
    """
    if problem.stage_meshes:
        return 0.0
    bounds_s: list[float] = []
    for timing in _timings(problem, ranges.layers, schedules):
        for number, clusters, few_to_most in _sizes(problem, ranges.layers, timing, num_stages):
            with suppress(MemoryTooSmall):  # stages of these sizes are not allowed
                search = _partitioned(
                    problem, ranges, timing, number, clusters, few_to_most, updates=False, below_s=below_s
                )
                bounds_s.append(search.lower_bound_s)
    return min(bounds_s, default=math.inf)


def _is_worth_splitting(candidate: PipelineCandidate, below_s: float) -> bool:
    """Return whether weight gradients as tasks of their own may gain much, and make such stages good enough."""
    gain = candidate.gain_from_splitting
    return gain > _WORTH_SPLITTING and _FORMULA_SHARE * (1 - gain) * candidate.step_time_s < below_s


def _remats(problem: StageProblem) -> tuple[bool, ...]:
    return (False, True) if problem.method.remat == "auto" else (bool(problem.method.remat),)


def _candidates(
    problem: StageProblem,
    ranges: RangeCosts,
    timing: Timing,
    num_stages: tuple[int, int],
    below_s: float,
    whole_share: float,
) -> list[PipelineCandidate]:
    """Return the best stages of any sizes, and the best ones of one size for every number of these."""
    if problem.stage_meshes:
        return _colocated_candidates(problem, ranges, timing)
    found: dict[object, PipelineCandidate] = {}
    some_fit, shortage = False, None
    for number, clusters, few_to_most in _sizes(problem, ranges.layers, timing, num_stages):
        try:
            near_s = _near_s(found.values(), below_s, whole_share)
            searches = solved_searches(problem, ranges, timing, number, clusters, few_to_most, near_s)
        except MemoryTooSmall as error:
            shortage = error
            continue
        some_fit = True
        for partition in [each for search in searches for each in (search.best, *search.runners_up)]:
            key = tuple((stage.start, stage.stop, stage.submesh) for stage in partition.stages)
            pointless = len(partition.stages) == 1 and timing.virtual_stages > 1 and not problem.offloads
            if key not in found and not pointless and _is_known(ranges, partition):
                stages = tuple(
                    replace(each, cost=ranges.cost(each.start, each.stop, each.submesh, each.cost.choice))
                    for each in partition.stages
                )
                devices = place_in_groups([stage.submesh for stage in stages], problem.clusters)
                assert devices is not None
                virtual_stages = make_virtual_stages(ranges, stages, devices, timing)
                slow = isinstance(timing.schedule, WarmedUp) and not timing.schedule.extra
                found[key] = PipelineCandidate(
                    layers=ranges.layers,
                    timing=schedule_for_slow_links(timing, stages, virtual_stages, problem.expected_bytes)
                    if slow
                    else timing,
                    bound_s=_formula_share(timing.num_microbatches, few_to_most[0]) * searches[0].lower_bound_s,
                    stages=stages,
                    virtual_stages=virtual_stages,
                    hosts=Hosts.of_devices(devices, problem.hardware),
                )
    if not some_fit and shortage is not None:
        raise shortage
    return list(found.values())


def _near_s(found: Iterable[PipelineCandidate], below_s: float, whole_share: float) -> float:
    """Return the seconds above which other stages are no better than those that are found, as a whole neither."""
    return min([below_s, *(each.step_time_s / whole_share for each in found)])


def _in_other_order_s(found: Sequence[PipelineCandidate], below_s: float, whole_share: float) -> float:
    """Return the seconds above which other orders are no better: formulas tell of these where links hardly matter."""
    best = min(found, key=lambda each: each.step_time_s, default=None)
    return _near_s([best], below_s, whole_share) if best and best.share_without_links >= 1 - _HARDLY_LINKS else below_s


def _sizes(
    problem: StageProblem, layers: Layers, timing: Timing, num_stages: tuple[int, int]
) -> Iterator[tuple[int | None, tuple[Submesh, ...], tuple[int, int]]]:
    """Yield what stages to search: any on these devices, or so many equal ones; and their least and largest number."""
    num_layers = len(layers.class_of) // timing.virtual_stages
    few, most = num_stages[0], min(num_stages[1], num_layers)
    every = problem.clusters
    equal = [(number, every, (few, most)) for number in equal_counts(problem, few, most)]
    if problem.num_stages is not None or few > most or (problem.takes_all_devices and not problem.named_stages):
        yield from equal
        if problem.given_may_differ and (few <= most or not equal):
            yield None, every, (few, few)
        return
    yield None, every, (few, most)
    yield from equal
    for whole in every:
        domain = problem.machine_of(whole).domain
        if whole.num_devices > domain or len(every) > 1:
            # Few devices whose links are all fast may do better than many.
            near = replace(cluster_shape(min(domain, whole.num_devices), whole.devices_per_host), group=whole.group)
            if near.num_devices >= few and _can_hold_all(problem, near):
                yield None, (near,), (few, most)


def _colocated_candidates(problem: StageProblem, ranges: RangeCosts, timing: Timing) -> list[PipelineCandidate]:
    """Return the best stages where the model puts some of them on the devices of others."""
    timed = colocated_stages(problem, ranges, timing)
    candidates: list[PipelineCandidate] = []
    for _, (stages, virtual_stages) in timed:
        devices = place_in_groups([stage.submesh for stage in stages], problem.clusters)
        assert devices is not None
        candidates.append(
            PipelineCandidate(
                layers=ranges.layers,
                timing=timing,
                bound_s=_formula_share(timing.num_microbatches, len(stages)) * timed[0][0],
                stages=stages,
                virtual_stages=virtual_stages,
                hosts=Hosts.of_devices(devices, problem.hardware),
            )
        )
    return candidates


def solved_searches(
    problem: StageProblem,
    ranges: RangeCosts,
    timing: Timing,
    number: int | None,
    clusters: tuple[Submesh, ...],
    num_stages: tuple[int, int],
    below_s: float,
) -> list[StageSearch]:
    """Return the best stages with and without their updates, their layers solved for; none if they are no good.

    By the formula, the longest update follows the last task of all. When simulated, each follows the last of its own
    stage, so that what is best lies between the two, and only the one without updates gives a bound. Raises `TimeIsUp`
    behind the problem's deadline.
    """
    search = partial(
        _partitioned, problem, ranges, timing, number, clusters, num_stages, is_known=partial(_is_known, ranges)
    )
    while True:
        problem.check_time()
        limit_s = below_s / _formula_share(timing.num_microbatches, num_stages[0])
        without = search(updates=False, below_s=limit_s)
        if without.best.step_time_s >= limit_s:
            return []
        if _solve_for(ranges, without.best):
            continue
        whole_s = without.best.step_time_s + max(stage.cost.update_s for stage in without.best.stages)
        whole = search(updates=True, below_s=whole_s)
        searches = [without, whole] if whole.best.step_time_s < whole_s else [without]
        if not _solve_for(ranges, searches[-1].best):
            return searches


def _solve_for(ranges: RangeCosts, best: Partition) -> bool:
    """Have layers solved for as the stages need them; return whether some were not yet.

    On one submesh at a time, as then others may be better: first where nothing but work tells how long they take, and
    on most devices, which tells of fewer.
    """
    unsolved = {stage.submesh for stage in best.stages if not _is_estimated(ranges, stage)}
    unsolved = {submesh for submesh in unsolved if not ranges.is_told(submesh)} or unsolved
    unsolved = sorted(unsolved, key=lambda each: (-each.num_devices, each.group))[:1]
    short = {(stage.submesh, stage.cost.choice) for stage in best.stages if not _is_solved(stage)}
    ranges.solve(unsolved)
    ranges.solve_for_memory(short)
    return bool(unsolved or short)


def _is_known(ranges: RangeCosts, partition: Partition) -> bool:
    """Return whether the layouts of all layers of a partition are known."""
    return all(_is_estimated(ranges, stage) and _is_solved(stage) for stage in partition.stages)


def _is_solved(stage: Stage) -> bool:
    """Return whether layouts of a stage's layers are known, and not only what those that save memory need at least."""
    return stage.cost.choice.memory_multiplier != SAVED_FOR_NOTHING


def _is_estimated(ranges: RangeCosts, stage: Stage) -> bool:
    """Return whether the layouts of a stage's layers are known, as they are or computed again, whichever it does.

    If only of those without weight gradients as tasks of their own, their seconds are close and no more, and what
    stages take as a whole is found anew. One device leaves nothing to choose; what it needs besides is asked for.
    """
    again, submesh = ranges.again, stage.submesh
    mine = again if again is not None and stage.cost.choice.remat != ranges.remat else ranges
    known = mine.solved if mine.whole is None else mine.solved | mine.whole.solved
    return submesh in known or ranges.has_one_choice(submesh)


def equal_counts(problem: StageProblem, few: int, most: int) -> list[int]:
    """Return the numbers of equal stages: the one given, or those from `few` to `most` that divide the devices.

    There is none where the one that is given does not divide them, and stages may differ.
    """
    if problem.hardware.is_mixed:
        return []
    if problem.num_stages is not None:
        return [problem.num_stages] if problem.divides_equally or not problem.given_may_differ else []
    devices, per_host = problem.cluster.num_devices, problem.cluster.devices_per_host
    sizes = {n: devices // n for n in range(few, most + 1) if devices % n == 0}
    return [n for n, size in sizes.items() if size % per_host == 0 or per_host % size == 0]


def _timings(problem: StageProblem, layers: Layers, schedules: Sequence[Schedule]) -> Iterator[Timing]:
    """Yield the schedules to try, each with its numbers of stages on a mesh.

    Where the number of stages is given, each has a mesh of its own unless the schedule is given as well.
    """
    given = problem.given_schedule is not None
    if problem.stage_meshes:
        yield from (Timing(schedule=each, num_microbatches=layers.num_microbatches) for each in schedules)
        return
    meshes = problem.num_stages or len(problem.named_stages) or 2  # of which each needs a layer for every stage
    for schedule in schedules:
        counts = [count for count in schedule.virtual_stages if len(layers.class_of) >= meshes * count] or [1]
        if schedule.virtual_stages == (1,) or given or problem.method.num_stages is None:
            for count in counts:
                yield Timing(schedule=schedule, num_microbatches=layers.num_microbatches, virtual_stages=count)


def _partitioned(
    problem: StageProblem,
    ranges: RangeCosts,
    timing: Timing,
    number: int | None,
    clusters: tuple[Submesh, ...],
    num_stages: tuple[int, int],
    *,
    updates: bool,
    below_s: float = math.inf,
    is_known: Callable[[Partition], bool] = lambda partition: True,
) -> StageSearch:
    """Return the best stages of any sizes on a part of every group, or so many of one size on all of the only one.

    Without `updates` the step ends before them. If no stages take less than `below_s`, it is any stages. Runners-up are
    those that are known well enough, as `is_known` says.

    With several stages on a mesh, the layers of each mesh are priced as one range.
    """
    num_layers = len(ranges.layers.class_of)
    near = len(clusters) == 1 and clusters[0].num_devices <= problem.machine_of(clusters[0]).domain
    transfer_s = partial(ranges.transfer_s, same_domain=True if near else None)

    def table(submesh: Submesh) -> RangeTable:
        found = ranges.table(submesh, _allowed_ranges(problem, ranges.layers, timing, num_stages, submesh))
        return found if problem.time_share is None else found.in_time(_shares(problem.time_share, submesh, num_layers))

    costs = TabledCosts(table=table)
    timing = replace(timing, counts_updates=updates)
    if number is not None:
        return search_fixed_stages(
            num_layers,
            number,
            _equal_part(problem.cluster, number),
            costs,
            transfer_s,
            timing=timing,
            memory_bytes=problem.expected_bytes[0],
            below_s=below_s,
            top=_NUM_RUNNERS_UP,
        )
    shapes = {cluster.group: cluster for cluster in clusters}
    choices = [
        submesh
        for group, cluster in shapes.items()
        for submesh in submesh_choices(cluster.num_devices, cluster.devices_per_host, any_host_count=False, group=group)
    ]
    available = [shapes[n].num_devices if n in shapes else 0 for n in range(len(problem.clusters))]
    places = [shapes.get(n, whole) for n, whole in enumerate(problem.clusters)]
    return search_stages(
        num_layers,
        available,
        [submesh for submesh in choices if submesh.num_devices + num_stages[0] - 1 <= sum(available)],
        costs,
        transfer_s,
        timing=timing,
        min_stages=1 if problem.num_stages is None else num_stages[0],
        max_stages=num_stages[1],
        memory_bytes=problem.expected_bytes,
        time_limit_s=min(problem.method.time_limit_s, problem.deadline_s - time.process_time()),
        most_labels=math.inf if problem.method.effort == "thorough" else MOST_LABELS,
        below_s=below_s,
        top=_NUM_RUNNERS_UP,
        can_place=lambda submeshes: place_in_groups(submeshes, places) is not None,
        is_known=is_known,
    )


def _shares(share_of: TimeShare, submesh: Submesh, num_layers: int) -> np.ndarray:
    """Return the shares [start, stop] of their time by their layers that ranges are expected to take on a submesh."""
    by_length = np.array([1.0, *(share_of(submesh, length) for length in range(1, num_layers + 1))])
    lengths = np.arange(num_layers + 1)[None, :] - np.arange(num_layers)[:, None]
    return by_length[np.maximum(lengths, 0)]


def _can_hold_all(problem: StageProblem, part: Submesh) -> bool:
    """Return whether all stages that the model names can lie on a part of one group."""
    named, group = problem.named_stages, problem.hardware.groups[part.group]
    return all(is_of_kind(group, each) for each in named) and sum(s.devices or 1 for s in named) <= part.num_devices


def _allowed_ranges(
    problem: StageProblem, layers: Layers, timing: Timing, num_stages: tuple[int, int], submesh: Submesh
) -> np.ndarray:
    """Return which ranges [start, stop) may be on a mesh: not too few layers, nor all where there are more stages."""
    num_layers = len(layers.class_of)
    start, stop = np.arange(num_layers)[:, None], np.arange(num_layers + 1)[None, :]
    allowed = stop - start >= timing.virtual_stages
    if num_stages[0] > 1:
        allowed &= stop - start < num_layers
    whole = all(submesh.num_devices % each == 0 for each in layers.least_devices)
    if problem.allows is None and not problem.named_stages and whole:
        return allowed
    for first, behind in np.argwhere(allowed).tolist():
        keeps = problem.allows is None or problem.allows(first, behind, num_layers)
        allowed[first, behind] = keeps and _keeps_scopes(problem, layers, first, behind, submesh)
    return allowed


def _keeps_scopes(problem: StageProblem, layers: Layers, start: int, stop: int, submesh: Submesh) -> bool:
    """Return whether a run of layers on a submesh is a stage that the model names, if it names any, on its devices."""
    if problem.named_stages:
        stage = problem.named_stages[start]
        if stop - start > 1 or stage.devices not in (None, submesh.num_devices):
            return False
        if not is_of_kind(problem.hardware.groups[submesh.group], stage):
            return False
    return all(submesh.num_devices % layers.least_devices[number] == 0 for number in set(layers.class_of[start:stop]))


def _equal_part(cluster: Submesh, count: int) -> Submesh:
    """Return one of `count` equal parts of the cluster."""
    size, rest = divmod(cluster.num_devices, count)
    if rest:
        raise InvalidArgument(
            f"{cluster.num_devices} devices do not divide into {count} equal stages. Use a number of stages that "
            "divides them, or leave it to the search."
        )
    return cluster_shape(size, cluster.devices_per_host)
