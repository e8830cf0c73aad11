"""Where linear programs end in fractions, searches that keep more partial choices prove what is best."""

import numpy as np
import pytest

from autopar.compiler.solver import linear_program
from autopar.compiler.solver.dual_ascent import Ascent, ascend
from autopar.compiler.solver.linear_program import solve_in_whole_numbers
from autopar.compiler.solver.problem import MRF, SolveEffort, WorkBudget, assignment_cost, num_pairs
from autopar.compiler.solver.solve import minimize
from tests.compiler.solver.random_problems import enumerate_best


def frustrated(num_nodes: int, num_options: int, seed: int) -> MRF:
    """A band of random costs of pairs alone: half a unit of every option costs a relaxation next to nothing."""
    rng = np.random.default_rng(seed)
    edges = {(i, j): rng.random((num_options, num_options)) for j in range(num_nodes) for i in range(max(0, j - 4), j)}
    return MRF(costs=tuple(np.zeros(num_options) for _ in range(num_nodes)), edges=edges)


def effort(seconds: float) -> SolveEffort:
    return SolveEffort(budget=WorkBudget.of_seconds(seconds))


@pytest.mark.parametrize("seed", range(5))
def test_small_problems_end_at_what_enumeration_finds(seed):
    problem = frustrated(7, 3, seed)
    found = minimize(problem, effort(60))
    assert found.value == pytest.approx(enumerate_best(problem)) == pytest.approx(found.bound)


def test_a_wide_search_proves_what_a_linear_program_leaves_in_fractions():
    problem = frustrated(40, 8, 0)
    assert num_pairs(problem) < 60_000
    found = minimize(problem, effort(60))
    assert "wide beam search" in found.how
    assert "branch and bound" not in found.how
    assert found.value == pytest.approx(assignment_cost(problem, found.assignment)) == pytest.approx(found.bound)


def test_a_long_ascent_raises_the_bound_where_a_short_one_gave_up():
    problem = frustrated(40, 8, 0)
    ascent = Ascent.of(problem)
    ascend(ascent, WorkBudget(left=np.inf))
    short = ascent.bound
    ascend(ascent, WorkBudget(left=np.inf), at_length=True)
    assert 1.0002 * short < ascent.bound < assignment_cost(problem, ascent.assignment) == pytest.approx(ascent.value)


def test_when_the_work_is_done_there_is_a_choice_and_a_bound_below_it():
    problem = frustrated(200, 12, 0)
    little = effort(0.5)
    found = minimize(problem, little)
    assert little.budget.is_spent
    assert found.bound <= found.value == pytest.approx(assignment_cost(problem, found.assignment))


def test_what_is_spent_of_a_part_is_spent_of_the_whole():
    whole = WorkBudget.of_seconds(1.0)
    before, part = whole.left, whole.part(0.25)
    part.spend(before / 4)
    assert part.is_spent
    assert whole.left == 0.75 * before


def test_branch_and_bound_says_when_the_last_resort_ended_it(monkeypatch):
    problem = frustrated(30, 6, 0)
    budget = WorkBudget.of_seconds(1e-6)
    done = solve_in_whole_numbers(problem, budget=budget)
    assert done.how == "branch and bound"
    assert budget.is_spent
    monkeypatch.setattr(linear_program, "LAST_RESORT", 1e-4)
    hurried = solve_in_whole_numbers(problem, budget=WorkBudget.of_seconds(1e-6))
    assert hurried.how == "branch and bound, ended by the clock"
    assert hurried.bound <= done.bound
