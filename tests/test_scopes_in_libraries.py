"""Scopes hold in models of Flax's linen and nnx, of Equinox and plain functions, under `grad`, scans and remat."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import autopar

ROWS, WIDTH, CLASSES, LAYERS = 16, 32, 64, 2


def plain():
    keys = jax.random.split(jax.random.key(0))
    params = {"body": jax.random.normal(keys[0], (WIDTH, WIDTH)), "head": jax.random.normal(keys[1], (WIDTH, CLASSES))}

    def apply(params, x):
        with autopar.replicate(name="body"):
            x = jnp.tanh(x @ params["body"])
        with autopar.split(devices=8, name="head"):
            return x @ params["head"]

    return params, apply


def linen():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            with autopar.replicate(name="body"):
                x = jnp.tanh(nn.Dense(WIDTH, use_bias=False, name="body")(x))
            with autopar.split(devices=8, name="head"):
                return nn.Dense(CLASSES, use_bias=False, name="head")(x)

    model = Model()
    return model.init(jax.random.key(0), jnp.zeros((1, WIDTH))), model.apply


def flax_nnx():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.body = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
            self.head = nnx.Linear(WIDTH, CLASSES, use_bias=False, rngs=rngs)

        def __call__(self, x):
            with autopar.replicate(name="body"):
                x = jnp.tanh(self.body(x))
            with autopar.split(devices=8, name="head"):
                return self.head(x)

    definition, params = nnx.split(Model(nnx.Rngs(0)))
    return params, lambda params, x: nnx.merge(definition, params)(x)


def equinox():
    class Model(eqx.Module):
        body: eqx.nn.Linear
        head: eqx.nn.Linear

        def __call__(self, x):
            with autopar.replicate(name="body"):
                x = jnp.tanh(jax.vmap(self.body)(x))
            with autopar.split(devices=8, name="head"):
                return jax.vmap(self.head)(x)

    keys = jax.random.split(jax.random.key(0))
    body = eqx.nn.Linear(WIDTH, WIDTH, use_bias=False, key=keys[0])
    model = Model(body, eqx.nn.Linear(WIDTH, CLASSES, use_bias=False, key=keys[1]))
    params, static = eqx.partition(model, eqx.is_array)
    return params, lambda params, x: eqx.combine(params, static)(x)


def layers_of_plain():
    keys = jax.random.split(jax.random.key(0))
    params = {
        "layers": jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / 6,
        "head": jax.random.normal(keys[1], (WIDTH, CLASSES)),
    }

    def apply(params, x):
        def layer(x, w):
            with autopar.split(devices=8, name="layer"):
                return jnp.tanh(x @ w), None

        x, _ = jax.lax.scan(layer, x, params["layers"])
        with autopar.replicate(name="head"):
            return x @ params["head"]

    return params, apply


def layers_of_linen():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            with autopar.split(devices=8, name="layer"):
                return jnp.tanh(nn.Dense(WIDTH, use_bias=False)(x)), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            scanned = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
            x, _ = scanned(name="layers")(x, None)
            with autopar.replicate(name="head"):
                return nn.Dense(CLASSES, use_bias=False, name="head")(x)

    model = Model()
    return model.init(jax.random.key(0), jnp.zeros((1, WIDTH))), model.apply


def layers_of_nnx():
    class Model(nnx.Module):
        def __init__(self, rngs):
            @nnx.split_rngs(splits=LAYERS)
            @nnx.vmap
            def layers(rngs):
                return nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

            self.layers = layers(rngs)
            self.head = nnx.Linear(WIDTH, CLASSES, use_bias=False, rngs=rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def layer(x, linear):
                with autopar.split(devices=8, name="layer"):
                    return jnp.tanh(linear(x))

            x = layer(x, self.layers)
            with autopar.replicate(name="head"):
                return self.head(x)

    definition, params = nnx.split(Model(nnx.Rngs(0)))
    return params, lambda params, x: nnx.merge(definition, params)(x)


def layers_of_equinox():
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(WIDTH, WIDTH, use_bias=False, key=key))(keys[1:])
    model = {"layers": layers, "head": eqx.nn.Linear(WIDTH, CLASSES, use_bias=False, key=keys[0])}
    params, static = eqx.partition(model, eqx.is_array)

    def apply(params, x):
        def layer(x, own):
            with autopar.split(devices=8, name="layer"):
                return jnp.tanh(jax.vmap(eqx.combine(own, static["layers"]))(x)), None

        x, _ = jax.lax.scan(layer, x, params["layers"])
        with autopar.replicate(name="head"):
            return jax.vmap(eqx.combine(params["head"], static["head"]))(x)

    return params, apply


@pytest.mark.parametrize("remat", [False, True], ids=["grad", "remat"])
@pytest.mark.parametrize(
    ("make", "divided"),
    [(each, "head") for each in (plain, linen, flax_nnx, equinox)]
    + [(each, "layers") for each in (layers_of_plain, layers_of_linen, layers_of_nnx, layers_of_equinox)],
)
def test_what_is_split_lies_in_parts_and_the_step_equals_plain_jit(make, divided, remat):
    params, apply = make()
    model = jax.checkpoint(apply) if remat else apply

    def step(params, batch):
        def loss(params):
            own = jnp.take_along_axis(jax.nn.log_softmax(model(params, batch[0])), batch[1][:, None], 1)
            return -own.mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    rng = np.random.default_rng(1)
    batch = jnp.float32(rng.normal(size=(ROWS, WIDTH))), jnp.int32(rng.integers(0, CLASSES, ROWS))
    parallel = autopar.parallelize(step, method=autopar.Auto())
    plan = parallel.trace(params, batch).plan().plan
    specs = {name: spec for name, spec in plan.input_specs.items() if divided in name}
    assert len(specs) == 1
    split = [axis for entry in next(iter(specs.values())) if entry for axis in np.atleast_1d(entry)]
    sizes = dict(zip(plan.meshes[0].axis_names, plan.meshes[0].shape, strict=True))
    assert np.prod([sizes[axis] for axis in split]) == 8
    for wanted, found in zip(
        *map(jax.tree.leaves, (jax.jit(step)(params, batch), parallel(params, batch))), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
