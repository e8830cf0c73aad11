"""Make one node of two neighbours, whose states are the pairs that their edge allows: fewer cycles, tighter bounds.

The bound of a choice problem falls short of the optimum only where costs contradict each other around cycles. A node
that stands for two closes the cycles through both of them, at the price of larger matrices; the neighbours whose
contraction adds the fewest pairs come first. Node by node this leads to a problem without cycles, which is elimination;
bounds in between exclude most of the states on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.compiler.solver.problem import Floats, Indices, Problem, States

MOST_STATES = 2_000
"""States that a contracted node may have."""
MOST_PAIRS = 3_000_000
"""Pairs that a contracted problem may have."""
GROWTH = 3.0
"""By how much the pairs may grow at a time, once they are many."""
FEW_PAIRS = 300_000
SHARE = 0.3
"""Share of the nodes that may be contracted at a time."""


@dataclass(frozen=True, kw_only=True)
class Contracted:
    """A problem with the same choices; per node of the one before, the node it went to and its state for each there."""

    problem: Problem
    places: tuple[tuple[int, Indices], ...]

    def expand(self, states: Sequence[int]) -> States:
        """The states of the problem before."""
        return tuple(int(meant[states[node]]) for node, meant in self.places)


def contract(problem: Problem) -> Contracted | None:
    """The problem with some neighbours made one; None if it would be too large. Every edge must allow some pair."""
    pairs = _chosen(problem)
    if not pairs:
        return None
    partner = {**dict(pairs), **{b: a for a, b in pairs}}
    costs = list[Floats]()
    places: dict[int, tuple[int, Indices]] = {}
    for node, cost in enumerate(problem.costs):
        if node not in partner:
            places[node] = len(costs), np.arange(cost.size)
            costs.append(cost)
        elif node < (other := partner[node]):
            matrix = problem.edges[node, other]
            of_node, of_other = np.nonzero(np.isfinite(matrix))
            places[node], places[other] = (len(costs), of_node), (len(costs), of_other)
            costs.append(cost[of_node] + problem.costs[other][of_other] + matrix[of_node, of_other])
    edges: dict[tuple[int, int], Floats] = {}
    for (i, j), matrix in problem.edges.items():
        (low, of_low), (high, of_high) = places[i], places[j]
        if low == high:
            continue
        larger = matrix[np.ix_(of_low, of_high)]
        if low > high:
            low, high, larger = high, low, larger.T
        edges[low, high] = edges[low, high] + larger if (low, high) in edges else larger
    return Contracted(
        problem=Problem(costs=tuple(costs), edges=edges),
        places=tuple(places[node] for node in range(len(problem.costs))),
    )


def _chosen(problem: Problem) -> list[tuple[int, int]]:
    """Disjoint edges to contract, those that add the fewest pairs first."""
    num_pairs = {ends: int(np.isfinite(matrix).sum()) for ends, matrix in problem.edges.items()}
    links: list[dict[int, int]] = [{} for _ in problem.costs]
    for (i, j), number in num_pairs.items():
        links[i][j] = links[j][i] = number
    total = sum(num_pairs.values())
    most = min(MOST_PAIRS, max(GROWTH * total, FEW_PAIRS))

    def added(ends: tuple[int, int]) -> int:
        i, j = ends
        before = sum(links[i].values()) + sum(links[j].values()) - num_pairs[ends]
        return num_pairs[ends] * sum(problem.costs[k].size for k in {*links[i], *links[j]} - {i, j}) - before

    taken = set[int]()
    chosen = list[tuple[int, int]]()
    for growth, ends in sorted((added(ends), ends) for ends in num_pairs):
        if num_pairs[ends] > MOST_STATES or not taken.isdisjoint(ends):
            continue
        if total + growth > most or len(chosen) > SHARE * len(problem.costs):
            break
        total += growth
        taken.update(ends)
        chosen.append(ends)
    return chosen
