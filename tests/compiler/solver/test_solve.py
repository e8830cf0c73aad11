"""Solving a choice problem gives the optimum, or the best choice in time and an honest bound."""

from dataclasses import replace

import numpy as np
import pytest

from autopar.compiler.solver.problem import Infeasible, choice_value, row_weight
from autopar.compiler.solver.solve import Optimum, Problem, Row, solve
from autopar.errors import SolverFailed
from tests.compiler.solver.random_choices import enumerate_best, memory_row, small_problem, small_rows, step_problem


def one_at_a_time(rows):
    """Shows one violated row at a time, as they come up when a peak is looked for."""
    return lambda states: [row for row in rows if row_weight(row, states) > row.limit][:1]


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


@pytest.mark.parametrize("hundred", range(3))
def test_optimum_within_rows_equals_enumeration(hundred):
    for seed in range(100 * hundred, 100 * (hundred + 1)):
        problem = small_problem(seed)
        rows = small_rows(problem, seed)
        best = enumerate_best(problem, rows)
        if np.isinf(best):
            with pytest.raises(Infeasible):
                solve(problem, violated_rows=one_at_a_time(rows), max_gap=0)
            continue
        optimum = solve(problem, violated_rows=one_at_a_time(rows), max_gap=0)
        assert optimum.value == pytest.approx(best, rel=1e-9), seed
        assert optimum.gap < 1e-6, seed
        assert not one_at_a_time(rows)(optimum.states)


@pytest.mark.parametrize("seed", range(3))
def test_optimum_of_a_step_lies_within_the_gap_of_its_bound(seed):
    problem = step_problem(seed, num_nodes=120, factors=4)
    free = solve(problem)
    row = memory_row(problem, seed, 0.5, free.states)
    within = solve(problem, violated_rows=one_at_a_time([row]))
    assert max(free.gap, within.gap) <= 1e-3 * (1 + 1e-9)  # round-off
    assert free.value == pytest.approx(choice_value(problem, free.states))
    assert free.lower_bound <= within.value
    assert row_weight(row, free.states) > row.limit >= row_weight(row, within.states)


def test_rows_that_bind_nothing_leave_the_optimum_as_proven_as_without_them():
    problem = step_problem(1, num_nodes=200)
    assert solve(problem, violated_rows=lambda states: [], max_gap=0.5).gap <= 1e-3


@pytest.mark.parametrize("share", [None, 0.4])
def test_equal_problems_have_equal_optima(share):
    problem = step_problem(3, num_nodes=100, factors=4)
    rows = [] if share is None else [memory_row(problem, 3, share, solve(problem).states)]
    first, second = (solve(problem, violated_rows=one_at_a_time(rows)) for _ in range(2))
    assert replace(first, seconds=0) == replace(second, seconds=0)


def test_of_equal_choices_the_lowest_states_are_taken():
    problem = Problem(costs=(np.zeros(3), np.ones(2)), edges={(0, 1): np.zeros((3, 2))})
    assert solve(problem).states == (0, 0)


def test_at_the_time_limit_the_best_choice_so_far_is_returned_with_its_bound():
    problem = step_problem(1, num_nodes=100)
    hurried = solve(problem, time_limit_s=0)
    assert hurried.value == pytest.approx(choice_value(problem, hurried.states))
    assert hurried.lower_bound < solve(problem).value <= hurried.value


def test_a_start_is_never_made_worse():
    problem = step_problem(1, num_nodes=100, factors=4)
    known = solve(problem)
    assert solve(problem, time_limit_s=0, starts=[known.states]).value == known.value
    row = memory_row(problem, 1, 0.5, known.states)
    within = solve(problem, violated_rows=one_at_a_time([row]))
    again = solve(problem, violated_rows=one_at_a_time([row]), time_limit_s=0, starts=[within.states])
    assert again.value == within.value


def test_no_choice_at_all_is_an_error_that_says_so():
    problem = Problem(costs=(np.zeros(2), np.zeros(2)), edges={(0, 1): np.full((2, 2), np.inf)})
    with pytest.raises(Infeasible, match="Every choice of states is forbidden") as error:
        solve(problem)
    assert error.value.rows == ()


def test_row_that_nothing_satisfies_is_named():
    problem = Problem(costs=(np.zeros(2), np.zeros(2)), edges={})
    row = Row(name="peak at equation 3", nodes={1: np.array([3e9, 2e9])}, edges={}, limit=1e9)
    with pytest.raises(Infeasible, match="peak at equation 3") as error:
        solve(problem, violated_rows=one_at_a_time([row]))
    assert error.value.rows == ("peak at equation 3",)


def test_rows_that_only_together_allow_nothing_are_named():
    problem = Problem(costs=(np.zeros(2),), edges={})
    rows = [Row(name=f"row {n}", nodes={0: np.roll([0.0, 2.0], n)}, edges={}, limit=1.0) for n in range(2)]
    with pytest.raises(Infeasible) as error:
        solve(problem, violated_rows=one_at_a_time(rows))
    assert sorted(error.value.rows) == ["row 0", "row 1"]


def test_rows_that_many_nodes_cannot_satisfy_together_are_named_without_a_search():
    problem = step_problem(1, num_nodes=200)
    weights = {node: np.arange(36.0) for node in range(200)}
    rows = [
        Row(name="few", nodes=weights, edges={}, limit=200 * 12.0),
        Row(name="most", nodes={node: -weight for node, weight in weights.items()}, edges={}, limit=-200 * 24.0),
    ]
    with pytest.raises(Infeasible, match="few, most"):
        solve(problem, violated_rows=lambda states: rows)


def test_nothing_found_in_time_is_an_error_that_says_so():
    problem = step_problem(1, num_nodes=200)
    rng = np.random.default_rng(0)
    weights = {node: rng.random(36) for node in range(200)}
    # Either is easily had; both only by choices that weigh almost the same.
    rows = [
        Row(name="few", nodes=weights, edges={}, limit=100.00001),
        Row(name="most", nodes={node: -weight for node, weight in weights.items()}, edges={}, limit=-100.0),
    ]
    with pytest.raises(SolverFailed, match=r"few.*was found.*Raise the time limit"):
        solve(problem, violated_rows=lambda states: rows, time_limit_s=0)


@pytest.mark.parametrize(
    ("value", "bound", "gap"), [(2.0, 2.0, 0.0), (1.0, 1.1, 0.0), (1.1, 1.0, 0.1), (1.0, 0.0, np.inf)]
)
def test_gap_is_a_share_of_the_bound(value, bound, gap):
    assert Optimum(states=(), value=value, lower_bound=bound, seconds=0, how="").gap == pytest.approx(gap)
