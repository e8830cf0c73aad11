"""Solve a choice problem: exact reductions, bounds, searches; branch and bound on what is left."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autopar.compiler.intra_op.choice_problem import Infeasible, Optimum, Problem, Row, choice_value
from autopar.compiler.intra_op.minimize import Effort, minimize
from autopar.compiler.intra_op.multipliers import minimize_within_rows
from autopar.errors import SolverFailed

__all__ = ["Infeasible", "Optimum", "Problem", "Row", "solve"]

SHARE_WITHOUT_ROWS = 0.25
"""Share of the time that goes to the optimum without rows, unless that is what is asked for."""
MAX_GAP = 1e-3
"""Gap that is small enough where nothing else is said, and for the optimum without rows before that with them."""


def solve(
    problem: Problem,
    *,
    violated_rows: Callable[[Sequence[int]], Sequence[Row]] | None = None,
    time_limit_s: float = 60,
    max_gap: float = MAX_GAP,
    starts: Sequence[Sequence[int]] = (),
) -> Optimum:
    """The choice of least cost that violates no row.

    `violated_rows` is shown candidates and returns the rows that they violate, none if there are none; they hold from
    then on. `starts` are choices known to be good. Branch and bound, which may take long, is left out where the gap is
    at most `max_gap`, and ends at the time limit; the result has its bound.

    Raises `Infeasible` if no choice is possible, and `SolverFailed` if none was found in time.
    """
    began = time.monotonic()
    known = [tuple(int(state) for state in states) for states in starts]
    # With rows the optimum without them is a bound only, not worth the whole time.
    share = 1.0 if violated_rows is None else SHARE_WITHOUT_ROWS
    gap = max_gap if violated_rows is None else min(max_gap, MAX_GAP)
    without = Effort(deadline=began + share * time_limit_s, max_gap=gap)
    found = minimize(problem, without)
    proven = found.states is None or without.is_enough(found.value, found.bound)
    if not proven and violated_rows is not None and not violated_rows(found.states or ()):
        # Rows that leave so good a choice are not likely to matter.
        found = minimize(problem, replace(without, deadline=began + time_limit_s))
    candidates = [*known] if found.states is None else [found.states, *known]
    if violated_rows is not None and candidates:
        effort = Effort(deadline=began + time_limit_s, max_gap=max_gap)
        within = minimize_within_rows(problem, violated_rows, effort, candidates, found.bound)
        found = replace(within, how=(*found.how, *within.how))
        candidates = [] if within.states is None else [within.states]
    best = min(candidates, key=lambda states: choice_value(problem, states), default=None)
    if best is None or np.isinf(value := choice_value(problem, best)):
        raise SolverFailed(
            f"No choice for the {len(problem.costs)} nodes was found within {time_limit_s} s, nor proof that there is "
            "none; one is required. Raise the time limit, or allow more states."
        )
    return Optimum(
        states=best,
        value=value,
        lower_bound=min(value, found.bound),
        seconds=time.monotonic() - began,
        how=", ".join(step if times == 1 else f"{times} x {step}" for step, times in Counter(found.how).items()),
    )
