"""A pairwise Markov random field, a choice among options for every node of a graph, with limits on what is used up.

    min  Σ_i c_i[x_i] + Σ_(i,j) M_ij[x_i, x_j]                     → MRF(costs, edges), assignment_cost
    s.t. Σ_i w_i[x_i] + Σ_(i,j) W_ij[x_i, x_j] <= limit            → Row(nodes, edges, limit), row_weight

An assignment x has one option of every node. The literature also calls the problem without rows a weighted constraint
satisfaction problem (WCSP), or a partitioned Boolean quadratic problem (PBQP).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from autopar.errors import AutoparError

FloatArray: TypeAlias = npt.NDArray[np.float64]
IndexArray: TypeAlias = npt.NDArray[np.intp]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
Assignment: TypeAlias = tuple[int, ...]
"""The option of every node."""

ENTRIES_PER_SECOND = 1e8
"""Entries of arrays that a core looks at in a second, roughly: in calls on small arrays fewer, in large ones more."""


@dataclass(frozen=True, kw_only=True)
class MRF:
    """Costs of the options of every node, and of the pairs of options of every edge. Infinite: forbidden."""

    costs: tuple[FloatArray, ...]
    edges: Mapping[tuple[int, int], FloatArray]
    """The costs of pairs of options by (i, j), i < j; the matrix's rows are the options of i."""

    def __post_init__(self) -> None:
        """Check the shapes, and that no cost is NaN or -∞."""
        assert all(cost.ndim == 1 and cost.size for cost in self.costs)
        assert not self.costs or np.minimum.reduce(np.concatenate(self.costs)) > -np.inf
        for (i, j), matrix in self.edges.items():
            assert i < j and matrix.shape == (self.costs[i].size, self.costs[j].size), (i, j, matrix.shape)
        for matrix in {id(matrix): matrix for matrix in self.edges.values()}.values():  # many edges share one
            assert np.minimum.reduce(matrix, axis=None) > -np.inf, matrix


@dataclass(frozen=True, kw_only=True)
class Row:
    """Weights of options and of pairs of options, whose sum must stay within a limit."""

    name: str
    nodes: Mapping[int, FloatArray]
    edges: Mapping[tuple[int, int], FloatArray]
    limit: float


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The best assignment found, its cost, and a lower bound on the cost of every assignment."""

    assignment: Assignment
    value: float
    lower_bound: float
    seconds: float
    how: str
    """The steps that led to it, for the reader."""

    @property
    def gap(self) -> float:
        """The share of the bound by which the value lies above it; 0 for a proven optimum."""
        if self.value <= self.lower_bound:
            return 0.0
        return self.value / self.lower_bound - 1 if self.lower_bound > 0 else float("inf")


@dataclass(frozen=True, kw_only=True)
class Incumbent:
    """The result of a solver step: the best assignment, its cost, and a lower bound on the cost of every assignment.

    Without an assignment below the upper limit that the step was given, `value` is that limit.
    """

    assignment: Assignment | None
    value: float
    bound: float
    how: tuple[str, ...] = ()


@dataclass(kw_only=True, eq=False)
class WorkBudget:
    """Work that may still be done, counted in entries of arrays that are looked at.

    It is counted and not timed, so that equal problems have equal solutions however busy the machine is.
    """

    left: float
    whole: WorkBudget | None = None
    """The budget that this is a part of: what is spent of the part is spent of it."""

    @classmethod
    def of_seconds(cls, seconds: float) -> WorkBudget:
        """Return the work that a core does in about so many seconds."""
        return cls(left=seconds * ENTRIES_PER_SECOND)

    def part(self, share: float) -> WorkBudget:
        """Return a budget of a share of what is left."""
        return WorkBudget(left=share * self.left, whole=self)

    def spend(self, entries: float) -> None:
        """Count work that was done."""
        self.left -= entries
        if self.whole is not None:
            self.whole.spend(entries)

    @property
    def is_spent(self) -> bool:
        """True if no work is left."""
        return self.left <= 0


@dataclass(frozen=True, kw_only=True)
class SolveEffort:
    """Bounds on a step: it may stop after some work, or at a gap, as a share of value plus `constant`."""

    budget: WorkBudget
    max_gap: float = 0.0
    constant: float = 0.0
    without: frozenset[str] = frozenset()
    """Steps to leave out, to measure what each is worth."""

    def slack(self, value: float) -> float:
        """Return how far below `value` a bound may lie for the gap to be at most `max_gap`."""
        return self.max_gap / (1 + self.max_gap) * abs(value + self.constant) if value < np.inf else 0.0

    def is_enough(self, value: float, bound: float) -> bool:
        """Return true if an assignment of this cost needs no further proof."""
        return value - bound <= self.slack(value)

    def after(self, constant: float) -> SolveEffort:
        """Return the same effort for a problem whose values are less by `constant`."""
        return replace(self, constant=self.constant + constant)


class Infeasible(AutoparError):
    """No assignment satisfies every row; `rows` names those that were asked for."""

    def __init__(self, rows: Sequence[str]) -> None:
        """Keep the names of the rows; none when the costs alone forbid every assignment."""
        self.rows = tuple(rows)
        if self.rows:
            found, todo = f"No choice of options satisfies {', '.join(self.rows)}", "Raise a limit"
        else:
            found, todo = "Every choice of options is forbidden", "Allow more options"
        super().__init__(f"{found}; at least one must be possible. {todo}.")


class NoneBelow(AutoparError):
    """No assignment costs less than was asked for, or less by no more than the gap; each costs at least `bound`.

    `limited` ones might, if they were not to keep within limits.
    """

    def __init__(self, bound: float, *, limited: bool = False) -> None:
        """Keep the bound, and if it is due to limits."""
        self.bound, self.limited = bound, limited
        super().__init__(f"Every choice of options costs at least {bound:.4g}, and less was asked for. Ask for more.")


def assignment_cost(problem: MRF, assignment: Sequence[int]) -> float:
    """Return the cost of an assignment."""
    nodes = sum([cost.item(option) for cost, option in zip(problem.costs, assignment, strict=True)])
    return nodes + sum([matrix.item(assignment[i], assignment[j]) for (i, j), matrix in problem.edges.items()])


def row_weight(row: Row, assignment: Sequence[int]) -> float:
    """Return the sum of a row's weights for an assignment."""
    nodes = sum(float(weight[assignment[i]]) for i, weight in row.nodes.items())
    return nodes + sum(float(weight[assignment[i], assignment[j]]) for (i, j), weight in row.edges.items())


def row_scale(row: Row) -> float:
    """Return what to divide a row by so that its numbers are near 1: the limit, or for 0 the largest weight."""
    weights = [*row.nodes.values(), *row.edges.values()]
    return abs(row.limit) or max((float(np.abs(weight).max()) for weight in weights), default=1.0) or 1.0


def num_pairs(problem: MRF) -> int:
    """Return how many pairs of options the edges allow: the size of what is left to solve."""
    return sum(int(np.count_nonzero(np.isfinite(matrix))) for matrix in problem.edges.values())
