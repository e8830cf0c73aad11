"""The modelled memory of stages is that of the simulation of their plan, and never more than the budget."""

import dataclasses
import importlib.util
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding

import autopar
from autopar.compiler.analysis.aot_targets import aot_devices
from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.intra_op.plan_tasks import task_graph
from autopar.compiler.lowering.stage_programs import tasks_of_stages
from autopar.compiler.memory.estimate import bytes_with_headroom
from autopar.compiler.pipeline.cut_stages import StageCut, cut_stages
from autopar.compiler.planning.mesh_sharding import device_tasks
from autopar.compiler.planning.search.candidates import stage_candidates
from autopar.compiler.planning.stages.layer_classes import layer_class
from autopar.compiler.planning.stages.layer_costs import MEMORY_MULTIPLIERS, memory_charges, stage_cost
from autopar.compiler.planning.stages.sharded_plan import shard_candidate
from autopar.compiler.planning.stages.stage_costs import KnownLayers
from autopar.compiler.planning.stages.stage_problem import StageProblem
from autopar.compiler.sharding.layout import LogicalMesh
from autopar.errors import MemoryTooSmall
from autopar.ir.plan import MeshPlan, Plan, StagePlan
from benchmarks.models import gpt
from benchmarks.models.alpa_gpt import GPTSize, alpa_gpt
from tests.slow_links import slow_links

WIDTH, ROWS, LAYERS = 128, 256, 4


def layer(params, h):
    return h + jnp.tanh(h @ params["up"]) @ params["down"]


