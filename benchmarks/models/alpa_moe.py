"""The mixtures of experts of Alpa's evaluation, and a DeepSeek-MoE: 16 bits with a master copy, layers recomputed.

Alpa's (benchmark/alpa/suite_manual_moe.py in alpa-projects/alpa, layers as in `alpa_layers`) have experts in every
second layer, two per token, chosen within groups of 2048 tokens (GShard), perceptrons eight times as wide as the model,
Adafactor. FLOPs of a step are counted as there (benchmark/alpa/util.py, `compute_moe_tflops`), without recomputation:
T tokens, width H, sequences of S tokens, groups of G, E experts, L layers, V words, half of the layers of each kind,

    dense     3 (T H² (8 + 4·8) + 4 T S H)
    experts   3 (T H² (8 + 8·8) + 4 T S H + 2 T H E + 4 T G + 8 T H G)
    words     6 T H V

DeepSeek-MoE (Dai et al. 2024, arXiv:2401.06066) has one dense layer, then experts in all, six of 64 per token and two
that every token goes to; its FLOPs are 6 for each parameter that a token meets, and 12 L S H for the attention
(Chowdhery et al. 2022, appendix B).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.models import alpa_layers
from benchmarks.models.model import Tree, integers, unmarked, weights
from benchmarks.models.transformer import attend, attention_params, cross_entropy, norm, norm_params
from benchmarks.models.workload import Workload, adamw

_MLP_FACTOR = 8
_GROUP = 2048


@dataclass(frozen=True, kw_only=True)
class MoESize:
    """The sizes of a model of Alpa's, and of its batch."""

    width: int
    layers: int
    experts: int
    heads: int = 16
    length: int = 1024
    vocabulary: int = 32000
    batch: int = 1024
    group: int = _GROUP
    recomputed: bool = True
    """Every layer is computed again in the backward pass."""

    @property
    def flops(self) -> float:
        """FLOPs of a step, as in the module's formula."""
        tokens, width = self.batch * self.length, self.width
        attention = 8 * tokens * width**2 + 4 * tokens * self.length * width
        dense = attention + 4 * _MLP_FACTOR * tokens * width**2
        chosen = 2 * tokens * width * self.experts + 4 * tokens * self.group + 8 * tokens * width * self.group
        experts = attention + 8 * _MLP_FACTOR * tokens * width**2 + chosen
        return 3 * (dense + experts) * self.layers / 2 + 6 * tokens * width * self.vocabulary


@dataclass(frozen=True, kw_only=True)
class DeepSeekSize:
    """The sizes of a DeepSeek-MoE, and of its batch."""

    width: int = 2048
    layers: int = 28
    experts: int = 64
    chosen: int = 6
    shared: int = 2
    expert_hidden: int = 1408
    hidden: int = 10944
    heads: int = 16
    length: int = 4096
    vocabulary: int = 102400
    batch: int = 256
    recomputed: bool = True


MOE_SIZES: Mapping[str, MoESize] = {
    "380M": MoESize(width=768, layers=8, experts=8),
    "690M": MoESize(width=768, layers=8, experts=16),
    "1.3B": MoESize(width=768, layers=16, experts=16),
    "2.4B": MoESize(width=1024, layers=16, experts=16),
    "7.1B": MoESize(width=1280, layers=16, experts=32),
    "10B": MoESize(width=1536, layers=16, experts=32),
    "27B": MoESize(width=2048, layers=16, experts=48),
    "70B": MoESize(width=2048, layers=32, experts=64),
    "140B": MoESize(width=2048, layers=32, experts=128),
}
DEEPSEEK_SIZES: Mapping[str, DeepSeekSize] = {"deepseek-moe-16b": DeepSeekSize()}


