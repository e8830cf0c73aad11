"""Solve an MRF problem as an integer program over the local marginal polytope, by HiGHS.

    min  Σ c_i[a] s_i[a] + Σ M_ij[a,b] e_ij[a,b]                                              → _as_program
    s.t. Σ_a s_i[a] = 1                                      every node
         Σ_b e_ij[a,b] = s_i[a],  Σ_a e_ij[a,b] = s_j[b]     every edge; forbidden pairs have no variable
         Σ w_i[a] s_i[a] + Σ W_ij[a,b] e_ij[a,b] <= limit    every row, divided by its limit  → _row_entries
         s, e >= 0, and s whole numbers

On the graphs of train steps the linear program without rows nearly always has a solution in whole numbers, so that
branch and bound ends where it begins. This file is the only one that knows the solver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

from autopar.compiler.solver.problem import (
    ENTRIES_PER_SECOND,
    MRF,
    Assignment,
    FloatArray,
    IndexArray,
    Infeasible,
    Row,
    WorkBudget,
    row_scale,
)
from autopar.errors import SolverFailed

LARGEST_PROGRAM = 400_000
"""Pairs of options beyond which a program would not end in time."""
ENTRIES_OF_NODE = 1_000
"""Entries, for every variable, that could be looked at in the time of a node of branch and bound."""
MOST_NODES = 1_000_000
LAST_RESORT = 5.0
"""Factor on the seconds that its work should take, at least `LEAST_S`, that branch and bound may take."""
LEAST_S = 5.0
LARGEST_COST = 1e4
"""The largest cost after scaling: far above the solver's tolerance of 1e-7, far below where doubles end."""
COST_TOLERANCE = 1e-6
"""Share of its terms by which the cost of a solution may differ from what the solver says."""


def solve_in_whole_numbers(
    problem: MRF,
    rows: Sequence[Row] = (),
    *,
    start: Sequence[int] | None = None,
    budget: WorkBudget,
    gap: float = 0.0,
) -> ProgramSolution:
    """Solve the program in whole numbers, by branch and bound, from a known assignment, up to an (absolute) gap.

    The budget says how many nodes of the search there may be: the first one there always is. As the work at a node is
    not counted, a clock ends the search as a last resort, after several times as long as the budget should take.
    """
    pairs = _pairs(problem)
    columns = None if start is None else _columns_of(problem, pairs, start)
    program = _as_program(problem, pairs, rows)
    work_of_node = ENTRIES_OF_NODE * program.costs.size
    most_nodes = max(1, int(min(budget.left / work_of_node, MOST_NODES)))
    last_resort_s = LAST_RESORT * max(budget.left / ENTRIES_PER_SECOND, LEAST_S)
    result = run_program(program, start=columns, most_nodes=most_nodes, last_resort_s=last_resort_s, gap=gap)
    budget.spend(work_of_node * max(1, result.num_nodes))
    if not result.feasible:
        raise Infeasible([row.name for row in rows])
    how = "branch and bound, ended by the clock" if result.timed_out else "branch and bound"
    if result.columns is None:
        return ProgramSolution(assignment=None, bound=result.bound, how=how)
    sizes = [cost.size for cost in problem.costs]
    chances = np.split(result.columns[: sum(sizes)], np.cumsum(sizes)[:-1])
    return ProgramSolution(assignment=tuple(int(chance.argmax()) for chance in chances), bound=result.bound, how=how)


@dataclass(frozen=True, kw_only=True)
class ProgramSolution:
    """The assignment that a program led to, None if it ended without any, and a bound on all of them."""

    assignment: Assignment | None
    bound: float
    how: str
    """The work that was done, for the reader."""


@dataclass(frozen=True, kw_only=True)
class _Pairs:
    """The allowed pairs of one edge, and the columns that stand for them."""

    low: IndexArray
    high: IndexArray
    columns: IndexArray


def _pairs(problem: MRF) -> dict[tuple[int, int], _Pairs]:
    pairs = dict[tuple[int, int], _Pairs]()
    end = sum(cost.size for cost in problem.costs)
    for ends, matrix in problem.edges.items():
        low, high = np.nonzero(np.isfinite(matrix))
        pairs[ends] = _Pairs(low=low, high=high, columns=end + np.arange(low.size))
        end += low.size
    return pairs


