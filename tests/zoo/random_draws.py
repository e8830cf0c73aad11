"""Steps that draw random numbers from a key in their state: dropout with either kind of key, a VAE, a GAN."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from tests.zoo.case import BATCH, Case, draw
from tests.zoo.mlp import WIDTH, init_layers, regression_batch

LATENT = 4
TYPE = {"param_dtype": jnp.float64}


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(4):
            h = nn.gelu(nn.Dense(2 * WIDTH, **TYPE, name=f"up_{i}")(x))
            h = nn.Dropout(0.2, deterministic=False)(h)
            x = nn.LayerNorm(**TYPE, name=f"ln_{i}")(x + nn.Dense(WIDTH, **TYPE, name=f"down_{i}")(h))
        return x


def make_dropout() -> tuple[Any, ...]:
    model, batch, tx = Dropped(), regression_batch(70), optax.adam(1e-2)
    params = jax.jit(model.init)({"params": jax.random.key(0), "dropout": jax.random.key(1)}, batch["x"])["params"]

    def step(state, batch):
        key, dropout_key = jax.random.split(state["key"])

        def loss_fn(params):
            predicted = model.apply({"params": params}, batch["x"], rngs={"dropout": dropout_key})
            return jnp.mean((predicted - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "key": key}, {"loss": loss}

    return step, {"params": params, "opt_state": tx.init(params), "key": jax.random.key(70)}, batch


def make_legacy_dropout() -> tuple[Any, ...]:
    batch, params, tx = regression_batch(71), init_layers(71), optax.sgd(0.1)

    def loss_fn(params, batch, key):
        h = batch["x"]
        for i, layer in enumerate(params):
            keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, h.shape)
            h = jnp.where(keep, jnp.tanh(h @ layer["w"] + layer["b"]) / 0.9, 0.0)
        return jnp.mean((h - batch["y"]) ** 2)

    def step(state, batch):
        key = jax.random.fold_in(state["key"], state["step"])
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch, key)
        updates, opt_state = tx.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        return {
            "params": params,
            "opt_state": opt_state,
            "key": state["key"],
            "step": state["step"] + 1,
        }, loss

    key = jax.random.PRNGKey(71)
    return step, {"params": params, "opt_state": tx.init(params), "key": key, "step": jnp.int32(0)}, batch


class VAE(nn.Module):
    @nn.compact
    def __call__(self, x, key):
        h = nn.relu(nn.Dense(32, **TYPE, name="encode")(x))
        mean, log_variance = jnp.split(nn.Dense(2 * LATENT, **TYPE, name="latent")(h), 2, axis=-1)
        z = mean + jnp.exp(0.5 * log_variance) * jax.random.normal(key, mean.shape, mean.dtype)
        h = nn.relu(nn.Dense(32, **TYPE, name="decode")(z))
        return nn.Dense(x.shape[-1], **TYPE, name="output")(h), mean, log_variance


def make_vae() -> tuple[Any, ...]:
    model, tx = VAE(), optax.adam(1e-2)
    images = jnp.asarray(draw(72).random((BATCH, 24)) < 0.3).astype(jnp.float64)
    params = jax.jit(model.init)(jax.random.key(72), images, jax.random.key(0))["params"]

    def loss_fn(params, images, key):
        logits, mean, log_variance = model.apply({"params": params}, images, key)
        reconstruction = optax.sigmoid_binary_cross_entropy(logits, images).sum(axis=-1)
        divergence = -0.5 * jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance), axis=-1)
        return jnp.mean(reconstruction + divergence)

    def step(state, images):
        key, sample_key = jax.random.split(state["key"])
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], images, sample_key)
        updates, opt_state = tx.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "key": key}, {"loss": loss}

    return step, {"params": params, "opt_state": tx.init(params), "key": jax.random.key(73)}, images


def dense_net(layers, x):
    for layer in layers[:-1]:
        x = jax.nn.leaky_relu(x @ layer["w"] + layer["b"], 0.2)
    return x @ layers[-1]["w"] + layers[-1]["b"]


def make_gan() -> tuple[Any, ...]:
    tx_d, tx_g = optax.adam(2e-3, b1=0.5), optax.adam(1e-3, b1=0.5)
    generator, discriminator = init_layers(74), init_layers(75)

    def d_loss_fn(discriminator, generator, real, noise):
        fake = jax.lax.stop_gradient(dense_net(generator, noise))
        on_real, on_fake = dense_net(discriminator, real)[:, 0], dense_net(discriminator, fake)[:, 0]
        return jnp.mean(jax.nn.softplus(-on_real)) + jnp.mean(jax.nn.softplus(on_fake))

    def g_loss_fn(generator, discriminator, noise):
        return jnp.mean(jax.nn.softplus(-dense_net(discriminator, dense_net(generator, noise))[:, 0]))

    def step(state, real):
        key, noise_key = jax.random.split(state["key"])
        noise = jax.random.normal(noise_key, real.shape, real.dtype)
        d_loss, grads = jax.value_and_grad(d_loss_fn)(state["d"], state["g"], real, noise)
        updates, d_opt = tx_d.update(grads, state["d_opt"])
        discriminator = optax.apply_updates(state["d"], updates)
        g_loss, grads = jax.value_and_grad(g_loss_fn)(state["g"], discriminator, noise)
        updates, g_opt = tx_g.update(grads, state["g_opt"])
        generator = optax.apply_updates(state["g"], updates)
        state = {"g": generator, "d": discriminator, "g_opt": g_opt, "d_opt": d_opt, "key": key}
        return state, {"d_loss": d_loss, "g_loss": g_loss}

    state = {
        "g": generator,
        "d": discriminator,
        "g_opt": tx_g.init(generator),
        "d_opt": tx_d.init(discriminator),
    }
    return step, {**state, "key": jax.random.key(74)}, regression_batch(76)["x"]


CASES = (
    Case(
        name="dropout",
        make=make_dropout,
        note="a new-style key, split each step",
        random=True,
        loss_falls=False,
    ),
    Case(
        name="dropout_legacy_key",
        make=make_legacy_dropout,
        note="a PRNGKey array, folded with the step counter",
        random=True,
        loss_falls=False,
    ),
    Case(name="vae", make=make_vae, note="samples of the latent, split key", random=True),
    Case(
        name="gan",
        make=make_gan,
        note="two losses and optimizers; the second gradient is taken at the updated discriminator",
        random=True,
        loss_falls=False,
    ),
)
