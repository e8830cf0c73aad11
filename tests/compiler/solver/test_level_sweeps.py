"""Sweeps of all nodes of a level at once move costs as sweeps of one node after another do."""

import numpy as np
import pytest

from autopar.compiler.solver import level_sweeps
from autopar.compiler.solver.level_sweeps import LevelSweeps
from autopar.compiler.solver.presolve import reduce_problem
from autopar.compiler.solver.problem import MRF, Infeasible, assignment_cost
from tests.compiler.solver.random_problems import enumerate_best, small_problem, step_problem


def possible(seed: int) -> MRF | None:
    """A small problem in which every option has partners."""
    try:
        core = reduce_problem(small_problem(seed), range(12)).core
    except Infeasible:
        return None
    return core if np.isfinite(enumerate_best(core)) else None


def swept(problem: MRF, times: int) -> tuple[LevelSweeps, float, np.ndarray]:
    sweeps = LevelSweeps.of(problem)
    least = np.full(sweeps.costs.size, -np.inf)
    bound = sweeps.sweep_back(0.0, least)
    for _ in range(times):
        bound = sweeps.sweep_forward(bound, least)
        bound = sweeps.sweep_back(bound, least)
    return sweeps, bound, least


def one_after_another(problem: MRF, order: list[int], times: int) -> float:
    """The bound after as many sweeps, by the definition, in nested loops."""
    rank = {node: place for place, node in enumerate(order)}
    costs = {node: cost.copy() for node, cost in enumerate(problem.costs)}
    matrices = {edge: matrix.copy() for edge, matrix in problem.edges.items()}
    matrices |= {(j, i): matrix.T for (i, j), matrix in matrices.items()}  # views of one memory
    bound = 0.0
    for back in (True, *(False, True) * times):
        for node in reversed(order) if back else order:
            sides = [[], []]
            for i, j in matrices:
                if i == node:
                    sides[(rank[j] > rank[i]) == back].append(j)
            to, from_ = sides
            for other in from_:
                least = matrices[node, other].min(1)
                matrices[node, other] -= least[:, None]
                costs[node] += least
            bound += costs[node].min()
            costs[node] -= costs[node].min()
            share = costs[node] / max(len(to), len(from_), 1)
            for other in to:
                matrices[node, other] += share[:, None]
            costs[node] -= len(to) * share
    return bound


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("small", [0, 6, 1000])
def test_sweeps_move_costs_and_change_none(seed, small, monkeypatch):
    monkeypatch.setattr(level_sweeps, "SMALL", small)  # all matrices one by one, some, none
    monkeypatch.setattr(level_sweeps, "RUNS", 1 + seed % 4)
    if (problem := possible(seed)) is None:
        return
    sweeps, bound, least = swept(problem, 2)
    assert bound == pytest.approx(one_after_another(problem, sweeps.order.tolist(), 2), abs=1e-12)
    moved = MRF(
        costs=tuple(sweeps.split(sweeps.costs)),
        edges={edge: sweeps.matrix(edge, matrix) for edge, matrix in problem.edges.items()},
    )
    rng = np.random.default_rng(seed)
    for _ in range(20):
        assignment = [int(rng.integers(cost.size)) for cost in problem.costs]
        whole = assignment_cost(problem, assignment)
        assert assignment_cost(moved, assignment) + bound == pytest.approx(whole, abs=1e-12)
        assert all(of[option] <= whole + 1e-12 for of, option in zip(sweeps.split(least), assignment, strict=True))


@pytest.mark.parametrize("seed", range(45))
@pytest.mark.parametrize("small", [0, 6, 1000])
def test_scores_have_the_least_along_every_edge(seed, small, monkeypatch):
    monkeypatch.setattr(level_sweeps, "SMALL", small)
    if (problem := possible(seed)) is None:
        return
    sweeps, _, _ = swept(problem, 2)
    costs, (scores, at_low, at_high) = sweeps.split(sweeps.costs), sweeps.scores()
    expected = [cost.copy() for cost in costs]
    for (i, j), before in problem.edges.items():
        matrix = sweeps.matrix((i, j), before)
        expected[i] += matrix.min(1)
        expected[j] += matrix.min(0)
        low, high, back = sweeps.edges[i, j]
        of_i, of_j = (at_high[high], at_low[low]) if back else (at_low[low], at_high[high])
        added_i, added_j = (
            (sweeps.at_high[high], sweeps.at_low[low]) if back else (sweeps.at_low[low], sweeps.at_high[high])
        )
        np.testing.assert_allclose(of_i, (before + added_j).min(1), atol=1e-12)
        np.testing.assert_allclose(of_j, (before + added_i[:, None]).min(0), atol=1e-12)
    for mine, other in zip(sweeps.split(scores), expected, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-12)


def test_a_level_has_nodes_of_every_run():
    problem = reduce_problem(step_problem(0, num_nodes=300, factors=4), range(300)).core
    sweeps = LevelSweeps.of(problem)
    assert sorted(node for level in sweeps.back for node in level.nodes) == list(range(len(problem.costs)))
    assert len(sweeps.back) < len(problem.costs) / 4


def test_sweeps_go_on_where_others_stand():
    problem = reduce_problem(step_problem(1, num_nodes=100, factors=4), range(100)).core
    first, bound, _ = swept(problem, 3)
    again = LevelSweeps.of(problem)
    again.go_on_from(first)
    for mine, others in zip(again.split(again.costs), first.split(first.costs), strict=True):
        assert np.ptp(mine - others) == pytest.approx(0, abs=1e-9)  # up to what went into the bound
    least = np.full(again.costs.size, -np.inf)
    assert again.sweep_back(0.0, least) == pytest.approx(first.sweep_back(bound, least.copy()), rel=1e-9)
