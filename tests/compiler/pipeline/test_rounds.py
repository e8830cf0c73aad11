"""A forward pass that waits for a backward pass of the same example is another round of the schedule."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.pipeline.stage_graph import evaluate
from autopar.ir.program import Run
from tests.small_steps import (
    adam,
    adam_state,
    assert_same,
    cut,
    draw,
    lowered,
    mlp_batch,
    mlp_loss,
    mlp_params,
    mlp_step,
    sgd,
    two_stages,
)


def apply(params, x):
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x


def perturbed(params, batch):
    x, y = batch
    return x + 0.1 * jnp.sign(jax.grad(lambda x: mlp_loss(params, (x, y)))(x)), y


def attack_then_train(params, batch):
    """FGSM (Goodfellow et al., arXiv 1412.6572): train on examples moved along the sign of their gradient."""
    return mlp_step(params, perturbed(params, batch))


def attack_thrice(params, batch):
    """PGD (Madry et al., arXiv 1706.06083)."""
    for _ in range(3):
        batch = perturbed(params, batch)
    return mlp_step(params, batch)


def attack_then_evaluate(params, batch):
    """The last forward pass is not differentiated."""
    new, _ = mlp_step(params, batch)
    x, y = perturbed(params, batch)
    return new, jnp.mean((apply(params, x) - y) ** 2)


def gradient_penalty(params, batch):
    """WGAN-GP (Gulrajani et al., arXiv 1704.00028): a loss of the gradient's norm, differentiated once more."""

    def norms(params, x):
        return jnp.sqrt(jnp.sum(jax.grad(lambda x: jnp.sum(apply(params, x)))(x) ** 2, axis=-1) + 1e-3)

    return mlp_loss(params, batch) + jnp.mean((norms(params, batch[0]) - 1) ** 2)


def adapt_then_learn(params, batch):
    """MAML (Finn et al., arXiv 1703.03400), every example a task: learn parameters from which a step leads far."""

    def after_a_step(params, x, y):
        return mlp_loss(sgd(mlp_loss)(params, (x, y))[0], (x, y))

    return jnp.mean(jax.vmap(after_a_step, (None, 0, 0))(params, *batch))


def hessian_times_gradient(params, batch):
    """Forward over reverse: the tangents go along with what they are tangents of."""
    gradient = jax.grad(lambda params: mlp_loss(params, batch))
    grads, turned = jax.jvp(gradient, (params,), (jax.tree.map(jnp.ones_like, params),))
    return jax.tree.map(lambda p, g, h: p - 0.1 * (g + 0.1 * h), params, grads, turned), jnp.float32(0)


STEPS = {
    "FGSM": (attack_then_train, 2),
    "PGD": (attack_thrice, 4),
    "evaluation": (attack_then_evaluate, 2),
    "gradient penalty": (sgd(gradient_penalty), 2),
    "MAML": (sgd(adapt_then_learn), 3),
    "Hessian": (hessian_times_gradient, 1),
}


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "interleaved"])
@pytest.mark.parametrize(("step", "rounds"), STEPS.values(), ids=STEPS)
def test_every_round_goes_forward_and_backward_through_the_stages(step, rounds, schedule):
    program = lowered(step, mlp_params(4), mlp_batch(), schedule=schedule)  # lowering verifies it
    for mesh in program.meshes:
        tasks = [i.task for i in mesh.instructions if isinstance(i, Run) and i.task.kind in "FBW"]
        assert all(a.round <= b.round for a, b in pairwise(tasks))
        assert {task.round for task in tasks if task.kind == "F"} == set(range(rounds))
        assert {task.round for task in tasks if task.kind == "B"} >= set(range(rounds - 1))
        for number in range(rounds):
            forward = [(t.stage, t.microbatch) for t in tasks if t.kind == "F" and t.round == number]
            assert len(set(forward)) == len(forward) == 2 * len({stage for stage, _ in forward})


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("step", [step for step, _ in STEPS.values()], ids=STEPS)
def test_rounds_equal_the_plain_step(step, remat):
    args = mlp_params(2), mlp_batch()
    graph = cut(step, *args, remat=remat)
    want = jax.jit(step)(*args)
    got = jax.jit(lambda *leaves: evaluate(graph, leaves))(*jax.tree.leaves(args))
    assert_same(jax.tree.unflatten(jax.tree.structure(want), got), want)


