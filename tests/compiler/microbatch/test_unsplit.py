"""A step that is not split completes its values on their way out of the gradient, and nowhere else."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.microbatch.split import MicrobatchedStep, evaluate_microbatched
from autopar.compiler.microbatch.unsplit import whole_batch
from tests.small_steps import (
    adam,
    adam_state,
    assert_same,
    gan_params,
    gan_step,
    gpt_batch,
    gpt_loss,
    gpt_params,
    mlp_batch,
    mlp_loss,
    mlp_params,
    mlp_step,
    sgd,
    traced,
)


def unsplit(step: Any, *args: Any) -> MicrobatchedStep:
    trace = traced(step, *args)
    return whole_batch(trace.jaxpr, batch_inputs=trace.batch_inputs)


def completed(step: MicrobatchedStep) -> list[Any]:
    """The operands of the accumulations."""
    return [eqn.invars[0] for eqn in step.jaxpr.jaxpr.eqns if eqn.primitive.name == "accumulate"]


def returning_the_batch(params, batch):
    new, loss = mlp_step(params, batch)
    return new, loss, batch[0], jnp.sum(batch[1], axis=-1)


def update_reads_the_batch(params, batch):
    grads = jax.grad(mlp_loss)(params, batch)
    return jax.tree.map(lambda p, g: p - g * jnp.mean(batch[0]), params, grads)


def count_in_the_loss(params, batch):
    rows = jnp.sum(batch[0] > 0)  # outside of the gradient, but needed inside
    return sgd(lambda p, b: mlp_loss(p, b) / rows)(params, batch)


STEPS = {
    "mlp": (mlp_step, (mlp_params(), mlp_batch())),
    "gpt": (adam(gpt_loss, clip=0.1), (adam_state(gpt_params()), gpt_batch())),
    "gan": (gan_step, (gan_params(), mlp_batch())),
    "returning the batch": (returning_the_batch, (mlp_params(), mlp_batch())),
    "update that reads the batch": (update_reads_the_batch, (mlp_params(), mlp_batch())),
    "count in the loss": (count_in_the_loss, (mlp_params(), mlp_batch())),
}


@pytest.mark.parametrize(("step", "args"), STEPS.values(), ids=STEPS)
def test_unsplit_step_evaluates_to_the_plain_step(step, args):
    want = jax.jit(step)(*args)
    whole = unsplit(step, *args)
    got = jax.jit(lambda *leaves: evaluate_microbatched(whole, leaves))(*jax.tree.leaves(args))
    assert_same(jax.tree.unflatten(jax.tree.structure(want), got), want)


@pytest.mark.parametrize(("step", "args"), list(STEPS.values())[:2], ids=list(STEPS)[:2])
def test_nothing_inside_of_the_gradient_reads_a_completed_value(step, args):
    jaxpr = unsplit(step, *args).jaxpr.jaxpr
    late = {v for eqn in jaxpr.eqns if eqn.primitive.name == "accumulate" for v in eqn.outvars}
    for eqn in jaxpr.eqns:
        if jc.ad_phase(eqn) is not None:
            assert not late.intersection(v for v in eqn.invars if isinstance(v, jc.Var))


def test_gradients_and_the_loss_are_completed_and_nothing_else():
    step = unsplit(mlp_step, mlp_params(), mlp_batch())
    assert sorted(v.aval.shape for v in completed(step)) == [(), (4,), (4,), (4, 4), (4, 4)]


def test_batch_is_given_once_and_completed_only_where_it_leaves_or_meets_what_is_complete():
    for step, times in ((mlp_step, 0), (count_in_the_loss, 0), (returning_the_batch, 1), (update_reads_the_batch, 0)):
        unsplit_step = unsplit(step, mlp_params(), mlp_batch())
        assert [spec.kind for spec in unsplit_step.inputs] == ["whole"] * 4 + ["microbatch"] * 2
        batch = set(unsplit_step.jaxpr.jaxpr.invars[4:])
        assert len(batch.intersection(completed(unsplit_step))) == times


def test_second_gradient_reads_what_the_first_one_completed():
    step = unsplit(gan_step, gan_params(), mlp_batch())
    late = {v for eqn in step.jaxpr.jaxpr.eqns if eqn.primitive.name == "accumulate" for v in eqn.outvars}
    forward_after = False
    for eqn in step.jaxpr.jaxpr.eqns:
        if late.intersection(v for v in eqn.invars if isinstance(v, jc.Var)):
            late.update(eqn.outvars)
            forward_after |= jc.ad_phase(eqn) == "forward"
    assert forward_after