def alpa_moe(
    name: str, size: MoESize, dtype: Any = jnp.float16, optimizer: optax.GradientTransformation | None = None
) -> Workload:
    """A train step of this size, by Adafactor unless an optimizer is given: layers 0, 2, ... have experts."""
    hidden = _MLP_FACTOR * size.width
    with_experts = {
        **alpa_layers.attention_half_params(size.width, size.heads, dtype),
        **_expert_params(size.width, size.experts, hidden, dtype),
    }
    dense = alpa_layers.layer_params(size.width, size.heads, hidden, dtype)
    layers = [dense if number % 2 else with_experts for number in range(size.layers)]
    experts = partial(run_experts, chosen=2, group=max(1, size.group // size.length))
    expert_layer = partial(alpa_layers.layer, perceptron=experts)
    runs = [alpa_layers.layer if number % 2 else expert_layer for number in range(size.layers)]
    return Workload(
        name=name,
        **_language_model(layers, runs, size, dtype, alpa_layers.cross_entropy),
        optimizer=optimizer or optax.adafactor(1e-2),
        flops=size.flops,
        tokens=size.batch * size.length,
    )


def deepseek_moe(name: str, size: DeepSeekSize, dtype: Any = jnp.bfloat16) -> Workload:
    """A train step of this size."""
    attention = _attention_half(size.width, size.heads, dtype)
    with_experts = {
        **attention,
        **_expert_params(size.width, size.experts, size.expert_hidden, dtype),
        "expert_gate": weights(dtype, expert=size.experts, embed=size.width, mlp=size.expert_hidden),
        "shared": _gated_params(size.width, size.shared * size.expert_hidden, dtype),
    }
    dense = {**attention, "shared": _gated_params(size.width, size.hidden, dtype)}
    expert_layer = partial(_expert_layer, experts=partial(run_experts, chosen=size.chosen, group=1))
    others = size.layers - 1
    fields = _language_model(
        [dense, *[with_experts] * others],
        [partial(_expert_layer, experts=None), *[expert_layer] * others],
        size,
        dtype,
        cross_entropy,
    )
    met = sum(array.abstract.size for array in jax.tree.leaves(fields["params"]))
    unused = (size.experts - size.chosen) * len(("up", "gate", "down")) * size.width * size.expert_hidden * others
    tokens = size.batch * size.length
    words = size.vocabulary * size.width  # of the embedding, which is looked up
    return Workload(
        name=name,
        **fields,
        optimizer=adamw(),
        flops=6.0 * (met - unused - words) * tokens + 12.0 * size.layers * size.length * size.width * tokens,
        tokens=tokens,
    )


def _language_model(
    layers: list[Tree],
    runs: list[Callable[[Tree, jax.Array], jax.Array]],
    size: MoESize | DeepSeekSize,
    dtype: Any,
    cross_entropy: Callable[[jax.Array, jax.Array], jax.Array],
) -> dict[str, Any]:
    """The fields of a workload: parameters, batch and loss."""

    def loss(params: Tree, statistics: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        x = params["embedding"][batch["tokens"]]
        for number, run in enumerate(runs):
            with jax.named_scope(f"h_{number}"):
                x = (jax.checkpoint(run) if size.recomputed else run)(params[f"h_{number}"], x)
        return cross_entropy(norm(params["norm"], x) @ params["head"], batch["targets"]), statistics

    params = {
        "embedding": weights(dtype, vocabulary=size.vocabulary, embed=size.width),
        **{f"h_{number}": layer for number, layer in enumerate(layers)},
        "norm": norm_params(size.width, dtype),
        "head": weights(dtype, embed=size.width, vocabulary=size.vocabulary),
    }
    batch = {name: integers(size.vocabulary, batch=size.batch, length=size.length) for name in ("tokens", "targets")}
    return {"params": params, "batch": batch, "loss": loss}


def _attention_half(width: int, heads: int, dtype: Any) -> Tree:
    return {
        "attention_norm": norm_params(width, dtype),
        "attention": attention_params(width, heads, dtype),
        "mlp_norm": norm_params(width, dtype),
    }


def _expert_params(width: int, experts: int, hidden: int, dtype: Any) -> Tree:
    return {
        "router": weights(dtype, embed=width, choices=experts),
        "expert_up": weights(dtype, expert=experts, embed=width, mlp=hidden),
        "expert_down": weights(dtype, expert=experts, mlp=hidden, embed=width),
    }


def _gated_params(width: int, hidden: int, dtype: Any) -> Tree:
    return {
        "gate": weights(dtype, embed=width, mlp=hidden),
        "up": weights(dtype, embed=width, mlp=hidden),
        "down": weights(dtype, mlp=hidden, embed=width),
    }


def _expert_layer(params: Tree, x: jax.Array, experts: Callable[[Tree, jax.Array], jax.Array] | None) -> jax.Array:
    """Attention, then the experts that a token chooses, or a perceptron that every token goes to, or both."""
    x = attend(params, x, unmarked, causal=True)
    h = norm(params["mlp_norm"], x)
    if experts is not None:
        x = x + experts(params, h)
    if "shared" in params:
        gate, up, down = (params["shared"][name] for name in ("gate", "up", "down"))
        x = x + (jax.nn.silu(h @ gate) * (h @ up)) @ down
    return x


def run_experts(params: Tree, x: jax.Array, *, chosen: int, group: int) -> jax.Array:
    """The experts' output for x [batch, length, embed]; `group` sequences share the places that an expert has."""
    grouped = x.reshape(-1, group * x.shape[1], x.shape[2])
    gates = jax.nn.softmax((grouped @ params["router"]).astype(jnp.float32))
    combine = _combine(gates, chosen).astype(x.dtype)
    sent = jnp.einsum("gsec,gsm->egcm", (combine > 0).astype(x.dtype), grouped)
    hidden = jnp.einsum("egcm,emh->egch", sent, params["expert_up"])
    if "expert_gate" in params:
        hidden = hidden * jax.nn.silu(jnp.einsum("egcm,emh->egch", sent, params["expert_gate"]))
    else:
        hidden = jax.nn.relu(hidden)
    done = jnp.einsum("egch,ehm->egcm", hidden, params["expert_down"])
    return jnp.einsum("gsec,egcm->gsm", combine, done).reshape(x.shape)


def _combine(gates: jax.Array, chosen: int) -> jax.Array:
    """Weights [group, token, expert, place]: an expert has as many places as an even share of the choices."""
    length, num_experts = gates.shape[1:]
    places = max(1, chosen * length // num_experts)
    weight, number = jax.lax.top_k(gates, chosen)
    weight = weight / weight.sum(-1, keepdims=True)
    onehot = jax.nn.one_hot(number, num_experts)  # [group, token, choice, expert]
    # First choices of all tokens take their places before second ones.
    queue = onehot.swapaxes(1, 2).reshape(-1, chosen * length, num_experts)
    place = ((jnp.cumsum(queue, axis=1) - 1) * queue).sum(-1).reshape(-1, chosen, length).swapaxes(1, 2)
    slot = jax.nn.one_hot(place.astype(jnp.int32), places)
    return jnp.einsum("gske,gskc->gsec", onehot * weight[..., None], slot)
