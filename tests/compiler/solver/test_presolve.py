"""Reductions and dual bounds keep the optimum, and lead back to it."""

import gc

import highspy
import numpy as np
import pytest

from autopar.compiler.solver.dual_ascent import Ascent, ascend, continued, within_gap
from autopar.compiler.solver.lagrangian import reduce_with_rows
from autopar.compiler.solver.linear_program import LinearProgram, run_program
from autopar.compiler.solver.presolve import Results, reduce_problem
from autopar.compiler.solver.problem import MRF, Infeasible, WorkBudget, assignment_cost, row_weight
from autopar.errors import SolverFailed
from tests.compiler.solver.random_problems import enumerate_best, small_problem, small_rows, step_problem

seeds = pytest.mark.parametrize("seed", range(60))


def reduced_or_none(problem, protected=()):
    try:
        return reduce_problem(problem, protected)
    except Infeasible:
        assert np.isinf(enumerate_best(problem))
        return None


@seeds
@pytest.mark.parametrize("protected", [(), (0, 2, 5)])
def test_core_has_the_optimum_of_the_whole(seed, protected):
    problem = small_problem(seed)
    reduced = reduced_or_none(problem, protected)
    if reduced is None:
        return
    best = enumerate_best(problem)
    assert enumerate_best(reduced.core) + reduced.constant == pytest.approx(best, rel=1e-9)
    assert {node for node in protected if node < len(problem.costs)} <= set(reduced.nodes)
    for core_assignment in np.ndindex(*(cost.size for cost in reduced.core.costs)):
        options = reduced.expand(core_assignment)
        value = assignment_cost(reduced.core, core_assignment) + reduced.constant
        assert assignment_cost(problem, options) == pytest.approx(value, rel=1e-9)
        assert reduced.core_assignment(options) == core_assignment


@pytest.mark.parametrize("size", [2, 7, 40])
def test_trees_and_rings_reduce_to_nothing(size):
    rng = np.random.default_rng(size)
    links = {(i, i + 1) for i in range(size - 1)} | ({(0, size - 1)} if size > 2 else set())
    problem = MRF(costs=tuple(rng.random((size, 5))), edges={ends: rng.random((5, 5)) for ends in links})
    assert reduce_problem(problem).core.costs == ()


@seeds
def test_rows_weigh_the_same_after_reductions(seed):
    problem = small_problem(seed)
    rows = small_rows(problem, seed)
    try:
        smaller = reduce_with_rows(problem, rows)
    except Infeasible:
        return
    rng = np.random.default_rng(seed)
    options = [int(rng.integers(cost.size)) for cost in smaller.reduced.core.costs]
    whole = smaller.reduced.expand(options)
    multipliers = rng.random(len(rows))
    for row, small in zip(rows, smaller.rows, strict=True):
        assert row_weight(small, options) == pytest.approx(row_weight(row, whole))
    priced = assignment_cost(smaller.with_multipliers(multipliers), options) + smaller.shift(multipliers)
    excess = [(row_weight(row, whole) - row.limit) / row.limit for row in rows]
    assert priced == pytest.approx(assignment_cost(problem, whole) + multipliers @ excess)


@seeds
def test_bounds_of_states_and_of_the_whole_hold(seed):
    problem = small_problem(seed)
    reduced = reduced_or_none(problem, range(12))
    if reduced is None or np.isinf(best := enumerate_best(reduced.core)):
        return
    ascent = Ascent.of(reduced.core)
    ascend(ascent, WorkBudget(left=np.inf))
    assert ascent.bound <= best + 1e-9 <= ascent.value + 2e-9
    for node, least in enumerate(ascent.least):
        for option in range(least.size):
            costs = list(reduced.core.costs)
            costs[node] = np.where(np.arange(least.size) == option, costs[node], np.inf)
            with_state = enumerate_best(MRF(costs=tuple(costs), edges=reduced.core.edges))
            assert least[option] <= with_state + 1e-9
    if np.isfinite(ascent.value):
        rest, _ = within_gap(ascent)
        assert enumerate_best(rest) + ascent.bound == pytest.approx(best, abs=1e-9)


def test_ascent_continues_where_another_stands():
    problem = reduce_problem(step_problem(0, num_nodes=100, factors=4), range(100)).core
    first = Ascent.of(problem)
    ascend(first, WorkBudget(left=np.inf))
    again = continued(first, problem)
    again.sweep_back()
    assert again.bound == pytest.approx(first.bound, rel=1e-3)


def test_program_without_an_optimum_is_an_error_that_says_what_the_solver_said():
    program = LinearProgram(
        costs=np.array([-1.0]),
        lower=np.zeros(1),
        upper=np.array([np.inf]),
        entry_rows=np.zeros(1, int),
        entry_columns=np.zeros(1, int),
        entries=np.ones(1),
        at_most=np.inf,
    )
    with pytest.raises(SolverFailed, match=r"HiGHS stopped with 'Unbounded'.*1 variables"):
        run_program(program)


def choice(monkeypatch, returned):
    """Return a choice of the second of two options, and the values that the solver is made to return from a start."""
    program = LinearProgram(
        costs=np.array([2.0, 1.0]),
        lower=np.ones(1),
        upper=np.ones(1),
        entry_rows=np.zeros(2, int),
        entry_columns=np.arange(2),
        entries=np.ones(2),
        num_whole=2,
    )
    sound = highspy.Highs.getSolution

    def solution(solver):
        found = sound(solver)
        found.col_value = returned(found.col_value)
        return found

    monkeypatch.setattr(highspy.Highs, "getSolution", solution)
    return program


def test_a_solver_that_returns_its_start_for_its_solution_runs_without_one(monkeypatch):
    start, answers = np.array([1.0, 0.0]), iter([[1.0, 0.0], [0.0, 1.0]])
    program = choice(monkeypatch, lambda values: next(answers))
    assert run_program(program, start=start).columns.tolist() == [0.0, 1.0]
    assert next(answers, None) is None


def test_a_solution_that_costs_other_than_the_solver_says_is_an_error(monkeypatch):
    program = choice(monkeypatch, lambda values: values[::-1])
    with pytest.raises(SolverFailed, match=r"a solution that costs 2 and says that it costs 1; .*another release"):
        run_program(program)


def test_what_reductions_make_of_equal_arrays_is_computed_once():
    results, asked = Results(), []

    def total(*arrays):
        asked.append(arrays)
        return sum(float(array.sum()) for array in arrays)

    one, equal, other, shorter = (results.same(np.array(a)) for a in ([0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [0.0]))
    assert one is equal and results.same(np.zeros(1, int)) is not shorter
    assert [results(total, one), results(total, equal), results(total, other), results(total, one, other)] == [
        1,
        1,
        1,
        2,
    ]
    assert len(asked) == 3


def test_equal_layers_are_reduced_to_equal_arrays():
    rng = np.random.default_rng(3)
    cost, chain, skip = rng.random(4), rng.random((4, 4)), rng.random((4, 4))
    costs = tuple(cost.copy() for _ in range(12))
    edges = {(i, i + 1): chain.copy() for i in range(11)} | {(i, i + 2): skip.copy() for i in range(10)}
    problem = MRF(costs=costs, edges=edges)
    reduced = reduce_problem(problem, protected=range(12))
    assert len({id(matrix) for matrix in reduced.core.edges.values()}) == 2 < len(reduced.core.edges) == 21


def test_what_reductions_are_done_with_needs_no_collector():
    problem = step_problem(seed=0)
    gc.collect()
    gc.disable()
    try:
        reduce_problem(problem)
        assert gc.collect() == 0
    finally:
        gc.enable()
