"""The parts that transformers share: norm, attention, feed-forward, and the loss over a vocabulary.

Dimensions are named so that "sequence" is the length of what flows between the parts (where a sequence-parallel plan
splits it) and "length" that of what is inside them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import cast

import jax
import jax.numpy as jnp

import autopar
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


def attention_params(width: int, heads: int, dtype: jnp.dtype, head: int | None = None) -> Tree:
    """Projections to heads and back; a `head` is as wide as makes all of them as wide as the model, unless given."""
    head = head or width // heads
    projections = {name: weights(dtype, embed=width, heads=heads, head=head) for name in ("query", "key", "value")}
    return {**projections, "out": weights(dtype, heads=heads, head=head, embed=width)}


def attention(
    params: Tree, x: jax.Array, memory: jax.Array, mark: Mark, *, causal: bool, kernel: bool = False
) -> jax.Array:
    """Attention of `x` to `memory`, both [batch, length, embed]; in a `kernel` scores stay inside of it."""
    inside = ("batch", "length", "heads", "head")
    query = mark(jnp.einsum("bqd,dhk->bqhk", x, params["query"]), *inside)
    key = mark(jnp.einsum("bsd,dhk->bshk", memory, params["key"]), *inside)
    value = mark(jnp.einsum("bsd,dhk->bshk", memory, params["value"]), *inside)
    mixed = _in_a_kernel(causal, query, key, value) if kernel else _mixed(causal, query, key, value)
    return mark(jnp.einsum("bqhk,hkd->bqd", mark(mixed, *inside), params["out"]), *OUTSIDE)


def _mixed(causal: bool, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqhk,bshk->bhqs", query, key).astype(jnp.float32) / query.shape[-1] ** 0.5
    if causal:
        earlier = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(earlier, scores, -1e9)
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores).astype(query.dtype), value)


def _in_a_kernel(causal: bool, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return cast(jax.Array, _differentiable_kernel(causal, query, key, value))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable_kernel(causal: bool, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """The same as one kernel that is told how it may be split, and another for its derivatives (Dao et al. 2022)."""
    return _kernel(causal)(query, key, value)


@cache
def _kernel(causal: bool) -> Callable[..., jax.Array]:
    return autopar.sharding_rule(partial(_mixed, causal), "b q h _, b _ h _, b _ h _ -> b q h _")


@cache
def _derivatives(causal: bool) -> Callable[..., tuple[jax.Array, ...]]:
    def derivatives(query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vjp(partial(_mixed, causal), query, key, value)[1](cotangent)

    return autopar.sharding_rule(derivatives, "b _ h _, b _ h _, b _ h _, b _ h _ -> b _ h _, b _ h _, b _ h _")


def _forward(causal: bool, query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, Tree]:
    return _in_a_kernel(causal, query, key, value), (query, key, value)


def _backward(causal: bool, operands: Tree, cotangent: jax.Array) -> tuple[jax.Array, ...]:
    return _derivatives(causal)(*operands, cotangent)


_differentiable_kernel.defvjp(_forward, _backward)


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


def block_params(width: int, heads: int, hidden: int, dtype: jnp.dtype, head: int | None = None) -> Tree:
    return {
        "attention_norm": norm_params(width, dtype),
        "attention": attention_params(width, heads, dtype, head),
        "mlp_norm": norm_params(width, dtype),
        "mlp": feed_forward_params(width, hidden, dtype),
    }


def block(params: Tree, x: jax.Array, mark: Mark, *, causal: bool, kernel: bool = False) -> jax.Array:
    """A pre-norm layer of self-attention and a perceptron."""
    x = attend(params, x, mark, causal=causal, kernel=kernel)
    h = mark(norm(params["mlp_norm"], x), *OUTSIDE)
    return mark(x + feed_forward(params["mlp"], h, mark), *OUTSIDE)


def attend(params: Tree, x: jax.Array, mark: Mark, *, causal: bool, kernel: bool = False) -> jax.Array:
    """The half of a layer that is self-attention."""
    h = mark(norm(params["attention_norm"], x), *OUTSIDE)
    return mark(x + attention(params["attention"], h, h, mark, causal=causal, kernel=kernel), *OUTSIDE)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean over all targets."""
    wide = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(wide, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(wide, axis=-1) - chosen)
