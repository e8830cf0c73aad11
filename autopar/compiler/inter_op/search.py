"""Cut the layers into stages and give each stage a submesh, so that a step takes the least time: exactly.

The time of a step (`stage_costs`) is a sum over stages plus the largest steady_s plus what ends last, subject
to the number of devices of each group and to the memory of each, which depends on the number of stages behind. The
groups of a cluster may follow each other in any order along the stages. Partitions are sorted into intervals (a, b] of
their largest steady_s, and for schedules whose memory depends on the number S of stages, into ranges of S. For an
interval,

    a + the least sum under the cap b, by `prefix_bounds`                                       → bound_s

bounds all that is in it. The interval with the lowest bound is next: its partitions are enumerated by `extend_labels`
if few labels are enough, otherwise it is halved. The search ends when no bound is below the best partition; then that
one is optimal among the submeshes that were given. Stopped earlier, the lowest bound left says how far it can be off.
"""

import heapq
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count, pairwise
from typing import Any, Literal, NoReturn

import numpy as np

from autopar.compiler.inter_op.bounds import PrefixBounds, least_time_s, most_stages, prefix_bounds, relaxed_path
from autopar.compiler.inter_op.labels import LabelTask, StageChoice, extend_labels
from autopar.compiler.inter_op.stage_costs import (
    CostTables,
    IntArray,
    Partition,
    Stage,
    StageCosts,
    TabledCosts,
    Timing,
    TransferTime,
    cost_tables,
)
from autopar.compiler.inter_op.submeshes import Submesh
from autopar.errors import InvalidArgument, MemoryTooSmall

_BEAM = 24  # labels per cut of the quick look for a first partition
_SLACK = 1.2  # it also looks for partitions that take so much longer than the best one, or than is of interest
_SLACK_OF_FEW = 1.5  # the same where there are few: schedules take less than formulas tell where values are sent
_MOST_ADDED = 200  # partitions of one enumeration, fastest first
_FEW_LABELS = 4000  # with more, an interval is halved instead
_FEW_CHOICES = 30  # ways to run ranges of layers, whose partitions are looked at without any halving
_LOWER = 0.8  # of a cap: one that is worth new bounds
_WIDE = 0.03  # of the step time: an interval that is halved before its partitions are looked at
_NARROW = 1e-3  # of the step time: an interval that gains little by halving
_LITTLE = 0.3  # the same, of the distance between its bound and the best partition
_CLOSED = 1e-12
_NEVER = 1 << 30  # devices that no cluster has
_HALVINGS = 12  # of the memory: a quarter of a per mille of the range
_ROUNDING = 1 + 1e-9  # bytes are added here, and divided in the tables
MANY_LABELS = 20_000
"""Labels beyond which bounds count the stages behind a cut: much closer where memory is short, but more work."""
MOST_LABELS = 100_000
"""Most labels that a search may take: five times as many as it takes where memory is not nearly all needed."""

Placeable = Callable[[Sequence[Submesh]], bool]


@dataclass(frozen=True, kw_only=True)
class StageSearch:
    """The best partition, what is proved of it, and others that were met on the way."""

    best: Partition
    lower_bound_s: float  # no partition into the given submeshes takes less by the schedule's formula
    runners_up: tuple[Partition, ...]  # fastest first; not necessarily the next best ones
    num_explored: int  # labels

    @property
    def step_time_s(self) -> float:
        """The step time of the best partition."""
        return self.best.step_time_s

    @property
    def gap(self) -> float:
        """The share of the step time by which it can at most be improved; 0.0 if it is proved to be optimal."""
        return max(0.0, 1.0 - self.lower_bound_s / self.step_time_s) if self.step_time_s else 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class _Interval:
    """Partitions of so many stages whose largest steady_s is above a floor and at most a cap."""

    bound_s: float
    floor_s: float
    cap_s: float
    stages: tuple[int, int]  # from, up to and including
    bounded: int = 0  # 1 if bound_s is that of its own cap, 2 if that counts the stages behind a cut
    tried: bool = False  # whether a quick look has been taken


