"""Degrees of parallelism become the plan that they name, which runs, equals the plain step, and can be simulated."""

import dataclasses
import doctest
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import Megatron, methods
from autopar.errors import InvalidArgument, Unsupported
from autopar.ir.plan import Plan
from benchmarks.models.alpa_gpt import GPTSize, alpa_gpt

HOSTS = autopar.Cluster.parse("p3.16xlarge")
# Never allocated: large enough that dividing is worth its collectives.
LARGE = alpa_gpt("large", GPTSize(width=1024, layers=2, heads=16, length=512, vocabulary=8192, batch=64), jnp.float32)
# Adam divides by the root of what it squares: without much of a constant, rounding would be seen.
SMALL = dataclasses.replace(
    alpa_gpt("small", GPTSize(width=32, layers=2, heads=4, length=8, vocabulary=128, batch=8), jnp.float32),
    optimizer=optax.adamw(1e-2, eps=1e-3),
)


@cache
def traced(num_devices=8):
    step = autopar.parallelize(LARGE.step, cluster=HOSTS.with_devices(num_devices))
    return step.trace(LARGE.abstract_state, LARGE.abstract_batch)


@cache
def planned(**fields):
    return traced().plan(Megatron(**fields))


EIGHT = {"data": 2, "tensor": 2, "pipeline": 2, "num_microbatches": 4}


def layouts(plan, mesh=0):
    return plan.meshes[mesh].sharding.layouts["values"]


# --- what is planned ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "degrees"),
    [
        ({}, (8, 1, 1)),
        ({"tensor": 2}, (4, 2, 1)),
        ({"tensor": 2, "pipeline": 4}, (1, 2, 4)),
        ({"data": 2, "tensor": 2, "pipeline": 2}, (2, 2, 2)),
    ],
)
def test_data_is_what_the_other_degrees_leave_of_the_devices(fields, degrees):
    assert Megatron(**fields).degrees(8) == degrees


def test_stages_have_as_many_layers_and_the_devices_of_a_stage_are_neighbours():
    plan = planned(**EIGHT).plan
    # With the embedding before the first layer, and the head after the last.
    assert [stage.layers for stage in plan.stages] == [(0, 2), (2, 4)]
    assert [mesh.devices for mesh in plan.meshes] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert {(mesh.shape, mesh.axis_names) for mesh in plan.meshes} == {((2, 2), ("data", "model"))}
    assert (plan.method, plan.num_microbatches, plan.schedule) == ("Megatron", 4, "1f1b")
    assert Plan.from_json(plan.to_json()) == plan


def test_weights_are_divided_by_columns_and_rows_and_examples_over_the_replicas():
    found = layouts(planned(**EIGHT).plan)
    assert found["batch.tokens"] == "data,-"
    for part in ("state.params", "state.opt_state.0.mu"):
        assert found[f"{part}.h_0.attention.query"] == "-,model,-"
        assert found[f"{part}.h_0.attention.out"] == "model,-,-"
        assert found[f"{part}.h_0.mlp.up"] == "-,model"
        assert found[f"{part}.h_0.mlp.down"] == "model,-"


def test_gradients_are_summed_over_the_replicas_once_per_step():
    plan = planned(**EIGHT).plan
    over_data = [each for each in plan.planned_collectives if "+ data" in each.what and each.nbytes > 1e5]
    assert over_data and {each.times for each in over_data} == {1}


def test_sums_of_gradients_share_their_latency_wherever_they_are_made():
    """With microbatches they are the update's, which XLA joins as it does those of one backward pass."""
    for count in (1, 4):
        collectives = planned(data=8, num_microbatches=count).plan.planned_collectives
        latency_s = 2 * 7 * HOSTS.machine.intra.latency_s
        sums = [each for each in collectives if each.kind == "all-reduce" and 1e3 < each.nbytes < 1e5]
        assert len(sums) > 15 and all(each.seconds < latency_s for each in sums)


