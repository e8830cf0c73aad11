"""A reduction over an axis of `jax.vmap`, inside of an example, is one over the batch."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar

DRAW = np.random.default_rng(0)
PARAMS = {"a": DRAW.normal(size=(4, 16)).astype(np.float32) / 4, "b": DRAW.normal(size=(16, 2)).astype(np.float32) / 4}
BATCH = tuple(DRAW.normal(size=(16, n)).astype(np.float32) for n in (4, 2))


def loss_of_one(params, x, y):
    return lax.pmean(jnp.sum((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2), "examples")


def step(params, batch):
    def loss(p):
        return jax.vmap(loss_of_one, in_axes=(None, 0, 0), out_axes=None, axis_name="examples")(p, *batch)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


METHODS = {
    "data": autopar.DataParallel(),
    "microbatches": autopar.DataParallel(num_microbatches=4),
    "stages": autopar.PipelineParallel(num_stages=2, num_microbatches=2),
    "search": autopar.Auto(num_stages=1, num_microbatches=1),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_mean_over_a_mapped_axis_is_exact_and_split(method):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = autopar.parallelize(step, method=method)(PARAMS, BATCH)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, step(PARAMS, BATCH))


def no_more_than_sixteen(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x[:16] @ w) ** 2))(w)


def test_rows_up_to_the_number_that_there_are_can_be_split():
    args = (np.eye(4, dtype=np.float32), BATCH[0])
    got = autopar.parallelize(no_more_than_sixteen, method=autopar.DataParallel(), num_microbatches=4)(*args)
    np.testing.assert_allclose(got, no_more_than_sixteen(*args), rtol=1e-5)
