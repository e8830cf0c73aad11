"""Solving an MRF problem gives the optimum, or the best assignment in time and an honest bound."""

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest

from autopar.compiler.solver.problem import MRF, Incumbent, Infeasible, NoneBelow, Optimum, assignment_cost
from autopar.compiler.solver.solve import STEPS, optimum_of, solve
from autopar.errors import SolverFailed
from tests.compiler.solver.random_problems import enumerate_best, small_problem, step_problem


@pytest.mark.parametrize("hundred", range(3))
def test_optimum_equals_enumeration(hundred):
    for seed in range(100 * hundred, 100 * (hundred + 1)):
        problem = small_problem(seed)
        best = enumerate_best(problem)
        if np.isinf(best):
            with pytest.raises(Infeasible):
                solve(problem, max_gap=0)
            continue
        optimum = solve(problem, max_gap=0)
        assert optimum.value == pytest.approx(best, rel=1e-9), seed
        assert optimum.gap < 1e-6, seed


@pytest.mark.parametrize("seed", range(3))
def test_optimum_of_a_step_lies_within_the_gap_of_its_bound(seed):
    problem = step_problem(seed, num_nodes=120, factors=4)
    found = solve(problem)
    assert found.gap <= 1e-3 * (1 + 1e-9)  # round-off
    assert found.value == pytest.approx(assignment_cost(problem, found.assignment))


@pytest.mark.parametrize("step", STEPS)
def test_the_optimum_is_the_same_without_a_step(step):
    for seed in range(40):
        problem = small_problem(seed)
        best = enumerate_best(problem)
        if np.isfinite(best):
            optimum = solve(problem, max_gap=0, without=[step])
            assert optimum.value == pytest.approx(best, rel=1e-9), seed
            assert optimum.lower_bound <= best * (1 + 1e-9), seed


@pytest.mark.parametrize("hundred", range(2))
def test_what_costs_too_much_is_known_by_a_bound_and_what_costs_less_is_found(hundred):
    num_found = num_none = 0
    for seed in range(100 * hundred, 100 * (hundred + 1)):
        problem = small_problem(seed)
        best = enumerate_best(problem)
        if np.isinf(best):
            with pytest.raises(Infeasible):
                solve(problem, max_gap=0, below=1.0)
            continue
        slack = 1e-3 * (abs(best) + 1)
        assert solve(problem, max_gap=0, below=best + slack).value == pytest.approx(best, rel=1e-9), seed
        num_found += 1
        with pytest.raises(NoneBelow, match="Every choice of options costs at least") as none:
            solve(problem, max_gap=0, below=best - slack)
        assert best - slack <= none.value.bound <= best + 1e-9 * (abs(best) + 1), seed
        num_none += 1
    assert num_found == num_none > 50


@pytest.mark.parametrize("seed", range(3))
def test_a_step_that_cannot_be_quick_enough_ends_at_its_bound(seed):
    problem = step_problem(seed, num_nodes=120, factors=4)
    best = solve(problem)
    with pytest.raises(NoneBelow) as none:
        solve(problem, below=0.9 * best.lower_bound)
    assert 0.9 * best.lower_bound <= none.value.bound <= best.value * (1 + 1e-9)
    assert solve(problem, below=1.1 * best.value).value == pytest.approx(best.value, rel=1e-3)


def test_work_that_ends_before_the_bound_is_high_enough_still_ends_with_an_assignment():
    problem = step_problem(1, num_nodes=100)
    hurried = solve(problem, time_limit_s=0, below=solve(problem).lower_bound)
    assert hurried.value == pytest.approx(assignment_cost(problem, hurried.assignment))


def test_equal_problems_have_equal_optima():
    problem = step_problem(3, num_nodes=100, factors=4)
    first, second = (solve(problem) for _ in range(2))
    assert replace(first, seconds=0) == replace(second, seconds=0)


@pytest.mark.parametrize("seconds", [0.02, 60.0])
def test_a_clock_that_races_changes_nothing(seconds, monkeypatch):
    problem = step_problem(2, num_nodes=100)
    first = solve(problem, time_limit_s=seconds)
    ticks = itertools.count(step=1e6)
    for clock in ("monotonic", "perf_counter", "process_time", "time"):
        monkeypatch.setattr(time, clock, lambda: float(next(ticks)))
    second = solve(problem, time_limit_s=seconds)
    assert second.seconds > first.seconds
    assert replace(first, seconds=0) == replace(second, seconds=0)


def test_of_equal_assignments_the_lowest_options_are_taken():
    problem = MRF(costs=(np.zeros(3), np.ones(2)), edges={(0, 1): np.zeros((3, 2))})
    assert solve(problem).assignment == (0, 0)


def test_at_the_limit_of_work_the_best_choice_so_far_is_returned_with_its_bound():
    problem = step_problem(1, num_nodes=100)
    hurried = solve(problem, time_limit_s=0)
    assert hurried.value == pytest.approx(assignment_cost(problem, hurried.assignment))
    assert hurried.lower_bound < solve(problem).value <= hurried.value


def test_no_choice_at_all_is_an_error_that_says_so():
    problem = MRF(costs=(np.zeros(2), np.zeros(2)), edges={(0, 1): np.full((2, 2), np.inf)})
    with pytest.raises(Infeasible, match="Every choice of options is forbidden") as error:
        solve(problem)
    assert error.value.rows == ()


def test_nothing_found_in_time_is_an_error_that_says_so():
    problem = step_problem(1, num_nodes=200)
    with pytest.raises(SolverFailed, match=r"200 nodes was found with the work of 0 s.*Raise the time limit"):
        optimum_of(problem, Incumbent(assignment=None, value=np.inf, bound=-np.inf), 0.0, 0)


@pytest.mark.parametrize(
    ("value", "bound", "gap"), [(2.0, 2.0, 0.0), (1.0, 1.1, 0.0), (1.1, 1.0, 0.1), (1.0, 0.0, np.inf)]
)
def test_gap_is_a_share_of_the_bound(value, bound, gap):
    assert Optimum(assignment=(), value=value, lower_bound=bound, seconds=0, how="").gap == pytest.approx(gap)
