"""A choice problem as a linear program over the local marginal polytope, for HiGHS; the one gate to the solver.

    min  Σ c_i[a] s_i[a] + Σ M_ij[a,b] e_ij[a,b]
    s.t. Σ_a s_i[a] = 1                                      every node
         Σ_b e_ij[a,b] = s_i[a],  Σ_a e_ij[a,b] = s_j[b]     every edge; forbidden pairs have no variable
         Σ w_i[a] s_i[a] + Σ W_ij[a,b] e_ij[a,b] <= limit    every row, scaled to a limit near 1
         s, e >= 0, and s whole numbers where asked for

On the graphs of train steps the program without rows nearly always has a solution in whole numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from autopar.compiler.intra_op.choice_problem import Floats, Infeasible, Problem, Row, States
from autopar.errors import SolverFailed

Indices = npt.NDArray[np.intp]

LARGEST_COST = 1e4
"""What the largest cost is scaled to: far above the solver's tolerance of 1e-7, far below where doubles end."""
WHOLE = 1 - 1e-6


@dataclass(frozen=True, kw_only=True)
class Solution:
    """What the solver found. `states` is None when it ran out of time without any."""

    states: States | None
    bound: float
    whole: bool
    """Whether `states` is what the program's solution says, rather than a rounding of it."""


@dataclass(frozen=True, kw_only=True)
class _Program:
    """The arrays of the linear program: columns are states, then pairs of states; entries by column."""

    costs: Floats
    num_states: int
    first_state: Indices
    starts: Indices
    rows: Indices
    values: Floats
    lower: Floats
    upper: Floats


def solve_relaxation(problem: Problem, rows: Sequence[Row] = (), *, time_limit_s: float) -> Solution:
    """The linear program: a bound, and the likeliest state of every node."""
    return _run(problem, rows, None, whole=False, time_limit_s=time_limit_s, gap=0.0)


def solve_in_whole_numbers(
    problem: Problem, rows: Sequence[Row] = (), *, start: Sequence[int] | None, time_limit_s: float, gap: float = 0.0
) -> Solution:
    """The program in whole numbers, by branch and bound, from a known choice."""
    return _run(problem, rows, start, whole=True, time_limit_s=time_limit_s, gap=gap)


def _run(
    problem: Problem, rows: Sequence[Row], start: Sequence[int] | None, *, whole: bool, time_limit_s: float, gap: float
) -> Solution:
    import highspy

    program = _as_program(problem, rows)
    scale = LARGEST_COST / max(float(np.abs(program.costs).max(initial=0.0)), 1e-30)
    solver: Any = highspy.Highs()
    for name, value in {
        "output_flag": False,
        "threads": 1,
        "random_seed": 1,
        "time_limit": max(time_limit_s, 0.01),
        "mip_rel_gap": gap,
        "mip_abs_gap": 1e-9,
        "primal_feasibility_tolerance": 1e-9,
        "mip_feasibility_tolerance": 1e-9,
    }.items():
        solver.setOptionValue(name, value)
    solver.passModel(_as_highs_model(program, scale, whole))
    if start is not None:
        known = highspy.HighsSolution()
        known.col_value = _columns_of(problem, program, start)
        solver.setSolution(known)
    solver.run()
    status = solver.getModelStatus()
    info = solver.getInfo()
    if status == highspy.HighsModelStatus.kInfeasible:
        raise Infeasible([row.name for row in rows])
    if status not in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kTimeLimit):
        raise SolverFailed(
            f"HiGHS stopped with {solver.modelStatusToString(status)!r} on {len(problem.costs)} nodes and {len(rows)} "
            "rows; it must end with an optimum or at its time limit. Raise the memory limit, or plan by hand."
        )
    optimal = status == highspy.HighsModelStatus.kOptimal
    bound = info.mip_dual_bound if whole else info.objective_function_value if optimal else -np.inf
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    if not found or not (whole or optimal):
        return Solution(states=None, bound=bound / scale, whole=False)
    chances = np.asarray(solver.getSolution().col_value)[: program.num_states]
    pieces = np.split(chances, program.first_state[1:])
    return Solution(
        states=tuple(int(piece.argmax()) for piece in pieces),
        bound=bound / scale,
        whole=all(piece.max() > WHOLE for piece in pieces),
    )