@pytest.mark.parametrize(
    ("zero", "divided"),
    [
        (0, set()),
        (1, {"optimizer state"}),
        (2, {"optimizer state", "gradients"}),
        (3, {"optimizer state", "gradients", "parameters"}),
    ],
)
def test_zero_divides_over_the_replicas(zero, divided):
    found = layouts(planned(data=4, pipeline=2, num_microbatches=2, zero=zero).plan)
    parts = {
        "optimizer state": [text for name, text in found.items() if ".mu." in name],
        "gradients": [text for name, text in found.items() if name.endswith("/total")],
        "parameters": [text for name, text in found.items() if ".params." in name],
    }
    assert all(parts.values())
    for part, texts in parts.items():
        assert {"data" in text.partition("|")[0] for text in texts} == {part in divided}


@pytest.mark.parametrize(("fields", "axes"), [({}, "data"), ({"tensor": 2}, "data, model"), ({"tensor": 8}, "model")])
def test_one_stage_with_the_whole_batch_is_one_program_of_the_same_layouts(fields, axes):
    whole, microbatches = planned(**fields), planned(num_microbatches=2, **fields)
    assert whole.plan.is_single_program and not microbatches.plan.is_single_program
    assert ", ".join(whole.plan.meshes[0].axis_names) == axes
    weights = ("query", "out", "mlp.up", "mlp.down")

    def layouts_of_weights(found):
        return {name: spec for name, spec in found.plan.input_specs.items() if name.endswith(weights)}

    assert layouts_of_weights(whole) == layouts_of_weights(microbatches)
    assert len(layouts_of_weights(whole)) == (24 if "tensor" in fields else 0)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_zero_stage_divides_as_much_in_one_program(zero):
    found = planned(tensor=2, zero=zero).plan.input_specs
    divided = {name for name, spec in found.items() if "data" in str(spec)}
    assert {name for name in divided if ".mu." in name} == {name for name in found if ".mu." in name} != set()
    assert any(".params." in name for name in divided) == (zero == 3)


def test_replicas_of_hosts_may_be_placed_within_them():
    plan = planned(tensor=4, placement="intra_node_replica").plan
    assert plan.is_single_program and plan.meshes[0].devices == (0, 2, 4, 6, 1, 3, 5, 7)


def test_parameters_of_zero_3_are_gathered_for_the_forward_pass_and_again_for_the_backward_pass():
    plan = traced(2).plan(Megatron(num_microbatches=2, zero=3)).plan
    gathers = [each for each in plan.planned_collectives if each.kind == "all-gather" and "[4096,1024]" in each.what]
    assert [(each.repeated, each.times) for each in gathers] == [
        (False, 2),
        (False, 2),
        (True, 2),
        (True, 2),
    ]


def test_stages_of_single_devices_have_no_collectives():
    assert not traced(2).plan(Megatron(pipeline=2, num_microbatches=4)).plan.planned_collectives


def test_interleaved_stages_lie_apart_on_their_devices():
    plan = traced(2).plan(Megatron(data=2, num_microbatches=2, schedule="interleaved", virtual_stages=2)).plan
    assert [(stage.layers, stage.mesh) for stage in plan.stages] == [((0, 2), 0), ((2, 4), 0)]


def mlp_step(params, batch):
    def loss(params):
        h = batch
        for layer in params:
            h = jnp.tanh(h @ layer)
        return jnp.mean(h**2)

    return [p - g for p, g in zip(params, jax.grad(loss)(params), strict=True)]


def test_a_model_without_numbered_layers_is_cut_by_its_flops():
    step = autopar.parallelize(mlp_step, cluster=HOSTS.with_devices(4))
    plan = step.trace([jnp.ones((64, 64))] * 4, jnp.ones((16, 64))).plan(Megatron(pipeline=4, num_microbatches=2)).plan
    assert [stage.layers for stage in plan.stages] == [(n, n + 1) for n in range(4)]


# --- what it does -------------------------------------------------------------------------------------------------


