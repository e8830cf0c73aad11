"""Linear and integer programs, solved by HiGHS: the one gate to the solver.

min c·x   s.t.  lower <= A x <= upper,  0 <= x <= at_most,  the first `num_whole` of x in whole numbers
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

from autopar.compiler.intra_op.choice_problem import Floats, Indices
from autopar.errors import SolverFailed

LARGEST_COST = 1e4
"""What the largest cost is scaled to: far above the solver's tolerance of 1e-7, far below where doubles end."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """The arrays of a program; the entries of A in any order."""

    costs: Floats
    lower: Floats
    upper: Floats
    entry_rows: Indices
    entry_columns: Indices
    entries: Floats
    at_most: float = 1.0
    num_whole: int = 0


@dataclass(frozen=True, kw_only=True)
class Result:
    """`columns` is None when time ran out first, or when `feasible` is false."""

    columns: Floats | None
    bound: float
    feasible: bool = True


def run_program(
    program: Program, *, start: Floats | None = None, time_limit_s: float = np.inf, gap: float = 0.0
) -> Result:
    """Solve a program on one thread, so that equal programs have equal results.

    Branch and bound ends when the best solution costs at most `gap` more than the bound.
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
        "time_limit": max(time_limit_s, 0.05),
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
        return Result(columns=None, bound=np.inf, feasible=False)
    if status not in (statuses.kOptimal, statuses.kTimeLimit):
        raise SolverFailed(
            f"HiGHS stopped with {solver.modelStatusToString(status)!r} on {program.costs.size} variables and "
            f"{program.lower.size} constraints; it must end with an optimum or at its time limit. Raise the memory "
            "limit, or use a smaller mesh."
        )
    optimal = status == statuses.kOptimal
    bound = info.mip_dual_bound if program.num_whole else info.objective_function_value if optimal else -np.inf
    known_choice = info.primal_solution_status == int(highspy.SolutionStatus.kSolutionStatusFeasible)
    if not known_choice or not (program.num_whole or optimal):
        return Result(columns=None, bound=bound / scale)
    return Result(columns=np.asarray(solver.getSolution().col_value), bound=bound / scale)


def _as_model(program: Program, scale: float) -> Any:
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
