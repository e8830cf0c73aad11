"""Minimise a choice problem without rows: reduce, bound, drop what the bound excludes, again; the solver does the rest.

Each round leaves a smaller problem. What cannot be made smaller goes to a linear program, and if that does not end in
whole numbers, to branch and bound. Every round keeps its best choice, and a bound under all that it dropped.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from autopar.compiler.intra_op.choice_problem import Infeasible, Problem, States, choice_value
from autopar.compiler.intra_op.dual_ascent import Ascent, ascend, within_gap
from autopar.compiler.intra_op.local_polytope import solve_in_whole_numbers, solve_relaxation
from autopar.compiler.intra_op.reductions import reduce_problem, total_pairs

SMALL_ENOUGH = 20_000
"""Pairs that the solver is given without another round."""
LARGEST_PROGRAM = 400_000
"""Pairs beyond which a linear program would not end in time."""
WORTHWHILE = 0.7
"""Share of the pairs that a round may leave for another one to follow."""
PROMISING = 3
"""States per node that the search for a good choice looks at."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """When to stop: at a time of the monotonic clock, or at a gap, a share of the value that includes `constant`."""

    deadline: float
    max_gap: float = 0.0
    constant: float = 0.0

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def slack(self, value: float) -> float:
        """How far below a choice of this value, costs of `constant` aside, a bound may lie for `max_gap`."""
        return self.max_gap / (1 + self.max_gap) * abs(value + self.constant) if value < np.inf else 0.0

    def is_enough(self, value: float, bound: float) -> bool:
        """Whether a choice of this value needs no further proof."""
        return value - bound <= self.slack(value)

    def after(self, constant: float) -> Effort:
        """The same effort on a problem whose values are less by `constant`."""
        return Effort(deadline=self.deadline, max_gap=self.max_gap, constant=self.constant + constant)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best choice, unless nothing was found below the upper limit; its value; a bound on every choice."""

    states: States | None
    value: float
    bound: float
    how: tuple[str, ...]


def minimize(problem: Problem, effort: Effort, upper: float = np.inf) -> Found:
    """The best choice of value at most `upper`. Raises `Infeasible` when no choice is possible."""
    reduced = reduce_problem(problem)
    if not reduced.core.costs:
        states = reduced.expand(())
        return Found(states=states, value=choice_value(problem, states), bound=reduced.constant, how=("reductions",))
    found = _minimize_core(reduced.core, effort.after(reduced.constant), upper - reduced.constant)
    states = None if found.states is None else reduced.expand(found.states)
    value = upper if states is None else choice_value(problem, states)
    return Found(states=states, value=value, bound=found.bound + reduced.constant, how=("reductions", *found.how))


def _minimize_core(core: Problem, effort: Effort, upper: float) -> Found:
    ascent = Ascent.of(core, upper, effort.constant)
    ascend(ascent, effort.deadline)
    if ascent.closed or effort.left_s <= 0:
        return _best_of(ascent, ())
    rest, kept = within_gap(ascent)
    if total_pairs(rest) > SMALL_ENOUGH:
        _search_promising(ascent, effort)
        rest, kept = within_gap(ascent)
    inner = effort.after(ascent.bound)
    spare = ascent.value - ascent.bound
    try:
        if total_pairs(rest) < WORTHWHILE * total_pairs(core):
            found = minimize(rest, inner, spare)
        else:
            found = _by_solver(rest, inner, _within(ascent.states, kept), spare)
    except Infeasible:
        if not ascent.states:
            raise
        # Round-off excluded the best choice itself: nothing is better.
        return _best_of(ascent, ())
    if found.states is not None:
        ascent.offer(tuple(int(np.flatnonzero(keep)[state]) for keep, state in zip(kept, found.states)))
    # What was dropped costs more than the best choice.
    ascent.bound = min(ascent.value, ascent.bound + max(found.bound, 0.0))
    return _best_of(ascent, found.how)


def _best_of(ascent: Ascent, how: tuple[str, ...]) -> Found:
    return Found(
        states=ascent.states or None,
        value=ascent.value,
        bound=min(ascent.bound, ascent.value),
        how=(f"{ascent.sweeps} sweeps", *how),
    )


def _search_promising(ascent: Ascent, effort: Effort) -> None:
    """Look for a better choice among the few states of every node that the bounds speak for."""
    kept = list[np.ndarray]()
    for node, least in enumerate(ascent.least):
        first = np.argsort(least, kind="stable")[:PROMISING]
        kept.append(np.unique([*first, ascent.states[node]] if ascent.states else first))
    few = Problem(
        costs=tuple(cost[keep] for cost, keep in zip(ascent.problem.costs, kept)),
        edges={(i, j): matrix[np.ix_(kept[i], kept[j])] for (i, j), matrix in ascent.problem.edges.items()},
    )
    brief = Effort(deadline=time.monotonic() + effort.left_s / 10, max_gap=effort.max_gap, constant=effort.constant)
    try:
        found = minimize(few, brief, ascent.value)
    except Infeasible:
        return
    if found.states is not None:
        ascent.offer(tuple(int(keep[state]) for keep, state in zip(kept, found.states)))


def _within(states: States, kept: list[np.ndarray]) -> States | None:
    """The states by their place among those kept."""
    if not states or not all(keep[state] for keep, state in zip(kept, states)):
        return None
    return tuple(int(keep[:state].sum()) for keep, state in zip(kept, states))


def _by_solver(problem: Problem, effort: Effort, start: States | None, upper: float) -> Found:
    """Linear program, then branch and bound if the program ends in fractions."""
    if total_pairs(problem) > LARGEST_PROGRAM and start is not None:
        return Found(states=None, value=upper, bound=0.0, how=("too large to prove",))
    relaxed = solve_relaxation(problem, time_limit_s=effort.left_s)
    found = Found(states=None, value=upper, bound=relaxed.bound, how=("linear program",))
    if relaxed.states is not None and (value := choice_value(problem, relaxed.states)) <= upper:
        found = Found(states=relaxed.states, value=value, bound=relaxed.bound, how=found.how)
    if relaxed.whole or effort.is_enough(found.value, found.bound) or effort.left_s <= 0:
        return found
    gap = effort.slack(found.value)
    mixed = solve_in_whole_numbers(problem, start=found.states or start, time_limit_s=effort.left_s, gap=gap)
    bound, how = max(found.bound, mixed.bound), (*found.how, "branch and bound")
    if mixed.states is not None and (value := choice_value(problem, mixed.states)) <= found.value:
        return Found(states=mixed.states, value=value, bound=bound, how=how)
    return Found(states=found.states, value=found.value, bound=bound, how=how)
