"""A transformer with experts for its perceptrons; each token goes to two of them, in one of two ways.

`moe` dispatches by products with one-hot matrices into places of a fixed number per sequence and expert (GShard,
Lepikhin et al. 2021); `moe_ragged` sorts all tokens by expert and multiplies runs of them (MegaBlocks, Gale et al.
2023).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.models.model import Mark, Model, Tree, integers, weights
from benchmarks.models.transformer import (
    OUTSIDE,
    attend,
    attention_params,
    cross_entropy,
    norm,
    norm_params,
)

Experts = Callable[[Tree, jax.Array, Mark], tuple[jax.Array, jax.Array]]
BALANCE = 0.01  # Weight of the loss that spreads tokens evenly.
SPARE = 1.25  # Places per expert, as a multiple of what an even share would need.


def moe(**sizes: Any) -> Model:
    """Dispatch by einsum. The sizes are those of `_model`."""
    return _model("moe", experts_by_einsum, **sizes)


def moe_ragged(**sizes: Any) -> Model:
    """Dispatch by sorting."""
    return _model("moe_ragged", experts_by_sorting, **sizes)


def _model(
    name: str,
    run_experts: Experts,
    *,
    layers: int = 2,
    width: int = 256,
    heads: int = 8,
    experts: int = 8,
    hidden: int = 512,
    vocabulary: int = 1024,
    length: int = 128,
    batch: int = 16,
    dtype: Any = jnp.float32,
) -> Model:
    def loss(params: Tree, batch: Tree, mark: Mark) -> jax.Array:
        x = mark(params["embedding"][batch["tokens"]], *OUTSIDE)
        balance = jnp.float32(0)
        for layer in params["layers"]:
            x = attend(layer, x, mark, causal=True)
            mixed, uneven = run_experts(layer, norm(layer["mlp_norm"], x), mark)
            x = mark(x + mixed, *OUTSIDE)
            balance += uneven
        logits = mark(norm(params["norm"], x) @ params["head"], "batch", "length", "vocabulary")
        return cross_entropy(logits, batch["targets"]) + BALANCE * balance

    layer = {
        "attention_norm": norm_params(width, dtype),
        "attention": attention_params(width, heads, dtype),
        "mlp_norm": norm_params(width, dtype),
        "router": weights(dtype, embed=width, choices=experts),
        "up": weights(dtype, expert=experts, embed=width, mlp=hidden),
        "down": weights(dtype, expert=experts, mlp=hidden, embed=width),
    }
    return Model(
        name=name,
        params={
            "embedding": weights(dtype, vocabulary=vocabulary, embed=width),
            "layers": [layer] * layers,
            "norm": norm_params(width, dtype),
            "head": weights(dtype, embed=width, vocabulary=vocabulary),
        },
        batch={name: integers(vocabulary, batch=batch, length=length) for name in ("tokens", "targets")},
        loss=loss,
    )


def experts_by_einsum(params: Tree, x: jax.Array, mark: Mark) -> tuple[jax.Array, jax.Array]:
    """Return what the experts add to x [batch, length, embed], and how unevenly they are used."""
    gates = jax.nn.softmax((x @ params["router"]).astype(jnp.float32))
    weight, onehot, uneven = _choose_two(gates)
    length, num_experts = gates.shape[1:]
    places = int(SPARE * 2 * length / num_experts)
    # First choices of all tokens take their places before second ones.
    queue = onehot.swapaxes(1, 2).reshape(-1, 2 * length, num_experts)
    place = ((jnp.cumsum(queue, axis=1) - 1) * queue).sum(-1).reshape(-1, 2, length).swapaxes(1, 2)
    slot = jax.nn.one_hot(place.astype(jnp.int32), places)
    combine = jnp.einsum("btk,btke,btkc->btec", weight, onehot, slot).astype(x.dtype)
    combine = mark(combine, "batch", "length", "choices", "places")
    sent = jnp.einsum("btec,btd->ebcd", (combine > 0).astype(x.dtype), x)
    sent = mark(sent, "expert", "expert_batch", "places", "embed")
    hidden = jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", sent, params["up"]))
    hidden = mark(hidden, "expert", "expert_batch", "places", "mlp")
    done = jnp.einsum("ebcf,efd->ebcd", hidden, params["down"])
    done = mark(done, "expert", "expert_batch", "places", "embed")
    return mark(jnp.einsum("btec,ebcd->btd", combine, done), *OUTSIDE), uneven


def experts_by_sorting(params: Tree, x: jax.Array, mark: Mark) -> tuple[jax.Array, jax.Array]:
    """The same without a limit on the tokens of an expert."""
    gates = jax.nn.softmax((x @ params["router"]).astype(jnp.float32))
    weight, onehot, uneven = _choose_two(gates)
    width = x.shape[-1]
    chosen = jnp.argmax(onehot, axis=-1).reshape(-1)
    order = jnp.argsort(chosen)
    tokens = x.reshape(-1, width)[order // 2]
    sizes = jnp.sum(onehot, axis=(0, 1, 2)).astype(jnp.int32)
    hidden = jax.nn.gelu(jax.lax.ragged_dot(tokens, params["up"], sizes))
    hidden = mark(hidden, "expert_batch", "mlp")
    done = jax.lax.ragged_dot(hidden, params["down"], sizes) * weight.reshape(-1)[order][:, None].astype(x.dtype)
    mixed = jnp.zeros((x.size // width, width), x.dtype).at[order // 2].add(done)
    return mark(mixed.reshape(x.shape), *OUTSIDE), uneven


def _choose_two(gates: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weights [batch, length, 2] and one-hot rows [batch, length, 2, experts] of the two best experts of a token."""
    weight, chosen = jax.lax.top_k(gates, 2)
    onehot = jax.nn.one_hot(chosen, gates.shape[-1])
    uneven = gates.shape[-1] * jnp.sum(gates.mean((0, 1)) * onehot[:, :, 0].mean((0, 1)))
    return weight / weight.sum(-1, keepdims=True), onehot, uneven
