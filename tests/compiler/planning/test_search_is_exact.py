"""The best plan is the best of all: enumerated cuts, submeshes, microbatches and schedules, each simulated."""

import pytest

from benchmarks.enumerated_plans import compare


@pytest.mark.filterwarnings("ignore::autopar.ReplicatedWarning")  # microbatches of one row
@pytest.mark.parametrize("seed", [0, 2, 106, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (4, 6))])
def test_no_enumerated_plan_is_faster_and_none_is_below_the_bound(seed):
    row = compare(seed)
    assert row.is_right, row
