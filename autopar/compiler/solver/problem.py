"""A choice for every node of a graph: what each state costs, what each pair of neighbours costs, what may be used up.

    min  Σ_i c_i[x_i] + Σ_(i,j) M_ij[x_i, x_j]                     → Problem(costs, edges)
    s.t. Σ_i w_i[x_i] + Σ_(i,j) W_ij[x_i, x_j] <= limit            → Row(nodes, edges, limit), any number

The literature calls this a pairwise Markov random field, or a partitioned Boolean quadratic problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from autopar.errors import AutoparError

Floats: TypeAlias = npt.NDArray[np.float64]
Indices: TypeAlias = npt.NDArray[np.intp]
Mask: TypeAlias = npt.NDArray[np.bool_]
States: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Costs of the states of every node, and of the pairs of states of every edge. Infinite: forbidden."""

    costs: tuple[Floats, ...]
    edges: Mapping[tuple[int, int], Floats]
    """By (i, j), i < j; rows are the states of i."""

    def __post_init__(self) -> None:
        """Check the shapes, and that no cost is NaN or -∞."""
        for cost in self.costs:
            assert cost.ndim == 1 and cost.size and np.minimum.reduce(cost) > -np.inf
        for (i, j), matrix in self.edges.items():
            assert i < j and matrix.shape == (self.costs[i].size, self.costs[j].size), (i, j, matrix.shape)
            assert np.minimum.reduce(matrix, axis=None) > -np.inf, (i, j)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Weights of states and of pairs of states, whose sum must stay within a limit."""

    name: str
    nodes: Mapping[int, Floats]
    edges: Mapping[tuple[int, int], Floats]
    limit: float


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The best states found, what they cost, and a value that no choice can fall below."""

    states: States
    value: float
    lower_bound: float
    seconds: float
    how: str
    """The steps that led to it, for the reader."""

    @property
    def gap(self) -> float:
        """By which share of the bound the value lies above it; 0 for a proven optimum."""
        if self.value <= self.lower_bound:
            return 0.0
        return self.value / self.lower_bound - 1 if self.lower_bound > 0 else float("inf")


class Infeasible(AutoparError):
    """No choice satisfies every row; `rows` names those that were asked for."""

    def __init__(self, rows: Sequence[str]) -> None:
        """Keep the names of the rows; none when the costs alone forbid every choice."""
        self.rows = tuple(rows)
        if self.rows:
            found, todo = f"No choice of states satisfies {', '.join(self.rows)}", "Raise a limit"
        else:
            found, todo = "Every choice of states is forbidden", "Allow more states"
        super().__init__(f"{found}; at least one must be possible. {todo}.")


def choice_value(problem: Problem, states: Sequence[int]) -> float:
    """What a choice costs."""
    nodes = sum(float(cost[state]) for cost, state in zip(problem.costs, states, strict=True))
    return nodes + sum(float(matrix[states[i], states[j]]) for (i, j), matrix in problem.edges.items())


def row_weight(row: Row, states: Sequence[int]) -> float:
    """What a choice uses up."""
    nodes = sum(float(weight[states[i]]) for i, weight in row.nodes.items())
    return nodes + sum(float(weight[states[i], states[j]]) for (i, j), weight in row.edges.items())


def row_scale(row: Row) -> float:
    """What to divide a row by so that its numbers are near 1: the limit; of a limit of zero, the largest weight."""
    weights = [*row.nodes.values(), *row.edges.values()]
    return abs(row.limit) or max((float(np.abs(weight).max()) for weight in weights), default=1.0) or 1.0