@dataclass(kw_only=True, eq=False)
class _State:
    """The state of the search; only functions of this module change it."""

    tables: CostTables
    memory_bytes: tuple[float, ...]  # of a device of each group
    least_stages: int
    most_stages: int
    can_place: Placeable
    deadline: float | None
    most_labels: float
    are_few: bool  # whether all partitions of an interval are looked at before it is halved
    below_s: float  # if no partition takes less, the best of them is of no interest
    partitions: dict[tuple[tuple[int, int, int], ...], Partition] = field(default_factory=dict[Any, Partition])
    best_s: float = math.inf
    not_placed_s: float = math.inf  # the least that a partition takes which there is no place for
    num_labels: int = 0
    limits: dict[int, IntArray] = field(default_factory=dict[int, IntArray])
    bounds: dict[tuple[int, int, float, bool], PrefixBounds | None] = field(default_factory=dict[Any, Any])

    @property
    def is_over(self) -> bool:
        """True once the time or the work is spent."""
        late = self.deadline is not None and time.monotonic() > self.deadline
        return late or self.num_labels > self.most_labels

    @property
    def by_stages(self) -> bool:
        """True once there are so many labels that bounds are worth more work."""
        return self.num_labels > MANY_LABELS

    @property
    def enough_s(self) -> float:
        """The bound in seconds that ends the search."""
        return min(self.best_s, self.below_s)

    @property
    def limit_s(self) -> float:
        """The seconds that partitions have to undercut; some that are of no interest are runners-up."""
        return min(self.best_s, _SLACK * self.below_s)


