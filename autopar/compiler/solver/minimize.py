"""Minimise a choice problem without rows: reduce, bound, search, drop what the bound excludes, and again.

Each round leaves a smaller problem, or one of fewer nodes. What is small but will not close goes to a linear program,
and if that does not end in whole numbers, to branch and bound; so does, at last, what has become too large. Every round
keeps its best choice, and a bound under all that it dropped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from autopar.compiler.solver.beam_search import MOST_WORK, search_frontier
from autopar.compiler.solver.contraction import contract
from autopar.compiler.solver.dual_ascent import FEW_PAIRS, Ascent, ascend, within_gap
from autopar.compiler.solver.linear_program import solve_in_whole_numbers, solve_relaxation
from autopar.compiler.solver.presolve import reduce_problem, total_pairs
from autopar.compiler.solver.problem import Infeasible, Mask, Problem, States, choice_value

LARGEST_PROGRAM = 400_000
"""Pairs beyond which a linear program would not end in time."""
QUICK_PROGRAM = 60_000
"""Pairs up to which a linear program takes less time than contracting: half a second, and mostly in whole numbers."""
WORTHWHILE = 0.7
"""Share of the pairs that a round may leave for another one to follow."""
LIGHTEST, NARROW, WIDE = 30, 1_000, 10_000
"""Partial choices that a search keeps: with many pairs, of every round, and before the solver."""
WIDER = (100_000, 1_000_000, 4_000_000)
"""Those that searches keep before branch and bound, which rarely ends where a relaxation is in fractions."""
SHARE_OF_WIDER = 0.5
"""Of the time that is left, what these may take."""
PROMISING = 0.5
"""Share of what is left to prove that a search must prove for a wider one to follow."""
LIGHT_WORK = 30_000_000
"""Pairs times partial choices of a search that first finds a good choice."""


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
    return _minimize(problem, upper, effort=effort)


def _minimize(problem: Problem, upper: float, *, effort: Effort) -> Found:
    reduced = reduce_problem(problem)
    if not reduced.core.costs:
        return _only(reduced.expand(()), problem, reduced.constant)
    found = _minimize_core(reduced.core, upper - reduced.constant, effort.after(reduced.constant))
    states = None if found.states is None else reduced.expand(found.states)
    value = upper if states is None else choice_value(problem, states)
    return Found(states=states, value=value, bound=found.bound + reduced.constant, how=("reduction", *found.how))


def _only(states: States, problem: Problem, bound: float) -> Found:
    """What reductions alone led to."""
    return Found(states=states, value=choice_value(problem, states), bound=bound, how=("reduction",))


def _minimize_core(core: Problem, upper: float, effort: Effort) -> Found:
    ascent = Ascent.of(core, upper, effort.constant)
    ascend(ascent, effort.deadline)
    best = _Best(ascent=ascent, bound=ascent.bound, how=["ascent"])
    pairs = total_pairs(core)
    light = min(NARROW, max(LIGHTEST, LIGHT_WORK // max(pairs, 1)))
    rest, kept = within_gap(ascent)
    for width in dict.fromkeys((0, light, NARROW)):
        # Going on with little is cheap: `max_gap` spares the rest only.
        spared = width and pairs > FEW_PAIRS and best.is_enough(effort)
        if spared or best.is_closed or effort.left_s <= 0:
            return best.found()
        if width:
            best.search(width, effort.deadline)
            rest, kept = within_gap(ascent)
        if total_pairs(rest) < WORTHWHILE * pairs:
            best.go_on(rest, kept, partial(_minimize, effort=effort.after(ascent.bound)))
            return best.found()
    if not best.is_enough(effort):
        start = _within(ascent.states, kept)
        best.go_on(rest, kept, partial(_contract, effort=effort.after(ascent.bound), start=start))
    return best.found()


def _contract(problem: Problem, upper: float, *, effort: Effort, start: States | None) -> Found:
    """The solver if that is quick, else the problem with some nodes made one; if it is too large, a wide search."""
    reduced = reduce_problem(problem)
    if not reduced.core.costs:
        return _only(reduced.expand(()), problem, reduced.constant)
    inner, spare = effort.after(reduced.constant), upper - reduced.constant
    known = None if start is None else reduced.core_states(start)
    if total_pairs(reduced.core) <= QUICK_PROGRAM and inner.left_s > 0:
        contracted, how = None, ()
        found = _by_solver(reduced.core, spare, effort=inner, start=known)
    else:
        contracted, how = contract(reduced.core), ("contraction",)
        if contracted is None:
            found = _exhaust(reduced.core, spare, inner, known)
        else:
            found = _minimize(contracted.problem, spare, effort=inner)
    how = (*how, *found.how)
    if found.states is None:
        return Found(states=None, value=upper, bound=found.bound + reduced.constant, how=how)
    states = reduced.expand(found.states if contracted is None else contracted.expand(found.states))
    return Found(states=states, value=choice_value(problem, states), bound=found.bound + reduced.constant, how=how)


def _exhaust(core: Problem, upper: float, effort: Effort, start: States | None) -> Found:
    """A wide search, then the solver."""
    found = _search_wide(core, Found(states=None, value=upper, bound=-math.inf, how=()), WIDE, effort.deadline)
    if effort.is_enough(found.value, found.bound) or total_pairs(core) > LARGEST_PROGRAM or effort.left_s <= 0:
        return found
    solved = _by_solver(core, found.value, effort=effort, start=found.states or start)
    return Found(
        states=found.states if solved.states is None else solved.states,
        value=solved.value,
        bound=max(found.bound, solved.bound),
        how=(*found.how, *solved.how),
    )


@dataclass(kw_only=True)
class _Best:
    """An ascent and what was found since: choices, and a higher bound."""

    ascent: Ascent
    bound: float
    how: list[str]

    @property
    def is_closed(self) -> bool:
        """Whether the best choice is proven to be the optimum."""
        return self.ascent.value - self.bound <= self.ascent.round_off

    def is_enough(self, effort: Effort) -> bool:
        """Whether the best choice needs no further proof."""
        return self.is_closed or effort.is_enough(self.ascent.value, self.bound)

    def search(self, width: int, deadline: float) -> None:
        """Search what is within the gap by partial choices."""
        ascent = self.ascent
        rest, kept = within_gap(ascent)
        most = ascent.value - ascent.bound + ascent.round_off
        self.how.append("search")
        try:
            reduced = reduce_problem(rest)
        except Infeasible:
            self.close()
            return
        searched = search_frontier(reduced.core, most - reduced.constant, width, deadline=deadline)
        if searched.states is not None:
            self.offer(reduced.expand(searched.states), kept)
        self.raise_bound(ascent.bound + reduced.constant + searched.bound)

    def go_on(self, rest: Problem, kept: list[Mask], method: Callable[[Problem, float], Found]) -> None:
        """Leave what is within the gap to another method."""
        spare = self.ascent.value - self.ascent.bound
        try:
            found = method(rest, spare)
        except Infeasible:
            self.close()
            return
        self.how += found.how
        if found.states is not None:
            self.offer(found.states, kept)
        # What was dropped costs more than the best choice.
        self.raise_bound(self.ascent.bound + found.bound)

    def close(self) -> None:
        """Nothing is left within the gap: there is no better choice, round-off aside, or none at all."""
        if not self.ascent.states:
            raise Infeasible(())
        self.bound = self.ascent.value

    def offer(self, states: States, kept: list[Mask]) -> None:
        """Keep a choice, by its states among those kept, if it is the best so far."""
        self.ascent.offer(tuple(int(np.flatnonzero(keep)[state]) for keep, state in zip(kept, states, strict=True)))

    def raise_bound(self, bound: float) -> None:
        """Note a bound on what is within the gap."""
        self.bound = min(self.ascent.value, max(self.bound, bound))

    def found(self) -> Found:
        """The result."""
        ascent = self.ascent
        bound = min(self.bound, ascent.value)
        return Found(states=ascent.states or None, value=ascent.value, bound=bound, how=tuple(self.how))


def _within(states: States, kept: list[np.ndarray]) -> States | None:
    """The states by their place among those kept."""
    if not states or not all(keep[state] for keep, state in zip(kept, states)):
        return None
    return tuple(int(keep[:state].sum()) for keep, state in zip(kept, states))


def _by_solver(problem: Problem, upper: float, *, effort: Effort, start: States | None) -> Found:
    """Linear program, then branch and bound if the program ends in fractions."""
    relaxed = solve_relaxation(problem, time_limit_s=effort.left_s)
    found = Found(states=None, value=upper, bound=relaxed.bound, how=("linear program",))
    if relaxed.states is not None and (value := choice_value(problem, relaxed.states)) <= upper:
        found = Found(states=relaxed.states, value=value, bound=relaxed.bound, how=found.how)
    if relaxed.whole or effort.is_enough(found.value, found.bound) or effort.left_s <= 0:
        return found
    found = _search_wider(problem, found, effort)
    if effort.is_enough(found.value, found.bound) or effort.left_s <= 0:
        return found
    gap = effort.slack(found.value)
    mixed = solve_in_whole_numbers(problem, start=found.states or start, time_limit_s=effort.left_s, gap=gap)
    bound, how = max(found.bound, mixed.bound), (*found.how, "branch and bound")
    if mixed.states is not None and (value := choice_value(problem, mixed.states)) <= found.value:
        return Found(states=mixed.states, value=value, bound=bound, how=how)
    return Found(states=found.states, value=found.value, bound=bound, how=how)


def _search_wider(problem: Problem, found: Found, effort: Effort) -> Found:
    """Search by more and more partial choices, until the best choice is proven, or it looks as if it would not be."""
    deadline = time.monotonic() + SHARE_OF_WIDER * effort.left_s
    relaxed = found.bound
    for width in (WIDE, *WIDER):
        found = _search_wide(problem, found, width, deadline, most_work=math.inf)
        is_promising = found.bound - relaxed >= PROMISING * (found.value - relaxed)
        if effort.is_enough(found.value, found.bound) or not is_promising or time.monotonic() > deadline:
            break
    return found


def _search_wide(problem: Problem, found: Found, width: int, deadline: float, *, most_work: float = MOST_WORK) -> Found:
    """What was found, improved by a search."""
    searched = search_frontier(problem, found.value, width, most_work=most_work, deadline=deadline)
    states = found.states if searched.states is None else searched.states
    value = found.value if searched.states is None else choice_value(problem, searched.states)
    bound = min(value, max(found.bound, searched.bound))
    return Found(states=states, value=value, bound=bound, how=(*found.how, "wide search"))
