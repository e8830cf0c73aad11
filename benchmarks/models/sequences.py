"""Two models of sequences besides GPT: an LSTM, a loop over time, and a translator of an encoder and a decoder."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.models.model import Mark, Model, Tree, constant, integers, weights
from benchmarks.models.transformer import (
    OUTSIDE,
    attend,
    attention,
    attention_params,
    block,
    block_params,
    cross_entropy,
    feed_forward,
    norm,
    norm_params,
)


def lstm(
    *,
    layers: int = 2,
    width: int = 256,
    vocabulary: int = 1024,
    length: int = 64,
    batch: int = 64,
    dtype: Any = jnp.float32,
) -> Model:
    """A language model; the four gates have a dimension of their own, so that the units can be split."""

    def loss(params: Tree, batch: Tree, mark: Mark) -> jax.Array:
        x = mark(params["embedding"][batch["tokens"]], *OUTSIDE)
        for layer in params["layers"]:
            x = mark(_recur(layer, x, mark), *OUTSIDE)
        logits = mark(x @ params["head"], "batch", "length", "vocabulary")
        return cross_entropy(logits, batch["targets"])

    layer = {
        "input": weights(dtype, embed=width, gates=4, mlp=width),
        "recurrent": weights(dtype, units=width, gates=4, mlp=width),
        "bias": constant(0, dtype, gates=4, mlp=width),
    }
    return Model(
        name="lstm",
        params={
            "embedding": weights(dtype, vocabulary=vocabulary, embed=width),
            "layers": [layer] * layers,
            "head": weights(dtype, embed=width, vocabulary=vocabulary),
        },
        batch={name: integers(vocabulary, batch=batch, length=length) for name in ("tokens", "targets")},
        loss=loss,
    )


def _recur(params: Tree, x: jax.Array, mark: Mark) -> jax.Array:
    """The outputs of one layer over x [batch, length, embed]."""
    inputs = jnp.einsum("btd,dgu->tbgu", x, params["input"]) + params["bias"]
    inputs = mark(inputs, "length", "batch", "gates", "mlp")

    def step(carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        cell, output = carry
        gates = mark(x + jnp.einsum("bd,dgu->bgu", output, params["recurrent"]), "batch", "gates", "mlp")
        enter, forget, leave = (jax.nn.sigmoid(gates[:, number]) for number in range(3))
        cell = forget * cell + enter * jnp.tanh(gates[:, 3])
        output = leave * jnp.tanh(cell)
        return (cell, output), output

    zeros = jnp.zeros_like(inputs[0, :, 0])
    _, outputs = jax.lax.scan(step, (zeros, zeros), inputs)
    return outputs.swapaxes(0, 1)


def encoder_decoder(
    *,
    layers: int = 2,
    width: int = 256,
    heads: int = 8,
    vocabulary: int = 1024,
    source_length: int = 128,
    target_length: int = 64,
    batch: int = 32,
    dtype: Any = jnp.float32,
) -> Model:
    """`layers` on either side; the decoder attends to itself and to what the encoder makes of the source."""

    def loss(params: Tree, batch: Tree, mark: Mark) -> jax.Array:
        memory = mark(params["embedding"][batch["source"]] + params["source_positions"], *OUTSIDE)
        for layer in params["encoder"]:
            memory = block(layer, memory, mark, causal=False)
        memory = mark(norm(params["encoder_norm"], memory), *OUTSIDE)
        x = mark(params["embedding"][batch["tokens"]] + params["target_positions"], *OUTSIDE)
        for layer in params["decoder"]:
            x = _decode(layer, x, memory, mark)
        logits = norm(params["decoder_norm"], x) @ params["embedding"].T
        return cross_entropy(mark(logits, "batch", "length", "vocabulary"), batch["targets"])

    layer = block_params(width, heads, 4 * width, dtype)
    cross = {"cross_norm": norm_params(width, dtype), "cross": attention_params(width, heads, dtype)}
    tokens = partial(integers, vocabulary, batch=batch)
    return Model(
        name="encoder_decoder",
        params={
            "embedding": weights(dtype, vocabulary=vocabulary, embed=width),
            "source_positions": weights(dtype, positions=source_length, embed=width),
            "target_positions": weights(dtype, positions=target_length, embed=width),
            "encoder": [layer] * layers,
            "decoder": [{**layer, **cross}] * layers,
            "encoder_norm": norm_params(width, dtype),
            "decoder_norm": norm_params(width, dtype),
        },
        batch={
            "source": tokens(length=source_length),
            "tokens": tokens(length=target_length),
            "targets": tokens(length=target_length),
        },
        loss=loss,
    )


def _decode(params: Tree, x: jax.Array, memory: jax.Array, mark: Mark) -> jax.Array:
    x = attend(params, x, mark, causal=True)
    h = mark(norm(params["cross_norm"], x), *OUTSIDE)
    x = mark(x + attention(params["cross"], h, memory, mark, causal=False), *OUTSIDE)
    h = mark(norm(params["mlp_norm"], x), *OUTSIDE)
    return mark(x + feed_forward(params["mlp"], h, mark), *OUTSIDE)
