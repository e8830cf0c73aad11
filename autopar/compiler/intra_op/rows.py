"""Carry the rows of a choice problem along as it shrinks, and price them.

Reductions may not touch what a row depends on: the rows' nodes are protected, and the edges that they weigh exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.compiler.intra_op.choice_problem import Floats, Indices, Problem, Row, row_scale
from autopar.compiler.intra_op.reductions import Reduced, reduce_problem


@dataclass(frozen=True, kw_only=True)
class ReducedWithRows:
    """A reduced problem, and the rows by its nodes and states."""

    reduced: Reduced
    rows: tuple[Row, ...]

    def priced(self, prices: Floats) -> Problem:
        """The core, with what the rows' weights cost at these prices of a whole limit."""
        costs, edges = list(self.reduced.core.costs), dict(self.reduced.core.edges)
        for row, price in zip(self.rows, prices, strict=True):
            per_weight = price / row_scale(row)
            for i, weight in row.nodes.items():
                costs[i] = costs[i] + per_weight * weight
            for ends, weight in row.edges.items():
                edges[ends] = edges[ends] + per_weight * weight
        return Problem(costs=tuple(costs), edges=edges)

    def shift(self, prices: Floats) -> float:
        """What to add to a value of the priced core to have one of the Lagrangian."""
        limits = sum(float(price) * row.limit / row_scale(row) for row, price in zip(self.rows, prices, strict=True))
        return self.reduced.constant - limits


def reduce_with_rows(problem: Problem, rows: Sequence[Row]) -> ReducedWithRows:
    """Reduce what no row depends on. Raises `Infeasible` when a node has no state left."""
    touched = {i for row in rows for i in (*row.nodes, *(end for ends in row.edges for end in ends))}
    reduced = reduce_problem(with_row_edges(problem, rows), touched)
    place = {node: index for index, node in enumerate(reduced.nodes)}
    kept = dict(zip(reduced.nodes, reduced.states))
    return ReducedWithRows(
        reduced=reduced,
        rows=tuple(
            replace(
                row,
                nodes={place[i]: weight[kept[i]] for i, weight in row.nodes.items()},
                edges=dict(
                    ((place[i], place[j]), w[np.ix_(kept[i], kept[j])])
                    if place[i] < place[j]
                    else ((place[j], place[i]), w.T[np.ix_(kept[j], kept[i])])
                    for (i, j), w in row.edges.items()
                ),
            )
            for row in rows
        ),
    )


def with_row_edges(problem: Problem, rows: Sequence[Row]) -> Problem:
    """The problem with an edge, of no cost, wherever a row weighs a pair that has none."""
    missing = {ends: np.zeros(w.shape) for row in rows for ends, w in row.edges.items() if ends not in problem.edges}
    return replace(problem, edges={**problem.edges, **missing}) if missing else problem


def restrict(problem: Problem, kept: Sequence[Indices]) -> Problem:
    """The problem with only some states of every node."""
    return Problem(
        costs=tuple(cost[keep] for cost, keep in zip(problem.costs, kept, strict=True)),
        edges={(i, j): matrix[np.ix_(kept[i], kept[j])] for (i, j), matrix in problem.edges.items()},
    )


def restrict_row(row: Row, kept: Sequence[Indices]) -> Row:
    """The row of a restricted problem."""
    edges: Mapping[tuple[int, int], Floats] = {
        (i, j): weight[np.ix_(kept[i], kept[j])] for (i, j), weight in row.edges.items()
    }
    return replace(row, nodes={i: weight[kept[i]] for i, weight in row.nodes.items()}, edges=edges)


def sum_of_rows(rows: Sequence[Row], factors: Floats) -> Row:
    """The rows times factors, as one; whatever is within all of them is within it."""
    nodes: dict[int, Floats] = {}
    edges: dict[tuple[int, int], Floats] = {}
    for row, factor in zip(rows, factors, strict=True):
        if factor == 0:
            continue
        for i, weight in row.nodes.items():
            nodes[i] = nodes.get(i, 0.0) + factor * weight
        for ends, weight in row.edges.items():
            edges[ends] = edges.get(ends, 0.0) + factor * weight
    limit = sum(float(factor) * row.limit for row, factor in zip(rows, factors, strict=True))
    return Row(name="all rows", nodes=nodes, edges=edges, limit=limit)


def weights_as_costs(problem: Problem, row: Row) -> Problem:
    """The problem of using up the least of one row."""
    problem = with_row_edges(problem, [row])

    def weights(costs: Floats, weight: Floats | None) -> Floats:
        return np.where(np.isinf(costs), np.inf, 0.0 if weight is None else weight)

    return Problem(
        costs=tuple(weights(cost, row.nodes.get(i)) for i, cost in enumerate(problem.costs)),
        edges={ends: weights(matrix, row.edges.get(ends)) for ends, matrix in problem.edges.items()},
    )
