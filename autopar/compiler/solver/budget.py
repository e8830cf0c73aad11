"""The best choice within limits that are only known by measuring: the fastest, one that fits, then the best of these.

    1  the choice of least cost; if it is within the limits, that is all
    2  lower the excess until a choice is within them, or the bound says that none is      (`least_excess`)
    3  from there, prices and branch and bound                                             (`multipliers`)

Whenever time runs out after step 2, there is a choice within the limits and a bound on the best one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from autopar.compiler.solver.constrained import minimize_within_rows
from autopar.compiler.solver.feasibility import Lowered, Measure, Measured, lower_excess
from autopar.compiler.solver.minimize import Effort, Found, minimize
from autopar.compiler.solver.problem import Infeasible, Optimum, Problem, Row, States
from autopar.errors import SolverFailed

SHARE_WITHOUT_LIMITS = 0.25
"""Share of the time that goes to the optimum without limits, unless that is what is asked for."""
MAX_GAP = 1e-3


class NoneWithin(Infeasible):
    """No choice within the limits was found; `lowered` says how near one came, and whether there can be any."""

    def __init__(self, lowered: Lowered) -> None:
        """Keep what was found."""
        super().__init__(("the limits measured",))
        self.lowered = lowered


def minimize_within_limits(
    problem: Problem, measure: Measure, *, time_limit_s: float, max_gap: float, clearly: float
) -> Optimum:
    """The best choice whose measured excess is not above zero.

    `clearly` is an excess from which on a bound need not be looked at twice. Raises `Infeasible` if no choice is
    possible, and `NoneWithin` if none within the limits was found.
    """
    began = time.monotonic()
    known: dict[States, Measured] = {}

    def measured(states: States) -> Measured:
        if states not in known:
            known[states] = measure(states)
        return known[states]

    free = _without_limits(problem, measured, began, time_limit_s, max_gap)
    if free.states is None:
        raise SolverFailed(
            f"No choice for the {len(problem.costs)} nodes was found within {time_limit_s} s, nor proof that there is "
            "none; one is required. Raise the time limit, or allow more states."
        )
    found = free
    if measured(free.states).excess > 0:
        effort = Effort(deadline=began + time_limit_s, max_gap=max_gap)
        # A choice that fits is worth the whole time.
        lowered = lower_excess(problem, measured, free.states, deadline=effort.deadline, clearly=clearly)
        found = _best_from(problem, measured, free, lowered, effort)
        lowering = (f"{lowered.rounds} lowerings",)
        found = replace(found, how=(*free.how, *lowering, *found.how))
    assert found.states is not None
    return Optimum(
        states=found.states,
        value=found.value,
        lower_bound=min(found.value, found.bound),
        seconds=time.monotonic() - began,
        how=", ".join(step if times == 1 else f"{times} x {step}" for step, times in Counter(found.how).items()),
    )


def _without_limits(problem: Problem, measured: Measure, began: float, time_limit_s: float, max_gap: float) -> Found:
    effort = Effort(deadline=began + SHARE_WITHOUT_LIMITS * time_limit_s, max_gap=min(max_gap, MAX_GAP))
    found = minimize(problem, effort)
    proven = found.states is None or effort.is_enough(found.value, found.bound)
    if not proven and measured(found.states or ()).excess <= 0:
        # Limits that leave so good a choice are not likely to matter.
        found = minimize(problem, replace(effort, deadline=began + time_limit_s))
    return found


def _best_from(problem: Problem, measured: Measure, free: Found, lowered: Lowered, effort: Effort) -> Found:
    """The best choice within the limits, from the one that was lowered."""
    fits = lowered.excess <= 0
    if not fits and lowered.bound > 0:
        raise NoneWithin(lowered)

    def violated(states: Sequence[int]) -> Sequence[Row]:
        found = measured(tuple(states))
        return found.rows if found.excess > 0 else ()

    assert free.states is not None
    try:
        return minimize_within_rows(
            problem, violated, effort, [free.states], free.bound, known=lowered.states if fits else None
        )
    except Infeasible:
        # Not even by the rows, which are less than the limits for choices that they were not made for.
        raise NoneWithin(replace(lowered, bound=max(lowered.bound, 0.0))) from None
    except SolverFailed:
        raise NoneWithin(lowered) from None
