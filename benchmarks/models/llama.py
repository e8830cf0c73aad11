"""A Llama train step in plain JAX: grouped attention, rotary positions, SwiGLU, RMS norms, remat per layer, adamw.

The layers stand in a `lax.scan` over stacked weights, or one after the other. Nothing is allocated: the state and the
batch are shapes, for planning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.models.model import SCALE, Array, Tree, integers
from benchmarks.models.workload import Workload

Weights = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Llama:
    """The sizes of a model."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    hidden: int
    vocabulary: int = 128_256
    sequence: int = 4096
    batch: int = 64
    scanned: bool = True

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.num_heads


LLAMA_8B = Llama(num_layers=32, width=4096, num_heads=32, num_kv_heads=8, hidden=14336)
LLAMA_70B = Llama(num_layers=80, width=8192, num_heads=64, num_kv_heads=8, hidden=28672)
LLAMA_405B = Llama(num_layers=126, width=16384, num_heads=128, num_kv_heads=8, hidden=53248)


class State(NamedTuple):
    """State that the train step replaces."""

    params: Weights
    opt_state: Any


def abstract_step(model: Llama) -> tuple[Callable[..., Any], State, jax.ShapeDtypeStruct]:
    """The train step, and the shapes of its state and of its batch."""
    optimizer = optax.adamw(3e-4)

    def create() -> State:
        params = _weights(model)
        return State(params, optimizer.init(params))

    def train_step(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
        loss, gradients = jax.value_and_grad(lambda params: _loss(model, params, tokens))(state.params)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), loss

    tokens = jax.ShapeDtypeStruct((model.batch, model.sequence + 1), jnp.int32)
    return train_step, jax.eval_shape(create), tokens


def llama(name: str, model: Llama) -> Workload:
    """The train step with a master copy in 32 bits, its layers one after the other.

    FLOPs are 6 for each parameter but those of the embedding and 12 L S H for the attention, per token (Chowdhery et
    al. 2022, appendix B).
    """
    params = jax.tree.map(_drawn, jax.eval_shape(lambda: _weights(model)))
    multiplied = sum(array.abstract.size for array in jax.tree.leaves(params)) - model.vocabulary * model.width
    tokens = model.batch * model.sequence

    def loss(params: Tree, statistics: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        return _loss(model, params, batch["tokens"]), statistics

    return Workload(
        name=name,
        params=params,
        batch={"tokens": integers(model.vocabulary, batch=model.batch, length=model.sequence + 1)},
        loss=loss,
        optimizer=optax.adamw(3e-4),
        flops=(6.0 * multiplied + 12.0 * model.num_layers * model.sequence * model.width) * tokens,
        tokens=tokens,
    )


def _drawn(shape: jax.ShapeDtypeStruct) -> Array:
    """Gains begin as 1, matrices are drawn."""
    names = tuple(f"dim_{number}" for number in range(len(shape.shape)))
    gain = len(shape.shape) == 1
    return Array(
        shape=shape.shape, names=names, dtype=shape.dtype, scale=0.0 if gain else SCALE, mean=1.0 if gain else 0.0
    )


def _weights(model: Llama) -> Weights:
    width, head = model.width, model.head_width
    shapes = {
        "attention_norm": (width,),
        "query": (width, model.num_heads, head),
        "key": (width, model.num_kv_heads, head),
        "value": (width, model.num_kv_heads, head),
        "out": (model.num_heads, head, width),
        "mlp_norm": (width,),
        "gate": (width, model.hidden),
        "up": (width, model.hidden),
        "down": (model.hidden, width),
    }
    weights: Weights = {
        "embedding": _zeros(model.vocabulary, width),
        "final_norm": _zeros(width),
        "head": _zeros(width, model.vocabulary),
    }
    if model.scanned:
        weights["layers"] = {name: _zeros(model.num_layers, *shape) for name, shape in shapes.items()}
    else:
        for number in range(model.num_layers):
            weights[f"layer_{number}"] = {name: _zeros(*shape) for name, shape in shapes.items()}
    return weights


def _zeros(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.bfloat16)


def _loss(model: Llama, params: Weights, tokens: jax.Array) -> jax.Array:
    x = params["embedding"][tokens[:, :-1]]
    layer = jax.checkpoint(lambda x, weights: _layer(model, x, weights))
    if model.scanned:
        x, _ = jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, params["layers"])
    else:
        for number in range(model.num_layers):
            with jax.named_scope(f"h_{number}"):
                x = layer(x, params[f"layer_{number}"])
    logits = jnp.einsum("bsd,dv->bsv", _norm(x, params["final_norm"]), params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def _layer(model: Llama, x: jax.Array, weights: Weights) -> jax.Array:
    x = x + _attention(model, _norm(x, weights["attention_norm"]), weights)
    y = _norm(x, weights["mlp_norm"])
    gate = jax.nn.silu(jnp.einsum("bsd,df->bsf", y, weights["gate"]))
    return x + jnp.einsum("bsf,fd->bsd", gate * jnp.einsum("bsd,df->bsf", y, weights["up"]), weights["down"])


def _attention(model: Llama, x: jax.Array, weights: Weights) -> jax.Array:
    batch, sequence, _ = x.shape
    groups = model.num_heads // model.num_kv_heads
    query = _rotated(jnp.einsum("bsd,dhk->bshk", x, weights["query"]))
    key = _rotated(jnp.einsum("bsd,dhk->bshk", x, weights["key"]))
    value = jnp.einsum("bsd,dhk->bshk", x, weights["value"])
    query = query.reshape(batch, sequence, model.num_kv_heads, groups, model.head_width)
    scores = jnp.einsum("bsngk,btnk->bngst", query, key).astype(jnp.float32) / model.head_width**0.5
    mask = jnp.tril(jnp.ones((sequence, sequence), bool))
    shares = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1).astype(x.dtype)
    mixed = jnp.einsum("bngst,btnk->bsngk", shares, value)
    mixed = mixed.reshape(batch, sequence, model.num_heads, model.head_width)
    return jnp.einsum("bshk,hkd->bsd", mixed, weights["out"])


def _rotated(x: jax.Array) -> jax.Array:
    """Turn the halves of every head by angles that grow with the position."""
    frequencies = 500_000.0 ** -jnp.linspace(0.0, 1.0, x.shape[-1] // 2, endpoint=False)
    angles = jnp.arange(x.shape[1])[:, None] * frequencies
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * scale