def _first_columns(problem: MRF) -> IndexArray:
    """Return the column of every node's first option."""
    return np.cumsum([0] + [cost.size for cost in problem.costs])


def _as_program(problem: MRF, pairs: dict[tuple[int, int], _Pairs], rows: Sequence[Row]) -> LinearProgram:
    first = _first_columns(problem)
    num_nodes, num_options = len(problem.costs), int(first[-1])
    entries = [(np.repeat(np.arange(num_nodes), np.diff(first)), np.arange(num_options), np.ones(num_options))]
    end = num_nodes
    for (i, j), matrix in problem.edges.items():
        allowed = pairs[i, j]
        for node, options, size in ((i, allowed.low, matrix.shape[0]), (j, allowed.high, matrix.shape[1])):
            entries.append((end + options, allowed.columns, np.ones(options.size)))
            entries.append((end + np.arange(size), first[node] + np.arange(size), -np.ones(size)))
            end += size
    entries += [_row_entries(row, end + number, first, pairs) for number, row in enumerate(rows)]
    entry_rows, entry_columns, values = (np.concatenate(part) for part in zip(*entries))
    equal = np.concatenate([np.ones(num_nodes), np.zeros(end - num_nodes)])
    matrices = [matrix[pairs[ends].low, pairs[ends].high] for ends, matrix in problem.edges.items()]
    return LinearProgram(
        costs=np.concatenate([*problem.costs, *matrices]),
        lower=np.concatenate([equal, np.full(len(rows), -np.inf)]),
        upper=np.concatenate([equal, [row.limit / row_scale(row) for row in rows]]),
        entry_rows=entry_rows,
        entry_columns=entry_columns,
        entries=values,
        num_whole=num_options,
    )


def _row_entries(
    row: Row, number: int, first: IndexArray, pairs: dict[tuple[int, int], _Pairs]
) -> tuple[IndexArray, IndexArray, FloatArray]:
    columns = [first[i] + np.arange(weight.size) for i, weight in row.nodes.items()]
    columns += [pairs[ends].columns for ends in row.edges]
    weights = [*row.nodes.values(), *(w[pairs[ends].low, pairs[ends].high] for ends, w in row.edges.items())]
    at = np.concatenate([np.empty(0, np.intp), *columns])
    return np.full(at.size, number), at, np.concatenate([np.empty(0), *weights]) / row_scale(row)


def _columns_of(problem: MRF, pairs: dict[tuple[int, int], _Pairs], assignment: Sequence[int]) -> FloatArray:
    """Return the values of the columns that mean an assignment."""
    chosen = _first_columns(problem)[:-1] + np.asarray(assignment)
    columns = [np.zeros(sum(cost.size for cost in problem.costs))]
    columns[0][chosen] = 1.0
    for (i, j), allowed in pairs.items():
        columns.append(((allowed.low == assignment[i]) & (allowed.high == assignment[j])).astype(float))
    return np.concatenate(columns)


@dataclass(frozen=True, kw_only=True)
class LinearProgram:
    """min c·x  s.t.  lower <= A x <= upper,  0 <= x <= at_most,  the first `num_whole` of x in whole numbers.

    The entries of A come in any order.
    """

    costs: FloatArray
    lower: FloatArray
    upper: FloatArray
    entry_rows: IndexArray
    entry_columns: IndexArray
    entries: FloatArray
    at_most: float = 1.0
    num_whole: int = 0


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    """The values of x and a bound; `columns` is None when the nodes ended first, or when `feasible` is false."""

    columns: FloatArray | None
    bound: float
    feasible: bool = True
    num_nodes: int = 0
    timed_out: bool = False


