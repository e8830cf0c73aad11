"""Within limits that are only measured the best choice is found, down to the least limit that any choice keeps."""

import functools
import math
from dataclasses import replace

import numpy as np
import pytest

from autopar.compiler.solver import constrained
from autopar.compiler.solver.constrained import NoneWithin, minimize_within_limits
from autopar.compiler.solver.feasibility import Measured, lower_excess
from autopar.compiler.solver.problem import (
    MRF,
    Infeasible,
    NoneBelow,
    Row,
    SolveEffort,
    WorkBudget,
    row_weight,
)
from autopar.compiler.solver.solve import minimize
from tests.compiler.solver.random_problems import (
    enumerate_best,
    least_excess,
    memory_row,
    small_problem,
    small_rows,
    step_problem,
)

MOST_CHOICES = 3_000
"""Of a problem that is tried at many limits."""


def worst_of(rows):
    """Measures what the worst row is exceeded by, and shows that row only, as peaks come up one by one."""

    def measure(options):
        over = [row_weight(row, options) - row.limit for row in rows]
        worst = int(np.argmax(over))
        return Measured(excess=over[worst], rows=[rows[worst]] if over[worst] > 0 else [])

    return measure


@functools.cache
def few(hundred: int) -> list[tuple[int, MRF, list[Row], float]]:
    """Problems of few choices, with rows and the least excess of any choice."""
    made = ((seed, small_problem(seed)) for seed in range(100 * hundred, 100 * (hundred + 1)))
    small = ((seed, problem) for seed, problem in made if math.prod(c.size for c in problem.costs) <= MOST_CHOICES)
    with_rows = ((seed, problem, small_rows(problem, seed)) for seed, problem in small)
    return [(seed, problem, rows, least_excess(problem, rows)) for seed, problem, rows in with_rows]


def moved(rows: list[Row], by: float) -> list[Row]:
    return [replace(row, limit=row.limit + by) for row in rows]


def test_what_is_too_slow_without_limits_is_not_searched_within_them():
    seed, problem, rows, _ = next(each for each in few(0) if np.isfinite(each[3]))
    best = enumerate_best(problem)
    asked = []

    def measure(assignment):
        asked.append(assignment)
        return worst_of(rows)(assignment)

    limits = {"time_limit_s": 60, "max_gap": 0, "hopeless_excess": np.inf}
    with pytest.raises(NoneBelow):
        minimize_within_limits(problem, measure, below=best - 1e-3 * (abs(best) + 1), **limits)
    assert not asked, seed


def within(problem: MRF, rows: list[Row]):
    return minimize_within_limits(problem, worst_of(rows), time_limit_s=60, max_gap=0, hopeless_excess=np.inf)


@pytest.mark.parametrize("hundred", range(2))
def test_down_to_the_least_limit_that_any_choice_keeps_the_best_choice_is_found(hundred):
    num_possible = 0
    for seed, problem, rows, least in few(hundred):
        if np.isinf(least):
            with pytest.raises(Infeasible):
                within(problem, rows)
            continue
        num_possible += 1
        tightest = moved(rows, least + 1e4)
        optimum = within(problem, tightest)
        assert optimum.value == pytest.approx(enumerate_best(problem, tightest), rel=1e-9), seed
        assert optimum.gap < 1e-6, seed
        with pytest.raises(NoneWithin) as none:
            within(problem, moved(rows, least - 1e4))
        assert none.value.least.excess >= 1e4 * (1 - 1e-6), seed
    assert num_possible >= 50


@pytest.mark.parametrize("hundred", range(3))
def test_optimum_within_rows_equals_enumeration(hundred):
    for seed in range(100 * hundred, 100 * (hundred + 1)):
        problem = small_problem(seed)
        rows = small_rows(problem, seed)
        best = enumerate_best(problem, rows)
        if np.isinf(best):
            with pytest.raises(Infeasible):
                within(problem, rows)
            continue
        optimum = within(problem, rows)
        assert optimum.value == pytest.approx(best, rel=1e-9), seed
        assert optimum.gap < 1e-6, seed
        assert all(row_weight(row, optimum.assignment) <= row.limit for row in rows)


@pytest.mark.parametrize("hundred", range(2))
def test_of_choices_within_limits_those_that_are_asked_for_are_found_or_none_is(hundred):
    num_limited = 0
    for seed in range(100 * hundred, 100 * (hundred + 1)):
        problem = small_problem(seed)
        rows = small_rows(problem, seed)
        best, fastest = enumerate_best(problem, rows), enumerate_best(problem)
        if np.isinf(best) or best <= 0:
            continue
        limits = {"time_limit_s": 60, "max_gap": 0, "hopeless_excess": np.inf}
        found = minimize_within_limits(problem, worst_of(rows), below=1.01 * best, **limits)
        assert found.value == pytest.approx(best, rel=1e-9), seed
        with pytest.raises(NoneBelow) as none:
            minimize_within_limits(problem, worst_of(rows), below=0.999 * best, **limits)
        assert 0.998 * best <= none.value.bound <= best * (1 + 1e-9), seed
        assert none.value.limited or 0.998 * best <= fastest, seed
        num_limited += none.value.limited
    assert num_limited >= 10


