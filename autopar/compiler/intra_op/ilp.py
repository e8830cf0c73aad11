"""Solve a choice problem: exact reductions, then a linear program, then branch and bound on what is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.compiler.intra_op.choice_problem import Infeasible, Optimum, Problem, Row
from autopar.compiler.intra_op.minimize import Effort, minimize
from autopar.compiler.intra_op.multipliers import minimize_within_rows

__all__ = ["Infeasible", "Optimum", "Problem", "Row", "solve"]


def solve(
    problem: Problem,
    *,
    violated_rows: Callable[[Sequence[int]], Sequence[Row]] | None = None,
    time_limit_s: float = 60,
    max_gap: float = 1e-3,
    starts: Sequence[Sequence[int]] = (),
) -> Optimum:
    """The choice of least cost that violates no row.

    `violated_rows` is shown candidates and returns the rows that they violate, none if there are none; they hold from
    then on. `starts` are choices known to be good. With rows a gap of `max_gap` is proof enough, and at the time limit
    any gap is: the result has its bound.

    Raises `Infeasible` if no choice is possible, and `SolverFailed` if none was found in time.
    """
    began = time.monotonic()
    deadline = began + time_limit_s
    found = minimize(problem, Effort(deadline=deadline))
    assert found.states is not None
    if violated_rows is not None:
        within = minimize_within_rows(
            problem,
            violated_rows,
            Effort(deadline=deadline, max_gap=max_gap),
            [found.states, *map(tuple, starts)],
            found.bound,
        )
        found = replace(within, how=(*found.how, *within.how))
    assert found.states is not None
    return Optimum(
        states=found.states,
        value=found.value,
        lower_bound=min(found.value, found.bound),
        seconds=time.monotonic() - began,
        how=", ".join(found.how),
    )
