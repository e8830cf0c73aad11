"""Assignments rounded the surest node first."""

import numpy as np
import pytest

from autopar.compiler.solver.dual_ascent import Ascent, ascend
from autopar.compiler.solver.presolve import reduce_problem
from autopar.compiler.solver.problem import MRF, WorkBudget, assignment_cost
from autopar.compiler.solver.rounding import surest_first
from tests.compiler.solver.random_problems import step_problem

both_ways = pytest.mark.parametrize("by_all", [False, True])


def chain(costs, along):
    """A chain of nodes with these costs, whose edges cost `along` unless both ends take the same option."""
    matrix = along * (1 - np.eye(costs.shape[1]))
    return MRF(costs=tuple(costs), edges={(i, i + 1): matrix for i in range(len(costs) - 1)})


@both_ways
def test_a_sure_node_decides_for_those_that_are_not(by_all):
    costs = np.array([[0.0, 0.1, 0.1], [0.0, 0.1, 0.1], [9.0, 9.0, 0.0], [0.0, 0.1, 0.1]])
    problem = chain(costs, along=1.0)
    assert surest_first(Ascent.of(problem).swept, by_all=by_all) == (2, 2, 2, 2)


@both_ways
def test_what_is_forced_comes_first(by_all):
    forbids_first = np.array([[np.inf, np.inf], [0.0, 0.0]])
    problem = MRF(
        costs=(np.array([0.0, 5.0]), np.array([0.0, 0.0]), np.array([0.0, 0.0])),
        edges={(0, 1): np.array([[0.0, np.inf], [np.inf, 0.0]]), (1, 2): forbids_first},
    )
    options = surest_first(Ascent.of(problem).swept, by_all=by_all)
    assert options[:2] == (1, 1)
    assert assignment_cost(problem, options) == 5


@both_ways
@pytest.mark.parametrize("seed", range(4))
def test_roundings_of_raised_costs_are_near_the_bound(seed, by_all):
    problem = reduce_problem(step_problem(seed, num_nodes=200, factors=4), range(200)).core
    ascent = Ascent.of(problem)
    ascend(ascent, WorkBudget(left=np.inf))
    options = surest_first(ascent.swept, by_all=by_all)
    assert ascent.bound * (1 - 1e-9) <= assignment_cost(problem, options) <= 1.3 * ascent.bound


def test_equal_problems_have_equal_roundings():
    problem = reduce_problem(step_problem(3, num_nodes=100, factors=4), range(100)).core
    first, second = (surest_first(Ascent.of(problem).swept) for _ in range(2))
    assert first == second
