"""Put stages in front of stages, from the last layer to the first, and keep what may become the best partition.

A label is a way to run the layers behind a cut. It remembers what matters for the layers before the cut: the first
submesh, devices and stages used, the sum of warm-ups and transfers, the largest steady_s, and what its stages take
behind the last task of the first. Of two labels of one cut and one first submesh, one that has no more of anything
makes the other superfluous, but for complete partitions, which are compared by their time alone. A label is dropped,
too, when even with the bound on what it lacks (`prefix_bounds`) it takes as long as a partition that is known already.
"""

import math
import time
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from autopar.compiler.inter_op.bounds import PrefixBounds
from autopar.compiler.inter_op.stage_costs import CostTables, IntArray, StageArray

_AT_ONCE = 200  # so many labels of one cut are all compared with each other at once
_PAIRWISE = 1500  # so many labels of one cut and submesh are all compared with each other
_TOLERANCE = 1e-12  # of the step time: what is better by less is not better

StageChoice = tuple[int, int, int, int]  # submesh, start, stop, number of the choice


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelTask:
    """The partitions that are looked for."""

    tables: CostTables
    limits: IntArray
    bounds: PrefixBounds
    num_stages: int  # at most
    least_stages: int  # with more than one, labels of fewer stages do not beat those of more
    least_steady_s: float  # below, a smaller steady_s gains nothing
    below_s: float  # only partitions that take less
    width: int | None = None  # labels kept at each cut, those with the lowest bounds
    max_labels: float = math.inf
    keeps_all: bool = False  # whether labels stay that another one makes superfluous: runners-up may have them
    deadline: float | None = None  # of time.monotonic()

    @property
    def limit_s(self) -> float:
        """The seconds that a bound must be below."""
        return self.below_s * (1 - _TOLERANCE)


@dataclass(frozen=True, kw_only=True)
class LabelResult:
    """Partitions, fastest first; `finished` if none of those asked for is missing."""

    partitions: tuple[tuple[StageChoice, ...], ...]
    num_labels: int
    finished: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class _Labels:
    cut: IntArray
    submesh: IntArray
    devices: IntArray  # [label, group]
    stages: IntArray
    sum_s: StageArray
    steady_s: StageArray
    end_s: StageArray
    parent: IntArray
    choice: IntArray
    bound_s: StageArray

    def take(self, index: NDArray[np.int64] | NDArray[np.bool_] | slice) -> "_Labels":
        return _Labels(**{name: getattr(self, name)[index] for name in _COLUMNS})


_COLUMNS = tuple(column.name for column in fields(_Labels))


def _joined(parts: list[_Labels]) -> _Labels:
    return _Labels(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS})


def extend_labels(task: LabelTask) -> LabelResult:
    """All partitions that are worth it, unless a width, a number of labels or a deadline ends the search."""
    labels = _root(task.tables)
    finished = True
    for start in range(task.tables.num_layers - 1, -1, -1):
        # Cuts fall from label to label: the first one that is not behind the longest stage from this layer.
        first = len(labels.cut) - int(np.searchsorted(labels.cut[::-1], task.bounds.furthest[start], side="right"))
        new = _stage_in_front(task, labels.take(slice(first, None)), start)
        if new is None:
            continue
        new = _undominated(new, task.least_stages > 1) if start and not task.keeps_all else new
        new = replace(new, parent=first + new.parent)
        if task.width is not None and len(new.cut) > task.width:
            new = new.take(np.argsort(new.bound_s, kind="stable")[: task.width])
            finished = False
        labels = _joined([labels, new])
        too_many = len(labels.cut) > task.max_labels
        if too_many or (task.deadline is not None and time.monotonic() > task.deadline):
            return LabelResult(partitions=(), num_labels=len(labels.cut), finished=False)
    whole = np.flatnonzero(labels.cut == 0)
    whole = whole[np.argsort(labels.bound_s[whole], kind="stable")]
    partitions = tuple(_choices(labels, int(n)) for n in whole)
    return LabelResult(partitions=partitions, num_labels=len(labels.cut), finished=finished)


def _root(tables: CostTables) -> _Labels:
    integers = {"cut": tables.num_layers, "submesh": len(tables.devices), "stages": 0}
    integers |= {"parent": -1, "choice": -1}
    floats = dict.fromkeys(("sum_s", "steady_s", "end_s", "bound_s"), 0.0)
    return _Labels(
        devices=np.zeros((1, len(tables.available)), dtype=np.int64),
        **{name: np.array([value], dtype=np.int64) for name, value in integers.items()},
        **{name: np.array([value]) for name, value in floats.items()},
    )


def _stage_in_front(task: LabelTask, labels: _Labels, start: int) -> _Labels | None:
    """Every label with one more stage, from layer `start` to the label's cut, on every submesh, in every way.

    None if there is none that is worth it.
    """
    tables, bounds = task.tables, task.bounds
    sizes = tables.sizes
    left = tables.available_by_group - labels.devices
    enough = left[:, tables.groups] >= sizes  # [label, submesh]
    enough &= left.sum(axis=1)[:, None] - sizes >= bounds.devices_before[start]
    crossing_s = bounds.transfer_s[labels.cut, : len(sizes), labels.submesh]
    behind = bounds.with_behind(labels.stages)
    sum_s = labels.sum_s[:, None] + crossing_s + bounds.fastest_s[bounds.places[:, start, labels.cut], behind].T
    stages_fit = labels.stages + 1 + bounds.stages_before[start] <= task.num_stages
    parents, m = np.nonzero(enough & stages_fit[:, None] & np.isfinite(sum_s))
    if not parents.size:
        return None
    units = (left[parents] - tables.devices_by_group[m]) // bounds.units
    before_s = bounds.before_s[start, m, *units.T, bounds.with_behind(labels.stages[parents] + 1)]
    lacking_s = sum_s[parents, m] - labels.sum_s[parents] + before_s
    bound_s = _bound(task, labels.sum_s[parents], lacking_s, labels.steady_s[parents], labels.end_s[parents])
    promising = bound_s < task.limit_s
    if not promising.any():
        return None
    parents, m, before_s = parents[promising], m[promising], before_s[promising]
    return _with_choices(task, labels, start, parents, m, before_s, crossing_s[parents, m])


