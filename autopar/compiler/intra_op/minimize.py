"""Minimise a choice problem without rows: reduce, bound, drop what the bound excludes, again; the solver does the rest.

Each round leaves a smaller problem. What cannot be made smaller goes to a linear program, and if that does not end in
whole numbers, to branch and bound. Every round keeps its best choice, and a bound under all that it dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from autopar.compiler.intra_op.choice_problem import Infeasible, Mask, Problem, States, choice_value
from autopar.compiler.intra_op.dual_ascent import Ascent, ascend, within_gap
from autopar.compiler.intra_op.frontier_search import search_frontier
from autopar.compiler.intra_op.local_polytope import solve_in_whole_numbers, solve_relaxation
from autopar.compiler.intra_op.reductions import reduce_problem, total_pairs

LARGEST_PROGRAM = 400_000
"""Pairs beyond which a linear program would not end in time."""
WORTHWHILE = 0.7
"""Share of the pairs that a round may leave for another one to follow."""
WIDTHS = (1_000, 10_000, 100_000)
"""Partial choices that searches keep, one after the other."""
WIDER = 0.7
"""Share of the gap that a search may leave for a wider one to follow."""


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
    return _minimize(problem, upper, effort=effort, width=WIDTHS[0])


def _minimize(problem: Problem, upper: float, *, effort: Effort, width: int) -> Found:
    reduced = reduce_problem(problem)
    if not reduced.core.costs:
        states = reduced.expand(())
        return Found(states=states, value=choice_value(problem, states), bound=reduced.constant, how=("reductions",))
    found = _minimize_core(reduced.core, effort.after(reduced.constant), upper - reduced.constant, width)
    states = None if found.states is None else reduced.expand(found.states)
    value = upper if states is None else choice_value(problem, states)
    return Found(states=states, value=value, bound=found.bound + reduced.constant, how=("reductions", *found.how))


def _minimize_core(core: Problem, effort: Effort, upper: float, width: int) -> Found:
    ascent = Ascent.of(core, upper, effort.constant)
    ascend(ascent, effort.deadline)
    best = _Best(ascent=ascent, bound=ascent.bound, how=[f"{ascent.sweeps} sweeps"])
    pairs = total_pairs(core)
    for width in [w for w in WIDTHS if w >= width]:
        if best.is_enough(effort) or effort.left_s <= 0:
            return best.found()
        missing = ascent.value - best.bound
        best.search(width)
        if best.is_enough(effort):
            return best.found()
        rest, kept = within_gap(ascent)
        if total_pairs(rest) < WORTHWHILE * pairs:
            best.go_on(rest, kept, partial(_minimize, effort=effort.after(ascent.bound), width=width))
            return best.found()
        if ascent.value - best.bound > WIDER * missing:
            break
    if effort.left_s > 0:
        rest, kept = within_gap(ascent)
        start = _within(ascent.states, kept)
        best.go_on(rest, kept, partial(_by_solver, effort=effort.after(ascent.bound), start=start))
    return best.found()


@dataclass(kw_only=True)
class _Best:
    """An ascent and what was found since: choices, and a higher bound."""

    ascent: Ascent
    bound: float
    how: list[str]

    def is_enough(self, effort: Effort) -> bool:
        """Whether the best choice needs no further proof."""
        value = self.ascent.value
        return value - self.bound <= self.ascent.round_off or effort.is_enough(value, self.bound)

    def search(self, width: int) -> None:
        """Search what is within the gap by partial choices."""
        ascent = self.ascent
        rest, kept = within_gap(ascent)
        most = ascent.value - ascent.bound + ascent.round_off
        self.how.append(f"{width} wide")
        try:
            reduced = reduce_problem(rest)
        except Infeasible:
            self.close()
            return
        searched = search_frontier(reduced.core, most - reduced.constant, width)
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
