"""Contracted problems have the same choices at the same costs."""

from dataclasses import replace

import numpy as np
import pytest

from autopar.compiler.solver.contraction import contract
from autopar.compiler.solver.problem import MRF, assignment_cost
from tests.compiler.solver.random_problems import enumerate_best, small_problem


def problem_of(seed: int) -> MRF:
    """A small problem in which every edge allows some pair."""
    problem = small_problem(seed)
    return replace(problem, edges={ends: m for ends, m in problem.edges.items() if np.isfinite(m).any()})


@pytest.mark.parametrize("seed", range(60))
def test_contraction_keeps_every_choice_and_its_cost(seed):
    problem = problem_of(seed)
    contracted = contract(problem)
    if contracted is None:
        assert not problem.edges
        return
    assert len(contracted.problem.costs) < len(problem.costs)
    rng = np.random.default_rng(seed)
    for _ in range(20):
        options = [int(rng.integers(cost.size)) for cost in contracted.problem.costs]
        value = assignment_cost(contracted.problem, options)
        assert value == pytest.approx(assignment_cost(problem, contracted.expand(options)))
    assert enumerate_best(contracted.problem) == pytest.approx(enumerate_best(problem))


def test_contracting_again_and_again_leaves_single_nodes():
    problem = MRF(
        costs=tuple(np.arange(2.0) for _ in range(8)),
        edges={(i, j): np.full((2, 2), float(i * j)) for j in range(8) for i in range(j)},
    )
    best = enumerate_best(problem)
    while (contracted := contract(problem)) is not None:
        problem = contracted.problem
    assert not problem.edges
    assert enumerate_best(problem) == best
