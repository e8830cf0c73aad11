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
from autopar.compiler.solver.problem import Assignment, FloatArray


def surest_first(swept: LevelSweeps, *, by_all: bool = False) -> Assignment:
    """Return an assignment of a problem, rounded from its costs as sweeps moved them.

    Nodes are sure by their second best options, or `by_all` of them.
    """
    scores, least_at_low, least_at_high = swept.scores()
    of_node = swept.split(scores)
    added, least = (swept.at_high.tolist(), swept.at_low.tolist()), (least_at_low, least_at_high)
    sureness = [_sureness(score, by_all) for score in of_node]
    queue = [(-sure, node) for node, sure in enumerate(sureness)]
    heapq.heapify(queue)
    chosen = [-1] * len(of_node)
    while queue:
        sure, node = heapq.heappop(queue)
        if chosen[node] >= 0 or -sure != sureness[node]:
            continue
        option = chosen[node] = int(of_node[node].argmin())
        for other, matrix, is_low, near, far in swept.links[node]:
            if chosen[other] < 0:
                # What was added at the other end is in both, and cancels.
                of_node[other] = of_node[other] + (matrix[option] + (added[is_low][near + option] - least[is_low][far]))
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
