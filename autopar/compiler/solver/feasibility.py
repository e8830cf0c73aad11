"""Lower what an assignment exceeds its limits by, until it is within them, or until no assignment can be.

    measure: assignment  ->  by how much it exceeds a limit, and the rows that say so

    min_x max_r (w_r(x) - limit_r)  >=  max_λ min_x Σ_r λ_r (w_r(x) - limit_r),   λ >= 0, Σ λ_r = 1

For given λ the right side is a problem without rows, which reductions alone solve as a rule. Which λ promises most is
the cutting plane's answer (`best_multipliers`); what is tried lies halfway between that and the best so far (Ben-Ameur
& Neto 2007). The rows of one moment say nothing about the others: so the assignments that are measured also cost time,
a little, which keeps what no row weighs yet as split as the fastest assignment has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.compiler.solver.cutting_plane import best_multipliers
from autopar.compiler.solver.lagrangian import sum_of_rows, weights_as_costs
from autopar.compiler.solver.problem import (
    MRF,
    Assignment,
    FloatArray,
    Row,
    SolveEffort,
    WorkBudget,
    assignment_cost,
    row_weight,
)
from autopar.compiler.solver.solve import MAX_GAP, minimize

MAX_ROUNDS = 16
FEW_ROUNDS = 5
"""Rounds that are spent on what is clearly too little, to say about how much would do."""
SHARE_OF_COSTS, LEAST_SHARE_OF_COSTS = 0.1, 1e-3
"""Shares of the rows' weights that the costs of the fastest assignment count for: at first, and at least."""
GAP_OF_CANDIDATES = 0.02
"""Gap up to which the assignments to measure are solved for; the bound is solved for up to `MAX_GAP`."""
LEAST_RISE = 1e-6
"""Share of the bound by which it must rise for another round with the same share of the costs."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The excess of an assignment over its limits, and if that is above zero the rows that it exceeds."""

    excess: float
    rows: Sequence[Row]


Measure = Callable[[Assignment], Measured]


@dataclass(frozen=True, kw_only=True)
class LeastExcess:
    """The assignment that was measured to exceed the limits least, by how much, and a bound for all assignments.

    The bound holds as far as the rows do: they are exact for the assignments that they were made for.
    """

    assignment: Assignment
    excess: float
    bound: float
    rounds: int


def lower_excess(
    problem: MRF, measure: Measure, start: Assignment, *, budget: WorkBudget, hopeless_excess: float
) -> LeastExcess:
    """Lower the excess of an assignment until it is within its limits, or as far as it gets.

    Once the bound is above `hopeless_excess`, few rounds are spent.
    """
    lowering = _Lowering(problem=problem, measure=measure, start=start)
    assignment, rounds = start, 0
    while lowering.meet(assignment) or lowering.has_risen or lowering.turn_to_rows():
        rounds += 1
        hopeless = lowering.bound > hopeless_excess and rounds > FEW_ROUNDS
        if lowering.is_done or hopeless or rounds > MAX_ROUNDS or budget.is_spent:
            break
        weights = lowering.next_weights()
        lowering.raise_bound(weights, budget)
        assignment = lowering.candidate(weights, budget)
    return LeastExcess(assignment=lowering.best, excess=lowering.excess, bound=lowering.bound, rounds=rounds)


@dataclass(kw_only=True)
class _Lowering:
    """The rows and assignments met so far, the best of these, and the bound."""

    problem: MRF
    measure: Measure
    start: Assignment
    best: Assignment = ()
    excess: float = np.inf
    bound: float = -np.inf
    weights: FloatArray = field(default_factory=lambda: np.zeros(0))
    """The weights of the rows that gave the bound."""
    rows: list[Row] = field(default_factory=list[Row])
    met: list[Assignment] = field(default_factory=list[Assignment])
    share_of_costs: float = SHARE_OF_COSTS
    has_risen: bool = True
    """True if the bound has risen in the last round."""

    @property
    def is_done(self) -> bool:
        """True if the limits are kept, or no assignment exceeds them less."""
        return self.excess <= 0 or self.bound >= self.excess

    def meet(self, assignment: Assignment) -> bool:
        """Measure an assignment, unless that was done; return true if it was new."""
        if assignment in self.met:
            return False
        self.met.append(assignment)
        measured = self.measure(assignment)
        self.rows += measured.rows
        if measured.excess < self.excess:
            self.best, self.excess = assignment, measured.excess
        return True

    def turn_to_rows(self) -> bool:
        """Let costs count for less, which brings other assignments, unless they hardly count any more."""
        self.share_of_costs /= 4
        return self.share_of_costs > LEAST_SHARE_OF_COSTS

    def next_weights(self) -> FloatArray:
        """Return the weights for which the cuts promise most, halfway from the best ones so far."""
        promising = _most_promising(np.array([self.over(assignment) for assignment in self.met]))
        if not self.weights.size:
            return promising
        return (promising + np.concatenate([self.weights, np.zeros(promising.size - self.weights.size)])) / 2

    def over(self, assignment: Assignment) -> FloatArray:
        """Return by how much each row is exceeded."""
        return np.array([row_weight(row, assignment) - row.limit for row in self.rows])

    def raise_bound(self, weights: FloatArray, budget: WorkBudget) -> None:
        """Bound what every assignment exceeds the rows by, weighted so."""
        row = sum_of_rows(self.rows, weights)
        found = minimize(weights_as_costs(self.problem, row), SolveEffort(budget=budget, max_gap=MAX_GAP))
        bound = found.bound - row.limit
        self.has_risen = bound > self.bound + LEAST_RISE * abs(self.bound) if self.weights.size else True
        if bound > self.bound:
            self.bound, self.weights = bound, weights

    def candidate(self, weights: FloatArray, budget: WorkBudget) -> Assignment:
        """Return an assignment that uses up little of the rows, and of those that are equal there costs little."""
        row = sum_of_rows(self.rows, weights)
        used, cost = abs(row_weight(row, self.start)), assignment_cost(self.problem, self.start)
        bytes_alone = weights_as_costs(self.problem, row)
        per_cost = self.share_of_costs * used / cost if used > 0 and cost > 0 else 1.0
        both = MRF(
            costs=tuple(a + per_cost * b for a, b in zip(bytes_alone.costs, self.problem.costs, strict=True)),
            edges={
                ends: matrix + per_cost * self.problem.edges[ends] if ends in self.problem.edges else matrix
                for ends, matrix in bytes_alone.edges.items()
            },
        )
        found = minimize(both, SolveEffort(budget=budget, max_gap=GAP_OF_CANDIDATES))
        return self.best if found.assignment is None else found.assignment


def _most_promising(over: FloatArray) -> FloatArray:
    """Return max_λ min_x over[x]·λ over λ >= 0 that sum to one. Shifted and scaled so that all numbers are near 1."""
    over = (over - over.min()) / (np.ptp(over) or 1.0)
    promised = best_multipliers(np.zeros(len(over)), over)
    assert promised is not None, "every cut allows zero"
    _, weights = promised
    return weights / weights.sum()