def run_program(
    program: LinearProgram,
    *,
    start: FloatArray | None = None,
    most_nodes: int = MOST_NODES,
    last_resort_s: float = np.inf,
    gap: float = 0.0,
) -> ProgramResult:
    """Solve a program on one thread, so that equal programs have equal results unless the last resort ends one.

    Branch and bound ends when the best solution costs at most `gap` more than the bound, or after `most_nodes`.
    """
    # The solver does not survive NaN.
    assert np.isfinite(program.costs).all() and np.isfinite(program.entries).all()
    assert not (np.isnan(program.lower).any() or np.isnan(program.upper).any())
    scale = LARGEST_COST / (float(np.abs(program.costs).max(initial=0.0)) or 1.0)
    solver: Any = highspy.Highs()
    for name, value in {
        "output_flag": False,
        "threads": 1,
        "random_seed": 1,
        "mip_max_nodes": most_nodes,
        "mip_allow_restart": False,  # most of the time at the first node went to reducing the program again and again
        "time_limit": last_resort_s,
        "mip_rel_gap": 0.0,
        "mip_abs_gap": max(1e-8, gap * scale),
        "primal_feasibility_tolerance": 1e-9,
        "mip_feasibility_tolerance": 1e-9,
    }.items():
        solver.setOptionValue(name, value)
    solver.passModel(_as_model(program, scale))
    if start is not None:
        known = highspy.HighsSolution()
        known.col_value = start
        solver.setSolution(known)
    solver.run()
    status, info = solver.getModelStatus(), solver.getInfo()
    statuses = highspy.HighsModelStatus
    if status == statuses.kInfeasible:
        return ProgramResult(columns=None, bound=np.inf, feasible=False)
    if status not in (statuses.kOptimal, statuses.kSolutionLimit, statuses.kTimeLimit):
        raise SolverFailed(
            f"HiGHS stopped with {solver.modelStatusToString(status)!r} on {program.costs.size} variables and "
            f"{program.lower.size} constraints; it must end with an optimum or after its nodes. Raise the memory "
            "limit, or use a smaller mesh."
        )
    optimal = status == statuses.kOptimal
    bound = info.mip_dual_bound if program.num_whole else info.objective_function_value if optimal else -np.inf
    has_solution = info.primal_solution_status == int(highspy.SolutionStatus.kSolutionStatusFeasible)
    found = has_solution and bool(program.num_whole or optimal)
    columns = np.asarray(solver.getSolution().col_value) if found else None
    if columns is not None and not _costs(program, columns, info.objective_function_value / scale):
        if start is None:
            raise _contradiction(
                solver.version(), float(program.costs @ columns), info.objective_function_value / scale
            )
        # It returned what it was given: without that there is nothing to mistake for the solution.
        return run_program(program, most_nodes=most_nodes, last_resort_s=last_resort_s, gap=gap)
    return ProgramResult(
        columns=columns,
        bound=bound / scale,
        num_nodes=int(info.mip_node_count) if program.num_whole else 0,
        timed_out=status == statuses.kTimeLimit,
    )


def _contradiction(version: str, cost: float, said: float) -> SolverFailed:
    return SolverFailed(
        f"HiGHS {version} returned a solution that costs {cost:.6g} and says that it costs {said:.6g}; both must "
        "agree. Install another release."
    )


def _costs(program: LinearProgram, columns: FloatArray, value: float) -> bool:
    """Return whether a solution costs what the solver says that it does."""
    unit = float(np.abs(program.costs) @ np.abs(columns))
    return abs(float(program.costs @ columns) - value) <= COST_TOLERANCE * unit


def _as_model(program: LinearProgram, scale: float) -> Any:
    num_columns, num_rows = program.costs.size, program.lower.size
    order = np.lexsort((program.entry_rows, program.entry_columns))
    model: Any = highspy.HighsLp()
    model.num_col_, model.num_row_ = num_columns, num_rows
    model.col_cost_ = program.costs * scale
    model.col_lower_, model.col_upper_ = np.zeros(num_columns), np.full(num_columns, program.at_most)
    model.row_lower_, model.row_upper_ = program.lower, program.upper
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = np.searchsorted(program.entry_columns[order], np.arange(num_columns + 1))
    model.a_matrix_.index_ = program.entry_rows[order]
    model.a_matrix_.value_ = program.entries[order]
    if program.num_whole:
        kinds = highspy.HighsVarType
        others = num_columns - program.num_whole
        model.integrality_ = [kinds.kInteger] * program.num_whole + [kinds.kContinuous] * others
    return model
