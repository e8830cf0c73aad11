"""A memory budget makes the plan fit: first the optimizer's state is split, then the weights, then the work itself."""

from dataclasses import replace

import pytest

from autopar.compiler.intra_op.compilers import CPU, GPU
from autopar.compiler.intra_op.figures import h100_figures
from autopar.compiler.intra_op.layout import LogicalMesh
from autopar.compiler.intra_op.local_program import local_block
from autopar.compiler.intra_op.memory_model import peak_memory
from autopar.compiler.intra_op.search import plan_intra_op
from autopar.errors import MemoryTooSmall
from benchmarks.models.mlp import mlp
from tests.intra_op.planned_memory import planned, state_inputs, traced, traced_model
from tests.intra_op.test_memory_model import compiled_bytes


def needed(block, mesh, donated) -> float:
    return GPU.needed_bytes(peak_memory(block, mesh, donated).peak_bytes)


def test_plans_split_more_of_the_state_as_the_budget_tightens():
    trace = traced_model(mlp(layers=6, width=256, hidden=1024, batch=1024))
    donated = state_inputs(trace)
    mesh, free, block = planned(trace, (8,))
    before = peak_memory(block, mesh, donated)
    cost = free.optimum.value
    for share in (0.9, 0.7):
        budget = share * needed(block, mesh, donated)
        _, found, tighter = planned(trace, (8,), memory_budget=budget, donated=donated, time_limit_s=10)
        after = peak_memory(tighter, mesh, donated)
        assert GPU.needed_bytes(after.peak_bytes) <= budget
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


SMALL = {"mlp": lambda: mlp(layers=4, width=256, hidden=1024, batch=256)}


def planned_for_cpu(trace, shape, **how):
    """As `planned`, but with the memory of the compiler that is here."""
    mesh = LogicalMesh(shape=shape, axis_names=("data", "model")[: len(shape)])
    figures = replace(h100_figures(len(shape)), name="cpu")
    found = plan_intra_op(trace.jaxpr, mesh, figures, state_outputs=dict(trace.state_outputs), **how)
    return mesh, local_block(trace.jaxpr.jaxpr, found.plan, mesh)


@pytest.mark.parametrize(
    "name, shape, share",
    [("mlp", (8,), 0.9), ("mlp", (8,), 0.7), ("mlp", (2, 4), 0.8)],
)
def test_compiled_plan_stays_within_its_budget(name, shape, share):
    trace = traced_model(SMALL[name]())
    donated = state_inputs(trace)
    mesh, free = planned_for_cpu(trace, shape)
    budget = share * CPU.needed_bytes(peak_memory(free, mesh, donated, compiler=CPU).peak_bytes)
    mesh, block = planned_for_cpu(trace, shape, memory_budget=budget, donated=donated, time_limit_s=8)
    assert peak_memory(block, mesh, donated, compiler=CPU).peak_bytes < budget
    assert compiled_bytes(trace, block, mesh, donated) <= budget