def search_stages(
    num_layers: int,
    num_devices: int | Sequence[int],
    submeshes: Sequence[Submesh],
    stage_costs: StageCosts | TabledCosts,
    transfer_s: TransferTime,
    *,
    timing: Timing,
    memory_bytes: float | Sequence[float],
    min_stages: int = 1,
    max_stages: int | None = None,
    time_limit_s: float | None = None,
    most_labels: float = math.inf,
    below_s: float = math.inf,
    top: int = 5,
    can_place: Placeable = lambda submeshes: True,
    is_known: Callable[[Partition], bool] = lambda partition: True,
) -> StageSearch:
    """Return the partition that takes the least time; raise `MemoryTooSmall` or `InvalidArgument` if there is none.

    In a cluster of several groups, `num_devices` and `memory_bytes` are by group, and every submesh is of one of them.
    `can_place` refuses submeshes that do not fit into the cluster although they have few enough devices; it is needed
    only where `submeshes.always_fits` is false, and what it refuses keeps the bound from rising above it.
    Runners-up are those that are known well enough, as `is_known` says: the `top` fastest, and as many elsewhere.
    Neither `time_limit_s` nor `most_labels`, which is work, ends the search before there is a partition, as there is no
    answer without one: then the bound is that of what is left. Nor does it end before that where none takes less than
    `below_s`: then any is returned, and a bound that is no lower.
    """
    if num_layers < 1 or (max_stages is not None and max_stages < 1):
        raise InvalidArgument(
            f"{num_layers} layers cannot be cut into at most {max_stages} stages. Give at least 1 of both."
        )
    if not 1 <= min_stages <= min(num_layers, max_stages or num_layers):
        raise InvalidArgument(
            f"At least {min_stages} stages were asked for of {num_layers} layers, and at most "
            f"{max_stages or num_layers}. Give a number from 1 to these."
        )
    available = (num_devices,) if isinstance(num_devices, int) else tuple(num_devices)
    memory = (memory_bytes,) if isinstance(memory_bytes, int | float) else tuple(memory_bytes)
    if len(memory) != len(available):
        raise InvalidArgument(
            f"There are devices of {len(available)} groups and memory of {len(memory)} groups. Give both for each."
        )
    tables = cost_tables(num_layers, available, submeshes, stage_costs, transfer_s, timing)
    # Costs are computed when they are asked for first, which may take longer than the search.
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
    state = _State(
        tables=tables,
        memory_bytes=memory,
        least_stages=min_stages,
        most_stages=min(num_layers, max_stages or num_layers, sum(available) // min(tables.devices, default=1)),
        can_place=can_place,
        deadline=deadline,
        most_labels=most_labels,
        are_few=int(np.isfinite(tables.steady_s).sum()) <= _FEW_CHOICES,
        below_s=below_s,
    )
    lower_s = _run(state)
    if not state.partitions:
        _raise_no_partition(tables, memory, state.least_stages, state.most_stages)
    if len(state.partitions) <= top and state.best_s < below_s and not state.is_over:
        _look_around(state)
    partitions = sorted(state.partitions.values(), key=lambda partition: partition.step_time_s)
    best_s = partitions[0].step_time_s
    return StageSearch(
        best=partitions[0],
        lower_bound_s=min(lower_s, state.not_placed_s, best_s),
        runners_up=_runners_up(partitions[0], filter(is_known, partitions[1:]), top),
        num_explored=state.num_labels,
    )


def _runners_up(best: Partition, others: Iterable[Partition], top: int) -> tuple[Partition, ...]:
    """Return the `top` fastest of others, and as many of the fastest on other submeshes than those before.

    What stages take as a whole depends on their submeshes more than on where layers are cut.
    """
    fastest: list[Partition] = []
    elsewhere: list[Partition] = []
    met = {tuple(stage.submesh for stage in best.stages)}
    for each in others:
        submeshes = tuple(stage.submesh for stage in each.stages)
        if len(fastest) < top:
            fastest.append(each)
        elif submeshes not in met and len(elsewhere) < top:
            elsewhere.append(each)
        met.add(submeshes)
    return (*fastest, *elsewhere)


def _run(state: _State) -> float:
    """Close intervals until none is left; the lowest bound of those left when the time is up."""
    steadies_s = state.tables.steady_s[np.isfinite(state.tables.steady_s)]
    if not steadies_s.size or state.most_stages < state.least_stages:
        return math.inf
    links_s = state.tables.transfer_s[np.isfinite(state.tables.transfer_s)]
    timing = state.tables.timing
    # No steady_s is longer than this, whichever way the schedule adds transfers.
    cap_s = float(steadies_s.max() + timing.num_microbatches * timing.virtual_stages * links_s.max(initial=0.0))
    numbers = count()
    least_s = least_time_s(state.tables) / _ROUNDING
    whole = _Interval(bound_s=least_s, floor_s=0.0, cap_s=cap_s, stages=(state.least_stages, state.most_stages))
    if least_s >= state.below_s:
        _add_smallest(state, whole)  # any partition will do
    queue = [(least_s, next(numbers), whole)]
    while queue:
        bound_s, _, interval = heapq.heappop(queue)
        if state.partitions and bound_s >= state.enough_s * (1 - _CLOSED):
            return min(max(bound_s, state.enough_s), state.limit_s)
        if state.partitions and state.is_over:
            return bound_s
        for rest in _close(state, interval):
            heapq.heappush(queue, (rest.bound_s, next(numbers), rest))
    return state.limit_s  # what takes longer was not looked for


def _close(state: _State, interval: _Interval) -> list[_Interval]:
    """Return the rest of an interval after one step to bound or enumerate it."""
    bounds = _bounds(state, interval)
    if bounds is None:
        return []
    if interval.bounded < 1 + state.by_stages:
        _add_relaxed(state, bounds)
        bound_s = max(interval.bound_s, interval.floor_s + bounds.bound_s)
        return [replace(interval, bound_s=bound_s, bounded=1 + state.by_stages)]
    one_number = interval.stages[0] == interval.stages[1] or not state.tables.timing.memory_depends_on_num_stages
    if not state.partitions and not _add_smallest(state, interval):
        low, high = interval.stages
        if one_number or _fewest_devices(state.tables, _limits(state, low), (state.least_stages, high)) is None:
            return []  # of more stages each holds no fewer microbatches in flight than of the lowest number
        return _by_stages(interval)
    # Whatever has a longer steady_s than this takes longer than what is of interest.
    useful_s = state.limit_s - bounds.bound_s
    if useful_s < _LOWER * interval.cap_s:
        return [replace(interval, cap_s=useful_s, bounded=0)] if useful_s > interval.floor_s else []
    width_s = interval.cap_s - interval.floor_s
    if width_s > _WIDE * state.limit_s and not state.are_few:
        return _by_steady(interval)
    if not interval.tried and not state.are_few:
        _enumerate(state, interval, bounds, _SLACK, width=_BEAM)
        return [replace(interval, tried=True)]
    # Halving takes off half of the width, and nothing of what the bound is too low by.
    narrow = width_s <= max(_NARROW * state.limit_s, _LITTLE * (state.limit_s - interval.bound_s))
    most = (state.most_labels if state.by_stages else min(MANY_LABELS + 1, state.most_labels)) - state.num_labels
    most, slack = most if narrow else min(most, _FEW_LABELS), _SLACK_OF_FEW if state.are_few else 1.0
    match _enumerate(state, interval, bounds, slack, max_labels=most):
        case "closed":
            return []
        case "does not fit":
            return _by_stages(interval)
        case _:
            state.are_few = False
            return [interval] if narrow else _by_steady(interval)


def _look_around(state: _State) -> None:
    """Add partitions that take little longer than the best, where its bound was attained before others were met."""
    cap_s = float(state.tables.steady_s[np.isfinite(state.tables.steady_s)].max())
    whole = _Interval(bound_s=0.0, floor_s=0.0, cap_s=cap_s, stages=(state.least_stages, state.most_stages))
    if (bounds := _bounds(state, whole)) is None:
        return
    if not state.are_few or _enumerate(state, whole, bounds, _SLACK_OF_FEW, max_labels=_FEW_LABELS) == "unfinished":
        _enumerate(state, whole, bounds, _SLACK, width=_BEAM)


def _by_steady(interval: _Interval) -> list[_Interval]:
    """Two halves; the upper one has the cap and hence the bound of the whole, and a higher floor."""
    middle_s = (interval.floor_s + interval.cap_s) / 2
    lower = replace(interval, cap_s=middle_s, bounded=0, tried=False)
    upper = replace(interval, floor_s=middle_s, bounded=0)
    return [lower, upper]


def _by_stages(interval: _Interval) -> list[_Interval]:
    low, high = interval.stages
    middle = (low + high) // 2
    ranges = ((low, middle), (middle + 1, high))
    return [replace(interval, stages=stages, bounded=0, tried=False) for stages in ranges]


def _enumerate(
    state: _State,
    interval: _Interval,
    bounds: PrefixBounds,
    slack: float,
    *,
    width: int | None = None,
    max_labels: float = math.inf,
) -> Literal["closed", "does not fit", "unfinished"]:
    """Add the partitions of an interval that take less than the best, or than some multiple of it.

    For a range of numbers of stages, memory is that of the lowest number. If even so nothing is better, or the best
    that is fits in truth, the interval is closed; otherwise the range has to be split.
    """
    task = LabelTask(
        tables=state.tables,
        limits=_limits(state, interval.stages[0] if state.tables.timing.memory_depends_on_num_stages else 0),
        bounds=bounds,
        num_stages=interval.stages[1],
        least_stages=state.least_stages,
        least_steady_s=interval.floor_s,
        below_s=slack * state.limit_s,
        width=width,
        max_labels=max_labels,
        keeps_all=state.are_few and width is None,
        deadline=state.deadline if state.partitions else None,
    )
    result = extend_labels(task)
    state.num_labels += result.num_labels
    fits = [_add(state, stages) for stages in result.partitions[:_MOST_ADDED]]
    if not result.finished:
        return "unfinished"
    return "closed" if not fits or fits[0] else "does not fit"


def _add_relaxed(state: _State, bounds: PrefixBounds) -> None:
    """Add the partition that attains a bound, if its stages are not too many, and fit into memory."""
    path = relaxed_path(state.tables, bounds)
    if len(path) > state.most_stages:
        return
    limits = _limits(state, len(path))
    stages: list[StageChoice] = []
    for behind, (start, stop, m) in enumerate(reversed(path)):
        at = (m, start, stop)
        fits = (limits[at] >= behind) & (state.tables.steady_s[at] <= bounds.cap_s)
        if not fits.any():
            return
        stages.append((m, start, stop, int(np.where(fits, state.tables.warmup_s[at], np.inf).argmin())))
    _add(state, stages[::-1])


def _add_smallest(state: _State, interval: _Interval) -> bool:
    """Add the partition on the fewest devices; False if there is none for the number of stages (or those tried)."""
    low, high = interval.stages
    depends = state.tables.timing.memory_depends_on_num_stages
    for most in sorted({low, *(1 << n for n in range(12) if low < 1 << n < high), high} if depends else {high}):
        stages = _fewest_devices(state.tables, _limits(state, most if depends else 0), (state.least_stages, most))
        if stages is not None:
            _add(state, stages)
            return True
    return False


def _add(state: _State, choices: Sequence[StageChoice]) -> bool:
    """Add a partition; False if it does not fit into memory with as many stages as it has."""
    tables = state.tables
    stages = tuple(
        Stage(start=start, stop=stop, submesh=tables.submeshes[m], cost=tables.cost(m, start, stop, c))
        for m, start, stop, c in choices
    )
    in_flight = (tables.timing.num_in_flight(stages_behind=n, num_stages=len(stages)) for n in count())
    memory = state.memory_bytes
    if any(s.cost.peak_bytes(n) > memory[s.submesh.group] * _ROUNDING for s, n in zip(reversed(stages), in_flight)):
        return False
    transfers_s = [float(tables.transfer_s[a[2], a[0], b[0]]) for a, b in pairwise(choices)]
    time_s = tables.timing.step_time_s([stage.cost for stage in stages], transfers_s)
    key = tuple((m, start, stop) for m, start, stop, _ in choices)
    if not math.isfinite(time_s) or (key in state.partitions and state.partitions[key].step_time_s <= time_s):
        return True
    if key not in state.partitions and not state.can_place([stage.submesh for stage in stages]):
        state.not_placed_s = min(state.not_placed_s, time_s)
        return True
    state.partitions[key] = Partition(stages=stages, step_time_s=time_s)
    state.best_s = min(state.best_s, time_s)
    return True


def _bounds(state: _State, interval: _Interval) -> PrefixBounds | None:
    key = (*interval.stages, interval.cap_s, state.by_stages)
    if key not in state.bounds:
        while len(state.bounds) >= 4:  # they are large
            state.bounds.pop(next(iter(state.bounds)))
        limits = _limits(state, interval.stages[0] if state.tables.timing.memory_depends_on_num_stages else 0)
        most, by_stages, cap_s = interval.stages[1], state.by_stages, interval.cap_s
        if by_stages and state.partitions:  # of intervals with one cap, later ones have no lower floor
            most = min(most, most_stages(state.tables, limits, cap_s, state.limit_s - interval.floor_s))
        least = state.least_stages
        state.bounds[key] = (
            prefix_bounds(state.tables, limits, cap_s, num_stages=most, least_stages=least, by_stages=by_stages)
            if most >= least
            else None
        )
    return state.bounds[key]


def _limits(state: _State, num_stages: int) -> IntArray:
    if num_stages not in state.limits:
        while len(state.limits) >= 4:
            state.limits.pop(next(iter(state.limits)))
        state.limits[num_stages] = state.tables.limits(state.memory_bytes, num_stages=num_stages)
    return state.limits[num_stages]


def _fewest_devices(tables: CostTables, limits: IntArray, num_stages: tuple[int, int]) -> list[StageChoice] | None:
    """Return a partition of so many stages, from the least to the most, on the fewest devices; None if these lack.

    D[s, i, r] = min over k > i, submesh m with a choice that fits with s-1 stages behind:  |m| + D[s-1, k, r - |m|]

    is the fewest devices of the first group on which layers [i, L) run as s stages, with r devices of each other group
    at most; |m| counts in the sum or in r, by its group. Some partition fits if D[s, 0] is no more than there are for
    some s of these numbers.
    """
    most_behind, sizes = limits.max(axis=-1), tables.devices_by_group
    first, *others = tables.available
    others = np.array(others, dtype=np.int64)
    needed = [np.full((tables.num_layers + 1, *(others + 1)), _NEVER)]
    needed[0][-1] = 0

    def on(m: int, behind: int) -> IntArray:
        """[stop, r]: the devices of the first group, if the next stage in front is on a submesh."""
        sums = np.full_like(needed[behind], _NEVER)
        own, rest = sizes[m, 0], sizes[m, 1:]
        room = np.maximum(others + 1 - rest, 0)
        sums[:, *map(slice, rest, others + 1)] = own + needed[behind][:, *map(slice, room)]
        return sums

    spread = (..., *[None] * len(others))
    for behind in range(num_stages[1]):
        fewest = np.full_like(needed[0], _NEVER)
        for m in range(len(sizes)):
            sums = np.where((most_behind[m] >= behind)[spread], on(m, behind)[None], _NEVER)
            np.minimum(fewest[:-1], sums.min(axis=1), out=fewest[:-1])
        needed.append(fewest)
    left = others
    best = min(range(num_stages[0], num_stages[1] + 1), key=lambda count: needed[count][0, *left])
    if needed[best][0, *left] > first:
        return None
    stages: list[StageChoice] = []
    start = 0
    for behind in range(best - 1, -1, -1):
        fitting = most_behind[:, start] >= behind
        sums = np.array([np.where(fitting[m], on(m, behind)[:, *left], _NEVER) for m in range(len(sizes))])
        m, stop = (int(n) for n in np.unravel_index(sums.argmin(), sums.shape))
        fits = limits[m, start, stop] >= behind
        stages.append((m, start, stop, int(np.where(fits, tables.warmup_s[m, start, stop], np.inf).argmin())))
        start, left = stop, left - sizes[m, 1:]
    return stages


def _raise_no_partition(
    tables: CostTables, memory_bytes: tuple[float, ...], least_stages: int, num_stages: int
) -> NoReturn:
    """Raise `MemoryTooSmall`, which tells the least memory that is enough, or `InvalidArgument` if none is.

    Where groups have different memory, all of it grows in proportion.
    """
    powers = {1 << power for power in range(num_stages.bit_length())}
    counts = sorted(each for each in powers | {num_stages} if each >= max(1, least_stages))
    if not tables.timing.memory_depends_on_num_stages:
        counts = counts[-1:]

    def fitting(budget_bytes: float) -> tuple[list[StageChoice], int] | None:
        for most in counts:
            budgets = [budget_bytes * (each / max(memory_bytes)) for each in memory_bytes]
            stages = _fewest_devices(tables, tables.limits(budgets, num_stages=most), (least_stages, most))
            if stages is not None:
                return stages, most
        return None

    needs = np.maximum(
        tables.base_bytes + tables.activation_bytes * tables.timing.num_microbatches, tables.update_bytes
    )
    high = float(np.max(needs[np.isfinite(needs)], initial=0.0))
    high *= max(memory_bytes) / min(memory_bytes)
    smallest = fitting(high) if high and counts else None
    if smallest is None or high <= max(memory_bytes):
        number = f"at least {least_stages}" if least_stages > 1 else f"at most {num_stages}"
        raise InvalidArgument(
            f"There is no way to run {tables.num_layers} layers in {number} stages on {tables.num_devices} "
            f"devices with submeshes {', '.join(map(str, tables.submeshes)) or '(none)'}, whatever memory they have. "
            "Give more devices, smaller submeshes or another number of stages."
        )

    @cache
    def found() -> tuple[str, float]:
        return _shortage(tables, memory_bytes, *_smallest(fitting, max(memory_bytes), high, smallest))

    raise MemoryTooSmall(lambda: found()[0], least_share=lambda: found()[1])


def _smallest(
    fitting: Callable[[float], tuple[list[StageChoice], int] | None],
    low: float,
    high: float,
    smallest: tuple[list[StageChoice], int],
) -> tuple[list[StageChoice], int]:
    """Return by halving the stages that fit into the least bytes from `low` to `high`, where the `smallest` do."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        better = fitting(middle)
        low, high, smallest = (low, middle, better) if better is not None else (middle, high, smallest)
    return smallest


def _shortage(
    tables: CostTables, memory_bytes: tuple[float, ...], stages: list[StageChoice], count: int
) -> tuple[str, float]:
    """Return in words what is missing, and the multiple of all memory that is enough."""
    excesses: list[tuple[float, int, float, float]] = []
    for number, (m, start, stop, _) in enumerate(stages):
        in_flight = tables.timing.num_in_flight(stages_behind=len(stages) - 1 - number, num_stages=count)
        there = np.flatnonzero(np.isfinite(tables.warmup_s[m, start, stop]))
        peak = min(tables.cost(m, start, stop, int(choice)).peak_bytes(in_flight) for choice in there)
        excesses.append((peak - memory_bytes[tables.submeshes[m].group], number, in_flight, peak))
    excess, number, in_flight, peak = max(excesses)
    m, start, stop, _ = stages[number]
    gib = 2.0**30
    budgets = " and ".join(f"{each / gib:.3g}" for each in memory_bytes)
    words = (
        f"No partition of {tables.num_layers} layers into stages on {tables.num_devices} devices fits into "
        f"{budgets} GiB per device. The smallest has {len(stages)} stages; its stage {number}, "
        f"layers [{start}, {stop}) on {tables.submeshes[m]} devices with {in_flight:.3g} microbatches in flight, needs "
        f"{peak / gib:.3g} GiB: {excess / gib:.3g} GiB are missing."
    )
    return words, max(each_peak / (each_peak - each) for each, _, _, each_peak in excesses)
