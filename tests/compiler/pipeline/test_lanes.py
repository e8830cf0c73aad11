"""Lanes compute the step on every division of the microbatches, whatever is summed, joined or drawn over them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.compiler.pipeline.lanes import with_lanes
from autopar.compiler.pipeline.stage_graph import evaluate
from tests.small_steps import adam, adam_state, assert_same, cut, gan_params, gan_step, mlp_batch, mlp_loss, mlp_params


def results_of_every_example(params, batch):
    """A step that returns what it has for each example, the largest of a batch, and whether any is negative."""

    def loss(params):
        h, y = batch
        for layer in params:
            h = jnp.tanh(h @ layer["w"] + layer["b"])
        return jnp.mean((h - y) ** 2), h

    (value, h), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value, h, jnp.max(h), jnp.any(h < 0)


def normalized(params, batch):
    """A step whose microbatches wait for statistics of the whole batch."""

    def loss(params):
        h = batch[0] @ params[0]["w"]
        h = (h - jnp.mean(h, 0)) / jnp.sqrt(jnp.var(h, 0) + 1e-3)
        return jnp.mean((jnp.tanh(h) @ params[1]["w"] - batch[1]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.mark.parametrize("shares", [(1, 3), (3, 1), (2, 1, 1)])
@pytest.mark.parametrize("step", [adam(mlp_loss, clip=0.5), results_of_every_example], ids=["clipped", "examples"])
def test_lanes_compute_the_step(step, shares):
    state = adam_state(mlp_params()) if step is not results_of_every_example else mlp_params()
    graph = cut(step, state, mlp_batch(), num_stages=1, num_microbatches=4, num_devices=1)
    lanes = with_lanes(graph, shares)
    lanes.verify()
    leaves = jax.tree.leaves((state, mlp_batch()))
    assert_same(evaluate(lanes, leaves), evaluate(graph, leaves))
    assert_same(evaluate(lanes, leaves), jax.tree.leaves(step(state, mlp_batch())))


@pytest.mark.parametrize(("step", "state"), [(gan_step, gan_params()), (normalized, mlp_params())], ids=["gan", "norm"])
def test_lanes_go_through_all_rounds(step, state):
    graph = cut(step, state, mlp_batch(), num_stages=1, num_microbatches=4, num_devices=1)
    assert graph.num_rounds > 1
    lanes = with_lanes(graph, (3, 1))
    lanes.verify()
    leaves = jax.tree.leaves((state, mlp_batch()))
    assert_same(evaluate(lanes, leaves), jax.tree.leaves(step(state, mlp_batch())))


def test_lanes_of_several_rounds_run_as_planned():
    state, batch = mlp_params(), mlp_batch()
    one = autopar.DataParallel(num_microbatches=4)
    bare = autopar.parallelize(normalized, method=one, devices=jax.devices()[:1]).trace(state, batch).plan().plan
    plan = replace(
        bare,
        meshes=tuple(autopar.MeshPlan(devices=(n,), shape=(1,), axis_names=("data",)) for n in range(2)),
        stages=tuple(replace(bare.stages[0], mesh=n, microbatches=share) for n, share in enumerate((3, 1))),
    )
    got = autopar.parallelize(normalized, method=plan, devices=jax.devices()[:2])(state, batch)
    assert_same(got, normalized(state, batch))


def test_only_state_goes_to_other_lanes_and_only_sums_come_back():
    graph = cut(adam(mlp_loss), adam_state(mlp_params()), mlp_batch(), num_stages=1, num_microbatches=4, num_devices=1)
    lanes = with_lanes(graph, (3, 1))
    there = {name for name, (source, _) in lanes.crossing.items() if source == 0}
    back = {name for name, (source, _) in lanes.crossing.items() if source == 1}
    assert {"params.0.w", "params.1.b"} <= {name.split(".", 1)[1] for name in there}
    assert all("mu" not in name for name in there)
    assert back and all(name.endswith(".lane1") for name in back)
    assert [list(lanes.microbatches_of(stage)) for stage in range(2)] == [[0, 1, 2], [3]]
