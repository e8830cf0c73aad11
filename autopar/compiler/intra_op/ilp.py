"""Solve a choice problem: exact reductions, then a linear program, then branch and bound on what is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from autopar.compiler.intra_op.choice_problem import Infeasible, Optimum, Problem, Row, States, choice_value
from autopar.compiler.intra_op.local_polytope import solve_in_whole_numbers, solve_relaxation
from autopar.compiler.intra_op.reductions import reduce_problem

__all__ = ["Infeasible", "Optimum", "Problem", "Row", "solve"]


def solve(
    problem: Problem,
    *,
    violated_rows: Callable[[Sequence[int]], Sequence[Row]] | None = None,
    time_limit_s: float = 60,
    starts: Sequence[Sequence[int]] = (),
) -> Optimum:
    """The choice of least cost."""
    began = time.monotonic()
    reduced = reduce_problem(problem)
    constant = reduced.constant
    how = "reductions"
    states: States | None = ()
    bound = 0.0
    if reduced.core.costs:
        relaxed = solve_relaxation(reduced.core, time_limit_s=time_limit_s)
        states, bound, how = relaxed.states, relaxed.bound, "reductions, linear program"
        if not relaxed.whole:
            left = time_limit_s - (time.monotonic() - began)
            mixed = solve_in_whole_numbers(reduced.core, start=None, time_limit_s=left)
            states, how = mixed.states, how + ", branch and bound"
            bound = max(bound, mixed.bound)
    assert states is not None
    whole = reduced.expand(states)
    value = choice_value(problem, whole)
    return Optimum(
        states=whole,
        value=value,
        lower_bound=min(value, bound + constant),
        seconds=time.monotonic() - began,
        how=how,
    )
