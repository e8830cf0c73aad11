"""Where linear programs end in fractions, searches that keep more partial choices prove what is best."""

import time

import numpy as np
import pytest

from autopar.compiler.solver.minimize import Effort, minimize
from autopar.compiler.solver.presolve import total_pairs
from autopar.compiler.solver.problem import Problem, choice_value
from tests.compiler.solver.random_choices import enumerate_best


def frustrated(num_nodes: int, num_states: int, seed: int) -> Problem:
    """A band of random costs of pairs alone: half a unit of every state costs a relaxation next to nothing."""
    rng = np.random.default_rng(seed)
    edges = {(i, j): rng.random((num_states, num_states)) for j in range(num_nodes) for i in range(max(0, j - 4), j)}
    return Problem(costs=tuple(np.zeros(num_states) for _ in range(num_nodes)), edges=edges)


def effort(seconds: float) -> Effort:
    return Effort(deadline=time.monotonic() + seconds)


@pytest.mark.parametrize("seed", range(5))
def test_small_problems_end_at_what_enumeration_finds(seed):
    problem = frustrated(7, 3, seed)
    found = minimize(problem, effort(60))
    assert found.value == pytest.approx(enumerate_best(problem)) == pytest.approx(found.bound)


def test_a_wide_search_proves_what_a_linear_program_leaves_in_fractions():
    problem = frustrated(40, 8, 0)
    assert total_pairs(problem) < 60_000
    found = minimize(problem, effort(60))
    assert "linear program" in found.how
    assert "wide search" in found.how
    assert "branch and bound" not in found.how
    assert found.value == pytest.approx(choice_value(problem, found.states)) == pytest.approx(found.bound)


def test_out_of_time_there_is_a_choice_and_a_bound_below_it():
    problem = frustrated(200, 12, 0)
    began = time.monotonic()
    found = minimize(problem, effort(0.5))
    assert time.monotonic() - began < 30
    assert found.bound <= found.value == pytest.approx(choice_value(problem, found.states))
