"""`Zero` divides the state that its stage says, and converts parameters before it gathers them.

`ExpertParallel` divides experts, also those that are converted, and examples everywhere else.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.hardware.cluster import Cluster

WIDTH, HIDDEN, ROWS, ODD = 256, 1024, 64, 67
OPTIMIZER = optax.adamw(1e-3)
GPUS = Cluster(num_devices=8, kind="dgx-h100")


def loss_of(params, batch, dtype):
    h = batch["x"].astype(dtype)
    for layer in params["layers"]:
        h = h + jax.nn.gelu(h @ layer["up"].astype(dtype)) @ layer["down"].astype(dtype)
    odd = batch["x"][:, :ODD] @ params["odd"]
    return jnp.mean((h.astype(jnp.float32) - batch["y"]) ** 2) + jnp.mean(odd**2)


def step_in(dtype):
    def step(params, moments, batch):
        loss, grads = jax.value_and_grad(loss_of)(params, batch, dtype)
        updates, moments = OPTIMIZER.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    return step


def arguments():
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layers = [{"up": array(WIDTH, HIDDEN), "down": array(HIDDEN, WIDTH)} for _ in range(2)]
    params = {"layers": layers, "odd": array(ODD, ODD)}
    return params, jax.eval_shape(OPTIMIZER.init, params), {"x": array(ROWS, WIDTH), "y": array(ROWS, WIDTH)}


def planned(method, dtype=jnp.float32):
    return autopar.parallelize(step_in(dtype), method=method, cluster=GPUS).trace(*arguments()).plan()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("mesh_shape", [(8,), (2, 4)], ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_state_is_divided_over_all_devices_as_the_stage_says(stage, mesh_shape, dtype):
    found = planned(autopar.Zero(stage=stage, mesh_shape=mesh_shape), dtype)
    (mesh,) = found.plan.meshes
    axes = {axis for axis, size in zip(mesh.axis_names, mesh.shape, strict=True) if size > 1}
    names = [leaf.name for leaf in found.trace.inputs if "layers" in leaf.name or "odd" in leaf.name]
    assert len(names) == 15
    for name in names:
        divided = "odd" not in name and (stage == 3 or name.startswith("moments"))  # nothing divides 67
        entries = found.plan.input_specs.get(name, P())
        used = {axis for each in entries if each is not None for axis in (each if isinstance(each, tuple) else [each])}
        assert used == (axes if divided else set()), (name, entries)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_the_search_is_no_slower_than_the_same_by_hand_and_needs_less_memory_than_replicas(dtype):
    searched, by_hand, replicas = (
        planned(method, dtype).simulate(GPUS)
        for method in (autopar.Zero(stage=3), autopar.Megatron(zero=3), autopar.DataParallel())
    )
    assert searched.step_time_s <= 1.001 * by_hand.step_time_s
    assert searched.peak_bytes < replicas.peak_bytes


def test_parameters_are_gathered_in_the_type_that_their_readers_compute_in():
    sharding = planned(autopar.Zero(stage=3, mesh_shape=(8,)), jnp.bfloat16).plan.sharding
    assert {each.dtype for each in sharding.collectives if each.kind == "all-gather"} == {"bfloat16"}


EXPERTS, PLACES, LENGTH = 8, 16, 32


def expert_loss(params, batch):
    up, down, mix = (params[name].astype(jnp.bfloat16) for name in ("up", "down", "mix"))
    x, places = batch["x"].astype(jnp.bfloat16), batch["places"].astype(jnp.bfloat16)
    given = jnp.einsum("btec,btd->ebcd", places, x @ mix)
    made = jnp.einsum("ebch,ehd->ebcd", jax.nn.gelu(jnp.einsum("ebcd,edh->ebch", given, up)), down)
    back = jnp.einsum("btec,ebcd->btd", places, made)
    return jnp.mean((back.astype(jnp.float32) - batch["x"]) ** 2)


def expert_step(params, moments, batch):
    updates, moments = OPTIMIZER.update(jax.grad(expert_loss)(params, batch), moments, params)
    return optax.apply_updates(params, updates), moments


@pytest.mark.parametrize("mesh_shape", [(8,), (2, 4)], ids=str)
def test_experts_are_divided_over_all_devices_and_products_by_examples_or_experts(mesh_shape):
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {
        "up": array(EXPERTS, WIDTH, HIDDEN),
        "down": array(EXPERTS, HIDDEN, WIDTH),
        "mix": array(WIDTH, WIDTH),
    }
    batch = {"x": array(ROWS, LENGTH, WIDTH), "places": array(ROWS, LENGTH, EXPERTS, PLACES)}
    method = autopar.ExpertParallel(mesh_shape=mesh_shape)
    step = autopar.parallelize(expert_step, method=method, cluster=GPUS)
    arguments = params, jax.eval_shape(OPTIMIZER.init, params), batch
    found = step.trace(*arguments).plan()
    plan = found.plan
    (mesh,) = plan.meshes
    axes = tuple(axis for axis, size in zip(mesh.axis_names, mesh.shape, strict=True) if size > 1)
    for name, spec in plan.input_specs.items():
        assert spec == P(axes if len(axes) > 1 else axes[0]), name
    divided = {name for name in plan.input_specs if not name.startswith("batch")}
    assert divided == {
        f"{state}.{name}" for state in ("params", "moments.0.mu", "moments.0.nu") for name in ("up", "down")
    }
    (reduced,) = [each for each in plan.sharding.collectives if each.kind == "all-reduce"]
    assert reduced.what.startswith("bfloat16[256,256]"), "the gradient of what is no expert's"
    free = step.trace(*arguments).plan(autopar.Auto(kinds=("data", "expert"), mesh_shape=mesh_shape))
    assert found.simulate().step_time_s <= 1.05 * free.simulate().step_time_s
