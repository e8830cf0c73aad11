"""Models of sequences that are no GPT: recurrent, encoder with decoder, and a masked language model."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from tests.zoo.case import ADAM_EPS, BATCH, Case, draw

VOCABULARY, LENGTH, WIDTH = 32, 8, 16
TYPE = {"param_dtype": jnp.float64}
PADDING, MASK = 0, 1


class Recurrent(nn.Module):
    """Two recurrent layers, each a scan over time."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH, **TYPE, name="embed")(tokens)
        x = nn.RNN(nn.OptimizedLSTMCell(WIDTH, **TYPE), name="lstm")(x)
        x = x + nn.RNN(nn.GRUCell(WIDTH, **TYPE), name="gru")(x)
        return nn.Dense(VOCABULARY, **TYPE, name="head")(x)


class Layer(nn.Module):
    """A transformer layer; with `memory` it attends to the encoder's output as well."""

    causal: bool = False

    @nn.compact
    def __call__(self, x, memory=None):
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]), dtype=bool) if self.causal else None
        h = nn.LayerNorm(**TYPE)(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, **TYPE, name="self")(h, h, mask=mask)
        if memory is not None:
            h = nn.LayerNorm(**TYPE)(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=2, **TYPE, name="cross")(h, memory)
        h = nn.relu(nn.Dense(2 * WIDTH, **TYPE)(nn.LayerNorm(**TYPE)(x)))
        return x + nn.Dense(WIDTH, **TYPE)(h)


class EncoderDecoder(nn.Module):
    @nn.compact
    def __call__(self, source, target):
        embed = nn.Embed(VOCABULARY, WIDTH, **TYPE, name="embed")
        memory = embed(source)
        for i in range(2):
            memory = Layer(name=f"encoder_{i}")(memory)
        x = embed(target)
        for i in range(2):
            x = Layer(causal=True, name=f"decoder_{i}")(x, memory)
        return nn.Dense(VOCABULARY, **TYPE, name="head")(x)


class MaskedModel(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH, **TYPE, name="embed")(tokens)
        for i in range(2):
            x = Layer(name=f"layer_{i}")(x)
        return nn.Dense(VOCABULARY, **TYPE, name="head")(x)


def draw_tokens(seed: int, length: int = LENGTH) -> jax.Array:
    return jnp.asarray(draw(seed).integers(2, VOCABULARY, size=(BATCH, length)), jnp.int32)


def make_recurrent() -> tuple[Any, ...]:
    model, tokens, tx = Recurrent(), draw_tokens(60, LENGTH + 1), optax.rmsprop(1e-2)
    params = jax.jit(model.init)(jax.random.key(60), tokens[:, :-1])

    def loss_fn(params, tokens):
        logits = model.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(state, tokens):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step, (params, tx.init(params)), tokens


def make_encoder_decoder() -> tuple[Any, ...]:
    model, tx = EncoderDecoder(), optax.adamw(1e-2, eps=ADAM_EPS)
    batch = {"source": draw_tokens(61), "target": draw_tokens(62, 7)}
    params = jax.jit(model.init)(jax.random.key(61), batch["source"], batch["target"][:, :-1])["params"]

    def loss_fn(params, batch):
        logits = model.apply({"params": params}, batch["source"], batch["target"][:, :-1])
        labels = jax.nn.one_hot(batch["target"][:, 1:], VOCABULARY, dtype=logits.dtype)
        return optax.softmax_cross_entropy(logits, optax.smooth_labels(labels, 0.1)).mean()

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {"loss": loss}

    return step, {"params": params, "opt_state": tx.init(params)}, batch


def make_masked() -> tuple[Any, ...]:
    model, tx = MaskedModel(), optax.adam(1e-2, eps=ADAM_EPS)
    rng, tokens = draw(63), draw_tokens(64)
    # Sentences of different lengths: microbatches hold different numbers of counted tokens.
    lengths = rng.integers(3, LENGTH + 1, size=BATCH)
    tokens = jnp.where(jnp.arange(LENGTH) < lengths[:, None], tokens, PADDING)
    hidden = jnp.asarray(rng.random((BATCH, LENGTH)) < 0.4)
    batch = {"tokens": tokens, "hidden": hidden}
    params = jax.jit(model.init)(jax.random.key(63), tokens)["params"]

    def loss_fn(params, batch):
        tokens, counted = batch["tokens"], batch["tokens"] != PADDING
        logits = model.apply({"params": params}, jnp.where(batch["hidden"] & counted, MASK, tokens))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens) * counted
        correct = (jnp.argmax(logits, axis=-1) == tokens) & counted
        aux = {
            "accuracy": correct.sum() / counted.sum(),
            "per_example": losses.sum(axis=1) / counted.sum(axis=1),
            "num_tokens": counted.sum(),
        }
        return losses.sum() / counted.sum(), aux

    def step(state, batch):
        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {"loss": loss, **aux}

    return step, {"params": params, "opt_state": tx.init(params)}, batch


CASES = (
    Case(name="recurrent", make=make_recurrent, note="an LSTM and a GRU, scans over time; RMSProp"),
    Case(
        name="encoder_decoder",
        make=make_encoder_decoder,
        note="cross-attention: one value read by several layers",
    ),
    Case(name="masked_lm", make=make_masked, note="loss per counted token; losses per example are an output"),
)
