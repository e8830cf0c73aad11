"""A search keeps state on the host where it is asked to, or where nothing else fits or is as fast."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import Auto
from autopar.errors import MemoryTooSmall, Unsupported
from tests.small_steps import gpt_loss, mlp_batch, mlp_params, mlp_step

WIDTH, VOCABULARY, BLOCKS = 32, 11, 2


def draw(seed, *shape):
    return jnp.asarray(0.2 * np.random.default_rng(seed).normal(size=shape), jnp.float64)


def new_state():
    """Parameters in 32 bits, and a master copy and moments of twice as many."""
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    blocks = [{name: draw(10 * n + len(name), *shape) for name, shape in shapes.items()} for n in range(1, BLOCKS + 1)]
    master = {"embed": draw(0, VOCABULARY, WIDTH), "blocks": blocks}
    mu, nu = (jax.tree.map(jnp.zeros_like, master) for _ in range(2))
    return {"params": in_32_bits(master), "master": master, "mu": mu, "nu": nu}


def in_32_bits(params):
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)


def train_step(state, batch):
    value, grads = jax.value_and_grad(gpt_loss)(state["params"], batch)
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g.astype(m.dtype), state["mu"], grads)
    nu = jax.tree.map(lambda n, g: 0.99 * n + 0.01 * g.astype(n.dtype) ** 2, state["nu"], grads)
    master = jax.tree.map(lambda p, m, n: p - 0.01 * m / (jnp.sqrt(n) + 1e-3), state["master"], mu, nu)
    return {"params": in_32_bits(master), "master": master, "mu": mu, "nu": nu}, value


def batch():
    return jnp.asarray(np.random.default_rng(70).integers(0, VOCABULARY, size=(4, 3)), jnp.int32)


@pytest.mark.usefixtures("float64", "patient")
def test_a_gpt_whose_state_is_one_and_a_half_times_the_budget_trains_as_the_plain_step():
    budget = sum(leaf.nbytes for leaf in jax.tree.leaves(new_state())) / 1.5
    options = {"devices": jax.devices()[:1], "donate_argnums": 0}
    without = autopar.parallelize(train_step, method=Auto(memory=budget), **options)
    with pytest.raises(MemoryTooSmall, match=r"\n  offload='auto' \(now 'off'\): .* per step"):
        without.trace(new_state(), batch()).plan()
    searched = autopar.parallelize(train_step, method=Auto(memory=budget, offload="auto"), **options)
    planned = searched.trace(new_state(), batch()).plan()
    kept = {name.split(".")[1] for part in planned.plan.host_state for name in part}
    assert kept == {"master", "mu", "nu"}
    assert planned.simulate().peak_bytes <= budget
    step, plain = planned.lower().compile(), jax.jit(train_step)
    state, expected = new_state(), new_state()
    for _ in range(3):
        state, value = step(state, batch())
        expected, expected_value = plain(expected, batch())
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state["master"])} == {"pinned_host"}
    assert float(value) == pytest.approx(float(expected_value), rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), state, expected)


@pytest.mark.usefixtures("float64")
def test_with_its_parameters_on_the_host_too_a_gpt_trains_in_about_half_of_its_state():
    budget = sum(leaf.nbytes for leaf in jax.tree.leaves(new_state())) / 1.9
    step = autopar.parallelize(train_step, devices=jax.devices()[:1], donate_argnums=0)
    peaks = {}
    for offload in ("off", "optimizer", "parameters"):
        method = autopar.Megatron(schedule="interleaved", virtual_stages=2 * BLOCKS, offload=offload)
        planned = step.trace(new_state(), batch()).plan(method)
        peaks[offload] = planned.simulate().peak_bytes
    assert peaks["off"] > peaks["optimizer"] > budget >= peaks["parameters"]
    parallel, plain = planned.lower().compile(), jax.jit(train_step)
    state, expected = new_state(), new_state()
    for _ in range(3):
        state, value = parallel(state, batch())
        expected, expected_value = plain(expected, batch())
    assert float(value) == pytest.approx(float(expected_value), rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), state, expected)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)} == {"pinned_host"}


@pytest.mark.usefixtures("float64")
def test_where_there_is_room_the_faster_plan_keeps_all_state_on_the_devices():
    step = autopar.parallelize(train_step, method=Auto(offload="auto"), devices=jax.devices()[:1])
    assert step.trace(new_state(), batch()).plan().plan.host_state == ()


def larger(leaf):
    """The same as a type, 32 times as wide."""
    shape = tuple(32 * size if size % WIDTH == 0 else size for size in leaf.shape)
    return jax.ShapeDtypeStruct(shape, leaf.dtype)


@pytest.mark.usefixtures("float64")
def test_devices_divide_what_is_on_the_host_because_copies_take_time():
    cluster = autopar.Cluster.parse("p3.16xlarge").with_devices(2)
    step = autopar.parallelize(train_step, cluster=cluster, donate_argnums=0)
    method = Auto(offload="optimizer", num_stages=1, mesh_shape=(1, 2), num_microbatches=1)
    state = jax.tree.map(larger, new_state())
    planned = step.trace(state, batch()).plan(method)
    kept = [name for part in planned.plan.host_state for name in part]
    assert len(kept) == 3 * (1 + 3 * BLOCKS)
    assert all(any(planned.plan.input_specs[name]) for name in kept if "blocks" in name)
    master = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state["master"]))
    assert planned.simulate().host_bytes == pytest.approx(3 * master / 2, rel=0.01)


def on_one_gpu():
    cluster = autopar.Cluster.parse("p3.16xlarge").with_devices(1)
    return autopar.parallelize(train_step, cluster=cluster, donate_argnums=0).trace(new_state(), batch())


@pytest.mark.parametrize("offload", ["activations", "parameters", ("parameters", "activations")], ids=str)
@pytest.mark.usefixtures("float64")
def test_a_search_refuses_nothing_that_degrees_fit_and_is_never_slower(offload):
    traced, given = on_one_gpu(), {"num_microbatches": 1, "remat": False}
    by_degrees = autopar.Megatron(schedule="interleaved", virtual_stages=2 * BLOCKS, offload=offload, **given)
    asked = traced.plan(by_degrees).simulate()
    searched = traced.plan(Auto(offload=offload, memory=float(asked.peak_bytes), **given)).simulate()
    assert searched.peak_bytes <= asked.peak_bytes
    assert searched.step_time_s <= asked.step_time_s


@pytest.mark.usefixtures("float64")
def test_where_the_optimizers_state_is_not_enough_the_parameters_go_to_the_host_as_well():
    traced, given = on_one_gpu(), {"num_microbatches": 1, "remat": False}
    least = traced.plan(autopar.Megatron(schedule="interleaved", virtual_stages=2 * BLOCKS, offload="parameters"))
    budget = float(least.simulate().peak_bytes)
    found = traced.plan(Auto(offload="auto", memory=budget, **given))
    assert {name.split(".")[1] for part in found.plan.host_state for name in part} == {"params", "master", "mu", "nu"}
    assert found.simulate().peak_bytes <= budget


def mean_loss(params, batch):
    return jnp.mean(batch @ params)


@pytest.mark.parametrize(
    ("step", "args", "message"),
    [
        (mlp_step, (mlp_params(), mlp_batch()), "keeps state on the host that only the update reads, and train_step"),
        (mean_loss, (jnp.ones((16, 16)), jnp.ones((8, 16))), "mean_loss cannot be cut into a gradient and an update"),
    ],
)
def test_steps_without_state_for_the_host_are_refused(step, args, message):
    with pytest.raises(Unsupported, match=message):
        autopar.parallelize(step, devices=jax.devices()[:2]).trace(*args).plan(Auto(offload="optimizer"))
