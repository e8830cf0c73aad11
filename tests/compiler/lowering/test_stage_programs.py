"""Stages with planned layouts: what runs is what was planned, and it computes what the plain step does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.compiler.lowering.stage_programs import tasks_of_stages
from autopar.compiler.passes import cut_step
from autopar.errors import PlanMismatch
from autopar.ir.plan_sharding import MeshSharding
from tests import equivalence
from tests.compiler.stage_plans import QUICK, with_planned_layouts
from tests.equivalence import Configuration
from tests.zoo import ZOO

EXPENSIVE = dataclasses.replace(
    QUICK,
    intra=dataclasses.replace(QUICK.intra, latency_s=1e-3),
    # Products run at 1e5 FLOP/s, and all else at 1e12.
    peak_flops={"float32": 2e12, "float16": 1e13, "bfloat16": 1e13},
    matmul_share={"float32": 5e-8, "float16": 1.0, "bfloat16": 1.0},
    memory_bandwidth=1e13,
)
"""Work is slow enough to be split, and collectives expensive enough to be run once per step, not per microbatch."""


pytestmark = pytest.mark.usefixtures("float64")


def traced_pipeline(name, *, num_stages=2, num_microbatches=2, schedule="1f1b", **options):
    """A case's step with its plan by hand."""
    case = ZOO[name]
    configuration = Configuration(
        num_stages=num_stages, num_microbatches=num_microbatches, schedule=schedule, options=options
    )
    _, state, *batch = equivalence._made(name)
    traced = equivalence.parallelized(case, configuration).trace(state, *batch, **case.kwargs)
    return traced, traced.plan().plan


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlp", {"mesh_shape": (2, 2), "schedule": "zero-bubble", "num_microbatches": 4}),
        ("tied_embedding", {"mesh_shape": (2, 2)}),
        ("regularized", {"mesh_shape": (4,), "remat": True}),
        ("scan_layers", {"mesh_shape": (2, 2), "num_stages": 2}),
        ("gan", {"mesh_shape": (2, 2)}),
        ("mlp", {"mesh_shape": (2,), "num_stages": 4, "num_microbatches": 1}),
        ("several_arguments", {"mesh_shape": (2, 2), "schedule": "interleaved", "virtual_stages": 2, "layers": 4}),
    ],
)
def test_stages_with_planned_layouts_equal_the_plain_step(name, options):
    case = ZOO[name]
    traced, plan = traced_pipeline(name, **options)
    planned = with_planned_layouts(traced, plan)
    fun, state, *batch = equivalence._made(name)
    step = autopar.parallelize(fun, method=planned, batch_argnums=case.batch_argnums)
    got = equivalence._run(step, state, batch, case)
    expected = equivalence._expected(case, planned.num_microbatches)
    assert equivalence.largest_difference(got, expected, case.tolerance).holds


def test_the_compiled_collectives_of_all_stages_are_the_planned_ones():
    case = ZOO["mlp"]
    traced, plan = traced_pipeline("mlp", mesh_shape=(2, 2))
    planned = with_planned_layouts(traced, plan)
    _, state, *batch = equivalence._made("mlp")
    report = traced.plan(planned).verify(state, *batch, **case.kwargs)
    assert report, report
    assert {kind.kind for kind in report.collectives.kinds} >= {"all-gather", "reduce-scatter"}


def wide_step(params, batch):
    def loss_of(params):
        h = batch["x"]
        for layer in params:
            h = jnp.tanh(h @ layer)
        return jnp.mean((h - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], loss


def traced_wide_step():
    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.normal(size=(64, 64)) / 8) for _ in range(4)]
    batch = {name: jnp.asarray(rng.normal(size=(512, 64))) for name in ("x", "y")}
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=4, mesh_shape=(4,))
    return autopar.parallelize(wide_step, method=method).trace(params, batch), params, batch


def test_gradients_stay_sums_until_the_update_where_collectives_are_dear():
    traced, params, batch = traced_wide_step()
    planned = with_planned_layouts(traced, traced.plan().plan, EXPENSIVE)
    assert any("|" in text for mesh in planned.meshes for text in mesh.sharding.layouts["values"].values())
    # Per stage two gradients, reduced once per step.
    reductions = [c for c in planned.planned_collectives if c.kind in ("all-reduce", "reduce-scatter")]
    assert [c.times for c in reductions if c.nbytes == 64 * 64 * 8] == [1.0] * 4
    assert traced.plan(planned).verify(params, batch)


def test_a_plan_with_layouts_of_stages_survives_its_file():
    traced, plan = traced_pipeline("mlp", mesh_shape=(2, 2))
    planned = with_planned_layouts(traced, plan)
    assert autopar.Plan.from_json(planned.to_json()) == planned


def test_layouts_of_another_program_are_refused():
    traced, plan = traced_pipeline("mlp", mesh_shape=(2, 2))
    planned = with_planned_layouts(traced, plan)
    first = planned.meshes[0]
    tasks = {name: data for name, data in first.sharding.layouts["tasks"].items() if name != "backward_0"}
    broken = dataclasses.replace(
        first,
        sharding=dataclasses.replace(first.sharding, layouts={**first.sharding.layouts, "tasks": tasks}),
    )
    with pytest.raises(PlanMismatch, match="no layouts for the task backward_0 of mesh 0"):
        traced.plan(dataclasses.replace(planned, meshes=(broken, *planned.meshes[1:]))).lower()


def test_a_mesh_sharding_of_other_keys_is_refused():
    with pytest.raises(PlanMismatch, match="sharding of a mesh cannot be read"):
        MeshSharding.from_data({"layouts": {}, "times": 3})


def test_the_objective_is_the_time_of_all_tasks_in_a_step():
    traced, _, _ = traced_wide_step()
    plan = traced.plan().plan
    planned = with_planned_layouts(traced, plan)
    graph = cut_step(traced.trace, plan)
    for number, mesh in enumerate(planned.meshes):
        times = {task.name: task.times for task in tasks_of_stages(graph, plan.stages_on(number))}
        total_s = sum(times[name] * took.total_s for name, took in mesh.sharding.times.items())
        # What every device computes for itself at next to no cost has no part in the objective.
        assert total_s == pytest.approx(mesh.sharding.objective_s, rel=0.02)