@pytest.mark.parametrize("hundred", range(2))
def test_least_excess_lies_between_what_is_found_and_its_bound(hundred):
    excesses, num_least = [], 0
    for seed, problem, rows, least in few(hundred):
        if np.isinf(least):
            continue
        start = minimize(problem, SolveEffort(budget=WorkBudget.of_seconds(60))).assignment
        far, by = moved(rows, -1e12), 1e12
        lowered = lower_excess(problem, worst_of(far), start, budget=WorkBudget.of_seconds(60), hopeless_excess=np.inf)
        assert lowered.bound - by <= least + 1.0 and least <= lowered.excess - by + 1.0, seed
        assert lowered.excess == pytest.approx(max(row_weight(r, lowered.assignment) - r.limit for r in far)), seed
        excesses.append(lowered.excess)
        num_least += lowered.excess - by <= least + 1.0
    assert num_least >= 0.6 * len(excesses) and len(excesses) >= 50


def test_lowering_a_step_ends_near_the_bound():
    problem = step_problem(2, num_nodes=200, factors=4)
    free = minimize(problem, SolveEffort(budget=WorkBudget.of_seconds(60))).assignment
    rows = [memory_row(problem, seed, 0.0, free) for seed in range(4)]
    lowered = lower_excess(problem, worst_of(rows), free, budget=WorkBudget.of_seconds(60), hopeless_excess=np.inf)
    before = worst_of(rows)(free).excess
    assert lowered.bound <= lowered.excess < before
    assert lowered.excess - lowered.bound < 0.2 * before


def test_limits_that_are_clearly_too_low_are_soon_given_up():
    problem = step_problem(2, num_nodes=200, factors=4)
    free = minimize(problem, SolveEffort(budget=WorkBudget.of_seconds(60))).assignment
    rows = moved([memory_row(problem, seed, 0.0, free) for seed in range(4)], -1e12)
    lowered = lower_excess(problem, worst_of(rows), free, budget=WorkBudget.of_seconds(60), hopeless_excess=1.0)
    assert lowered.bound > 1.0 and lowered.rounds <= 6


def test_when_time_runs_out_the_choice_within_the_limits_is_returned_with_its_bound():
    problem = step_problem(1, num_nodes=200, factors=4)
    free = minimize(problem, SolveEffort(budget=WorkBudget.of_seconds(60))).assignment
    rows = [memory_row(problem, 1, 0.4, free)]
    best = minimize_within_limits(problem, worst_of(rows), time_limit_s=60, max_gap=1e-3, hopeless_excess=np.inf)
    easy = minimize_within_limits(problem, worst_of(rows), time_limit_s=60, max_gap=10.0, hopeless_excess=np.inf)
    for found in (best, easy):
        assert found.lower_bound <= best.value <= found.value * (1 + 1e-9)
        assert row_weight(rows[0], found.assignment) <= rows[0].limit


def test_branch_and_bound_takes_a_part_of_the_work_once_there_is_a_choice(monkeypatch):
    problem, parts = step_problem(1, num_nodes=200, factors=4), []
    free = minimize(problem, SolveEffort(budget=WorkBudget.of_seconds(60))).assignment
    rows, solve = [memory_row(problem, 1, 0.4, free)], constrained.solve_in_whole_numbers

    def solve_a_part(core, rows, *, budget, **options):
        assert budget.whole is not None
        parts.append(budget.left / budget.whole.left)
        return solve(core, rows, budget=budget, **options)

    monkeypatch.setattr(constrained, "solve_in_whole_numbers", solve_a_part)
    found = minimize_within_limits(problem, worst_of(rows), time_limit_s=60, max_gap=1e-6, hopeless_excess=np.inf)
    assert parts == [pytest.approx(constrained.BRANCHING_SHARE)] * len(parts) and len(parts) >= 2
    assert found.lower_bound <= found.value and row_weight(rows[0], found.assignment) <= rows[0].limit


def test_limits_that_the_fastest_choice_keeps_change_nothing():
    problem = step_problem(1, num_nodes=100)
    free = minimize(problem, SolveEffort(budget=WorkBudget.of_seconds(60)))
    found = minimize_within_limits(
        problem, lambda options: Measured(excess=-1.0, rows=()), time_limit_s=60, max_gap=0.5, hopeless_excess=np.inf
    )
    assert found.gap <= 1e-3 and found.value == pytest.approx(free.value, rel=1e-3)
