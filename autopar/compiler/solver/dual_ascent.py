"""Bound a problem from below, and find good assignments, by moving costs between nodes and edges.

A reparametrisation adds u(a) to an edge's matrix and takes it from a node's costs, so that every assignment costs what
it did. The sum of all least entries is then a lower bound,

    min_x cost(x)  >=  Σ_i min_a c'_i[a] + Σ_(i,j) min_(a,b) M'_ij[a,b]        → Ascent.bound

Sweeps over the nodes raise it: a node collects from its edges all that they cost at least, its least cost goes to the
bound, and shares of the rest go to the edges ahead (sequential reweighted message passing, Kolmogorov 2015; without the
higher orders it is TRW-S).

Three things come out: the bound, an assignment rounded from the costs as moved, and for every option a bound on all
assignments that contain it, so that options (and pairs) too costly for the optimum can go (`within_gap`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.compiler.solver.level_sweeps import LevelSweeps
from autopar.compiler.solver.problem import MRF, Assignment, BoolArray, FloatArray, WorkBudget, assignment_cost
from autopar.compiler.solver.rounding import surest_first

MAX_SWEEPS = 400
WINDOW = 8
"""Sweeps over which progress is judged."""
FEW_PAIRS = 30_000
"""Pairs of options with which all other steps are done soon."""
LEAST_CLOSED, LEAST_CLOSED_OF_FEW = 0.05, 0.3
"""Share of the gap that a window must close for another one to follow; with few pairs."""
LEAST_CLOSED_AT_LENGTH = 0.002
"""The same where all that is left to do takes longer than sweeps. The gap says little of the bound where the best
assignment is a bad one, and good ones appear when the bound is nearly as high as it gets."""
SHARE_TO_START_AGAIN = 0.5
"""Share of the pairs of options within the gap below which it pays to go on with these alone."""
ENTRIES_OF_EDGE = 1_000
"""Entries that could be looked at in the time that a small matrix takes, whatever its size."""
SUM_TOLERANCE = 1e-12
"""Share of the value by which sums of the same numbers may differ."""


@dataclass(kw_only=True)
class Ascent:
    """A reparametrised problem: what `swept` holds and `bound` sum to what `problem` costs."""

    problem: MRF
    swept: LevelSweeps
    bound: float
    least_of_options: FloatArray
    assignment: Assignment
    """The best so far; empty if there is none below the upper limit."""
    value: float
    constant: float
    """A constant that every value includes and the problem does not; rounding errors grow with it."""
    offered: Assignment | None = None
    """The last assignment that was offered: sweeps often round to one over and over."""
    roundings: int = 0

    @classmethod
    def of(cls, problem: MRF, upper: float = np.inf, constant: float = 0.0) -> Ascent:
        """Begin with nothing moved. Every option must have a partner along every edge."""
        swept = LevelSweeps.of(problem)
        return cls(
            problem=problem,
            swept=swept,
            bound=0.0,
            least_of_options=np.full(swept.costs.size, -np.inf),
            assignment=(),
            value=upper,
            constant=constant,
        )

    def sweep_back(self) -> None:
        """Sweep from the last node to the first."""
        self.bound = self.swept.sweep_back(self.bound, self.least_of_options)

    def sweep_forward(self) -> None:
        """Sweep from the first node to the last."""
        self.bound = self.swept.sweep_forward(self.bound, self.least_of_options)

    @property
    def least(self) -> list[FloatArray]:
        """A bound for each option of every node: no assignment that contains it costs less."""
        return self.swept.split(self.least_of_options)

    def round(self) -> None:
        """Round the costs as moved to an assignment, in one way and the other by turns."""
        self.roundings += 1
        self.offer(surest_first(self.swept, by_all=self.roundings % 2 == 0))

    def offer(self, assignment: Assignment) -> None:
        """Keep an assignment if it is the best so far."""
        if assignment == self.offered:
            return
        self.offered = assignment
        value = assignment_cost(self.problem, assignment)
        if value < self.value:
            self.assignment, self.value = assignment, value

    def kept(self) -> list[BoolArray]:
        """Return the options that may be part of an assignment as good as the best."""
        most = self.value + self.round_off
        return [least <= most for least in self.least]

    def share_within_gap(self) -> float:
        """Return the share of the pairs whose options are both kept."""
        kept = [int(np.count_nonzero(mask)) for mask in self.kept()]
        return sum(kept[i] * kept[j] for i, j in self.problem.edges) / max(self.num_pairs, 1)

    @property
    def num_pairs(self) -> int:
        """Entries of all matrices."""
        return sum(matrix.size for matrix in self.problem.edges.values())

    @property
    def closed(self) -> bool:
        """True if the best assignment is proven to be the optimum."""
        return self.value - self.bound <= self.round_off

    @property
    def round_off(self) -> float:
        """The amount by which sums that should be equal may differ."""
        return SUM_TOLERANCE * (abs(self.value) + abs(self.constant)) if np.isfinite(self.value) else 0.0


def continued(before: Ascent, problem: MRF, upper: float = np.inf) -> Ascent:
    """Return the ascent of a problem with the same edges but other costs, from where another one's stands."""
    assert problem.edges.keys() == before.problem.edges.keys()
    ascent = Ascent.of(problem, upper, before.constant)
    ascent.swept.go_on_from(before.swept)
    return ascent


