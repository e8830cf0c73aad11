"""Minimise a choice problem under rows: prices for what the rows limit, then the solver on what the prices leave.

For prices λ >= 0 (seconds per whole limit) no choice within the rows costs less than

    L(λ) = min_x  cost(x) + Σ_r λ_r (weight_r(x) / limit_r - 1)

a problem without rows. Every choice x met on the way is a cut, L(λ) <= cost(x) + Σ_r λ_r (weight_r(x) / limit_r - 1);
the prices tried next are the best that the cuts allow (Kelley 1960), near the best so far. Choices within the rows are
candidates; more come from the solver, limited to the states that were met. The gap between the best candidate and the
best bound excludes most states, and branch and bound goes over the rest if the gap is too large to stop.

Rows may come late: every candidate is shown to `violated_rows`, and what it returns joins the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.compiler.solver.dual_ascent import Ascent, ascend, continued
from autopar.compiler.solver.linear_program import Program, run_program, solve_in_whole_numbers
from autopar.compiler.solver.minimize import LARGEST_PROGRAM, WORTHWHILE, Effort, Found, minimize
from autopar.compiler.solver.presolve import (
    ReducedWithRows,
    reduce_with_rows,
    restrict,
    restrict_row,
    sum_of_rows,
    total_pairs,
    weights_as_costs,
    with_row_edges,
)
from autopar.compiler.solver.problem import (
    Floats,
    Indices,
    Infeasible,
    Problem,
    Row,
    States,
    choice_value,
    row_scale,
    row_weight,
)
from autopar.errors import SolverFailed

ViolatedRows = Callable[[Sequence[int]], Sequence[Row]]

MAX_PRICES = 25
"""Vectors of prices that are tried before the solver takes over."""
MAX_TOGETHER = 8
"""Weightings of all rows together that are tried for a first choice within them."""
LEAST_PROGRESS = 0.05
"""Share of what the cuts promise that a trial must bring, unless it brings a new cut."""
UNSURE = 0.1
"""Share of what the cuts promise by which a bound may fall short before the priced problem is solved."""
LEAST_PROMISE = 1e-9
"""Share of the value that further prices must promise."""
FIRST_PRICE = 0.02
"""Share of the value that a whole limit may cost at first."""
TRUST = 4.0
"""By how much a price may grow at a time."""
PROMISING = 2
"""States per node, apart from those met, that the search for a good candidate looks at."""
NEARLY = 0.02
"""Share of its limit by which a row may be exceeded for a choice to be shown all the same: rows may count too much for
choices that they were not made for."""
ROUND_OFF = 1e-9
"""Share of its limit by which a row may be exceeded: sums in another order differ."""


@dataclass(kw_only=True)
class _Search:
    """What is known so far."""

    problem: Problem
    violated_rows: ViolatedRows
    effort: Effort
    bound: float
    ceiling: float
    """What no choice costs more than, ∞ aside: if the bound is higher, no choice is within the rows."""
    least: list[Floats]
    """Per state: no choice within the rows that contains it costs less."""
    rows: list[Row] = field(default_factory=list[Row])
    met: dict[States, float] = field(default_factory=dict[States, float])
    """Every choice met, within the rows or not, and its value."""
    best: States | None = None
    value: float = np.inf
    how: list[str] = field(default_factory=list[str])

    @property
    def is_done(self) -> bool:
        """Whether the best candidate needs no further proof."""
        return self.best is not None and self.effort.is_enough(self.value, self.bound)

    def begin_with(self, states: States) -> None:
        """Note a choice that is known to do."""
        self.best = states
        self.value = self.met[states] = choice_value(self.problem, states)

    def meet(self, states: States) -> None:
        """Note a choice: a cut, and the best candidate if it costs least and violates nothing; else rows may appear."""
        if states in self.met:
            return
        value = self.met[states] = choice_value(self.problem, states)
        excess = _excess(self.rows, states).max(initial=0.0)
        if value >= self.value or excess > NEARLY:
            return
        # A row that is exceeded by the caller's sums and not by ours is not violated.
        new = [row for row in self.violated_rows(states) if _excess([row], states).max() > ROUND_OFF]
        if not new:
            self.best, self.value = states, value
        elif excess <= ROUND_OFF:
            self.rows += new

    def not_excluded(self, most: float | None = None) -> list[Indices]:
        """The states that choices of at most this value may contain, and those of the best candidate.

        By default the value is the best candidate's.
        """
        if most is None:
            most = np.inf if self.best is None else self.value + ROUND_OFF * abs(self.value)
        kept = [np.flatnonzero(least <= most) for least in self.least]
        return kept if self.best is None else [np.union1d(keep, [state]) for keep, state in zip(kept, self.best)]

    def raise_bound(self, bound: float) -> None:
        """Note a bound. It lies above the best candidate by round-off only."""
        self.bound = min(max(self.bound, bound), self.value)


def minimize_within_rows(
    problem: Problem,
    violated_rows: ViolatedRows,
    effort: Effort,
    starts: Sequence[States],
    bound: float,
    known: States | None = None,
) -> Found:
    """The best choice that violates no row; one of `starts` must have the least cost without rows, `bound`.

    `known` is a choice to improve upon, whatever the rows say of it.

    Raises `Infeasible` if no choice is within the rows, and `SolverFailed` if time runs out before one is found.
    """
    search = _Search(
        problem=problem,
        violated_rows=violated_rows,
        effort=effort,
        bound=bound,
        ceiling=_ceiling(problem),
        least=[np.full(cost.size, -np.inf) for cost in problem.costs],
    )
    if known is not None:
        search.begin_with(known)
    for states in starts:
        search.meet(states)
    prices, num_rows = np.zeros(0), -1
    while num_rows < len(search.rows) and not search.is_done:
        for row in search.rows[prices.size :] if search.best is None else ():
            _use_least(search, row, [row.name])
        num_rows = len(search.rows)
        if search.best is None and num_rows > 1:
            _use_least_together(search)
        prices = _try_prices(search, np.concatenate([prices, np.zeros(num_rows - prices.size)]))
        if num_rows == len(search.rows) and not search.is_done:
            _solve_promising(search)
        if num_rows == len(search.rows) and not search.is_done:
            _solve_rest(search)
        if effort.left_s <= 0 and search.best is not None:
            break
    if search.best is None:
        raise SolverFailed(
            f"Within the time limit no choice within {', '.join(row.name for row in search.rows)} was found, nor proof "
            "that there is none; one is required. Raise the time limit, or a limit of these rows."
        )
    return Found(states=search.best, value=search.value, bound=search.bound, how=tuple(search.how))


def _ceiling(problem: Problem) -> float:
    """The sum of all largest finite costs."""
    every = (*problem.costs, *problem.edges.values())
    most = [float(np.max(costs, where=np.isfinite(costs), initial=0.0)) for costs in every]
    return sum(most) * (1 + ROUND_OFF)


def _use_least(search: _Search, row: Row, names: Sequence[str]) -> States | None:
    """Meet the choice that uses up least of a row. Raises `Infeasible`, of these names, if even that is too much."""
    found = minimize(weights_as_costs(search.problem, row), Effort(deadline=search.effort.deadline, max_gap=1e-3))
    if found.bound > row.limit + ROUND_OFF * row_scale(row):
        raise Infeasible(names)
    if found.states is not None:
        search.meet(found.states)
    return found.states


def _use_least_together(search: _Search) -> None:
    """Use up least of all rows together, those that are exceeded weighing more and more, until a choice is within."""
    rows = list(search.rows)
    weights, step = np.ones(len(rows)), 1.0
    for _ in range(MAX_TOGETHER):
        num_met = len(search.met)
        states = _use_least(search, _in_shares(rows, weights / weights.sum()), [row.name for row in rows])
        if states is None or search.best is not None or len(search.rows) > len(rows) or search.effort.left_s <= 0:
            return
        # The same choice again calls for other weights.
        step = 2 * step if len(search.met) == num_met else 1.0
        excess = _excess(rows, states)
        weights = weights * np.exp(step * (excess - excess.max()) / (np.ptp(excess) or 1.0))


def _in_shares(rows: Sequence[Row], weights: Floats) -> Row:
    """The rows as one, in shares of their limits."""
    return sum_of_rows(rows, weights / np.array([row_scale(row) for row in rows]))


def _try_prices(search: _Search, prices: Floats) -> Floats:
    """Raise the bound until the cuts promise no more, or a new row appears; the best prices."""
    relaxation = _Relaxation.of(search)
    ascent: Ascent | None = None
    best, best_bound = prices, -np.inf if prices.any() else search.bound
    num_tried = 0
    while len(search.rows) == prices.size and not search.is_done and search.effort.left_s > 0:
        prices, promised = (prices, np.inf) if np.isinf(best_bound) else _next_prices(search, best, best_bound)
        missing = promised - best_bound
        enough = max(search.effort.max_gap / 10, LEAST_PROMISE) * abs(best_bound)
        if missing <= enough < np.inf or num_tried == MAX_PRICES:
            break
        num_met, num_tried = len(search.met), num_tried + 1
        priced = relaxation.smaller.priced(prices)
        ascent = Ascent.of(priced) if ascent is None else continued(ascent, priced)
        ascend(ascent, search.effort.deadline)
        bound = relaxation.note(search, ascent, prices)
        if ascent.value - ascent.bound > UNSURE * min(missing, abs(ascent.value)):
            bound = max(bound, relaxation.note_optimum(search, priced, prices, enough))
        if len(search.met) == num_met and bound - best_bound < LEAST_PROGRESS * missing:
            break
        if bound > best_bound:
            best, best_bound = prices, bound
        if (smaller := relaxation.shrunk(search)) is not None:
            relaxation, ascent = smaller, None
    search.how.append(f"{num_tried} prices of {len(search.rows)} rows")
    return best


@dataclass(frozen=True, kw_only=True)
class _Relaxation:
    """The problem and its rows, without the states that the best candidate excludes, and reduced."""

    kept: Sequence[Indices]
    smaller: ReducedWithRows

    @classmethod
    def of(cls, search: _Search, kept: Sequence[Indices] | None = None) -> _Relaxation:
        kept = search.not_excluded() if kept is None else kept
        problem = restrict(with_row_edges(search.problem, search.rows), kept)
        return cls(kept=kept, smaller=reduce_with_rows(problem, [restrict_row(row, kept) for row in search.rows]))

    def expand(self, core_states: Sequence[int]) -> States:
        """The states of the whole problem."""
        states = self.smaller.reduced.expand(core_states)
        return tuple(int(keep[state]) for keep, state in zip(self.kept, states, strict=True))

    def note(self, search: _Search, ascent: Ascent, prices: Floats) -> float:
        """Note what the ascent of the priced problem found, bounds on states and a choice; return its bound."""
        reduced, shift = self.smaller.reduced, self.smaller.shift(prices)
        for node, states, least in zip(reduced.nodes, reduced.states, ascent.least):
            search.least[node][self.kept[node][states]] = np.maximum(
                search.least[node][self.kept[node][states]], least + shift
            )
        search.raise_bound(ascent.bound + shift)
        if search.bound > search.ceiling:
            raise Infeasible([row.name for row in search.rows])
        search.meet(self.expand(ascent.states))
        return ascent.bound + shift

    def note_optimum(self, search: _Search, priced: Problem, prices: Floats, gap: float) -> float:
        """Solve the priced problem, up to a gap, where its ascent alone tells too little; return its bound."""
        shift = self.smaller.shift(prices)
        share = gap / (abs(search.bound) or 1.0)
        found = minimize(priced, Effort(deadline=search.effort.deadline, max_gap=share, constant=shift))
        search.raise_bound(found.bound + shift)
        if found.states is not None:
            search.meet(self.expand(found.states))
        return found.bound + shift

    def shrunk(self, search: _Search) -> _Relaxation | None:
        """The relaxation of what is left, if that is much less."""
        kept = search.not_excluded()
        nodes = self.smaller.reduced.nodes
        now, before = (sum(of[node].size for node in nodes) for of in (kept, self.kept))
        return _Relaxation.of(search, kept) if now < WORTHWHILE * before else None


def _next_prices(search: _Search, best: Floats, best_bound: float) -> tuple[Floats, float]:
    """The prices for which the cuts promise the highest bound, and that bound: max z s.t. z <= every cut, λ <= box.

    Solved as a program in z - best_bound and λ, in shares of the value so that all numbers are near 1.
    """
    met = [(value, states) for states, value in search.met.items() if value < np.inf]
    values = np.array([value for value, _ in met])
    slopes = np.array([_excess(search.rows, states) for _, states in met])
    unit = max(abs(values).min(), abs(best_bound), 1e-6 * abs(values).max()) or 1.0
    num_cuts, num_rows = slopes.shape
    box = TRUST * np.maximum(best / unit, FIRST_PRICE)
    entries = np.concatenate([np.ones((num_cuts, 1)), -slopes], axis=1)
    matrix = np.concatenate([entries, np.eye(num_rows, num_rows + 1, 1)])
    at_row, at_column = np.nonzero(matrix)
    result = run_program(
        Program(
            costs=np.concatenate([[-1.0], np.zeros(num_rows)]),
            lower=np.full(num_cuts + num_rows, -np.inf),
            upper=np.concatenate([(values - best_bound) / unit, box]),
            entry_rows=at_row,
            entry_columns=at_column,
            entries=matrix[at_row, at_column],
            at_most=np.inf,
        )
    )
    if result.columns is None:
        # By round-off the cuts contradict the bound: they promise nothing that counts.
        return best, best_bound
    return np.maximum(result.columns[1:], 0.0) * unit, best_bound + result.columns[0] * unit


def _solve_promising(search: _Search) -> None:
    """Look for a better candidate among the states that were met and the few that the bounds speak for."""
    kept = list[Indices]()
    for node, least in enumerate(search.least):
        first = np.argsort(least, kind="stable")[:PROMISING] if np.isfinite(least).any() else []
        kept.append(np.unique([*first, *(states[node] for states in search.met)]).astype(np.intp))
    try:
        states, _ = _solve_restricted(search, kept, search.effort.left_s / 5)
    except Infeasible:
        return
    search.how.append("the states met")
    if states is not None:
        search.meet(states)


def _solve_rest(search: _Search) -> None:
    """Branch and bound on the states that may be part of a choice better than the best candidate by `max_gap`."""
    most = search.value - search.effort.slack(search.value)
    search.how.append("branch and bound")
    try:
        states, bound = _solve_restricted(search, search.not_excluded(most), search.effort.left_s)
    except Infeasible:
        if search.best is None:
            raise
        states, bound = None, most
    if states is not None:
        search.meet(states)
    search.raise_bound(min(bound, most))


def _solve_restricted(search: _Search, kept: Sequence[Indices], time_limit_s: float) -> tuple[States | None, float]:
    """The best choice of some states that is within the rows, if one was found in time; a bound on such choices."""
    relaxation = _Relaxation.of(search, kept)
    smaller = relaxation.smaller
    core, constant = smaller.reduced.core, smaller.reduced.constant
    if not core.costs:
        return relaxation.expand(()), constant
    if total_pairs(core) > LARGEST_PROGRAM:
        return None, -np.inf
    start = None if search.best is None else smaller.reduced.core_states(_places(kept, search.best))
    gap = search.effort.slack(search.value)
    solution = solve_in_whole_numbers(core, smaller.rows, start=start, time_limit_s=time_limit_s, gap=gap)
    states = None if solution.states is None else relaxation.expand(solution.states)
    return states, solution.bound + constant


def _places(kept: Sequence[Indices], states: States) -> States:
    """States by their place among those kept, all of which they are."""
    return tuple(int(np.searchsorted(keep, state)) for keep, state in zip(kept, states, strict=True))


def _excess(rows: Sequence[Row], states: Sequence[int]) -> Floats:
    """By which share of its limit each row is exceeded."""
    return np.array([(row_weight(row, states) - row.limit) / row_scale(row) for row in rows])