def train_step(params, batch, *, recomputed=True):
    def loss_of(params):
        h = batch["x"]
        for i in range(LAYERS):
            with jax.named_scope(f"h_{i}"):
                h = (jax.checkpoint(layer) if recomputed else layer)(params[f"h_{i}"], h)
        return jnp.mean((h @ params["head"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def arguments():
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layers = {f"h_{i}": {"up": array(WIDTH, 4 * WIDTH), "down": array(4 * WIDTH, WIDTH)} for i in range(LAYERS)}
    return {**layers, "head": array(WIDTH, WIDTH)}, {"x": array(ROWS, WIDTH), "y": array(ROWS, WIDTH)}


CLUSTER = slow_links(8, link=1e8, flops=1e10)


def traced(recomputed=True, donated=True):
    step = partial(train_step, recomputed=recomputed)
    donate = (0,) if donated else ()
    return autopar.parallelize(step, cluster=CLUSTER, donate_argnums=donate).trace(*arguments())


@pytest.mark.parametrize(
    ("recomputed", "donated", "fields"),
    [
        (True, True, {"schedule": "1f1b"}),
        (True, True, {"schedule": "1f1b", "num_stages": 2}),
        (False, True, {"schedule": "interleaved", "num_stages": 2}),
        (False, True, {"schedule": "gpipe", "num_stages": 4}),
        (False, False, {"schedule": "eager-1f1b", "num_stages": 2}),
    ],
)
def test_stages_hold_what_is_simulated(recomputed, donated, fields):
    step = traced(recomputed, donated)
    problem = StageProblem(
        trace=step.trace,
        method=autopar.Auto(num_microbatches=8, **fields),
        hardware=CLUSTER,
        cache_directory=None,
    )
    found = stage_candidates(problem, KnownLayers.of(problem), 8, (2, 8), math.inf)
    sharded = shard_candidate(problem, min(found, key=lambda each: each.step_time_s))
    peak_bytes = max(sharded.peaks)
    simulated = step.plan(sharded.plan).simulate(CLUSTER)
    assert peak_bytes == pytest.approx(simulated.peak_bytes, rel=0.02)
    # Of stages on one mesh each is taken to hold as much as another.
    assert peak_bytes >= simulated.peak_bytes * (0.98 if fields["schedule"] == "interleaved" else 1 - 1e-3)


@pytest.mark.parametrize(("share", "there_is_one"), [(0.98, True), (0.5, False)])
def test_no_plan_is_simulated_to_need_more_than_its_budget(share, there_is_one):
    step = traced()
    free = step.plan(autopar.Auto(memory="off", num_microbatches=8)).simulate(CLUSTER)
    budget = share * free.peak_bytes
    method = autopar.Auto(memory=bytes_with_headroom(budget), num_microbatches=8)
    if there_is_one:
        assert step.plan(method).simulate(CLUSTER).peak_bytes <= budget
    else:
        with pytest.raises(MemoryTooSmall):
            step.plan(method)


@pytest.mark.parametrize("share", [0.98, 0.97, 0.966, 0.964])
def test_stages_that_are_taken_to_hold_as_much_as_another_are_simulated_to_fit(share):
    step = traced(recomputed=False)
    method = autopar.Auto(num_microbatches=8, schedule="interleaved", num_stages=2, memory="off")
    budget = share * step.plan(method).simulate(CLUSTER).peak_bytes
    found = step.plan(dataclasses.replace(method, memory=bytes_with_headroom(budget)))
    assert found.simulate(CLUSTER).peak_bytes <= budget


def test_a_task_that_holds_its_backward_pass_keeps_little_for_it_where_memory_has_a_price():
    """Whole weights, gathered in the forward pass, would wait for the backward pass; layers apart gather them again."""
    mesh = LogicalMesh(shape=(8, 1), axis_names=("data", "model"))
    mesh_costs = MeshCosts(machine=dataclasses.replace(CLUSTER.machine, product_workspace_bytes=0), mesh=mesh)
    params, batch = arguments()
    batch = {name: jax.ShapeDtypeStruct((64 * ROWS, WIDTH), given.dtype) for name, given in batch.items()}
    trace = autopar.parallelize(train_step, cluster=CLUSTER, donate_argnums=(0,)).trace(params, batch).trace
    problem = StageProblem(trace=trace, method=autopar.Auto(), hardware=CLUSTER, cache_directory=None)
    layers, _ = KnownLayers.of(problem)(8, False, splits=False)
    plan = Plan(
        fingerprint="",
        method="Auto",
        meshes=(MeshPlan(devices=tuple(range(8)), shape=mesh.shape, axis_names=mesh.axis_names),),
        stages=(StagePlan(layers=(0, len(layers.class_of)), mesh=0),),
        cuts=layers.cuts,
        num_microbatches=8,
        input_specs={},
    )
    graph = cut_stages(layers.prepared, StageCut.of(plan))
    tasks = tasks_of_stages(graph, plan.stages_on(0))
    assert [task.phase for task in tasks] == ["forward", "update"]
    stage = layer_class(graph, tasks)
    choices = task_graph(tasks, mesh_costs, stage.constraints)
    free = stage_cost(stage, choices.best({}), mesh_costs)
    gathered: list[float] = []
    for within in (False, True):
        charges = memory_charges(stage, free, MEMORY_MULTIPLIERS[-1], mesh_costs.mesh.num_devices, within=within)
        memory = device_tasks(tasks, choices.best(charges), mesh_costs)[tasks[0].name].memory
        gathered.append(sum(part.nbytes for part in memory.parts if part.name == "all-gather"))
    matrix = 4 * WIDTH * 4 * WIDTH
    assert gathered[0] >= (2 * LAYERS - 1) * matrix and gathered[1] == matrix


@pytest.mark.skipif(importlib.util.find_spec("jax_plugins") is None, reason="pip install 'autopar[gpu-aot]'")
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize(("target", "machine"), [("h100", "dgx-h100"), ("a100", "p4d.24xlarge")])
def test_backward_tasks_of_recomputed_layers_compile_to_the_memory_modelled(target, machine, remat):
    size = GPTSize(width=1024, layers=4, heads=16, length=512, vocabulary=8192, batch=32)
    workload = alpa_gpt("gpt", size, jnp.bfloat16)
    method = autopar.Auto(num_stages=2, num_microbatches=4, remat=remat, memory="off")
    hosts = autopar.Cluster.parse(machine)
    step = autopar.parallelize(workload.step, donate_argnums=(0,), cluster=hosts, method=method)
    planned_step = step.trace(workload.abstract_state, workload.abstract_batch).plan()
    lowered = planned_step.lower()
    devices = np.array(aot_devices(target, 8))
    for name, executable in lowered.program.executables.items():
        mesh = planned_step.plan.meshes[executable.mesh]
        if not name.startswith("backward"):
            continue
        grid = Mesh(devices[list(mesh.devices)].reshape(mesh.shape), mesh.axis_names)
        arguments_ = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=NamedSharding(grid, kind.spec))
            for v, kind in zip(executable.jaxpr.jaxpr.invars, executable.inputs, strict=True)
        ]
        run = jax.jit(
            jaxpr_as_fun(executable.jaxpr),
            out_shardings=[NamedSharding(grid, kind.spec) for kind in executable.outputs],
            donate_argnums=executable.donated,
        )
        # Timing kernels needs a GPU.
        sizes = run.lower(*arguments_).compile({"xla_gpu_enable_triton_gemm": False}).memory_analysis()
        results = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        compiled = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + results
        modelled = sizes.argument_size_in_bytes + mesh.sharding.temporary_bytes[name]
        assert compiled <= bytes_with_headroom(modelled)
        assert modelled <= 1.1 * compiled


def test_a_budget_in_bytes_leaves_stages_what_compiled_programs_may_need_beyond_the_model():
    model = gpt(layers=2, width=64, heads=4, vocabulary=128, length=32, batch=16)
    there = autopar.Cluster.parse("1x p3.16xlarge")
    traced = autopar.parallelize(model.step, cluster=there).trace(model.abstract_state, model.abstract_batch)

    def peak_bytes(**options: Any) -> float:
        return traced.plan(autopar.Auto(num_stages=2, num_microbatches=1, **options)).simulate().peak_bytes

    budget = 0.999 * bytes_with_headroom(peak_bytes())  # what it needs is less than that
    assert bytes_with_headroom(peak_bytes(memory=budget)) <= budget
    with pytest.raises(MemoryTooSmall, match="are kept free for what compiled programs may need"):
        peak_bytes(memory=240e3)  # the state takes 165 kB of each, divided among all