def _bound(
    task: LabelTask, sum_s: StageArray, lacking_s: StageArray, steady_s: StageArray, end_s: StageArray
) -> StageArray:
    """The least seconds of a step, where stages that are lacking in front add so much to the sum."""
    bounds = task.bounds
    ends_s = np.maximum(lacking_s + bounds.tail_s, bounds.exposed_share * lacking_s + end_s)
    return sum_s + np.maximum(steady_s, task.least_steady_s) + ends_s


def _with_choices(
    task: LabelTask,
    labels: _Labels,
    start: int,
    parents: IntArray,
    m: IntArray,
    before_s: StageArray,
    crossing_s: StageArray,
) -> _Labels | None:
    tables = task.tables
    cut = labels.cut[parents]
    at = (m, start, cut)  # [new label, choice]
    link_s = tables.transfer_s[cut, m, labels.submesh[parents]]
    stage_s = tables.timing.with_transfer_s(tables.steady_s[at], link_s[:, None])
    steady_s = np.maximum(labels.steady_s[parents, None], stage_s)
    returned_s = tables.return_s[at] + tables.timing.return_s(0.0, 0.0, link_s)[:, None]
    end_s = np.maximum(labels.end_s[parents, None] - returned_s, tables.tail_s[at])
    sum_s = (labels.sum_s[parents] + crossing_s)[:, None] + tables.warmup_s[at]
    # A complete partition is taken at its own steady_s, even where that is below what the interval is for.
    bound_s = _bound(task, sum_s, before_s[:, None], steady_s, end_s) if start else sum_s + steady_s + end_s
    fits = (task.limits[at] >= labels.stages[parents, None]) & (steady_s <= task.bounds.cap_s)
    new, choice = np.nonzero(fits & (bound_s < task.limit_s))
    if not new.size:
        return None
    return _Labels(
        cut=np.full_like(new, start),
        submesh=m[new],
        devices=labels.devices[parents[new]] + tables.devices_by_group[m[new]],
        stages=labels.stages[parents[new]] + 1,
        sum_s=sum_s[new, choice],
        steady_s=steady_s[new, choice],
        end_s=end_s[new, choice],
        parent=parents[new],
        choice=choice,
        bound_s=bound_s[new, choice],
    )


def _undominated(labels: _Labels, by_stages: bool) -> _Labels:
    """The labels of one cut that no other one makes superfluous (some that one does may stay).

    With `by_stages`, only one with as many stages does.
    """
    if len(labels.cut) == 1:
        return labels
    key = labels.submesh
    for devices in (*labels.devices.T, *([labels.stages] if by_stages else [])):
        key = key * (devices.max(initial=0) + 1) + devices
    order = np.lexsort((labels.end_s, labels.steady_s, labels.stages, labels.sum_s, key))
    if len(order) > _AT_ONCE:
        order = _without_followers(labels, order, key[order])
    submeshes = labels.submesh[order]
    groups = [order] if len(order) <= _AT_ONCE else [order[submeshes == m] for m in np.unique(submeshes)]
    return labels.take(np.concatenate([_pairwise(labels, group, by_stages) for group in groups]))


def _without_followers(labels: _Labels, order: IntArray, key: IntArray) -> IntArray:
    """Return the labels, in order, that none in front on their submesh and devices beats, if that is quick to see."""
    stages, steady_s, end_s = (each[order] for each in (labels.stages, labels.steady_s, labels.end_s))
    kept: list[IntArray] = []
    waiting = np.arange(len(order))
    while len(waiting):
        first = np.ones(len(waiting), dtype=bool)
        first[1:] = key[waiting[1:]] != key[waiting[:-1]]
        kept.append(waiting[first])
        leader = waiting[first][np.cumsum(first) - 1]
        beaten = (
            (stages[leader] <= stages[waiting])
            & (steady_s[leader] <= steady_s[waiting])
            & (end_s[leader] <= end_s[waiting])
        )
        waiting = waiting[~beaten]  # a leader beats itself
    return order[np.sort(np.concatenate(kept))]


def _pairwise(labels: _Labels, group: IntArray, by_stages: bool) -> IntArray:
    """Return the labels of a group that none of it on their submesh beats in everything; of equals the first stays."""
    if len(group) > _PAIRWISE:
        return group
    submesh = labels.submesh[group]
    beats = submesh[:, None] == submesh
    if by_stages:
        beats &= labels.stages[group][:, None] == labels.stages[group]
    for column in (*labels.devices.T, labels.stages, labels.sum_s, labels.steady_s, labels.end_s):
        values = column[group]
        beats &= values[:, None] <= values
    # Only the first of equals may beat the others, and none itself.
    beats &= ~np.tril(beats.T)
    return group[~beats.any(axis=0)]


def _choices(labels: _Labels, label: int) -> tuple[StageChoice, ...]:
    """The stages of a label, first to last."""
    stages: list[StageChoice] = []
    while labels.parent[label] >= 0:
        parent = int(labels.parent[label])
        columns = (labels.submesh[label], labels.cut[label], labels.cut[parent], labels.choice[label])
        stages.append((int(columns[0]), int(columns[1]), int(columns[2]), int(columns[3])))
        label = parent
    return tuple(stages)
