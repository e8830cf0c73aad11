"""A memory budget makes the plan fit: first the optimizer's state is split, then the weights, then the work itself."""

import pytest

from autopar.compiler.intra_op.memory_model import peak_memory
from autopar.errors import MemoryTooSmall
from tests.intra_op.planned_memory import planned, state_inputs, traced


def test_plans_split_more_of_the_state_as_the_budget_tightens():
    trace = traced("mlp")
    donated = state_inputs(trace)
    mesh, free, block = planned(trace, (8,))
    before = peak_memory(block, mesh, donated)
    cost = free.optimum.value
    for share in (0.9, 0.7):
        budget = share * peak_memory(block, mesh, donated).peak_bytes
        _, found, tighter = planned(trace, (8,), memory_budget=budget, donated=donated, time_limit_s=10)
        after = peak_memory(tighter, mesh, donated)
        assert after.peak_bytes <= budget
        assert after.arguments_bytes <= before.arguments_bytes
        assert found.optimum.value >= cost * (1 - 1e-6)
        before, cost = after, found.optimum.value
    assert before.arguments_bytes < 0.9 * peak_memory(block, mesh, donated).arguments_bytes


def test_budget_that_is_large_enough_changes_nothing():
    trace = traced("mlp")
    _, free, _ = planned(trace, (2, 4))
    _, found, _ = planned(trace, (2, 4), memory_budget=2**40, donated=state_inputs(trace))
    assert found.optimum.value == pytest.approx(free.optimum.value, rel=1e-3)


def test_budget_that_nothing_fits_is_an_error_that_says_what_would():
    trace = traced("mlp")
    with pytest.raises(
        MemoryTooSmall, match=r"at least .* MiB per device on the mesh \(8,\).*budget is .*more devices"
    ):
        planned(trace, (8,), memory_budget=1e6, donated=state_inputs(trace))
