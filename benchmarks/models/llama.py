"""A Llama train step in plain JAX: grouped attention, rotary positions, SwiGLU, RMS norms, remat per layer, adamw.

In place of its perceptron a layer may have `experts`, of which each token goes through `chosen`. Every expert takes an
even share of the tokens of a sequence, in the order of experts: those that are too many for one go through the next.

The layers stand in a `lax.scan` over stacked weights, or one after the other. Of the large models nothing is allocated:
the state and the batch are shapes, for planning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.models.gpt import stacked
from benchmarks.models.model import Array, Mark, Model, Tree, constant, integers, unmarked, weights
from benchmarks.models.transformer import OUTSIDE
from benchmarks.models.workload import Workload


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
    remat: bool = True
    cudnn: bool = False
    """Attention is a kernel of cuDNN, for GPUs and 16 bits."""
    dtype: Any = jnp.bfloat16
    head: int | None = None
    """Width of a head; by default all heads together are as wide as the model."""
    gated: bool = True
    """SwiGLU; else one product comes before a GELU."""
    in_8_bits: bool = False
    """Products of layers with their weights multiply in 8 bits."""
    experts: int = 0
    """Perceptrons of a layer, each `hidden` wide and gated; 0: one for all tokens."""
    chosen: int = 1
    """Experts that each token goes through."""
    sharding: jax.sharding.Sharding | None = None
    """The sharding of tokens at their experts: [batch, expert, place, embed]."""

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head or self.width // self.num_heads

    @property
    def product(self) -> Callable[[str, jax.Array, jax.Array], jax.Array]:
        """The product with weights of a layer, as `jnp.einsum` of two arrays."""
        return einsum_in_8_bits if self.in_8_bits else jnp.einsum


LLAMA_8B = Llama(num_layers=32, width=4096, num_heads=32, num_kv_heads=8, hidden=14336)
LLAMA_70B = Llama(num_layers=80, width=8192, num_heads=64, num_kv_heads=8, hidden=28672)
LLAMA_405B = Llama(num_layers=126, width=16384, num_heads=128, num_kv_heads=8, hidden=53248)


class State(NamedTuple):
    """State that the train step replaces."""

    params: Tree
    opt_state: Any


def abstract_step(model: Llama) -> tuple[Callable[..., Any], State, jax.ShapeDtypeStruct]:
    """The train step, and the shapes of its state and of its batch."""
    optimizer = optax.adamw(3e-4)

    def create() -> State:
        params = jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), _weights(model))
        return State(params, optimizer.init(params))

    def train_step(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
        loss, gradients = jax.value_and_grad(lambda params: _loss(model, params, tokens))(state.params)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), loss

    tokens = jax.ShapeDtypeStruct((model.batch, model.sequence + 1), jnp.int32)
    return train_step, jax.eval_shape(create), tokens


def llama(
    *,
    layers: int = 4,
    width: int = 256,
    heads: int = 16,
    kv_heads: int = 8,
    hidden: int = 512,
    vocabulary: int = 1024,
    length: int = 128,
    batch: int = 32,
    dtype: Any = jnp.float32,
) -> Model:
    """The model at a size to compile, its layers one after the other and nothing computed again."""
    model = Llama(
        num_layers=layers,
        width=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        hidden=hidden,
        vocabulary=vocabulary,
        sequence=length,
        batch=batch,
        scanned=False,
        remat=False,
        dtype=dtype,
    )
    return Model(
        name="llama",
        params=_weights(model),
        batch={"tokens": integers(vocabulary, batch=batch, positions=length + 1)},
        loss=lambda params, batch, mark: _loss(model, params, batch["tokens"], mark),
    )


def llama_workload(name: str, model: Llama) -> Workload:
    """The train step with a master copy in 32 bits, its layers one after the other.

    FLOPs are 6 for each parameter but those of the embedding and 12 L S H for the attention, per token (Chowdhery et
    al. 2022, appendix B).
    """
    params = _weights(model)
    multiplied = sum(
        array.abstract.size * (model.chosen / model.experts if "expert" in array.names else 1)
        for array in jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Array))
    )
    multiplied -= model.vocabulary * model.width
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


def _weights(model: Llama) -> Tree:
    """The parameters as arrays to make, by the names of their dimensions."""
    width, head, dtype = model.width, model.head_width, model.dtype
    expert = {"expert": model.experts} if model.experts else {}
    layer = {
        "attention_norm": constant(1, dtype, embed=width),
        "query": weights(dtype, embed=width, heads=model.num_heads, head=head),
        "key": weights(dtype, embed=width, heads=model.num_kv_heads, head=head),
        "value": weights(dtype, embed=width, heads=model.num_kv_heads, head=head),
        "out": weights(dtype, heads=model.num_heads, head=head, embed=width),
        "mlp_norm": constant(1, dtype, embed=width),
        **({"gate": weights(dtype, **expert, embed=width, mlp=model.hidden)} if model.gated else {}),
        "up": weights(dtype, **expert, embed=width, mlp=model.hidden),
        "down": weights(dtype, **expert, mlp=model.hidden, embed=width),
        **({"router": weights(dtype, embed=width, choices=model.experts)} if model.experts else {}),
    }
    outside = {
        "embedding": weights(dtype, vocabulary=model.vocabulary, embed=width),
        "final_norm": constant(1, dtype, embed=width),
        "head": weights(dtype, embed=width, vocabulary=model.vocabulary),
    }
    if model.scanned:
        return {**outside, "layers": stacked(layer, model.num_layers)}
    return {**outside, **{f"layer_{number}": layer for number in range(model.num_layers)}}


def _loss(model: Llama, params: Tree, tokens: jax.Array, mark: Mark = unmarked) -> jax.Array:
    x = mark(params["embedding"][tokens[:, :-1]], *OUTSIDE)
    run = partial(_layer, model, mark=mark)
    layer = jax.checkpoint(run) if model.remat else run
    if model.scanned:
        x, _ = jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, params["layers"])
    else:
        for number in range(model.num_layers):
            with jax.named_scope(f"h_{number}"):
                x = layer(x, params[f"layer_{number}"])
    logits = jnp.einsum("bsd,dv->bsv", _norm(x, params["final_norm"]), params["head"]).astype(jnp.float32)
    logits = mark(logits, "batch", "length", "vocabulary")
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def _layer(model: Llama, x: jax.Array, weights: Tree, mark: Mark) -> jax.Array:
    h = mark(_norm(x, weights["attention_norm"]), *OUTSIDE)
    x = mark(x + _attention(model, h, weights, mark), *OUTSIDE)
    y = mark(_norm(x, weights["mlp_norm"]), *OUTSIDE)
    if model.experts:
        return mark(x + through_experts(model, y, weights), *OUTSIDE)
    up = model.product("bsd,df->bsf", y, weights["up"])
    gate = jax.nn.silu(model.product("bsd,df->bsf", y, weights["gate"])) * up if model.gated else jax.nn.gelu(up)
    hidden = mark(gate, "batch", "length", "mlp")
    return mark(x + model.product("bsf,fd->bsd", hidden, weights["down"]), *OUTSIDE)


def through_experts(model: Llama, x: jax.Array, weights: Tree) -> jax.Array:
    """Return the result of the chosen experts for x [batch, sequence, embed]; tokens of one lie behind each other."""

    def at_experts(tokens: jax.Array) -> jax.Array:
        return tokens if model.sharding is None else jax.lax.with_sharding_constraint(tokens, model.sharding)

    batch, sequence, width = x.shape
    places = sequence * model.chosen // model.experts
    gates = jax.nn.softmax((x @ weights["router"]).astype(jnp.float32))
    share, expert = jax.lax.top_k(gates, model.chosen)
    order = jnp.argsort(expert.reshape(batch, sequence * model.chosen), axis=-1)
    sent = jnp.take_along_axis(x, (order // model.chosen)[..., None], axis=1)
    sent = at_experts(sent.reshape(batch, model.experts, places, width))
    up = model.product("becd,edf->becf", sent, weights["up"])
    hidden = jax.nn.silu(model.product("becd,edf->becf", sent, weights["gate"])) * up
    done = at_experts(model.product("becf,efd->becd", hidden, weights["down"]))
    done = done.reshape(batch, sequence * model.chosen, width)
    came_back = jnp.take_along_axis(done, jnp.argsort(order, axis=-1)[..., None], axis=1)
    share = (share / share.sum(-1, keepdims=True)).astype(x.dtype)
    return jnp.einsum("bsk,bskd->bsd", share, came_back.reshape(batch, sequence, model.chosen, width))


def _attention(model: Llama, x: jax.Array, weights: Tree, mark: Mark) -> jax.Array:
    batch, sequence, _ = x.shape
    groups = model.num_heads // model.num_kv_heads
    inside = ("batch", "length", "heads", "head")
    query = mark(_rotated(model.product("bsd,dhk->bshk", x, weights["query"])), *inside)
    key = mark(_rotated(model.product("bsd,dhk->bshk", x, weights["key"])), *inside)
    value = mark(model.product("bsd,dhk->bshk", x, weights["value"]), *inside)
    if model.cudnn:
        mixed = mark(jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn"), *inside)
        return model.product("bshk,hkd->bsd", mixed, weights["out"])
    query = query.reshape(batch, sequence, model.num_kv_heads, groups, model.head_width)
    scores = jnp.einsum("bsngk,btnk->bngst", query, key).astype(jnp.float32) / model.head_width**0.5
    mask = jnp.tril(jnp.ones((sequence, sequence), bool))
    shares = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1).astype(x.dtype)
    mixed = jnp.einsum("bngst,btnk->bsngk", shares, value)
    mixed = mark(mixed.reshape(batch, sequence, model.num_heads, model.head_width), *inside)
    return model.product("bshk,hkd->bsd", mixed, weights["out"])


def _rotated(x: jax.Array) -> jax.Array:
    """Turn the halves of every head by angles that grow with the position."""
    frequencies = 500_000.0 ** -jnp.linspace(0.0, 1.0, x.shape[-1] // 2, endpoint=False)
    angles = jnp.arange(x.shape[1])[:, None] * frequencies
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum_in_8_bits(subscripts: str, x: jax.Array, weights: jax.Array) -> jax.Array:
    """An einsum whose factors are rounded to 8 bits, as its gradient is for those of the factors (Micikevicius et al.
    2022): four bits of exponent for values, five for gradients."""
    return _in_8_bits(subscripts, x, weights)


def _in_8_bits(subscripts: str, x: jax.Array, y: jax.Array, gradient: Any = jnp.float8_e4m3fn) -> jax.Array:
    return jnp.einsum(subscripts, x.astype(gradient), y.astype(jnp.float8_e4m3fn), preferred_element_type=jnp.bfloat16)


def _forward_in_8_bits(subscripts: str, x: jax.Array, weights: jax.Array) -> tuple[jax.Array, Tree]:
    return _in_8_bits(subscripts, x, weights), (x, weights)


def _backward_in_8_bits(subscripts: str, factors: Tree, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    (of_x, of_weights), of_result = subscripts.split("->")[0].split(","), subscripts.split("->")[1]
    x, weights = factors
    in_5_bits = jnp.float8_e5m2
    to_x = _in_8_bits(f"{of_result},{of_weights}->{of_x}", cotangent, weights, in_5_bits)
    to_weights = _in_8_bits(f"{of_result},{of_x}->{of_weights}", cotangent, x, in_5_bits)
    return to_x.astype(x.dtype), to_weights.astype(weights.dtype)


einsum_in_8_bits.defvjp(_forward_in_8_bits, _backward_in_8_bits)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * scale
