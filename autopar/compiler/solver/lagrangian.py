"""Turn rows into costs: the problems without rows by which those with rows are bounded and solved.

For multipliers λ >= 0, seconds per whole limit, no assignment within the rows costs less than

    L(λ) = min_x  cost(x) + Σ_r λ_r (weight_r(x) / limit_r - 1)        → ReducedRows.with_multipliers, shift

Reductions may not touch what a row depends on: the rows' nodes are protected, and the edges that they weigh exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.compiler.solver.presolve import ReducedMRF, reduce_problem
from autopar.compiler.solver.problem import MRF, FloatArray, IndexArray, Row, row_scale


@dataclass(frozen=True, kw_only=True)
class ReducedRows:
    """A reduced problem, and the rows by its nodes and options."""

    reduced: ReducedMRF
    rows: tuple[Row, ...]

    def with_multipliers(self, multipliers: FloatArray) -> MRF:
        """Return the core with the rows' weights as costs, at these multipliers."""
        costs, edges = list(self.reduced.core.costs), dict(self.reduced.core.edges)
        for row, multiplier in zip(self.rows, multipliers, strict=True):
            per_weight = multiplier / row_scale(row)
            for i, weight in row.nodes.items():
                costs[i] = costs[i] + per_weight * weight
            for ends, weight in row.edges.items():
                edges[ends] = edges[ends] + per_weight * weight
        return MRF(costs=tuple(costs), edges=edges)

    def shift(self, multipliers: FloatArray) -> float:
        """Return what to add to a value of the core with multipliers to have one of the Lagrangian."""
        pairs = zip(self.rows, multipliers, strict=True)
        limits = sum(float(multiplier) * row.limit / row_scale(row) for row, multiplier in pairs)
        return self.reduced.constant - limits


def reduce_with_rows(problem: MRF, rows: Sequence[Row]) -> ReducedRows:
    """Reduce what no row depends on; raise `Infeasible` when a node has no option left."""
    touched = {i for row in rows for i in (*row.nodes, *(end for ends in row.edges for end in ends))}
    reduced = reduce_problem(with_row_edges(problem, rows), touched)
    place = {node: index for index, node in enumerate(reduced.nodes)}
    kept = dict(zip(reduced.nodes, reduced.options))
    return ReducedRows(
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


def with_row_edges(problem: MRF, rows: Sequence[Row]) -> MRF:
    """Return the problem with an edge, of no cost, wherever a row weighs a pair that has none."""
    missing = {ends: np.zeros(w.shape) for row in rows for ends, w in row.edges.items() if ends not in problem.edges}
    return replace(problem, edges={**problem.edges, **missing}) if missing else problem


def restrict(problem: MRF, kept: Sequence[IndexArray]) -> MRF:
    """Return the problem with only some options of every node."""
    return MRF(
        costs=tuple(cost[keep] for cost, keep in zip(problem.costs, kept, strict=True)),
        edges={(i, j): matrix[np.ix_(kept[i], kept[j])] for (i, j), matrix in problem.edges.items()},
    )


def restrict_row(row: Row, kept: Sequence[IndexArray]) -> Row:
    """Return the row of a restricted problem."""
    return replace(
        row,
        nodes={i: weight[kept[i]] for i, weight in row.nodes.items()},
        edges={(i, j): weight[np.ix_(kept[i], kept[j])] for (i, j), weight in row.edges.items()},
    )


def sum_of_rows(rows: Sequence[Row], factors: FloatArray) -> Row:
    """Return the sum of rows times factors, which holds wherever all of them do."""
    nodes: dict[int, FloatArray] = {}
    edges: dict[tuple[int, int], FloatArray] = {}
    for row, factor in zip(rows, factors, strict=True):
        if factor == 0:
            continue
        for i, weight in row.nodes.items():
            nodes[i] = nodes.get(i, 0.0) + factor * weight
        for ends, weight in row.edges.items():
            edges[ends] = edges.get(ends, 0.0) + factor * weight
    limit = sum(float(factor) * row.limit for row, factor in zip(rows, factors, strict=True))
    return Row(name="all rows", nodes=nodes, edges=edges, limit=limit)


def weights_as_costs(problem: MRF, row: Row) -> MRF:
    """Return the problem of using up the least of one row."""
    problem = with_row_edges(problem, [row])

    def weights(costs: FloatArray, weight: FloatArray | None) -> FloatArray:
        return np.where(np.isinf(costs), np.inf, 0.0 if weight is None else weight)

    return MRF(
        costs=tuple(weights(cost, row.nodes.get(i)) for i, cost in enumerate(problem.costs)),
        edges={ends: weights(matrix, row.edges.get(ends)) for ends, matrix in problem.edges.items()},
    )
