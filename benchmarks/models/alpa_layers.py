"""The layers of Alpa's transformers: norms behind what they add up, biases everywhere, softmax in the model's own type.

As `FlaxBertLayer` in alpa/model/bert_model.py of alpa-projects/alpa has them, without dropout: no score is ever held in
32 bits, every token sees all others, and a layer that is computed again is so to its last product, which the norm
behind it needs.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.models.model import Tree, constant
from benchmarks.models.transformer import attention_params, feed_forward_params, norm, norm_params


def layer_params(width: int, heads: int, hidden: int, dtype: jnp.dtype) -> Tree:
    """The parameters of a layer whose perceptron is `hidden` wide."""
    return {**attention_half_params(width, heads, dtype), "mlp": feed_forward_params(width, hidden, dtype)}


def attention_half_params(width: int, heads: int, dtype: jnp.dtype) -> Tree:
    """The parameters of all but the perceptron, the norm behind it included."""
    inside = {"heads": heads, "head": width // heads}
    biases = {f"{name}_bias": constant(0, dtype, **inside) for name in ("query", "key", "value")}
    return {
        "attention": {
            **attention_params(width, heads, dtype),
            **biases,
            "out_bias": constant(0, dtype, embed=width),
        },
        "attention_norm": norm_params(width, dtype),
        "mlp_norm": norm_params(width, dtype),
    }


def layer(
    params: Tree,
    x: jax.Array,
    perceptron: Callable[[Tree, jax.Array], jax.Array] | None = None,
    *,
    cudnn: bool = False,
) -> jax.Array:
    """A layer's output for x [batch, length, embed], with a perceptron or what stands in its place."""
    x = norm(params["attention_norm"], x + _attention(params["attention"], x, cudnn))
    inner = _feed_forward(params["mlp"], x) if perceptron is None else perceptron(params, x)
    return norm(params["mlp_norm"], x + inner)


def _attention(params: Tree, x: jax.Array, cudnn: bool) -> jax.Array:
    query, key, value = (
        jnp.einsum("bsd,dhk->bshk", x, params[name]) + params[f"{name}_bias"] for name in ("query", "key", "value")
    )
    if cudnn:
        mixed = jax.nn.dot_product_attention(query, key, value, implementation="cudnn")
    else:
        scores = jnp.einsum("bqhk,bshk->bhqs", query / query.shape[-1] ** 0.5, key)
        mixed = jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores), value)
    return jnp.einsum("bqhk,hkd->bqd", mixed, params["out"]) + params["out_bias"]


def _feed_forward(params: Tree, x: jax.Array) -> jax.Array:
    hidden = jax.nn.gelu(x @ params["up"] + params["up_bias"], approximate=False)
    return hidden @ params["down"] + params["down_bias"]


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean over all targets, which are written as one-hot rows of the vocabulary."""
    wanted = jax.nn.one_hot(targets, logits.shape[-1])
    return -jnp.mean(jnp.sum(wanted * jax.nn.log_softmax(logits), axis=-1))
