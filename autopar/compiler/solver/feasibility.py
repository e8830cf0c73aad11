"""Lower what a choice exceeds its limits by, until it is within them, or until no choice can be.

    measure: states  ->  by how much they exceed a limit, and the rows that say so

    min_x max_r (w_r(x) - limit_r)  >=  max_λ min_x Σ_r λ_r (w_r(x) - limit_r),   λ >= 0, Σ λ_r = 1

For given λ the right side is a problem without rows, which reductions alone solve as a rule. Every choice met is a cut
on what λ can bring, and a linear program says which λ promises most (Kelley 1960); what is tried lies halfway between
that and the best so far (Ben-Ameur & Neto 2007). The rows of one moment say nothing about the others: so the choices
that are measured also cost time, a little, which keeps what no row weighs yet as split as the fastest choice has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.compiler.solver.linear_program import Program, run_program
from autopar.compiler.solver.minimize import Effort, minimize
from autopar.compiler.solver.presolve import sum_of_rows, weights_as_costs
from autopar.compiler.solver.problem import Floats, Problem, Row, States, choice_value, row_weight

MAX_ROUNDS = 16
FEW_ROUNDS = 5
"""Rounds that are spent on what is clearly too little, to say about how much would do."""
SHARE_OF_COSTS, LEAST_SHARE = 0.1, 1e-3
"""Of the weights of the rows, what the costs of the fastest choice count for: at first, and at least."""
MAX_GAP = 0.02
LEAST_PROGRESS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Measured:
    """By how much a choice exceeds its limits, if that is above zero; the rows that it exceeds, at least one then."""

    excess: float
    rows: Sequence[Row]


Measure = Callable[[States], Measured]


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """The choice that was measured to exceed the limits least, by how much, and what no choice falls below.

    The bound holds as far as the rows do: they are exact for the choices that they were made for.
    """

    states: States
    excess: float
    bound: float
    rounds: int


def lower_excess(problem: Problem, measure: Measure, start: States, *, deadline: float, clearly: float) -> Lowered:
    """Lower the excess of a choice until it is within its limits, or as far as it gets.

    Once the bound is above `clearly`, few rounds are spent.
    """
    lowering = _Lowering(problem=problem, measure=measure, start=start)
    states, rounds = start, 0
    while lowering.meet(states) or lowering.has_risen or lowering.turn_to_rows():
        rounds += 1
        hopeless = lowering.bound > clearly and rounds > FEW_ROUNDS
        if lowering.is_done or hopeless or rounds > MAX_ROUNDS or time.monotonic() > deadline:
            break
        weights = lowering.next_weights()
        lowering.raise_bound(weights, deadline)
        states = lowering.candidate(weights, deadline)
    return Lowered(states=lowering.best, excess=lowering.excess, bound=lowering.bound, rounds=rounds)


@dataclass(kw_only=True)
class _Lowering:
    """What is known so far."""

    problem: Problem
    measure: Measure
    start: States
    best: States = ()
    excess: float = np.inf
    bound: float = -np.inf
    weights: Floats = field(default_factory=lambda: np.zeros(0))
    """Of the rows, those that gave the bound."""
    rows: list[Row] = field(default_factory=list[Row])
    met: list[States] = field(default_factory=list[States])
    share_of_costs: float = SHARE_OF_COSTS
    has_risen: bool = True
    """Whether the bound has, the last time."""

    @property
    def is_done(self) -> bool:
        """Whether the limits are kept, or no choice exceeds them less."""
        return self.excess <= 0 or self.bound >= self.excess

    def meet(self, states: States) -> bool:
        """Measure a choice, unless that was done."""
        if states in self.met:
            return False
        self.met.append(states)
        measured = self.measure(states)
        self.rows += measured.rows
        if measured.excess < self.excess:
            self.best, self.excess = states, measured.excess
        return True

    def turn_to_rows(self) -> bool:
        """Let costs count for less, which brings other choices, unless they hardly count any more."""
        self.share_of_costs /= 4
        return self.share_of_costs > LEAST_SHARE

    def next_weights(self) -> Floats:
        """What the cuts promise most for, halfway from what was best so far."""
        promising = _most_promising(np.array([self.over(states) for states in self.met]))
        if not self.weights.size:
            return promising
        return (promising + np.concatenate([self.weights, np.zeros(promising.size - self.weights.size)])) / 2

    def over(self, states: States) -> Floats:
        """By how much each row is exceeded."""
        return np.array([row_weight(row, states) - row.limit for row in self.rows])

    def raise_bound(self, weights: Floats, deadline: float) -> None:
        """Bound what every choice exceeds the rows by, weighted so."""
        row = sum_of_rows(self.rows, weights)
        found = minimize(weights_as_costs(self.problem, row), Effort(deadline=deadline, max_gap=1e-3))
        bound = found.bound - row.limit
        self.has_risen = bound > self.bound + LEAST_PROGRESS * abs(self.bound) if self.weights.size else True
        if bound > self.bound:
            self.bound, self.weights = bound, weights

    def candidate(self, weights: Floats, deadline: float) -> States:
        """A choice that uses up little of the rows, and of what is equal there costs little."""
        row = sum_of_rows(self.rows, weights)
        used, cost = abs(row_weight(row, self.start)), choice_value(self.problem, self.start)
        bytes_alone = weights_as_costs(self.problem, row)
        per_cost = self.share_of_costs * used / cost if used > 0 and cost > 0 else 1.0
        both = Problem(
            costs=tuple(a + per_cost * b for a, b in zip(bytes_alone.costs, self.problem.costs, strict=True)),
            edges={
                ends: matrix + per_cost * self.problem.edges[ends] if ends in self.problem.edges else matrix
                for ends, matrix in bytes_alone.edges.items()
            },
        )
        found = minimize(both, Effort(deadline=deadline, max_gap=MAX_GAP))
        return self.best if found.states is None else found.states


def _most_promising(over: Floats) -> Floats:
    """max_λ min_x over[x]·λ over λ >= 0 that sum to one. Shifted and scaled so that all numbers are near 1."""
    num_cuts, num_rows = over.shape
    shift = over.min()
    over = (over - shift) / (np.ptp(over) or 1.0)
    matrix = np.ones((num_cuts + 1, num_rows + 1))
    matrix[:num_cuts, 1:] = -over
    matrix[num_cuts, 0] = 0.0
    at_row, at_column = np.nonzero(matrix)
    result = run_program(
        Program(
            costs=np.concatenate([[-1.0], np.zeros(num_rows)]),
            lower=np.concatenate([np.full(num_cuts, -np.inf), [1.0]]),
            upper=np.concatenate([np.zeros(num_cuts), [1.0]]),
            entry_rows=at_row,
            entry_columns=at_column,
            entries=matrix[at_row, at_column],
            at_most=np.inf,
        )
    )
    assert result.columns is not None
    weights = np.maximum(result.columns[1:], 0.0)
    return weights / weights.sum()