def test_a_step_by_degrees_equals_the_plain_step():
    state, batch = SMALL.create_state(), SMALL.create_batch()
    expected = jax.tree.leaves(jax.jit(SMALL.step)(state, batch))
    found = jax.tree.leaves(autopar.parallelize(SMALL.step, method=Megatron(**EIGHT, zero=1))(state, batch))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_microbatches_of_one_example_whose_equations_are_others_than_those_of_two_equal_the_plain_step(
    num_microbatches,
):
    size = GPTSize(width=32, layers=2, heads=4, length=8, vocabulary=128, batch=num_microbatches)
    one = dataclasses.replace(alpa_gpt("one", size, jnp.float32), optimizer=optax.adamw(1e-2, eps=1e-3))
    method = Megatron(tensor=4, pipeline=2, num_microbatches=num_microbatches)
    state, batch = one.create_state(), one.create_batch()
    expected = jax.tree.leaves(jax.jit(one.step)(state, batch))
    found = jax.tree.leaves(autopar.parallelize(one.step, method=method)(state, batch))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def step_in_one_region(params, batch):
    """Two layers with batch norm, computed again as one."""

    def norm(h):
        return (h - h.mean(0)) * jax.lax.rsqrt(h.var(0) + 1e-5)

    @jax.checkpoint
    def loss(params):
        h = jax.nn.relu(norm(batch @ params["in"]))
        h = jax.nn.relu(norm(h @ params["hidden"]))
        return jnp.mean(jax.nn.logsumexp(h @ params["out"], axis=1))

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def drawn(*shapes):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape) / 4 for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize("method", [Megatron(pipeline=2), Megatron(pipeline=2, zero=3), Megatron(tensor=2, pipeline=2)])
def test_a_region_wider_than_a_layer_is_dissolved_alike_for_a_batch_as_large_as_a_layer_is_wide(method):
    *params, batch = drawn((12, 16), (16, 16), (16, 10), (16, 12))
    state = dict(zip(("in", "hidden", "out"), params, strict=True))
    expected = jax.tree.leaves(jax.jit(step_in_one_region)(state, batch))
    step = autopar.parallelize(step_in_one_region, method=method, devices=jax.devices()[:4])
    for a, b in zip(jax.tree.leaves(step(state, batch)), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        Megatron(data=2, tensor=2, pipeline=2, num_microbatches=2, zero=3, remat=True),
        Megatron(num_microbatches=1, zero=2),
        Megatron(tensor=4, pipeline=2, num_microbatches=4, schedule="zero-bubble"),
    ],
)
def test_more_steps_by_degrees_equal_the_plain_step(method):
    state, batch = SMALL.create_state(), SMALL.create_batch()
    expected = jax.tree.leaves(jax.jit(SMALL.step)(state, batch))
    found = jax.tree.leaves(autopar.parallelize(SMALL.step, method=method)(state, batch))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_a_plan_by_degrees_is_simulated_on_its_cluster():
    report = planned(**EIGHT).simulate()
    assert report.step_time_s > 0 and 0 < report.bubble_fraction < 1 and report.fits
    assert report.counts_temporaries


