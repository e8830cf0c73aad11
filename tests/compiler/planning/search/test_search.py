"""The whole search: stages, submeshes, microbatches. What it finds runs, and equals the plain step."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.frontend.checkpoint_regions import find_wide_regions
from autopar.compiler.intra_op.plan_tasks import task_graph
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.primitives import REMAT
from autopar.compiler.lowering.stage_programs import tasks_of_stages
from autopar.compiler.passes import cut_step
from autopar.compiler.pipeline.cut_stages import StageCut, cut_stages
from autopar.compiler.pipeline.prepare import prepare
from autopar.compiler.planning.stages.layer_classes import count_step_layers, find_layers, layer_class
from autopar.compiler.planning.stages.layer_costs import LayerCosts, LayoutChoice, stage_cost
from autopar.compiler.planning.stages.stage_costs import KnownLayers
from autopar.compiler.planning.stages.stage_problem import StageProblem
from autopar.compiler.sharding.layout import LogicalMesh
from autopar.errors import InvalidArgument, MemoryTooSmall, Unsupported
from autopar.hardware.machine import Machine
from autopar.ir.plan import MeshPlan, Plan, StagePlan
from benchmarks.models import MODELS
from benchmarks.models.alpa_gpt import GPTSize, alpa_gpt
from tests.compiler.stage_plans import QUICK
from tests.slow_links import slow_links

WIDTH, ROWS, LAYERS = 128, 64, 4


def train_step(params, batch):
    def loss_of(params):
        h = batch["x"]
        for i in range(LAYERS):
            with jax.named_scope(f"h_{i}"):
                h = h + jnp.tanh(h @ params[f"h_{i}"]["up"]) @ params[f"h_{i}"]["down"]
        return jnp.mean((h @ params["head"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def arguments():
    rng = np.random.default_rng(0)

    def weights(*shape):
        return jnp.asarray(rng.normal(size=shape) / shape[0], jnp.float32)

    layers = {f"h_{i}": {"up": weights(WIDTH, 2 * WIDTH), "down": weights(2 * WIDTH, WIDTH)} for i in range(LAYERS)}
    return {**layers, "head": weights(WIDTH, WIDTH)}, {"x": weights(ROWS, WIDTH), "y": weights(ROWS, WIDTH)}


def traced(method, cluster=None):
    return autopar.parallelize(train_step, method=method, cluster=cluster).trace(*arguments())


def test_slow_links_between_hosts_make_stages_of_hosts():
    cluster = slow_links(8)
    plan = traced(autopar.Auto(), cluster).plan().plan
    assert plan.num_stages > 1
    assert plan.num_microbatches > 1
    certificate = plan.certificate
    assert certificate.lower_bound_s <= certificate.step_time_s
    assert certificate.gap <= 0.6
    assert plan.num_microbatches in certificate.tried
    assert all(seconds >= certificate.step_time_s for _, seconds in certificate.runners_up)
    assert "% above the best plan" in " ".join(str(plan).split())
    assert {device for mesh in plan.meshes for device in mesh.devices} <= set(range(8))


def test_a_plan_for_another_cluster_runs_here_and_equals_the_plain_step():
    cluster = slow_links(8)
    planned = traced(autopar.Auto(), cluster).plan()
    text = planned.plan.to_json()
    step = autopar.parallelize(train_step, method=autopar.Plan.from_json(text))
    params, batch = arguments()
    got, want = step(params, batch), jax.jit(train_step)(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), got, want)
    assert step.trace(params, batch).plan(autopar.Plan.from_json(text)).verify(params, batch)


@pytest.mark.parametrize(
    ("fields", "shapes"),
    [
        ({"num_stages": 2}, [(2, 2)] * 2),
        ({"num_stages": 4}, [(1, 2)] * 4),
        ({"num_stages": 2, "mesh_shape": (4,), "axis_names": ("model",)}, [(4,)] * 2),
        ({"num_stages": 1}, [(2, 4)]),
    ],
)
def test_what_is_given_is_fixed(fields, shapes):
    method = autopar.Auto(num_microbatches=2, schedule="gpipe", **fields)
    plan = traced(method, autopar.Cluster(num_devices=8, kind="cpu")).plan().plan
    assert [mesh.shape for mesh in plan.meshes] == shapes or fields["num_stages"] == 1
    assert (plan.num_microbatches, plan.schedule) == (2, "gpipe")


def test_interleaved_stages_are_one_to_a_mesh_where_layers_are_few():
    cluster = slow_links(8)
    plan = traced(autopar.Auto(num_stages=4, schedule="interleaved", num_microbatches=8), cluster).plan().plan
    assert [stage.mesh for stage in plan.stages] == [0, 1, 2, 3]


def test_interleaved_stages_are_no_slower_than_three_to_a_mesh_by_hand():
    """Three of twelve layers to each of four meshes, and the head as a fourth that only the last visit has."""
    size = GPTSize(
        width=4096, layers=12, heads=32, length=1024, vocabulary=8192, batch=8, recomputed=False, kernel=True
    )
    made = alpa_gpt("gpt", size, jnp.float16)
    cluster = autopar.Cluster(num_devices=4, machine=Machine.named("dgx-a100-80"))
    step = autopar.parallelize(made.step, donate_argnums=(0,), cluster=cluster)
    traced = step.trace(made.abstract_state, made.abstract_batch)
    given = {"schedule": "interleaved", "num_microbatches": 8}
    by_hand = traced.plan(autopar.Megatron(pipeline=4, virtual_stages=3, **given)).simulate()
    for method in (autopar.Auto(num_stages=4, **given), autopar.Auto(num_microbatches=8)):
        assert traced.plan(method).simulate().step_time_s <= 1.0001 * by_hand.step_time_s


def test_pins_hold_in_stages():
    pins = {r"h_\d\.up": P(None, "model")}
    method = autopar.Auto(num_stages=2, num_microbatches=2, pins=pins)
    plan = traced(method, autopar.Cluster(num_devices=8, kind="cpu")).plan().plan
    values = {name: text for mesh in plan.meshes for name, text in mesh.sharding.layouts["values"].items()}
    pinned = {name: text for name, text in values.items() if ".up" in name and name.startswith("params")}
    assert len(pinned) == LAYERS
    assert set(pinned.values()) == {"-,model"}


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({r"nowhere": P(None, "model")}, "The pin 'nowhere' matches no input"),
        (
            {r"h_\d\.up": P(None, "model"), r"h_2\.up": P("model")},
            r"both match params.h_2.up and ask for different layouts",
        ),
    ],
)
@pytest.mark.parametrize("num_stages", [1, 2])
def test_pins_that_no_plan_can_keep_are_refused(pins, message, num_stages):
    method = autopar.Auto(num_stages=num_stages, num_microbatches=2, pins=pins)
    with pytest.raises(InvalidArgument, match=message):
        traced(method, autopar.Cluster(num_devices=8, kind="cpu")).plan()


@pytest.mark.parametrize(("num_devices", "num_stages"), [(3, None), (12, None), (12, 2), (11, None)])
def test_any_number_of_devices_has_a_plan(num_devices, num_stages):
    cluster = autopar.Cluster(
        num_devices=num_devices, machine=dataclasses.replace(slow_links().machine, devices_per_host=8)
    )
    plan = traced(autopar.Auto(num_stages=num_stages, num_microbatches=2), cluster).plan().plan
    devices = [device for mesh in plan.meshes for device in mesh.devices]
    assert len(devices) == len(set(devices)) and max(devices) < num_devices
    assert num_stages is None or plan.num_stages == num_stages


def test_memory_that_nothing_fits_into_is_refused():
    cluster = slow_links(8)
    with pytest.raises(MemoryTooSmall):
        traced(autopar.Auto(memory=1e4), cluster).plan()


def test_more_stages_than_scopes_are_cut_by_flops():
    cluster = autopar.Cluster(num_devices=8, kind="cpu")
    assert traced(autopar.Auto(num_stages=8, num_microbatches=2), cluster).plan().plan.num_stages == 8


@pytest.mark.parametrize("method", [autopar.Auto, autopar.PipelineParallel])
def test_more_stages_than_equations_are_refused(method):
    with pytest.raises(InvalidArgument, match=r"64 layers were asked for.*only .* equations.*Ask for at most"):
        cluster = autopar.Cluster(num_devices=64, kind="cpu")
        traced(method(num_stages=64, num_microbatches=2), cluster).plan()


def test_layers_that_are_given_are_kept():
    """Without them the two products of a layer are one, and what does next to nothing joins another."""
    cluster = autopar.Cluster(num_devices=8, kind="cpu")
    plan = traced(autopar.Auto(num_stages=2, num_microbatches=2, layers=8), cluster).plan().plan
    assert plan.num_layers == 8


def layers_of(num_microbatches=2):
    trace = traced(autopar.Auto()).trace
    count, pieces = count_step_layers(trace)
    return find_layers(
        trace,
        num_layers=count,
        loop_pieces=pieces,
        num_microbatches=num_microbatches,
        split_weight_gradients=False,
        remat=False,
        pins={},
    )


def test_layers_of_one_kind_are_one_class():
    layers = layers_of()
    assert len(layers.class_of) == LAYERS + 1
    assert len(set(layers.class_of[1 : LAYERS - 1])) == 1
    assert len(layers.classes) <= 4


def test_the_cost_of_a_range_is_that_of_its_layers():
    layers = layers_of()
    mesh = LogicalMesh(shape=(2, 2), axis_names=("data", "model"))
    mesh_costs = MeshCosts(machine=QUICK, mesh=mesh)
    costs = LayerCosts(classes=layers.classes, most_common=layers.class_of[1], method=autopar.Auto())
    each = [costs.cost(number, mesh_costs, LayoutChoice(0.0)) for number in layers.class_of]
    plan = Plan(
        fingerprint="",
        method="Auto",
        meshes=(MeshPlan(devices=(0, 1, 2, 3), shape=(2, 2), axis_names=("data", "model")),),
        stages=(StagePlan(layers=(0, len(each)), mesh=0),),
        cuts=layers.cuts,
        num_microbatches=2,
        input_specs={},
    )
    graph = cut_stages(layers.prepared, StageCut.of(plan))
    tasks = tasks_of_stages(graph, plan.stages_on(0))
    stage = layer_class(graph, tasks)
    whole = stage_cost(stage, task_graph(tasks, mesh_costs, stage.constraints).best({}), mesh_costs)
    composed_s = 2 * sum(c.forward_s + c.backward_s for c in each) + sum(c.update_s for c in each)
    direct_s = 2 * (whole.forward_s + whole.backward_s) + whole.update_s
    assert direct_s <= composed_s * 1.001
    assert composed_s == pytest.approx(direct_s, rel=0.05)


def test_layers_hand_on_examples_divided_where_positions_would_do_as_well():
    made, cluster = MODELS["vit"](), autopar.Cluster(num_devices=4, kind="dgx-h100")
    trace = autopar.parallelize(made.step, cluster=cluster).trace(made.abstract_state, made.abstract_batch).trace
    problem = StageProblem(trace=trace, method=autopar.Auto(), hardware=cluster, cache_directory=None)
    layers, costs = KnownLayers.of(problem)(1, remat=False, splits=False)
    mesh_costs = MeshCosts(machine=cluster.machine, mesh=LogicalMesh(shape=(2, 2), axis_names=("data", "model")))
    for number in range(len(layers.classes)):
        costs.cost(number, mesh_costs, LayoutChoice(0.0))
    (border,) = {
        layout for each in costs.optima.values() for aval, layout in each.border.items() if len(aval[0]) == 3
    }  # one for all classes
    examples, *others = border.dims
    assert examples == (0, 1) and not any(others)


def test_equal_layers_are_solved_for_once():
    mesh_costs = MeshCosts(machine=QUICK, mesh=LogicalMesh(shape=(2, 2), axis_names=("data", "model")))
    optima, found = {}, []
    for layers in (layers_of(), layers_of()):
        common = layers.class_of[1]
        costs = LayerCosts(classes=layers.classes, most_common=common, method=autopar.Auto(), optima=optima)
        found.append([costs.cost(number, mesh_costs, LayoutChoice(0.0)) for number in layers.class_of])
        assert len(optima) == len(layers.classes)
    assert found[0] == found[1]
    assert costs.choices == {}


def test_the_work_of_equal_tasks_is_found_once():
    works, found = {}, []
    for layers in (layers_of(), layers_of()):
        costs = LayerCosts(
            classes=layers.classes, most_common=layers.class_of[1], method=autopar.Auto(), task_works=works
        )
        found.append([costs.least(number, QUICK, 4) for number in layers.class_of])
        assert len(works) == len({(task.key, task.parameters) for one in layers.classes for task in one.tasks})
    assert found[0] == found[1]


def test_what_tasks_need_at_work_is_asked_for_only_where_it_may_not_fit():
    mesh_costs = MeshCosts(machine=QUICK, mesh=LogicalMesh(shape=(2, 2), axis_names=("data", "model")))
    layers = layers_of()
    of = partial(LayerCosts, classes=layers.classes, most_common=layers.class_of[1], method=autopar.Auto())
    asked, spared = (
        [costs.cost(number, mesh_costs, LayoutChoice(0.0)) for number in layers.class_of]
        for costs in (of(), of(fits=True))
    )
    nothing = {"temporary_bytes": 0.0, "update_bytes": 0.0}
    assert all(cost.temporary_bytes > 0 for cost in asked)
    assert spared == [dataclasses.replace(cost, **nothing) for cost in asked]


# --- jax.checkpoint -----------------------------------------------------------------------------------------------

CHECKPOINTED = alpa_gpt("gpt", GPTSize(width=256, layers=2, heads=4, length=64, vocabulary=1024, batch=8), jnp.float32)


def num_regions(equations):
    return sum(eqn.primitive.name in REMAT for eqn in equations)


def test_regions_are_measured_by_the_layers_that_are_left():
    """A layer that does too little joins the next: what is wide for the layers asked for need not be for those left."""
    step = autopar.parallelize(CHECKPOINTED.step)
    trace = step.trace(CHECKPOINTED.abstract_state, CHECKPOINTED.abstract_batch).trace
    options = {"batch_statistics": "exact", "random": "full_batch"}
    asked, pieces = count_step_layers(trace, **options)
    options |= {"loop_pieces": pieces, "num_microbatches": 2}
    layers = find_layers(trace, num_layers=asked, split_weight_gradients=False, remat=False, pins={}, **options)
    left = len(layers.cuts) + 1
    assert left < asked
    assert find_wide_regions(trace.jaxpr, num_layers=asked) and not find_wide_regions(trace.jaxpr, num_layers=left)
    planned = prepare(trace, num_layers=left, **options)
    assert num_regions(layers.prepared.phases.equations) == num_regions(planned.phases.equations) == 2


@pytest.mark.parametrize("method", [autopar.Megatron(num_microbatches=2), autopar.Auto(num_microbatches=2)])
def test_one_stage_computes_again_what_the_user_says(method):
    cluster = autopar.Cluster.parse("p3.16xlarge").with_devices(1)
    step = autopar.parallelize(CHECKPOINTED.step, cluster=cluster)
    traced = step.trace(CHECKPOINTED.abstract_state, CHECKPOINTED.abstract_batch)
    plan = traced.plan(method).plan
    assert plan.num_stages == 1 and not any(stage.recomputed for stage in plan.stages)
    graph = cut_step(traced.trace, plan)
    assert num_regions(eqn for task in graph.tasks for eqn in jc.all_equations(task.jaxpr)) == 2


def shared_noise_step(scale, batch):
    """A step of variational inference: one draw of the weights for all examples, and a penalty without any."""
    noise = jax.random.normal(jax.random.key(0), scale.shape)

    def loss_of(scale):
        weights = jnp.exp(scale) * noise
        return jnp.mean((batch @ weights) ** 2) - jnp.sum(scale) + 0.5 * jnp.sum(weights**2)

    return scale - 0.1 * jax.grad(loss_of)(scale)


def test_what_cannot_be_cut_is_one_program_of_a_free_search_and_refused_in_stages():
    arguments = (jnp.zeros((8, 4)), jnp.ones((16, 8)))
    with pytest.raises(Unsupported, match="random numbers that all examples share"):
        autopar.parallelize(shared_noise_step, method=autopar.PipelineParallel(num_stages=2, num_microbatches=2)).trace(
            *arguments
        ).plan()
    step = autopar.parallelize(shared_noise_step, method=autopar.Auto())
    np.testing.assert_allclose(step(*arguments), shared_noise_step(*arguments), rtol=1e-5)


def test_a_step_without_a_batch_has_a_plan_on_one_mesh():
    def step(params, senders):
        grads = jax.grad(lambda p: jnp.sum((jnp.tanh(p["nodes"][senders]) @ p["out"]).sum(0) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    arguments = ({"nodes": jnp.ones((16, 8)) / 4, "out": jnp.ones((8, 4)) / 8}, jnp.arange(5) % 3)
    parallel = autopar.parallelize(step, method=autopar.Auto(), unbatched="senders")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), parallel(*arguments), step(*arguments))
