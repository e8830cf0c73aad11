"""Compute cuDNN's kernels of attention by plain operations: steps that have them then run on CPUs.

Scores of one example and head: s = scale · q kᵀ + bias, what the mask hides -inf. The result is softmax(s) v, the
statistics are logsumexp(s), and the gradients are those of the result.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as of_jax
from jax.interpreters import mlir


def attention(q: Any, k: Any, v: Any, bias: Any, lengths: Any, params: Any) -> tuple[jax.Array, jax.Array]:
    """Return the result, and the statistics [batch, heads, length]."""
    mask = params["mask_type"]
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(each, groups, axis=2).astype(jnp.float32) for each in (k, v))
    scores = params["scale"] * jnp.einsum("bqhk,bshk->bhqs", q.astype(jnp.float32), k)
    if params["variadic_args"][0]:
        scores += bias.astype(jnp.float32)
    places, seen = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
    hidden = jnp.zeros(scores.shape, bool)
    if "CAUSAL" in mask.name:
        hidden |= seen > places
    if params["sliding_window_length"] is not None:
        hidden |= seen <= places - params["sliding_window_length"]
    if "PADDING" in mask.name:
        hidden |= seen >= lengths[:, None, None, None]
    scores = jnp.where(hidden, -jnp.inf, scores)
    result = jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores), v)
    return result.astype(q.dtype), jax.nn.logsumexp(scores, axis=-1)


def _forward(q, k, v, bias, _, kv_lengths, *others, is_training, **params):
    result, statistics = attention(q, k, v, bias, kv_lengths, params)
    return [result, statistics] if is_training else [result]


def _backward(q, k, v, bias, _, kv_lengths, *others, **params):
    def result_of(q, k, v, bias):
        return attention(q, k, v, bias, kv_lengths, params)[0]

    gradients = jax.vjp(result_of, q, k, v, bias)[1](others[-1])
    return list(gradients[: 4 if params["variadic_args"][1] else 3])


mlir.register_lowering(
    of_jax._dot_product_attention_fwd_p, mlir.lower_fun(_forward, multiple_results=True), platform="cpu"
)
mlir.register_lowering(
    of_jax._dot_product_attention_bwd_p, mlir.lower_fun(_backward, multiple_results=True), platform="cpu"
)
