"""Solving a choice problem gives the optimum."""

import numpy as np
import pytest

from autopar.compiler.intra_op.ilp import Infeasible, solve
from tests.intra_op.random_choices import enumerate_best, small_problem


@pytest.mark.parametrize("hundred", range(3))
def test_optimum_equals_enumeration(hundred):
    for seed in range(100 * hundred, 100 * (hundred + 1)):
        problem = small_problem(seed)
        best = enumerate_best(problem)
        if np.isinf(best):
            with pytest.raises(Infeasible):
                solve(problem)
            continue
        optimum = solve(problem)
        assert optimum.value == pytest.approx(best, rel=1e-9), seed
        assert optimum.gap < 1e-6, seed
