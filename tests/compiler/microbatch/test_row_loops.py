"""Loops over the examples of a batch equal the plain step in microbatches, where no round waits for another."""

import jax
import jax.numpy as jnp
import pytest

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.errors import NotSplittable
from tests.compiler.microbatch.microbatched import PARAMS, X, assert_equal, evaluate_both, hidden, sgd, split

pytestmark = pytest.mark.usefixtures("float64")


def of_one(p, x):
    return jnp.mean(jnp.tanh(hidden(p, x) @ p["c"]) ** 2)


def one_at_a_time(p, batch):
    return jnp.mean(jax.lax.map(lambda x: of_one(p, x), batch["x"]))


def two_at_a_time(p, batch):
    return jnp.mean(jax.lax.map(lambda x: of_one(p, x), batch["x"], batch_size=2))


def computed_again(p, batch):
    return jnp.mean(jax.lax.map(jax.checkpoint(lambda x: of_one(p, x)), batch["x"], batch_size=2))


def summed_and_counted(p, batch):
    def after(carry, x):
        total, count, scale = carry
        return (total + scale * of_one(p, x), count + 1.0, scale), hidden(p, x)

    (total, count, _), rows = jax.lax.scan(after, (0.5, 0.0, p["b"][0]), batch["x"])
    return total / count + jnp.mean(rows @ p["c"])


def between_two_layers(p, batch):
    rows = jax.lax.map(lambda x: hidden(p, x), hidden(p, batch["x"]), batch_size=2)
    return jnp.mean((rows / jnp.sqrt(1 + jnp.mean(rows**2, 0))) @ p["c"])


@pytest.mark.parametrize("loss", [one_at_a_time, two_at_a_time, computed_again, summed_and_counted, between_two_layers])
@pytest.mark.parametrize("microbatches", [2, 4])
def test_loops_of_independent_rounds_equal_the_plain_step(loss, microbatches):
    assert_equal(*evaluate_both(sgd(loss), PARAMS, X, microbatches=microbatches))


def test_a_microbatch_runs_as_many_rounds_as_it_has_rows():
    step, _ = split(sgd(one_at_a_time), PARAMS, X)
    loops = [eqn for eqn in jc.all_equations(step.jaxpr) if eqn.primitive.name == "scan"]
    rows = {leaf.aval.shape[0] for leaf, i in zip(step.jaxpr.jaxpr.invars, step.inputs) if i.kind == "microbatch"}
    assert {jp.scan_of(eqn).length for eqn in loops} == rows


def carried_on(p, batch):
    return jax.lax.scan(lambda c, x: (0.5 * c + jnp.sum(hidden(p, x)), None), 0.0, batch["x"])[0]


def shown_on_the_way(p, batch):
    return jnp.mean(jax.lax.scan(lambda c, x: (c + jnp.sum(hidden(p, x)), c), 0.0, batch["x"])[1])


def picked_by_number(p, batch):
    def after(i, total):
        return total + jnp.sum(hidden(p, jax.lax.dynamic_index_in_dim(batch["x"], i)))

    return jax.lax.fori_loop(0, batch["x"].shape[0], after, 0.0)


@pytest.mark.parametrize("loss", [carried_on, shown_on_the_way, picked_by_number])
def test_loops_whose_rounds_wait_for_each_other_are_refused(loss):
    with pytest.raises(NotSplittable, match=r"is a loop over the batch's examples.* Compute all of them at once"):
        split(lambda p, batch: (p, loss(p, batch)), PARAMS, X)