@pytest.mark.parametrize("method", [two_stages(), autopar.Auto(num_stages=2, num_microbatches=2)])
def test_rounds_run_and_are_simulated(method):
    args = mlp_params(2), mlp_batch()
    cluster = autopar.Cluster.parse("p3.16xlarge").with_devices(2)
    devices = jax.devices()[:2]
    for step in (attack_then_train, sgd(gradient_penalty)):
        assert_same(autopar.parallelize(step, method=method, devices=devices)(*args), jax.jit(step)(*args))
        planned = autopar.parallelize(step, method=method, cluster=cluster).trace(*args).plan()
        plain = autopar.parallelize(mlp_step, method=method, cluster=cluster).trace(*args).plan()
        assert planned.plan.num_stages == 2
        assert planned.simulate().step_time_s > plain.simulate().step_time_s


def test_what_a_round_leaves_for_the_next_is_counted_for_every_microbatch():
    graph = cut(attack_then_train, mlp_params(2), mlp_batch())
    left = [graph.values[name] for name in graph.read_in_later_rounds]
    assert [value.shape for value in left] == [(4, 4)]  # the examples of a microbatch, as they are after the attack
    assert not cut(mlp_step, mlp_params(2), mlp_batch()).read_in_later_rounds


def test_the_norm_of_a_gradient_is_no_round_of_its_own():
    graph = cut(sgd(gradient_penalty), mlp_params(2), mlp_batch())
    roots = {t.name for t in graph.tasks for eqn in t.jaxpr.jaxpr.eqns if eqn.primitive.name == "sqrt"}
    assert roots == {"B0"}


def test_passes_over_the_same_parameters_go_through_the_same_stages():
    def two_views(params, batch):
        return jnp.mean((apply(params, batch[0]) - apply(params, batch[1])) ** 2)

    def follow_a_target(state, batch):
        """A target network that the parameters draw behind them, as in DQN (Mnih et al., arXiv 1312.5602)."""
        params, target = state
        goal = jax.lax.stop_gradient(apply(target, batch[1]))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(mlp_loss)(params, (batch[0], goal)))
        return params, jax.tree.map(lambda t, p: 0.9 * t + 0.1 * p, target, params)

    for step, state in ((sgd(two_views), mlp_params(4)), (follow_a_target, (mlp_params(4), mlp_params(4)))):
        graph = cut(step, state, mlp_batch())
        readers = [i.stages for i in graph.inputs if i.kind == "whole"]
        assert all(len(stages) == 1 for stages in readers) and {s for (s,) in readers} == {0, 1}
        want = jax.jit(step)(state, mlp_batch())
        got = evaluate(graph, jax.tree.leaves((state, mlp_batch())))
        assert_same(jax.tree.unflatten(jax.tree.structure(want), got), want)


def test_a_transposition_within_a_transposition_goes_forward():
    def phases(function, *args):
        return {jc.ad_phase(eqn) for eqn in jax.make_jaxpr(function)(*args).jaxpr.eqns if eqn.primitive.name == "sin"}

    def inner(x):
        return jnp.sum(jnp.cos(x))  # its derivative is a sine, made by the transposition of the forward pass

    assert phases(jax.grad(lambda x: jnp.sum(jnp.sin(x))), draw(0, 3)) == {"forward"}
    assert phases(lambda x: x + 1, draw(0, 3)) == set()
    twice = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(jax.grad(inner)(x) ** 2)))(draw(0, 3)).jaxpr.eqns
    assert {jc.ad_phase(eqn) for eqn in twice} == {"forward", "backward"}


def test_optimizers_follow_the_last_round():
    graph = cut(adam(gradient_penalty, clip=0.1), adam_state(mlp_params(2)), mlp_batch())
    assert {t.round for t in graph.tasks if t.kind == "U"} == {2}