def ascend(
    ascent: Ascent,
    budget: WorkBudget,
    *,
    most_sweeps: int = MAX_SWEEPS,
    at_length: bool = False,
    rounds: bool = True,
) -> bool:
    """Sweep until the gap closes, or excludes much, or until sweeping does not get on with it.

    Returns true if `most_sweeps` were made and the gap is not closed.
    """
    # A sweep looks at every matrix twice, forward and back.
    work_of_sweep = 2 * (ascent.num_pairs + ENTRIES_OF_EDGE * len(ascent.problem.edges))
    least_progress = LEAST_CLOSED if ascent.num_pairs > FEW_PAIRS else LEAST_CLOSED_OF_FEW
    if at_length:
        least_progress = LEAST_CLOSED_AT_LENGTH
    ascent.sweep_back()
    window_start = -np.inf
    for sweep in range(1, most_sweeps + 1):
        ascent.sweep_forward()
        ascent.sweep_back()
        budget.spend(work_of_sweep)
        ends = sweep == most_sweeps or budget.is_spent
        if sweep % WINDOW == 0:
            gap = ascent.value - ascent.bound
            ends = ends or ascent.bound - window_start < least_progress * gap
            ends = ends or ascent.share_within_gap() < SHARE_TO_START_AGAIN
            window_start = ascent.bound
        if rounds and (ends or sweep.bit_count() == 1):
            ascent.round()
        if ends or ascent.closed:
            return sweep == most_sweeps and not ascent.closed
    return False


def within_gap(ascent: Ascent) -> tuple[MRF, list[BoolArray]]:
    """Return the problem, as moved, without the options and pairs that cost more than the best assignment.

    Its optimum is the problem's, less `ascent.bound`.
    """
    kept, costs = ascent.kept(), ascent.swept.split(ascent.swept.costs)
    spare = ascent.value + ascent.round_off - ascent.bound
    costs = [cost[keep] for cost, keep in zip(costs, kept)]
    options = [None if cost.size == keep.size else np.flatnonzero(keep) for cost, keep in zip(costs, kept)]
    edges = dict[tuple[int, int], FloatArray]()
    for (i, j), before in sorted(ascent.problem.edges.items(), key=lambda item: item[0]):
        matrix = ascent.swept.matrix((i, j), before, options[i], options[j])
        np.maximum(matrix, 0.0, out=matrix)
        matrix[matrix + costs[i][:, None] + costs[j] > spare] = np.inf
        edges[i, j] = matrix
    return MRF(costs=tuple(costs), edges=edges), kept
