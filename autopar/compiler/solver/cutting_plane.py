"""Choose Lagrange multipliers by a cutting plane (Kelley 1960).

    max_λ min_x  v(x) + Σ_r λ_r s_r(x),    λ >= 0

is concave in λ. Every assignment x that was met is a cut, an upper bound that is linear in λ, and the multipliers for
which the cuts promise most come from a linear program,

    max z  s.t.  z - Σ_r λ_r s_r(x) <= v(x)  for every x met,   and λ <= at_most, or else Σ_r λ_r = 1.
"""

from __future__ import annotations

import numpy as np

from autopar.compiler.solver.linear_program import LinearProgram, run_program
from autopar.compiler.solver.problem import FloatArray


def best_multipliers(
    values: FloatArray, slopes: FloatArray, at_most: FloatArray | None = None
) -> tuple[float, FloatArray] | None:
    """Return the most that the cuts promise, which must not be below zero, and the multipliers; None if it is.

    `slopes` has a row for every cut. Numbers should be near 1. Without `at_most` the multipliers sum to one.
    """
    num_cuts, num_rows = slopes.shape
    ranges = np.ones((1, num_rows)) if at_most is None else np.eye(num_rows)
    most = np.ones(1) if at_most is None else at_most
    least = most if at_most is None else np.full(num_rows, -np.inf)
    matrix = np.block([[np.ones((num_cuts, 1)), -slopes], [np.zeros((most.size, 1)), ranges]])
    at_row, at_column = np.nonzero(matrix)
    result = run_program(
        LinearProgram(
            costs=np.concatenate([[-1.0], np.zeros(num_rows)]),
            lower=np.concatenate([np.full(num_cuts, -np.inf), least]),
            upper=np.concatenate([values, most]),
            entry_rows=at_row,
            entry_columns=at_column,
            entries=matrix[at_row, at_column],
            at_most=np.inf,
        )
    )
    return None if result.columns is None else (float(result.columns[0]), np.maximum(result.columns[1:], 0.0))
