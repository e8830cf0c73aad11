"""Loops around gradients: every iteration is a round of a pipeline, or the loop is refused with its line."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.compiler.frontend.training_loops import MOST_ROUNDS, unroll_training_loops
from autopar.compiler.pipeline.stage_graph import evaluate
from autopar.errors import Unsupported
from tests.small_steps import assert_same, cut, mlp_batch, mlp_params, mlp_step, traced, two_stages


def epochs(count, **options):
    """A step of several updates on one batch, as in PPO (Schulman et al., arXiv 1707.06347)."""

    def train_step(params, batch):
        return jax.lax.scan(lambda p, rate: mlp_step(p, (batch[0] * rate, batch[1])), params, rates(count), **options)

    return train_step


def rates(count):
    return jnp.linspace(0.5, 1.0, count)


def nested(params, batch):
    return jax.lax.scan(lambda p, _: epochs(2)(p, batch), params, None, length=2)


def attacked(params, batch):
    def move(_, x):
        return x + 0.1 * jnp.sign(jax.grad(lambda x: mlp_step(params, (x, batch[1]))[1])(x))

    return mlp_step(params, (jax.lax.fori_loop(0, 2, move, batch[0]), batch[1]))


LOOPS = {
    "epochs": (epochs(2), 2),
    "backwards": (epochs(3, reverse=True), 3),
    "nested": (nested, 4),
    "an attack": (attacked, 3),
}


@pytest.mark.parametrize(("step", "rounds"), LOOPS.values(), ids=LOOPS)
def test_every_iteration_is_a_round(step, rounds):
    args = mlp_params(2), mlp_batch()
    graph = cut(step, *args)
    assert graph.num_rounds == rounds
    want = jax.jit(step)(*args)
    got = jax.jit(lambda *leaves: evaluate(graph, leaves))(*jax.tree.leaves(args))
    assert_same(jax.tree.unflatten(jax.tree.structure(want), got), want)


@pytest.mark.parametrize("method", [two_stages(), autopar.Auto(num_stages=2, num_microbatches=2)])
def test_epochs_run_in_stages(method):
    args = mlp_params(2), mlp_batch()
    step = autopar.parallelize(epochs(2), method=method, devices=jax.devices()[:2])
    assert_same(step(*args), jax.jit(epochs(2))(*args))
    assert step.trace(*args).plan().plan.num_stages == 2


def test_a_plan_names_the_step_as_it_was_traced():
    trace = traced(epochs(2), mlp_params(2), mlp_batch())
    unrolled = unroll_training_loops(trace)
    assert unrolled.fingerprint == trace.fingerprint and unrolled.differentiates and not trace.differentiates
    assert unroll_training_loops(unrolled) is unrolled


def test_a_loop_over_layers_stays():
    def loss(params, batch):
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch, params)[0] ** 2)

    trace = traced(lambda p, b: p - jax.grad(loss)(p, b), jnp.ones((3, 4, 4)), jnp.ones((8, 4)))
    assert unroll_training_loops(trace) is trace


def until(params, batch):
    return jax.lax.while_loop(lambda c: c[1] > 0.1, lambda c: mlp_step(c[0], batch), (params, jnp.float32(1)))


@pytest.mark.parametrize("method", [two_stages(), autopar.Auto(num_stages=2, num_microbatches=2)])
@pytest.mark.parametrize("step", [epochs(MOST_ROUNDS + 1), until], ids=["long", "of unknown length"])
def test_other_loops_are_refused_with_their_line(step, method):
    step = autopar.parallelize(step, method=method, devices=jax.devices()[:2])
    with pytest.raises(Unsupported, match=r"2 stages were asked for.*test_training_loops.py.*at most 16 iterations"):
        step(mlp_params(2), mlp_batch())
