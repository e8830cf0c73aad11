"""Make one node of two neighbours, whose options are the pairs that their edge allows: fewer cycles, tighter bounds.

The bound of a problem falls short of the optimum only where costs contradict each other around cycles. A node that
stands for two closes the cycles through both of them, at the price of larger matrices; the neighbours whose
contraction adds the fewest pairs come first. Node by node this leads to a problem without cycles, which is elimination;
bounds in between exclude most of the options on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.compiler.solver.problem import MRF, Assignment, FloatArray, IndexArray

MOST_STATES = 2_000
"""Options that a contracted node may have."""
MOST_PAIRS = 3_000_000
"""Pairs that a contracted problem may have."""
GROWTH = 3.0
"""Factor by which the pairs may grow at a time, once they are more than `PAIRS_AT_WILL`."""
PAIRS_AT_WILL = 300_000
CONTRACTED_AT_A_TIME = 0.3
"""Share of the nodes that may be contracted at a time."""


@dataclass(frozen=True, kw_only=True)
class Contracted:
    """A problem with the same assignments; per node of the one before, the node it went to and its option for each."""

    problem: MRF
    places: tuple[tuple[int, IndexArray], ...]

    def expand(self, assignment: Sequence[int]) -> Assignment:
        """Return the assignment of the problem before."""
        return tuple(int(meant[assignment[node]]) for node, meant in self.places)


def contract(problem: MRF) -> Contracted | None:
    """Return the problem with some neighbours made one, or None if it would be too large.

    Every edge must allow some pair.
    """
    pairs = _chosen(problem)
    if not pairs:
        return None
    partner = {**dict(pairs), **{b: a for a, b in pairs}}
    costs = list[FloatArray]()
    places: dict[int, tuple[int, IndexArray]] = {}
    for node, cost in enumerate(problem.costs):
        if node not in partner:
            places[node] = len(costs), np.arange(cost.size)
            costs.append(cost)
        elif node < (other := partner[node]):
            matrix = problem.edges[node, other]
            of_node, of_other = np.nonzero(np.isfinite(matrix))
            places[node], places[other] = (len(costs), of_node), (len(costs), of_other)
            costs.append(cost[of_node] + problem.costs[other][of_other] + matrix[of_node, of_other])
    edges: dict[tuple[int, int], FloatArray] = {}
    for (i, j), matrix in problem.edges.items():
        (low, of_low), (high, of_high) = places[i], places[j]
        if low == high:
            continue
        larger = matrix[np.ix_(of_low, of_high)]
        if low > high:
            low, high, larger = high, low, larger.T
        edges[low, high] = edges[low, high] + larger if (low, high) in edges else larger
    return Contracted(
        problem=MRF(costs=tuple(costs), edges=edges),
        places=tuple(places[node] for node in range(len(problem.costs))),
    )


def _chosen(problem: MRF) -> list[tuple[int, int]]:
    """Disjoint edges to contract, those that add the fewest pairs first."""
    num_pairs = {ends: int(np.isfinite(matrix).sum()) for ends, matrix in problem.edges.items()}
    links: list[dict[int, int]] = [{} for _ in problem.costs]
    for (i, j), number in num_pairs.items():
        links[i][j] = links[j][i] = number
    total = sum(num_pairs.values())
    most = min(MOST_PAIRS, max(GROWTH * total, PAIRS_AT_WILL))

    def added(ends: tuple[int, int]) -> int:
        i, j = ends
        before = sum(links[i].values()) + sum(links[j].values()) - num_pairs[ends]
        return num_pairs[ends] * sum(problem.costs[k].size for k in {*links[i], *links[j]} - {i, j}) - before

    taken = set[int]()
    chosen = list[tuple[int, int]]()
    for growth, ends in sorted((added(ends), ends) for ends in num_pairs):
        if num_pairs[ends] > MOST_STATES or not taken.isdisjoint(ends):
            continue
        if total + growth > most or len(chosen) > CONTRACTED_AT_A_TIME * len(problem.costs):
            break
        total += growth
        taken.update(ends)
        chosen.append(ends)
    return chosen