def _as_program(problem: Problem, rows: Sequence[Row]) -> _Program:
    sizes = np.array([cost.size for cost in problem.costs])
    first_state = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    num_states, num_nodes = int(sizes.sum()), len(sizes)
    costs = [np.concatenate(problem.costs)]
    entries = [(np.repeat(np.arange(num_nodes), sizes), np.arange(num_states), np.ones(num_states))]
    num_columns, num_equations = num_states, num_nodes
    weights = [dict(row.edges) for row in rows]
    pair_weights: list[list[tuple[Indices, Floats]]] = [[] for _ in rows]
    for (i, j), matrix in problem.edges.items():
        a, b = np.nonzero(np.isfinite(matrix))
        columns = num_columns + np.arange(a.size)
        costs.append(matrix[a, b])
        ends = ((first_state[i], a, matrix.shape[0]), (first_state[j], b, matrix.shape[1]))
        for first, state, size in ends:
            entries.append((num_equations + state, columns, np.ones(a.size)))
            entries.append((num_equations + np.arange(size), first + np.arange(size), -np.ones(size)))
            num_equations += size
        for row, at in enumerate(weights):
            if (i, j) in at:
                pair_weights[row].append((columns, at[i, j][a, b]))
        num_columns += a.size
    equal = np.concatenate([np.ones(num_nodes), np.zeros(num_equations - num_nodes)])
    for number, row in enumerate(rows):
        parts = [(first_state[i] + np.arange(weight.size), weight) for i, weight in row.nodes.items()]
        parts += pair_weights[number]
        scale = abs(row.limit) or max((float(np.abs(w).max(initial=0.0)) for _, w in parts), default=1.0) or 1.0
        for columns, weight in parts:
            entries.append((np.full(columns.size, num_equations + number), columns, weight / scale))
    limits = np.array([np.sign(row.limit) for row in rows])
    at_row, at_column, value = (np.concatenate(part) for part in zip(*entries))
    order = np.lexsort((at_row, at_column))
    return _Program(
        costs=np.concatenate(costs),
        num_states=num_states,
        first_state=first_state,
        starts=np.searchsorted(at_column[order], np.arange(num_columns + 1)),
        rows=at_row[order],
        values=value[order],
        lower=np.concatenate([equal, np.full(len(rows), -np.inf)]),
        upper=np.concatenate([equal, limits]),
    )


def _as_highs_model(program: _Program, scale: float, whole: bool) -> Any:
    import highspy

    model: Any = highspy.HighsLp()
    model.num_col_, model.num_row_ = program.costs.size, program.lower.size
    model.col_cost_ = program.costs * scale
    model.col_lower_ = np.zeros(program.costs.size)
    model.col_upper_ = np.ones(program.costs.size)
    model.row_lower_, model.row_upper_ = program.lower, program.upper
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = program.starts
    model.a_matrix_.index_ = program.rows
    model.a_matrix_.value_ = program.values
    if whole:
        num_pairs = program.costs.size - program.num_states
        kinds = highspy.HighsVarType
        model.integrality_ = [kinds.kInteger] * program.num_states + [kinds.kContinuous] * num_pairs
    return model


def _columns_of(problem: Problem, program: _Program, states: Sequence[int]) -> Floats:
    """The values of the columns that say `states`."""
    columns = np.zeros(program.costs.size)
    columns[program.first_state + np.asarray(states)] = 1.0
    at = program.num_states
    for (i, j), matrix in problem.edges.items():
        a, b = np.nonzero(np.isfinite(matrix))
        columns[at : at + a.size] = (a == states[i]) & (b == states[j])
        at += a.size
    return columns
