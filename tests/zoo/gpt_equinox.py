"""A GPT in Equinox: the model is the parameters, `vmap` makes the batch, filters tell arrays from rest."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from tests.zoo.case import ADAM_EPS, BATCH, Case, draw

VOCABULARY, LENGTH, WIDTH, LAYERS = 32, 8, 16, 2


class Block(eqx.Module):
    ln_1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    ln_2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.ln_1 = eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(2, WIDTH, key=first)
        self.ln_2 = eqx.nn.LayerNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, depth=1, activation=jax.nn.gelu, key=second)

    def __call__(self, x):
        mask = jnp.tril(jnp.ones((x.shape[0], x.shape[0]), bool))
        h = jax.vmap(self.ln_1)(x)
        x = x + self.attention(h, h, h, mask=mask)
        return x + jax.vmap(self.mlp)(jax.vmap(self.ln_2)(x))


class GPT(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, LAYERS + 2)
        self.embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
        self.blocks = [Block(key) for key in keys[1:-1]]
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, key=keys[-1])

    def __call__(self, tokens):
        x = jax.vmap(self.embed)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


def loss_fn(model, tokens):
    logits = jax.vmap(model)(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def make() -> tuple[Any, ...]:
    params, static = eqx.partition(GPT(jax.random.key(30)), eqx.is_inexact_array)
    tx = optax.adamw(1e-2, eps=ADAM_EPS)
    tokens = jnp.asarray(draw(30).integers(0, VOCABULARY, size=(BATCH, LENGTH + 1)), jnp.int32)

    def step(state, tokens):
        params, opt_state = state
        model = eqx.combine(params, static)
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        params, _ = eqx.partition(eqx.apply_updates(model, updates), eqx.is_inexact_array)
        return (params, opt_state), {"loss": loss}

    return step, (params, tx.init(params)), tokens


CASES = (Case(name="gpt_equinox", make=make, note="partition, combine, filter_value_and_grad; the batch by vmap"),)
