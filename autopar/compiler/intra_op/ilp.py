"""Solve a choice problem: exact reductions, then a linear program, then branch and bound on what is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from autopar.compiler.intra_op.choice_problem import Infeasible, Optimum, Problem, Row, States, choice_value
from autopar.compiler.intra_op.minimize import Effort, minimize

__all__ = ["Infeasible", "Optimum", "Problem", "Row", "solve"]


def solve(
    problem: Problem,
    *,
    violated_rows: Callable[[Sequence[int]], Sequence[Row]] | None = None,
    time_limit_s: float = 60,
    max_gap: float = 0.0,
    starts: Sequence[Sequence[int]] = (),
) -> Optimum:
    """The choice of least cost."""
    began = time.monotonic()
    found = minimize(problem, Effort(deadline=began + time_limit_s, max_gap=max_gap))
    assert found.states is not None
    return Optimum(
        states=found.states,
        value=found.value,
        lower_bound=min(found.value, found.bound),
        seconds=time.monotonic() - began,
        how=", ".join(found.how),
    )
