"""A memory budget makes the plan fit: first the optimizer's state is split, then the weights, then the work itself."""

import itertools
import json
import time
from collections import Counter
from dataclasses import dataclass

import pytest
from jax.sharding import PartitionSpec

from autopar.compiler.intra_op.plan_program import Constraints
from autopar.compiler.memory.estimate import MemoryBudget, bytes_with_headroom
from autopar.compiler.sharding.layout import LogicalMesh, from_spec, num_shards, replicated
from autopar.compiler.spmd.block_plan import to_data
from autopar.compiler.spmd.collectives import planned_collectives
from autopar.errors import MemoryTooSmall
from benchmarks.models.gpt import gpt
from benchmarks.models.mlp import mlp
from tests.compiler.planned_memory import (
    compiled_bytes,
    needs_gpu_compiler,
    peak_memory,
    planned,
    state_inputs,
    traced,
    traced_model,
)


def needed(block, mesh, donated) -> float:
    return bytes_with_headroom(peak_memory(block, mesh, donated).peak_bytes)


def test_a_plan_within_a_budget_is_the_same_by_a_clock_that_races(monkeypatch):
    trace = traced_model(mlp(layers=2, width=256, hidden=1024, batch=256))
    mesh, _, block = planned(trace, (2, 4))
    budget, donated = 0.8 * needed(block, mesh, state_inputs(trace)), state_inputs(trace)

    def plan():
        _, found, _ = planned(trace, (2, 4), budget=MemoryBudget(nbytes=budget), donated=donated, time_limit_s=5)
        return json.dumps(to_data(found.plan, mesh)), found.optimum.lower_bound

    first, ticks = plan(), itertools.count(step=1e6)
    for clock in ("monotonic", "perf_counter", "process_time", "time"):
        monkeypatch.setattr(time, clock, lambda: float(next(ticks)))
    assert plan() == first


def test_plans_need_less_and_split_more_of_the_state_as_the_budget_tightens():
    trace = traced_model(mlp(layers=4, width=256, hidden=1024, batch=1024))
    donated = state_inputs(trace)
    mesh, free, block = planned(trace, (8,))
    unlimited = peak_memory(block, mesh, donated)
    cost = free.optimum.value
    for share in (0.9, 0.85):
        budget = share * needed(block, mesh, donated)
        _, found, tighter = planned(trace, (8,), budget=MemoryBudget(nbytes=budget), donated=donated, time_limit_s=10)
        after = peak_memory(tighter, mesh, donated)
        assert bytes_with_headroom(after.peak_bytes) <= budget
        assert after.peak_bytes < unlimited.peak_bytes
        assert found.optimum.value >= cost * (1 - 1e-6)
    assert after.arguments_bytes < 0.9 * unlimited.arguments_bytes


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Arrays other than scalars that a plan of a GPT splits and sends."""

    moments: float
    """Share that a device holds."""
    weights: float
    gathered: set[str]
    """The phases that gather weights."""
    exchanges_activations: bool


def kind_of(trace, mesh, block, batch: int) -> Kind:
    held, whole = Counter[str](), Counter[str]()
    for leaf, value in zip(trace.inputs, block.inputs, strict=True):
        name = "moments" if ".mu" in leaf.name or ".nu" in leaf.name else leaf.name.partition(".")[0]
        whole[name] += leaf.aval.size
        held[name] += leaf.aval.size / num_shards(leaf.aval.shape, value.layout, mesh)
    large = [each for each in planned_collectives(block, mesh) if each.collective.nbytes > 10_000]
    of_batch = [f"[{batch}," in each.what for each in large]
    return Kind(
        moments=held["moments"] / whole["moments"],
        weights=held["state"] / whole["state"],
        gathered={
            each.phase
            for each, activation in zip(large, of_batch, strict=True)
            if each.collective.kind == "all-gather" and not activation
        },
        exchanges_activations=any(of_batch),
    )


def data_parallel_peak(trace, shape, donated) -> float:
    """Modelled bytes of the plan that holds the whole state everywhere and splits the batch."""
    mesh = LogicalMesh(shape=shape, axis_names=("data", "model")[: len(shape)])
    whole = [replicated(len(leaf.aval.shape)) for leaf in trace.inputs]
    split = [from_spec(PartitionSpec(mesh.axis_names), max(1, len(leaf.aval.shape)), mesh) for leaf in trace.inputs]
    inputs = {i: (whole[i] if i in donated else split[i],) for i, leaf in enumerate(trace.inputs) if leaf.aval.shape}
    mesh, _, block = planned(trace, shape, constraints=Constraints(inputs=inputs))
    return peak_memory(block, mesh, donated).peak_bytes


def test_tightening_the_budget_of_a_gpt_splits_moments_then_weights_then_products():
    batch = 32
    trace = traced_model(gpt(layers=1, width=512, heads=8, vocabulary=512, length=64, batch=batch))
    donated = state_inputs(trace)
    whole = data_parallel_peak(trace, (8,), donated)
    kinds, times = {}, []
    for share in (1.0, 0.5, 0.44):
        budget = MemoryBudget(nbytes=share * whole, headroom=0.0)
        mesh, found, block = planned(trace, (8,), budget=budget, donated=donated, time_limit_s=120)
        assert peak_memory(block, mesh, donated).peak_bytes <= share * whole
        kinds[share] = kind_of(trace, mesh, block, batch)
        times.append(found.optimum.value)
    assert times == sorted(times)
    assert all(kind.moments < 0.13 for kind in kinds.values())
    # Mostly ZeRO-1: the update's new weights are gathered. ZeRO-3: most are gathered whenever they are read.
    assert kinds[1.0].weights > 0.9 and "backward" not in kinds[1.0].gathered
    assert kinds[0.5].weights < 0.8 and kinds[0.5].gathered >= {"forward", "backward", "update"}
    assert not kinds[1.0].exchanges_activations and not kinds[0.5].exchanges_activations
    # Gathered weights take too much, too: products are split instead, and exchange activations.
    assert kinds[0.44].weights < 0.3 and kinds[0.44].exchanges_activations


def test_budget_that_is_large_enough_changes_nothing():
    trace = traced("mlp")
    _, free, _ = planned(trace, (2, 4))
    _, found, _ = planned(trace, (2, 4), budget=MemoryBudget(nbytes=2**40), donated=state_inputs(trace))
    assert found.optimum.value == pytest.approx(free.optimum.value, rel=1e-3)


def test_budget_that_nothing_fits_is_an_error_that_says_what_would():
    trace = traced("mlp")
    with pytest.raises(
        MemoryTooSmall, match=r"at least .* MiB per device on the mesh \(8,\).*was found.*budget is .*Most is taken at"
    ):
        planned(trace, (8,), budget=MemoryBudget(nbytes=1e6), donated=state_inputs(trace))


@needs_gpu_compiler
@pytest.mark.parametrize("shape, share", [((8,), 0.9), ((8,), 0.78), ((2, 4), 0.9)])
def test_compiled_plan_stays_within_its_budget(shape, share):
    trace = traced_model(mlp(layers=4, width=1024, hidden=4096, batch=4096))
    donated = state_inputs(trace)
    mesh, _, free = planned(trace, shape)
    budget = share * needed(free, mesh, donated)
    mesh, _, block = planned(trace, shape, budget=MemoryBudget(nbytes=budget), donated=donated, time_limit_s=8)
    assert needed(block, mesh, donated) <= budget
    assert compiled_bytes(trace, block, mesh, donated) <= budget
