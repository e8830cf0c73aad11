"""Round a problem whose costs were moved to an assignment: the surest node is next.

A node's options have scores: what each costs, with the least along every edge. A node is the surer, the more its
second best option costs than its best one, or that and all others on average (their geometric mean): each leads to
assignments that the other does not. The surest is next and takes its best option. The scores of its neighbours then
have what this costs along the edge in place of the least. So choices that are forced, or nearly so, come first and lead
to others, where an order that is fixed chooses some nodes before anything tells which of their options is good.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left

from autopar.compiler.solver.level_sweeps import LevelSweeps
from autopar.compiler.solver.problem import MRF, Assignment, FloatArray


def surest_first(problem: MRF, swept: LevelSweeps, *, by_all: bool = False) -> Assignment:
    """Return an assignment of a problem, rounded from its costs as they were moved by sweeps.

    Nodes are sure by their second best options, or `by_all` of them.
    """
    scores, least_at_low, least_at_high = swept.scores()
    of_node = swept.split(scores)
    links: list[list[tuple[int, FloatArray, FloatArray, FloatArray]]] = [[] for _ in problem.costs]
    for (i, j), matrix in problem.edges.items():
        at_low, at_high, back = swept.edges[i, j]
        low, high = (j, i) if back else (i, j)
        by_low = matrix.T if back else matrix
        links[low].append((high, by_low, swept.at_low[at_low], least_at_high[at_high]))
        links[high].append((low, by_low.T, swept.at_high[at_high], least_at_low[at_low]))
    sureness = [_sureness(score, by_all) for score in of_node]
    queue = [(-sure, node) for node, sure in enumerate(sureness)]
    heapq.heapify(queue)
    chosen = [-1] * len(of_node)
    while queue:
        sure, node = heapq.heappop(queue)
        if chosen[node] >= 0 or -sure != sureness[node]:
            continue
        option = chosen[node] = int(of_node[node].argmin())
        for other, matrix, added, least in links[node]:
            if chosen[other] < 0:
                # What was added at the other end is in both, and cancels.
                of_node[other] = of_node[other] + (matrix[option] + (added[option] - least))
                sureness[other] = _sureness(of_node[other], by_all)
                heapq.heappush(queue, (-sureness[other], other))
    return tuple(chosen)


def _sureness(score: FloatArray, by_all: bool) -> float:
    """Return how much more the second best option costs than the best, or the mean of that and of all on average."""
    costs = sorted(score.tolist())
    if len(costs) < 2 or costs[1] == math.inf:
        return math.inf
    margin = costs[1] - costs[0]
    if not by_all:
        return margin
    possible = costs[: bisect_left(costs, math.inf)]
    return math.sqrt(margin * (sum(possible) / len(possible) - costs[0]))