def test_the_examples_of_the_docstring_are_true():
    assert doctest.testmod(methods).failed == 0


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor": 0}, "tensor is 0, it must be an integer. Give 1 or more"),
        ({"data": 0}, "data is 0"),
        ({"pipeline": 1.5}, "pipeline is 1.5"),
        ({"num_microbatches": 0}, "num_microbatches is 0"),
        ({"schedule": "chimera"}, "schedule is 'chimera'. Choose one of"),
        ({"virtual_stages": 2}, 'virtual_stages is 2 with schedule="1f1b"'),
        ({"virtual_stages": 0, "schedule": "interleaved"}, "virtual_stages is 0"),
        ({"zero": 4}, "zero is 4; ZeRO has the stages 1, 2 and 3"),
        ({"offload": "auto"}, 'offload="auto" is for Auto, which searches. Use "off", or one or more of "optimizer", '),
        ({"offload": "all"}, "offload is 'all'. Choose one of"),
        ({"zero": 1, "data": 1}, "zero=1 divides the state among replicas of the data, and data is 1. Use zero=0"),
        ({"random": "off"}, "random is 'off'"),
        ({"batch_statistics": "off"}, "batch_statistics is 'off'"),
        ({"time_limit_s": 0}, "time_limit_s is 0; give a positive number"),
    ],
)
def test_fields_that_cannot_be_used_are_refused(fields, message):
    with pytest.raises(InvalidArgument, match=message):
        Megatron(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor": 3}, "tensor=3 x pipeline=1 does not divide 8 devices. Give divisors of 8"),
        ({"data": 2, "tensor": 2}, "data=2 x tensor=2 x pipeline=1 is 4, there are 8 devices. Give degrees whose"),
        ({"tensor": 8, "zero": 1}, "zero=1 divides the state among replicas of the data, and data is 1"),
        ({"pipeline": 8, "num_microbatches": 2}, "2 layers for 8 stages, each needs one. Use at most 2 stages"),
        (
            {"pipeline": 4, "num_microbatches": 2, "schedule": "interleaved"},
            r"2 layers for 8 stages, each needs one. Use at most 2 stages \(pipeline x virtual_stages\)",
        ),
        (
            {"num_microbatches": 16},
            "Each of 16 microbatches has 4 of the 64 examples, which do not divide among data=8",
        ),
        ({"num_microbatches": 3}, "64 rows, which do not divide into 3 microbatches"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(InvalidArgument, match=message):
        planned(**fields)


def test_tensor_that_divides_no_weight_is_refused():
    with pytest.raises(InvalidArgument, match="tensor=3 divides no dimension of any weight of step"):
        traced(3).plan(Megatron(tensor=3))


def step_without_gradient(params, batch):
    return params * jnp.mean(batch)


def test_a_step_without_a_gradient_is_refused():
    step = autopar.parallelize(step_without_gradient, cluster=HOSTS.with_devices(2))
    traced = step.trace(jnp.ones((16, 16)), jnp.ones((8, 16)))
    with pytest.raises(Unsupported, match="takes no gradient, and Megatron is for steps of training"):
        traced.plan(Megatron())


def test_replicas_of_a_step_without_examples_are_refused():
    def train_step(params):
        return params - jax.grad(lambda p: jnp.mean(jnp.tanh(p @ p) ** 2))(params)

    step = autopar.parallelize(train_step, cluster=HOSTS.with_devices(2), batch_argnums=())
    traced = step.trace(jnp.ones((64, 64)))
    with pytest.raises(Unsupported, match=r"examples over data=2 replicas, and train_step has none: .* Name"):
        traced.plan(Megatron())
    assert traced.plan(Megatron(tensor=2)).plan.is_single_program


def step_of_one_batch_size(params, batch):
    return params - 0.1 * jax.grad(lambda p: jnp.mean((jnp.tanh(batch.reshape(8, 16) @ p) @ p) ** 2))(params), ()


def step_of_its_own_at_eight_rows(params, batch):
    def loss(params):
        h = batch @ params
        return jnp.mean((jax.nn.relu(jnp.tanh(h) if len(batch) == 8 else h) @ params) ** 2)

    return params - jax.grad(loss)(params), ()


@pytest.mark.parametrize("step", [step_of_one_batch_size, step_of_its_own_at_eight_rows])
@pytest.mark.parametrize("method", [Megatron(), Megatron(tensor=2), Megatron(pipeline=2), Megatron(tensor=2, zero=3)])
def test_steps_that_other_batches_make_no_step_or_another_equal_the_plain_step(step, method):
    given = drawn((16, 16), (8, 16))
    expected = jax.jit(step)(*given)[0]
    parallel = autopar.parallelize(step, method=method, devices=jax.devices()[:4])
    np.testing.assert_allclose(parallel(*given)[0], expected, rtol=2e-4, atol=2e-5)


def test_a_bias_that_is_added_at_a_cut_is_summed_on_the_mesh_behind_it_and_updated_on_its_own():
    """Like layers are planned as one; of their biases, some have sums that are received."""

    def train_step(state, batch):
        def loss(params):
            x = batch
            for layer in params:
                x = x + jax.nn.gelu(x @ layer["in"] + layer["hidden"]) @ layer["out"] + layer["bias"]
            return jnp.mean(x**2)

        params, moments = state
        updates, moments = optax.adamw(1e-3).update(jax.grad(loss)(params), moments, params)
        return optax.apply_updates(params, updates), moments

    shapes = {"in": (128, 128), "hidden": (128,), "out": (128, 128), "bias": (128,)}
    params = [{name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}] * 40
    state = params, jax.eval_shape(optax.adamw(1e-3).init, params)
    method = autopar.Megatron(data=4, pipeline=2, num_microbatches=4, schedule="interleaved")
    step = autopar.parallelize(train_step, method=method, cluster=autopar.Cluster.parse("dgx-h100"))
    planned = step.trace(state, jax.ShapeDtypeStruct((64, 128), jnp.float32)).plan()
    planned.verify()
    assert planned.simulate().step_time_s > 0
