"""Find the best assignment within limits that are only known by measuring: the fastest, one that fits, then the best.

    1  the assignment of least cost; if it is within the limits, that is all       → minimize
    2  lower the excess until an assignment is within the limits                   → lower_excess
    3  raise the bound by Lagrange multipliers (`lagrangian`), on the assignments
       that the cutting plane asks for                                             → _try_multipliers
    4  branch and bound on the options that were met, for a good candidate         → _solve_promising
    5  branch and bound on the options that the bound has not excluded             → _solve_rest

For multipliers λ every option a of node i has a bound on the assignments with x_i = a as well; what lies above the best
assignment so far is excluded. Every assignment that is met is measured: it is a candidate if it is within the limits,
else the rows that it exceeds join the problem. Whenever the work ends after step 2, there is an assignment within the
limits and a bound on the best one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.compiler.solver.cutting_plane import best_multipliers
from autopar.compiler.solver.dual_ascent import Ascent, ascend, continued
from autopar.compiler.solver.feasibility import LeastExcess, Measure, Measured, lower_excess
from autopar.compiler.solver.lagrangian import ReducedRows, reduce_with_rows, restrict, restrict_row, with_row_edges
from autopar.compiler.solver.linear_program import LARGEST_PROGRAM, solve_in_whole_numbers
from autopar.compiler.solver.problem import (
    MRF,
    Assignment,
    FloatArray,
    Incumbent,
    IndexArray,
    Infeasible,
    NoneBelow,
    Optimum,
    Row,
    SolveEffort,
    WorkBudget,
    assignment_cost,
    num_pairs,
    row_scale,
    row_weight,
)
from autopar.compiler.solver.solve import MAX_GAP, minimize, minimize_below, optimum_of

SHARE_WITHOUT_LIMITS = 0.25
"""Share of the work that goes to the optimum without limits, unless that is what is asked for."""
MAX_MULTIPLIERS = 25
"""Vectors of multipliers that are tried before branch and bound takes over."""
LEAST_RISE_OF_PROMISE = 0.05
"""Share of what the cuts promise that a trial must bring, unless it brings a new cut."""
UNSURE = 0.1
"""Share of what the cuts promise by which a bound may fall short before the problem with multipliers is solved."""
TRIAL_SHARE = 1 / 20
"""Share of the work left that may solve the problem with some multipliers: a rough bound for each tells more of the
next ones than an exact one for few."""
LEAST_PROMISE = 1e-9
"""Share of the value that further multipliers must promise."""
FIRST_MULTIPLIER = 0.02
"""Share of the value that a whole limit may cost at first."""
TRUST = 4.0
"""Factor by which a multiplier may grow at a time."""
PROMISING_OPTIONS = 2
"""Options per node, apart from those met, that the search for a good candidate looks at."""
BRANCHING_SHARE = 1 / 5
"""Share of the work left that one branch and bound may take, unless it is the last one and there is no assignment yet:
to prove that the best is met takes many times as long as to meet it."""
SHARE_TO_REDUCE_AGAIN = 0.7
"""Share of the options that the bound must leave, at most, for the problem to be reduced again without the others."""
NEARLY = 0.02
"""Share of its limit by which a row may be exceeded for an assignment to be measured all the same: rows may count too
much for assignments that they were not made for."""
ROW_TOLERANCE = 1e-9
"""Share of its limit by which a row may be exceeded: sums in another order differ."""


class NoneWithin(Infeasible):
    """No assignment within the limits was found; `least` says how near one came, and whether there can be any."""

    def __init__(self, least: LeastExcess) -> None:
        """Keep what was found."""
        super().__init__(("the limits measured",))
        self.least = least


def minimize_within_limits(
    problem: MRF,
    measure: Measure,
    *,
    time_limit_s: float,
    max_gap: float,
    hopeless_excess: float,
    below: float = np.inf,
) -> Optimum:
    """Return the best assignment whose measured excess is not above zero.

    A bound above `hopeless_excess` need not be looked at twice. Raises `Infeasible` if no assignment is possible,
    `NoneBelow` as soon as it is known that none within the limits costs less than `below`, or hardly less, and
    `NoneWithin` if none within the limits was found.
    """
    began, budget = time.monotonic(), WorkBudget.of_seconds(time_limit_s)
    known: dict[Assignment, Measured] = {}

    def measured(assignment: Assignment) -> Measured:
        if assignment not in known:
            known[assignment] = measure(assignment)
        return known[assignment]

    fastest = _without_limits(problem, measured, budget, max_gap, below)
    if fastest.assignment is None or measured(fastest.assignment).excess <= 0:
        return optimum_of(problem, fastest, began, time_limit_s)
    # An assignment that fits is worth all the work.
    effort = SolveEffort(budget=budget, max_gap=max_gap)
    least = lower_excess(problem, measured, fastest.assignment, budget=budget, hopeless_excess=hopeless_excess)
    best = _best_from(problem, measured, fastest, least, effort, below)
    how = (*fastest.how, f"{least.rounds} lowerings", *best.how)
    return optimum_of(problem, replace(best, how=how), began, time_limit_s)


def _without_limits(problem: MRF, measure: Measure, budget: WorkBudget, max_gap: float, below: float) -> Incumbent:
    effort = SolveEffort(budget=budget.part(SHARE_WITHOUT_LIMITS), max_gap=min(max_gap, MAX_GAP))
    found = minimize_below(problem, effort, below)
    proven = found.assignment is None or effort.is_enough(found.value, found.bound)
    if not proven and measure(found.assignment or ()).excess <= 0:
        # Limits that leave so good an assignment are not likely to matter.
        found = minimize(problem, replace(effort, budget=budget))
    return found


def _best_from(
    problem: MRF, measure: Measure, fastest: Incumbent, least: LeastExcess, effort: SolveEffort, below: float
) -> Incumbent:
    """Return the best assignment within the limits, from that of least excess, unless none costs less than `below`."""
    fits = least.excess <= 0
    if not fits and least.bound > 0:
        raise NoneWithin(least)
    assert fastest.assignment is not None
    search = _Search(
        problem=problem,
        measure=measure,
        effort=effort,
        below=below - MAX_GAP * abs(below) if below < np.inf else below,
        bound=fastest.bound,
        least=[np.full(cost.size, -np.inf) for cost in problem.costs],
    )
    if fits:
        search.begin_with(least.assignment)
    search.meet(fastest.assignment)
    try:
        _search_within_rows(search)
    except Infeasible:
        # Not even by the rows, which are less than the limits for assignments that they were not made for.
        if search.most == np.inf:
            raise NoneWithin(replace(least, bound=max(least.bound, 0.0))) from None
        search.raise_bound(search.most)
    if search.is_pointless:
        raise NoneBelow(search.bound, limited=True)
    if search.best is None:
        raise NoneWithin(least)
    return Incumbent(assignment=search.best, value=search.value, bound=search.bound, how=tuple(search.how))


@dataclass(kw_only=True)
class _Search:
    """The rows and assignments met so far, the best of these, and the bounds."""

    problem: MRF
    measure: Measure
    effort: SolveEffort
    below: float
    """The cost that an assignment has to undercut to be of any use."""
    bound: float
    least: list[FloatArray]
    """A bound for each option: no assignment within the rows that contains it costs less."""
    rows: list[Row] = field(default_factory=list[Row])
    met: dict[Assignment, float] = field(default_factory=dict[Assignment, float])
    """Every assignment met, within the rows or not, and its cost."""
    best: Assignment | None = None
    value: float = np.inf
    how: list[str] = field(default_factory=list[str])

    @property
    def is_done(self) -> bool:
        """True if the best candidate needs no further proof, or there is none to be found."""
        return self.is_pointless or (self.best is not None and self.effort.is_enough(self.value, self.bound))

    @property
    def is_pointless(self) -> bool:
        """True if no assignment costs as little as is asked for."""
        return self.below < np.inf and min(self.value, self.bound) >= self.below

    @property
    def most(self) -> float:
        """The cost that an assignment has to undercut to be better than what there is."""
        return min(self.value, self.below)

    @property
    def goal(self) -> float:
        """The cost that an assignment has to undercut to be worth a search."""
        return min(self.value - self.effort.slack(self.value), self.below)

    def begin_with(self, assignment: Assignment) -> None:
        """Note an assignment that is within the limits, whatever the rows say of it."""
        self.best = assignment
        self.value = self.met[assignment] = assignment_cost(self.problem, assignment)

    def meet(self, assignment: Assignment) -> None:
        """Note a cut, which is the best candidate if it costs least and is within the limits; else rows may appear."""
        if assignment in self.met:
            return
        value = self.met[assignment] = assignment_cost(self.problem, assignment)
        excess = _excess(self.rows, assignment).max(initial=0.0)
        if value >= self.value or excess > NEARLY:
            return
        measured = self.measure(assignment)
        # A row that is exceeded by the caller's sums and not by ours is not violated.
        exceeded = measured.rows if measured.excess > 0 else ()
        new = [row for row in exceeded if _excess([row], assignment).max() > ROW_TOLERANCE]
        if not new:
            self.best, self.value = assignment, value
        elif excess <= ROW_TOLERANCE:
            self.rows += new

    def not_excluded(self, most: float | None = None) -> list[IndexArray]:
        """Return the options that assignments of at most this cost may contain, and those of the best candidate.

        By default the cost is the best candidate's, or the one to undercut. Raises `Infeasible` where nothing is left.
        """
        if most is None:
            most = self.most + ROW_TOLERANCE * abs(self.most)
        kept = [np.flatnonzero(least <= most) for least in self.least]
        if self.best is None and not all(options.size for options in kept):
            raise Infeasible(())
        return kept if self.best is None else [np.union1d(keep, [option]) for keep, option in zip(kept, self.best)]

    def raise_bound(self, bound: float) -> None:
        """Note a bound on what is of use. It lies above the best candidate by round-off only."""
        self.bound = min(max(self.bound, bound), self.most)


def _search_within_rows(search: _Search) -> None:
    """Raise the bound and improve the best candidate until it is proven, the work is done, or no new row appears."""
    multipliers, num_rows = np.zeros(0), -1
    while num_rows < len(search.rows) and not search.is_done:
        num_rows = len(search.rows)
        multipliers = _try_multipliers(search, np.concatenate([multipliers, np.zeros(num_rows - multipliers.size)]))
        if num_rows == len(search.rows) and not search.is_done:
            _solve_promising(search)
        if num_rows == len(search.rows) and not search.is_done:
            _solve_rest(search)
        if search.effort.budget.is_spent and search.best is not None:
            break


def _try_multipliers(search: _Search, multipliers: FloatArray) -> FloatArray:
    """Raise the bound until the cuts promise no more, or a new row appears; return the best multipliers."""
    relaxation = _Relaxation.of(search)
    ascent: Ascent | None = None
    best, best_bound = multipliers, -np.inf if multipliers.any() else search.bound
    num_tried = 0
    while len(search.rows) == multipliers.size and not search.is_done and not search.effort.budget.is_spent:
        promised = np.inf
        if np.isfinite(best_bound):
            multipliers, promised = _next_multipliers(search, best, best_bound)
        missing = promised - best_bound
        enough = max(search.effort.max_gap / 10, LEAST_PROMISE) * abs(best_bound)
        if missing <= enough < np.inf or num_tried == MAX_MULTIPLIERS:
            break
        num_met, num_tried = len(search.met), num_tried + 1
        with_multipliers = relaxation.smaller.with_multipliers(multipliers)
        ascent = Ascent.of(with_multipliers) if ascent is None else continued(ascent, with_multipliers)
        ascend(ascent, search.effort.budget)
        bound = relaxation.note(search, ascent, multipliers)
        if ascent.value - ascent.bound > UNSURE * min(missing, abs(ascent.value)):
            bound = max(bound, relaxation.note_optimum(search, with_multipliers, multipliers, enough))
        if len(search.met) == num_met and bound - best_bound < LEAST_RISE_OF_PROMISE * missing:
            break
        if bound > best_bound:
            best, best_bound = multipliers, bound
        if (smaller := relaxation.shrunk(search)) is not None:
            relaxation, ascent = smaller, None
    search.how.append(f"{num_tried} multipliers of {len(search.rows)} rows")
    return best


@dataclass(frozen=True, kw_only=True)
class _Relaxation:
    """The problem and its rows, without the options that the best candidate excludes, and reduced."""

    kept: Sequence[IndexArray]
    smaller: ReducedRows

    @classmethod
    def of(cls, search: _Search, kept: Sequence[IndexArray] | None = None) -> _Relaxation:
        kept = search.not_excluded() if kept is None else kept
        problem = restrict(with_row_edges(search.problem, search.rows), kept)
        return cls(kept=kept, smaller=reduce_with_rows(problem, [restrict_row(row, kept) for row in search.rows]))

    def expand(self, core_assignment: Sequence[int]) -> Assignment:
        """Return the assignment of the whole problem."""
        assignment = self.smaller.reduced.expand(core_assignment)
        return tuple(int(keep[option]) for keep, option in zip(self.kept, assignment, strict=True))

    def note(self, search: _Search, ascent: Ascent, multipliers: FloatArray) -> float:
        """Note what an ascent with multipliers found, bounds on options and an assignment; return its bound."""
        reduced, shift = self.smaller.reduced, self.smaller.shift(multipliers)
        for node, options, least in zip(reduced.nodes, reduced.options, ascent.least):
            search.least[node][self.kept[node][options]] = np.maximum(
                search.least[node][self.kept[node][options]], least + shift
            )
        search.raise_bound(ascent.bound + shift)
        search.meet(self.expand(ascent.assignment))
        return ascent.bound + shift

    def note_optimum(self, search: _Search, problem: MRF, multipliers: FloatArray, gap: float) -> float:
        """Solve the problem with multipliers, up to a gap, where its ascent tells too little; return its bound."""
        shift = self.smaller.shift(multipliers)
        share = gap / (abs(search.bound) or 1.0)
        budget = search.effort.budget.part(TRIAL_SHARE)
        found = minimize(problem, SolveEffort(budget=budget, max_gap=share, constant=shift))
        search.raise_bound(found.bound + shift)
        if found.assignment is not None:
            search.meet(self.expand(found.assignment))
        return found.bound + shift

    def shrunk(self, search: _Search) -> _Relaxation | None:
        """Return the relaxation of what is left, if that is much less."""
        kept = search.not_excluded()
        nodes = self.smaller.reduced.nodes
        now, before = (sum(of[node].size for node in nodes) for of in (kept, self.kept))
        return _Relaxation.of(search, kept) if now < SHARE_TO_REDUCE_AGAIN * before else None


def _next_multipliers(search: _Search, best: FloatArray, best_bound: float) -> tuple[FloatArray, float]:
    """Return the multipliers near the best for which the cuts promise the highest bound, and that bound.

    The program is one in z - best_bound and λ, in shares of the value so that all numbers are near 1.
    """
    met = [(value, assignment) for assignment, value in search.met.items() if value < np.inf]
    values = np.array([value for value, _ in met])
    slopes = np.array([_excess(search.rows, assignment) for _, assignment in met])
    unit = max(abs(values).min(), abs(best_bound), 1e-6 * abs(values).max()) or 1.0
    promised = best_multipliers(
        (values - best_bound) / unit, slopes, at_most=TRUST * np.maximum(best / unit, FIRST_MULTIPLIER)
    )
    if promised is None:
        # By round-off the cuts contradict the bound: they promise nothing that counts.
        return best, best_bound
    rise, multipliers = promised
    return multipliers * unit, best_bound + rise * unit


def _solve_promising(search: _Search) -> None:
    """Look for a better candidate among the options that were met and the few that the bounds speak for."""
    kept = list[IndexArray]()
    for node, least in enumerate(search.least):
        first = np.argsort(least, kind="stable")[:PROMISING_OPTIONS] if np.isfinite(least).any() else []
        kept.append(np.unique([*first, *(assignment[node] for assignment in search.met)]).astype(np.intp))
    try:
        assignment, _ = _solve_restricted(search, kept, search.effort.budget.part(BRANCHING_SHARE))
    except Infeasible:
        return
    if assignment is not None:
        search.meet(assignment)


def _solve_rest(search: _Search) -> None:
    """Branch and bound on the options that may be part of a better assignment than the best by `max_gap`."""
    most = search.goal
    budget = search.effort.budget if search.most == np.inf else search.effort.budget.part(BRANCHING_SHARE)
    try:
        assignment, bound = _solve_restricted(search, search.not_excluded(most), budget)
    except Infeasible:
        if search.most == np.inf:
            raise
        assignment, bound = None, most
    if assignment is not None:
        search.meet(assignment)
    search.raise_bound(min(bound, most))


def _solve_restricted(
    search: _Search, kept: Sequence[IndexArray], budget: WorkBudget
) -> tuple[Assignment | None, float]:
    """Return the best assignment of some options within the rows, if one was found, and a bound on such."""
    relaxation = _Relaxation.of(search, kept)
    smaller = relaxation.smaller
    core, constant = smaller.reduced.core, smaller.reduced.constant
    if not core.costs:
        return relaxation.expand(()), constant
    if num_pairs(core) > LARGEST_PROGRAM:
        return None, -np.inf
    start = None if search.best is None else smaller.reduced.core_assignment(_places(kept, search.best))
    gap = search.effort.slack(search.most)
    solution = solve_in_whole_numbers(core, smaller.rows, start=start, budget=budget, gap=gap)
    search.how.append(solution.how)
    assignment = None if solution.assignment is None else relaxation.expand(solution.assignment)
    return assignment, solution.bound + constant


def _places(kept: Sequence[IndexArray], assignment: Assignment) -> Assignment:
    """Return the options by their place among those kept, all of which they are."""
    return tuple(int(np.searchsorted(keep, option)) for keep, option in zip(kept, assignment, strict=True))


def _excess(rows: Sequence[Row], assignment: Sequence[int]) -> FloatArray:
    """Return by which share of its limit each row is exceeded."""
    return np.array([(row_weight(row, assignment) - row.limit) / row_scale(row) for row in rows])
