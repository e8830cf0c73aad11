"""The parts that transformers share: norm, attention, feed-forward, and the loss over a vocabulary.

Dimensions are named so that "sequence" is the length of what flows between the parts (where a sequence-parallel plan
splits it) and "length" that of what is inside them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks.models.model import Mark, Tree, constant, weights

OUTSIDE = ("batch", "sequence", "embed")


def norm_params(width: int, dtype: jnp.dtype) -> Tree:
    return {"gain": constant(1, dtype, embed=width), "bias": constant(0, dtype, embed=width)}


def norm(params: Tree, x: jax.Array) -> jax.Array:
    """Layer norm, in 32 bits."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return scaled.astype(x.dtype) * params["gain"] + params["bias"]


def attention_params(width: int, heads: int, dtype: jnp.dtype) -> Tree:
    head = width // heads
    projections = {name: weights(dtype, embed=width, heads=heads, head=head) for name in ("query", "key", "value")}
    return {**projections, "out": weights(dtype, heads=heads, head=head, embed=width)}


def attention(params: Tree, x: jax.Array, memory: jax.Array, mark: Mark, *, causal: bool) -> jax.Array:
    """Attention of `x` to `memory`, both [batch, length, embed]."""
    inside = ("batch", "length", "heads", "head")
    query = mark(jnp.einsum("bqd,dhk->bqhk", x, params["query"]), *inside)
    key = mark(jnp.einsum("bsd,dhk->bshk", memory, params["key"]), *inside)
    value = mark(jnp.einsum("bsd,dhk->bshk", memory, params["value"]), *inside)
    scores = jnp.einsum("bqhk,bshk->bhqs", query, key).astype(jnp.float32) / query.shape[-1] ** 0.5
    if causal:
        earlier = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(earlier, scores, -1e9)
    mixed = jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores).astype(x.dtype), value)
    return mark(jnp.einsum("bqhk,hkd->bqd", mark(mixed, *inside), params["out"]), *OUTSIDE)


def feed_forward_params(width: int, hidden: int, dtype: jnp.dtype) -> Tree:
    return {
        "up": weights(dtype, embed=width, mlp=hidden),
        "up_bias": constant(0, dtype, mlp=hidden),
        "down": weights(dtype, mlp=hidden, embed=width),
        "down_bias": constant(0, dtype, embed=width),
    }


def feed_forward(params: Tree, x: jax.Array, mark: Mark) -> jax.Array:
    hidden = mark(jax.nn.gelu(x @ params["up"] + params["up_bias"]), "batch", "length", "mlp")
    return mark(hidden @ params["down"] + params["down_bias"], *OUTSIDE)


def block_params(width: int, heads: int, hidden: int, dtype: jnp.dtype) -> Tree:
    return {
        "attention_norm": norm_params(width, dtype),
        "attention": attention_params(width, heads, dtype),
        "mlp_norm": norm_params(width, dtype),
        "mlp": feed_forward_params(width, hidden, dtype),
    }


def block(params: Tree, x: jax.Array, mark: Mark, *, causal: bool) -> jax.Array:
    """A pre-norm layer of self-attention and a perceptron."""
    x = attend(params, x, mark, causal=causal)
    h = mark(norm(params["mlp_norm"], x), *OUTSIDE)
    return mark(x + feed_forward(params["mlp"], h, mark), *OUTSIDE)


def attend(params: Tree, x: jax.Array, mark: Mark, *, causal: bool) -> jax.Array:
    """The half of a layer that is self-attention."""
    h = mark(norm(params["attention_norm"], x), *OUTSIDE)
    return mark(x + attention(params["attention"], h, h, mark, causal=causal), *OUTSIDE)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean over all targets."""
    wide = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(wide, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(wide, axis=-1) - chosen)
