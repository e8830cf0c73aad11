"""Minimise an MRF problem without rows: presolve, bound, search, then exhaust what is left.

    presolve      reductions that keep the optimum                                    → reduce_problem
    bound         dual ascent: a bound, an assignment, the options that may be better → ascend, within_gap
    beam search   among these options; then the ascent at length, and a wider beam    → beam_search, ascend
    exhaustive    some nodes contracted, and all of this again; with few pairs left, or
                  too many, wide beams, then branch and bound                         → _exhaust

Each step takes a problem and an upper limit on what is of interest, and returns an `Incumbent`: its best assignment,
and a bound under all that it dropped. A round that leaves few options begins again with these alone.

A first ablation (`benchmarks/results/solver-ablation-2026-11-22.json`) took one step out at a time on saved problems of
the test suite, on a shared machine, within 12 to 40 s each: seconds of the processor were 5 times as many without
elimination, 2.3 times without the ascent; without beam search a gap of 3e-4 stayed in one of 13 problems that reach it.
Problems that ran out of time say nothing about gaps, so that pruning is undecided. `benchmarks.optimality_gaps
--without STEP` repeats it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from autopar.compiler.solver.beam_search import MOST_WORK, beam_search
from autopar.compiler.solver.contraction import contract
from autopar.compiler.solver.dual_ascent import FEW_PAIRS, Ascent, ascend, within_gap
from autopar.compiler.solver.linear_program import LARGEST_PROGRAM, solve_in_whole_numbers
from autopar.compiler.solver.presolve import reduce_problem
from autopar.compiler.solver.problem import (
    MRF,
    Assignment,
    BoolArray,
    Incumbent,
    Infeasible,
    NoneBelow,
    Optimum,
    SolveEffort,
    WorkBudget,
    assignment_cost,
    num_pairs,
)
from autopar.errors import SolverFailed

MAX_GAP = 1e-3
"""Gap that is small enough where nothing else is said."""
FEW_TO_CONTRACT = 60_000
"""Pairs up to which wide beams and branch and bound take less time than contracting."""
SHARE_TO_GO_ON = 0.7
"""Share of the pairs that a round may leave for another one to follow."""
LIGHTEST, NARROW, WIDE = 30, 4_000, 10_000
"""Widths of a beam: with many pairs, of every round, and before branch and bound."""
WIDER = (100_000, 1_000_000, 4_000_000)
"""Further widths before branch and bound, which rarely ends where a linear program is in fractions."""
MOST_WIDER_WORK = 2_000_000_000
"""Pairs of a partial assignment and an option that each further width may look at."""
PROVEN_TO_WIDEN = 0.5
"""Share of what is left to prove that a wide beam search must prove for a wider one to follow."""
SWEEPS_TO_SEARCH = 96
"""Sweeps of a long ascent between one beam search and the next."""
LIGHT_WORK = 1_000_000
"""Pairs times partial assignments of a search that first finds a good assignment."""

ROUND_OFF = 1e-9
"""Share of a cost by which it may differ where its terms are added in another order."""

STEPS = (
    "elimination",
    "dual ascent",
    "rounding",
    "pruning",
    "beam search",
    "contraction",
    "wide beams",
    "branch and bound",
)
"""Steps that may be left out, to measure what each is worth."""

SolverStep = Callable[[MRF, SolveEffort, float], Incumbent]
"""Looks for an assignment of value at most the last argument. Raises `Infeasible` when none is possible."""


def solve(
    problem: MRF,
    *,
    time_limit_s: float = 60,
    max_gap: float = MAX_GAP,
    below: float = np.inf,
    without: Collection[str] = (),
) -> Optimum:
    """Return the assignment of least cost; once the gap is at most `max_gap`, what takes long is left out.

    It takes the work of about `time_limit_s` seconds, which is counted: equal problems have equal solutions on a busy
    machine. `without` names steps to leave out. Raises `Infeasible` if no assignment is possible, `NoneBelow` as soon
    as it is known that none costs less than `below`, and `SolverFailed` if none was found with so much work.
    """
    began = time.monotonic()
    budget = WorkBudget.of_seconds(time_limit_s)
    effort = SolveEffort(budget=budget, max_gap=max_gap, without=frozenset(without))
    return optimum_of(problem, minimize_below(problem, effort, below), began, time_limit_s)


def minimize_below(problem: MRF, effort: SolveEffort, below: float) -> Incumbent:
    """Return the best assignment; raise `NoneBelow` as soon as it is known that none costs less than `below`."""
    found = minimize(problem, effort, below)
    if below == np.inf or found.value < below - ROUND_OFF * abs(below):
        return found
    if found.bound >= below - ROUND_OFF * abs(below) or effort.is_enough(below, found.bound):
        raise NoneBelow(found.bound)
    return minimize(problem, effort)  # the work ended before that was known


def optimum_of(problem: MRF, found: Incumbent, began: float, time_limit_s: float) -> Optimum:
    """Return the result of a search that began at a time of the monotonic clock."""
    if found.assignment is None or np.isinf(found.value):
        raise SolverFailed(
            f"No choice for the {len(problem.costs)} nodes was found with the work of {time_limit_s} s, nor proof that "
            "there is none; one is required. Raise the time limit, or allow more options."
        )
    return Optimum(
        assignment=found.assignment,
        value=found.value,
        lower_bound=min(found.value, found.bound),
        seconds=time.monotonic() - began,
        how=", ".join(step if times == 1 else f"{times} x {step}" for step, times in Counter(found.how).items()),
    )


def minimize(problem: MRF, effort: SolveEffort, upper: float = np.inf) -> Incumbent:
    """Presolve, bound and search, then exhaust what is left; the best assignment of value at most `upper`."""
    return _presolved(_bound_and_search, problem, effort, upper)


def _presolved(
    step: SolverStep, problem: MRF, effort: SolveEffort, upper: float, *, ordered: bool = False
) -> Incumbent:
    """Reduce a problem, take a step on what is left of it, and return its result for the whole problem."""
    reduced = reduce_problem(problem, eliminates="elimination" not in effort.without, ordered=ordered)
    if not reduced.core.costs:
        assignment = reduced.expand(())
        value = assignment_cost(problem, assignment)
        return Incumbent(assignment=assignment, value=value, bound=reduced.constant, how=("reduction",))
    found = step(reduced.core, effort.after(reduced.constant), upper - reduced.constant)
    assignment = None if found.assignment is None else reduced.expand(found.assignment)
    return Incumbent(
        assignment=assignment,
        value=upper if assignment is None else assignment_cost(problem, assignment),
        bound=found.bound + reduced.constant,
        how=("reduction", *found.how),
    )


def _bound_and_search(core: MRF, effort: SolveEffort, upper: float) -> Incumbent:
    """Bound, prune and search; go on with what is left, with all of this if it is little, else exhaustively."""
    ascent = Ascent.of(core, upper, effort.constant)
    if "dual ascent" not in effort.without:
        ascend(ascent, effort.budget, rounds="rounding" not in effort.without)
    found = _Round(ascent=ascent, bound=ascent.bound, how=["ascent"])
    pairs = num_pairs(core)
    light = min(NARROW, max(LIGHTEST, LIGHT_WORK // max(pairs, 1)))
    steps = (partial(found.search, light), partial(found.ascend_and_search, light), partial(found.search, NARROW))
    for step in (None, *steps):
        # Going on with little is cheap: `max_gap` spares the rest only, and one that is wide spares the first search.
        spared = pairs > FEW_PAIRS and found.is_enough(effort) and (step or effort.max_gap > MAX_GAP)
        if spared or found.is_closed or effort.budget.is_spent:
            return found.best()
        if step:
            step(effort)
        rest, kept = found.rest()
        if num_pairs(rest) < SHARE_TO_GO_ON * pairs and "pruning" not in effort.without:
            found.go_on(partial(_presolved, _bound_and_search, ordered=True), rest, kept, effort)
            return found.best()
    if not found.is_enough(effort):
        found.go_on(partial(_presolved, _exhaust), *found.rest(), effort)
    return found.best()


@dataclass(kw_only=True)
class _Round:
    """An ascent and what was found since: assignments, and a higher bound."""

    ascent: Ascent
    bound: float
    how: list[str]
    _within: tuple[tuple[float, float], tuple[MRF, list[BoolArray]]] | None = None

    @property
    def is_closed(self) -> bool:
        """True if the best assignment is proven to be the optimum."""
        return self.ascent.value - self.bound <= self.ascent.round_off

    def is_enough(self, effort: SolveEffort) -> bool:
        """Return true if the best assignment needs no further proof."""
        return self.is_closed or effort.is_enough(self.ascent.value, self.bound)

    def rest(self) -> tuple[MRF, list[BoolArray]]:
        """Return what is within the gap, with the options kept."""
        state = self.ascent.value, self.ascent.bound
        if self._within is None or self._within[0] != state:
            self._within = state, within_gap(self.ascent)
        return self._within[1]

    def ascend_and_search(self, width: int, effort: SolveEffort) -> None:
        """Go on with the ascent where it stopped, as long as the bound rises at all.

        A beam search now and then finds assignments that rounding does not, and proves them before the ascent does.
        """
        if "dual ascent" in effort.without:
            return
        self.how.append("long ascent")
        rounds, goes_on = "rounding" not in effort.without, True
        while goes_on and not self.is_closed:
            goes_on = ascend(self.ascent, effort.budget, most_sweeps=SWEEPS_TO_SEARCH, at_length=True, rounds=rounds)
            self.raise_bound(self.ascent.bound)
            if goes_on:
                self.search(width, effort)

    def search(self, width: int, effort: SolveEffort) -> None:
        """Search what is within the gap by partial assignments."""
        if "beam search" in effort.without:
            return
        ascent = self.ascent
        rest, kept = self.rest()
        most = ascent.value - ascent.bound + ascent.round_off
        self.how.append("beam search")
        try:
            # What is forbidden goes; the rest of the reductions takes longer than it saves.
            reduced = reduce_problem(rest, eliminates=False, ordered=True)
        except Infeasible:
            self.close()
            return
        searched = beam_search(reduced.core, most - reduced.constant, width, budget=effort.budget)
        if searched.assignment is not None:
            self.offer(reduced.expand(searched.assignment), kept)
        self.raise_bound(ascent.bound + reduced.constant + searched.bound)

    def go_on(self, step: SolverStep, rest: MRF, kept: list[BoolArray], effort: SolveEffort) -> None:
        """Leave what is within the gap to a step."""
        try:
            found = step(rest, effort.after(self.ascent.bound), self.ascent.value - self.ascent.bound)
        except Infeasible:
            self.close()
            return
        self.how += found.how
        if found.assignment is not None:
            self.offer(found.assignment, kept)
        # What was dropped costs more than the best assignment.
        self.raise_bound(self.ascent.bound + found.bound)

    def close(self) -> None:
        """Note that nothing is left within the gap: there is no better assignment, round-off aside, or none at all."""
        if np.isinf(self.ascent.value):
            raise Infeasible(())
        self.bound = self.ascent.value

    def offer(self, assignment: Assignment, kept: list[BoolArray]) -> None:
        """Keep an assignment, by its options among those kept, if it is the best so far."""
        self.ascent.offer(tuple(int(np.flatnonzero(keep)[o]) for keep, o in zip(kept, assignment, strict=True)))

    def raise_bound(self, bound: float) -> None:
        """Note a bound on what is within the gap."""
        self.bound = min(self.ascent.value, max(self.bound, bound))

    def best(self) -> Incumbent:
        """Return the result."""
        ascent = self.ascent
        bound = min(self.bound, ascent.value)
        return Incumbent(assignment=ascent.assignment or None, value=ascent.value, bound=bound, how=tuple(self.how))


def _exhaust(core: MRF, effort: SolveEffort, upper: float) -> Incumbent:
    """Contract the problem and begin again; where that is no help, search widely, then branch and bound."""
    contracted = None
    if num_pairs(core) > FEW_TO_CONTRACT and "contraction" not in effort.without:
        contracted = contract(core)
    if contracted is None:
        return _search_widely(core, effort, upper)
    found = minimize(contracted.problem, effort, upper)
    assignment = None if found.assignment is None else contracted.expand(found.assignment)
    return replace(found, assignment=assignment, how=("contraction", *found.how))


def _search_widely(core: MRF, effort: SolveEffort, upper: float) -> Incumbent:
    """Search widely, more widely as long as that looks as if it would prove the best, then branch and bound."""
    # All costs are at least zero by now.
    found = Incumbent(assignment=None, value=upper, bound=0.0)
    for width in () if "wide beams" in effort.without else (WIDE, *WIDER):
        most_work = MOST_WORK if width == WIDE else MOST_WIDER_WORK
        searched = beam_search(core, found.value, width, most_work=most_work, budget=effort.budget)
        found = _better(core, found, searched.assignment, searched.bound, "wide beam search")
        is_promising = found.bound >= PROVEN_TO_WIDEN * found.value
        if effort.is_enough(found.value, found.bound) or not is_promising or effort.budget.is_spent:
            break
    if effort.is_enough(found.value, found.bound) or effort.budget.is_spent:
        return found
    if num_pairs(core) > LARGEST_PROGRAM or "branch and bound" in effort.without:
        return found
    gap = effort.slack(found.value)
    mixed = solve_in_whole_numbers(core, start=found.assignment, budget=effort.budget, gap=gap)
    return _better(core, found, mixed.assignment, mixed.bound, mixed.how)


def _better(problem: MRF, found: Incumbent, assignment: Assignment | None, bound: float, how: str) -> Incumbent:
    """Return what was found with an assignment, if that is as good, and with the higher one of two bounds."""
    value = found.value
    if assignment is not None and (cost := assignment_cost(problem, assignment)) <= value:
        found, value = replace(found, assignment=assignment), cost
    return replace(found, value=value, bound=min(value, max(found.bound, bound)), how=(*found.how, how))
