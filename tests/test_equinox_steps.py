"""Where `@eqx.filter_jit` stood: arrays are traced, functions and hyperparameters in a module are what they are."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar

TX = optax.adam(1e-2)
RNG = np.random.default_rng(0)
X, Y = (jnp.asarray(RNG.normal(size=(16, n)), jnp.float32) for n in (8, 4))
METHODS = {"data": autopar.DataParallel(), "stages": autopar.PipelineParallel(num_stages=2, num_microbatches=2)}


class Network(eqx.Module):
    layers: list
    dropout: eqx.nn.Dropout
    activation: object
    scale: float

    def __init__(self, key):
        keys = jax.random.split(key, 2)
        self.layers = [eqx.nn.Linear(8, 16, key=keys[0]), eqx.nn.Linear(16, 4, key=keys[1])]
        self.dropout, self.activation, self.scale = eqx.nn.Dropout(0.5), jax.nn.relu, 2.0

    def __call__(self, x, key):
        h = self.dropout(self.activation(self.layers[0](x)), key=key)
        return self.layers[1](h) * (self.scale if self.scale > 1 else 1)


def step(model, opt_state, x, y, key):
    def loss_of(model):
        keys = jax.random.split(key, len(x))
        return jnp.mean((jax.vmap(model)(x, keys) - y) ** 2)

    loss, grads = eqx.filter_value_and_grad(loss_of)(model)
    updates, opt_state = TX.update(grads, opt_state, model)
    return eqx.apply_updates(model, updates), opt_state, loss


def trained(function):
    model = Network(jax.random.key(0))
    opt_state = TX.init(eqx.filter(model, eqx.is_array))
    for i in range(2):
        model, opt_state, loss = function(model, opt_state, X, Y, jax.random.key(i))
    return model, loss


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("given", [step, eqx.filter_jit(step)], ids=["plain", "filter_jit"])
def test_module_is_trained_as_by_filter_jit(method, given):
    parallel = autopar.parallelize(given, method=method, batch_argnums=(2, 3))
    (ours, loss), (theirs, expected) = trained(parallel), trained(eqx.filter_jit(step))
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    assert ours.activation is jax.nn.relu and ours.scale == 2.0 and ours.dropout.p == 0.5
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(eqx.filter(ours, eqx.is_array)), jax.tree.leaves(eqx.filter(theirs, eqx.is_array))):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert len(parallel.all_compiled()) == 1


def test_numbers_are_traced_unless_filter_jit_holds_them_static():
    def scaled(x, factor):
        return x * factor, isinstance(factor, jax.core.Tracer), factor

    _, traced, factor = autopar.parallelize(scaled, method=autopar.DataParallel(), batch_argnums=0)(X, 2.0)
    assert bool(traced) and isinstance(factor, jax.Array)
    _, traced, factor = autopar.parallelize(eqx.filter_jit(scaled), method=autopar.DataParallel(), batch_argnums=0)(
        X, 2.0
    )
    assert traced is False and factor == 2.0 and not isinstance(factor, jax.Array)


def test_donation_of_filter_jit_is_kept():
    donated = autopar.parallelize(eqx.filter_jit(step, donate="all-except-first")).arguments.donated
    assert donated == {1, 2, 3, 4}


def test_batch_norm_carries_its_state():
    class Normed(eqx.Module):
        linear: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

        def __call__(self, x, state):
            return self.norm(self.linear(x), state)

    def normed_step(model, state, x):
        def loss_of(model, state):
            mapped = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
            y, state = mapped(x, state)
            return jnp.mean((y - 1) ** 2), state

        grads, state = eqx.filter_grad(loss_of, has_aux=True)(model, state)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), state

    def make():
        norm = eqx.nn.BatchNorm(4, "batch", mode="batch")
        return eqx.nn.State(model := Normed(eqx.nn.Linear(8, 4, key=jax.random.key(0)), norm)), model

    state, model = make()
    ours = autopar.parallelize(normed_step, method=autopar.DataParallel(), batch_argnums=2)(model, state, X)
    state, model = make()
    theirs = eqx.filter_jit(normed_step)(model, state, X)
    for a, b in zip(jax.tree.leaves(eqx.filter(ours, eqx.is_array)), jax.tree.leaves(eqx.filter(theirs, eqx.is_array))):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_argument_with_more_than_arrays_is_not_placed_ahead_of_a_call():
    def scaled(batch, w):
        return w * jnp.mean(batch["x"])

    step = autopar.parallelize(scaled, method=autopar.DataParallel(), batch_argnums=0)
    batch = {"x": X, "kind": "images"}
    step(batch, Y)
    with pytest.raises(autopar.InvalidArgument, match="Argument 0 of scaled holds more than arrays"):
        autopar.shard_batch(batch, like=step, argnum=0)
