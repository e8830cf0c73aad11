"""Shardings that a user wrote into a step are obeyed or refused with a reason, and the result is the plain step's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from tests.small_steps import two_stages

METHODS = {
    "data parallel": autopar.DataParallel(),
    "two stages": two_stages(),
    "searched": autopar.Auto(num_stages=1, num_microbatches=1, mesh_shape=(8,)),
}


def draw(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32)


def equals_plain(step, *args, method):
    wanted, got = jax.jit(step)(*args), autopar.parallelize(step, method=method)(*args)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(jax.device_get(got)), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_constraint_beside_a_gather(method):
    mesh = Mesh(np.array(jax.devices()), ("data",))

    def loss(weights, tokens):
        h = jax.lax.with_sharding_constraint(weights[0][tokens], NamedSharding(mesh, P("data")))
        return jnp.mean(jnp.tanh(h @ weights[1]) ** 2)

    def step(weights, tokens):
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, tokens))

    equals_plain(step, [draw(32, 8), draw(8, 8)], np.arange(16) % 7, method=method)
