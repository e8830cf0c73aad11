"""Search a problem node after node, keeping the best partial assignments only; what is dropped bounds the rest.

Nodes are decided in order. What is still to come depends on the frontier alone, the nodes decided that have undecided
neighbours; of the partial assignments that agree there one of least cost is kept (dynamic programming over a path
decomposition). Of the frontiers the `width` cheapest are kept (a beam). All costs being at least zero, no assignment
that was dropped costs less than its part did, so that the search ends with an assignment and with a bound on all
others; wide enough, it is exact.

The costs are moved to the earliest nodes first, so that the cost of a part foresees what it leads to.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.compiler.solver.problem import MRF, Assignment, FloatArray, IndexArray, WorkBudget

Shorts = npt.NDArray[np.int16]

MOST_WORK = 400_000_000
"""Pairs of a partial assignment and an option that one search may look at, if nothing else is said."""
AT_ONCE = 2_000_000
"""Pairs that are looked at at a time."""
LARGEST_CODE = 2**62
MOST_OPTIONS = 2**15
"""Most options of a node, which are numbered in 16 bits."""
MANY = 2_000
"""Numbers from which sorting them by 16 bits at a time takes less time."""
STARTS = 4
"""Nodes from which an order is tried."""


@dataclass(frozen=True, kw_only=True)
class BeamResult:
    """The best assignment of at most the limit, if any was met; a bound on all that cost at most the limit."""

    assignment: Assignment | None
    bound: float


@dataclass(frozen=True, kw_only=True)
class _Step:
    """The partial assignments kept after a node was decided: the one that each extends, and its new option."""

    extended: IndexArray
    options: Shorts


@dataclass(frozen=True, kw_only=True)
class _Early:
    """A problem with its costs moved to the earliest nodes; per node its decided neighbours and their matrices."""

    costs: list[FloatArray]
    behind: list[list[tuple[int, FloatArray]]]
    last: list[int]
    """The last neighbour of every node."""
    bound: float


def beam_search(
    problem: MRF, most: float, width: int, *, most_work: float = MOST_WORK, budget: WorkBudget | None = None
) -> BeamResult:
    """Return the best assignment of cost at most `most` among those whose parts are never out of the `width` best.

    No cost may be below zero, and every option must have a partner along every edge. After `most_work`, pairs of a
    partial assignment and an option, or when the `budget` is spent, there is only the bound.
    """
    early = _moved_early(problem)
    spare, dropped = most - early.bound, np.inf
    steps = list[_Step]()
    chosen, values = dict[int, Shorts](), np.zeros(1)  # by node of the frontier, the options of all parts
    work = 0
    for node in range(len(problem.costs)):
        more = values.size * early.costs[node].size * (1 + len(early.behind[node]))
        work += more
        if work <= most_work and budget is not None:
            budget.spend(more)
        if work > most_work or (budget is not None and budget.is_spent):
            return BeamResult(assignment=None, bound=early.bound + min(dropped, float(values.min())))
        parts = values.size
        extended, options, values = _extensions(early, node, chosen, values, spare)
        if not values.size:
            return BeamResult(assignment=None, bound=early.bound + min(dropped, spare))
        waits = early.last[node] > node
        chosen = {other: column for other, column in chosen.items() if early.last[other] > node}
        code, size = _codes(list(chosen.values()), [problem.costs[other].size for other in chosen], parts)
        code, num_options = code[extended], early.costs[node].size if waits else 1
        best = _best_of_each(code * num_options + options if waits else code, size * num_options, values)
        if best.size > width:
            cheapest, least_dropped = _cheapest(values[best], width)
            dropped, best = min(dropped, least_dropped), best[cheapest]
        kept = extended[best]
        steps.append(_Step(extended=kept, options=options[best]))
        chosen, values = {other: column[kept] for other, column in chosen.items()}, values[best]
        if waits:
            chosen[node] = steps[-1].options
    return BeamResult(assignment=_traced_back(steps), bound=early.bound + min(dropped, float(values[0])))


def frontier_order(links: list[set[int]], sizes: list[int]) -> list[int]:
    """Return an order of nodes that keeps the frontier small: greedy, from a few starts."""
    weights = [math.log(size) for size in sizes]
    starts = sorted(range(len(sizes)), key=lambda n: (len(links[n]), weights[n], n))[:STARTS]
    least, best = math.inf, list[int]()
    for start in starts:
        size, order = _greedy_order(links, weights, start, least)
        if size < least:
            least, best = size, order
    return best


def _greedy_order(links: list[set[int]], weights: list[float], start: int, most: float) -> tuple[float, list[int]]:
    """Return an order, and the logarithm of how many partial assignments it leads to; above `most` it ends early."""
    undecided = [len(neighbours) for neighbours in links]
    left = dict.fromkeys(range(len(links)))
    weight, sizes, order, share_of_most = 0.0, list[float](), list[int](), 0.0

    def growth(node: int) -> float:
        closed = 0.0
        for other in links[node]:
            if undecided[other] == 1 and other not in left:
                closed += weights[other]
        return (weights[node] if undecided[node] else 0.0) - closed

    grown: dict[int, float] = {start: growth(start)}
    queue = [(grown[start], start)]  # with sizes that are no longer those of `grown`
    while left:
        while queue and grown.get(queue[0][1]) != queue[0][0]:
            heapq.heappop(queue)
        node = queue[0][1] if queue else next(iter(left))
        size = grown.pop(node) if queue else growth(node)
        sizes.append(weight + weights[node])
        share_of_most += math.exp(min(sizes[-1] - most, 1.0))
        if share_of_most > 1 + 1e-9:  # by more than rounding
            break
        weight += size
        order.append(node)
        del left[node]
        for other in links[node]:
            undecided[other] -= 1
        # What may grow otherwise now: the neighbours, and those that would close a decided one.
        touched = {other for other in links[node] if other in left}
        for other in (node, *links[node]):
            if undecided[other] <= 1 and other not in left:
                touched |= links[other] & grown.keys()
        for other in touched:
            grown[other] = growth(other)
            heapq.heappush(queue, (grown[other], other))
    return float(np.logaddexp.reduce(sizes)), order


def _moved_early(problem: MRF) -> _Early:
    """Move to every node what it costs at least to go on from it, then to the edges that lead to it."""
    num_nodes = len(problem.costs)
    behind: list[dict[int, FloatArray]] = [{} for _ in range(num_nodes)]
    last = [-1] * num_nodes
    for (i, j), matrix in problem.edges.items():
        behind[j][i] = matrix
        last[i], last[j] = max(last[i], j), max(last[j], i)
    costs, bound = list(problem.costs), 0.0
    for node in reversed(range(num_nodes)):
        # The nodes ahead have put their least costs here by now.
        least = float(costs[node].min())
        bound += least
        cost = costs[node] - least
        share = cost / max(len(behind[node]), 1)
        costs[node] = cost - len(behind[node]) * share if behind[node] else cost
        for other, matrix in behind[node].items():
            matrix = matrix + share
            to_other = matrix.min(1)
            behind[node][other] = matrix - to_other[:, None]
            costs[other] = costs[other] + to_other
    return _Early(
        costs=costs, behind=[sorted(found.items(), key=lambda i: i[0]) for found in behind], last=last, bound=bound
    )


def _extensions(
    early: _Early, node: int, chosen: Mapping[int, Shorts], values: FloatArray, spare: float
) -> tuple[IndexArray, Shorts, FloatArray]:
    """Return the pairs of a partial assignment and an option of the next node within `spare`, and their costs."""
    cost = early.costs[node]
    found = list[tuple[IndexArray, Shorts, FloatArray]]()
    step = max(1, AT_ONCE // cost.size)
    for start in range(0, values.size, step):
        total = values[start : start + step, None] + cost
        for other, matrix in early.behind[node]:
            total += matrix[chosen[other][start : start + step]]
        within = total <= spare
        extended, options = np.nonzero(within)
        found.append((extended + start, options.astype(np.int16), total[within]))
    extended, options, totals = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return extended, options, totals


def _cheapest(values: FloatArray, width: int) -> tuple[IndexArray, float]:
    """Return the places of the `width` least values, of equal ones the first, and the least of the others."""
    limit = np.partition(values, width)[width]
    kept = values < limit
    kept[np.flatnonzero(values == limit)[: width - int(np.count_nonzero(kept))]] = True
    return np.flatnonzero(kept), float(limit)


def _codes(chosen: Sequence[Shorts], sizes: Sequence[int], parts: int) -> tuple[IndexArray, int]:
    """Return numbers in the order of the choices of each part, given node by node, equal for equal ones; and a limit.

    There is room for the options of one node more. Large numbers are made small: of these the extensions, which are
    many times as many, are sorted in less time.
    """
    code, size = np.zeros(parts, np.int64), 1
    for column, options in zip(chosen, sizes, strict=True):
        code, size = code * options + column, size * options
        if size > LARGEST_CODE // MOST_OPTIONS:
            code, size = _ranks(code)
    return _ranks(code) if size > parts else (code, size)


def _ranks(code: IndexArray) -> tuple[IndexArray, int]:
    """Return the places of numbers among all different ones, and how many these are."""
    order = np.argsort(code)
    ordered = code[order]
    ranks = np.empty(code.size, np.int64)
    ranks[order] = np.cumsum(np.concatenate([[False], ordered[1:] != ordered[:-1]]))
    return ranks, int(ranks[order[-1]]) + 1


def _best_of_each(code: IndexArray, size: int, values: FloatArray) -> IndexArray:
    """Return, for each group of equal codes, which are below `size`, the place of the first of least value."""
    order = _sorted_order(code, size)
    ordered, values = code[order], values[order]
    bounds = np.concatenate([[0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1, [values.size]])
    starts, lengths = bounds[:-1], bounds[1:] - bounds[:-1]
    least = np.flatnonzero(values == np.repeat(np.minimum.reduceat(values, starts), lengths))
    return order[least[np.searchsorted(least, starts)]]


def _sorted_order(code: IndexArray, size: int) -> IndexArray:
    """Return the stable order of numbers below `size`: of many, by 16 bits at a time, which takes less time."""
    if code.size < MANY or size > 1 << 32:
        return np.argsort(code, kind="stable")
    order = np.argsort(code.astype(np.uint16), kind="stable")
    return order if size <= 1 << 16 else order[np.argsort((code >> 16).astype(np.uint16)[order], kind="stable")]


def _traced_back(steps: list[_Step]) -> Assignment:
    assignment, place = list[int](), 0
    for step in reversed(steps):
        assignment.append(int(step.options[place]))
        place = int(step.extended[place])
    return tuple(reversed(assignment))
