"""A search by partial choices is exact when wide enough, and bounds what it dropped when not."""

import numpy as np
import pytest

from autopar.compiler.solver.beam_search import beam_search, frontier_order
from autopar.compiler.solver.problem import MRF, WorkBudget, assignment_cost
from tests.compiler.solver.random_problems import enumerate_best


def problem_of(seed: int) -> MRF:
    """Up to ten nodes, every option with a partner along every edge, no cost below zero."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, rng.integers(1, 11))
    edges = {}
    for j in range(sizes.size):
        for i in range(j):
            if rng.random() < 0.4:
                matrix = rng.integers(0, 5, (sizes[i], sizes[j])).astype(float)
                matrix[1:, 1:][rng.random((sizes[i] - 1, sizes[j] - 1)) < 0.2] = np.inf
                edges[i, j] = matrix
    return MRF(costs=tuple(rng.random(size) for size in sizes), edges=edges)


@pytest.mark.parametrize("seed", range(40))
def test_wide_search_is_exact(seed):
    problem = problem_of(seed)
    best = enumerate_best(problem)
    searched = beam_search(problem, np.inf, 10**6)
    assert searched.assignment is not None
    assert assignment_cost(problem, searched.assignment) == pytest.approx(best)
    assert searched.bound == pytest.approx(best)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("seed", range(40))
def test_narrow_search_has_a_bound_that_holds(seed, width):
    problem = problem_of(seed)
    best = enumerate_best(problem)
    searched = beam_search(problem, np.inf, width)
    assert searched.bound <= best + 1e-9
    if searched.assignment is not None:
        assert assignment_cost(problem, searched.assignment) >= best - 1e-9


@pytest.mark.parametrize("seed", range(40))
def test_bound_holds_up_to_the_limit_that_nothing_stays_below(seed):
    problem = problem_of(seed)
    best = enumerate_best(problem)
    below = beam_search(problem, 0.9 * best, 10**6)
    assert below.assignment is None
    assert 0.9 * best - 1e-9 <= below.bound <= best + 1e-9
    assert beam_search(problem, best + 1e-9, 10**6).assignment is not None


def test_with_no_work_left_a_search_has_a_bound_and_no_choice():
    problem = problem_of(0)
    searched = beam_search(problem, np.inf, 10**6, budget=WorkBudget(left=0.0))
    assert searched.assignment is None
    assert searched.bound <= enumerate_best(problem) + 1e-9


def test_order_of_a_ladder_crosses_few_of_its_rungs_at_a_time():
    links = [{n for n in (i - 1, i + 1, 39 - i) if 0 <= n < 40} for i in range(40)]
    order = frontier_order(links, [10] * 40)
    assert sorted(order) == list(range(40))
    place = {node: index for index, node in enumerate(order)}
    widths = [
        sum(place[i] <= now and any(place[j] > now for j in links[i]) for i in range(40)) for now in range(len(order))
    ]
    assert max(widths) <= 3
