"""Loops and conditions around gradients: each gradient is a round of a pipeline, or is refused with its line."""

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


def guarded(params, batch):
    """A step that is skipped where the data are not finite, its gradient and all."""
    return jax.lax.cond(jnp.isfinite(batch[0]).all(), mlp_step, lambda p, _: (p, jnp.float32(-1)), params, batch)


def switched(params, batch):
    keep, update = (lambda p: (p, jnp.float32(-1))), lambda p: mlp_step(mlp_step(p, batch)[0], batch)
    return jax.lax.switch(jnp.sum(batch[0] > 9).astype(jnp.int32) + 5, [keep, keep, update], params)


LOOPS = {
    "a condition": (guarded, 1),
    "one branch of three": (switched, 2),
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


SEARCHES = [autopar.Auto(num_microbatches=2), autopar.Zero(stage=3, num_microbatches=2)]


@pytest.mark.parametrize("method", SEARCHES, ids=str)
def test_epochs_run_in_the_microbatches_that_a_search_is_given(method):
    args = mlp_params(2), mlp_batch()
    step = autopar.parallelize(epochs(2), method=method, devices=jax.devices()[:2])
    assert_same(step(*args), jax.jit(epochs(2))(*args))
    assert step.all_compiled()[-1].plan.num_microbatches == 2


@pytest.mark.parametrize("method", SEARCHES, ids=str)
def test_microbatches_of_more_epochs_are_refused_by_a_search(method):
    step = autopar.parallelize(epochs(17), method=method, devices=jax.devices()[:2])
    with pytest.raises(Unsupported, match=r"2 microbatches were asked for.*in a loop.*at most 16 iterations"):
        step.trace(mlp_params(2), mlp_batch()).plan()


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


@pytest.mark.parametrize(
    "method", [two_stages(), autopar.Megatron(data=2), autopar.DataParallel(num_microbatches=2)], ids=str
)
def test_a_skipped_step_keeps_the_state(method):
    params, (x, y) = mlp_params(2), mlp_batch()
    step = autopar.parallelize(guarded, method=method, devices=jax.devices()[:2])
    for batch in (x, y), (x.at[0, 0].set(jnp.nan), y):
        assert_same(step(params, batch), jax.jit(guarded)(params, batch))


def test_a_condition_of_which_two_branches_train_is_refused():
    def train_step(params, batch):
        return jax.lax.cond(jnp.any(batch[0] > 0), mlp_step, lambda p, b: mlp_step(p, b[::-1]), params, batch)

    for method in (autopar.Megatron(data=2), autopar.Auto(num_stages=2)):
        step = autopar.parallelize(train_step, method=method, devices=jax.devices()[:2])
        with pytest.raises(Unsupported, match=r"in a condition, `cond`.*test_training_loops.py.*only one branch may"):
            step.trace(mlp_params(2), mlp_batch()).plan()


def test_a_condition_stays_beside_a_loop_that_has_to():
    def train_step(params, batch):
        return until(guarded(params, batch)[0], batch)

    step = autopar.parallelize(train_step, method=two_stages(), devices=jax.devices()[:2])
    with pytest.raises(Unsupported, match=r"in a loop, `while`.*at most 16 iterations"):
        step.trace(mlp_params(2), mlp_batch()).plan()


def until(params, batch):
    return jax.lax.while_loop(lambda c: c[1] > 0.1, lambda c: mlp_step(c[0], batch), (params, jnp.float32(1)))


@pytest.mark.parametrize("method", [two_stages(), autopar.Auto(num_stages=2, num_microbatches=2)])
@pytest.mark.parametrize("step", [epochs(MOST_ROUNDS + 1), until], ids=["long", "of unknown length"])
def test_other_loops_are_refused_with_their_line(step, method):
    step = autopar.parallelize(step, method=method, devices=jax.devices()[:2])
    with pytest.raises(Unsupported, match=r"2 stages were asked for.*test_training_loops.py.*at most 16 iterations"):
        step(mlp_params(2), mlp_batch())
