"""M6's mixtures of experts: transformers of few, wide layers whose perceptrons are thousands of experts.

Yang et al., M6-T, arXiv:2105.15082: 1T parameters on 480 V100s; Lin et al., M6-10T, arXiv:2110.03888: 10T on 512. Those
sums and devices are published; layers, widths, numbers of experts and the batch are ours, such that the sums come out.
The tokens of one device are a group; each goes to one expert, which has a fixed number of places for a group (GShard,
Lepikhin et al. 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import autopar
from benchmarks.models.model import Tree, integers, unmarked, weights
from benchmarks.models.transformer import attend, attention_params, cross_entropy, norm, norm_params

SPARE = 1.25  # Places per expert, as a multiple of what an even share would need.


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model of a published number of parameters, and the devices that it was trained on."""

    name: str
    num_devices: int
    layers: int
    experts: int
    hidden: int
    width: int = 1024
    heads: int = 16
    vocabulary: int = 21_128
    length: int = 128
    batch: int = 8
    """Sequences of one device."""

    @property
    def num_parameters(self) -> int:
        """The parameters of all experts; the rest is less than a hundredth."""
        return self.layers * self.experts * 2 * self.width * self.hidden


SIZES = (
    Size(name="M6 1T", num_devices=480, layers=24, experts=960, hidden=21_248),
    Size(name="M6 10T", num_devices=512, layers=48, experts=10_240, hidden=9_984),
)


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Two moments and a master copy of every parameter, in 32 bits: 12 bytes beside the 2 of a parameter in 16 bits."""

    def init(self, params: Tree) -> Tree:
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return {"master": jax.tree.map(lambda p: p.astype(jnp.float32), params), "mu": zeros, "nu": zeros}

    def update(self, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g.astype(jnp.float32), state["mu"], grads)
        nu = jax.tree.map(lambda n, g: 0.99 * n + 0.01 * g.astype(jnp.float32) ** 2, state["nu"], grads)
        master = jax.tree.map(lambda p, m, n: p - 1e-3 * m / (jnp.sqrt(n) + 1e-8), state["master"], mu, nu)
        params = jax.tree.map(lambda p, q: q.astype(p.dtype), params, master)
        return params, {"master": master, "mu": mu, "nu": nu}


@dataclass(frozen=True, kw_only=True)
class Factored:
    """Adafactor's second moment, the mean of every row and column of a matrix (Shazeer and Stern, arXiv:1804.04235)."""

    def init(self, params: Tree) -> Tree:
        rows = jax.tree.map(lambda p: jnp.zeros(p.shape[:-1], jnp.float32), params)
        columns = jax.tree.map(lambda p: jnp.zeros((*p.shape[:-2], p.shape[-1]), jnp.float32), params)
        return {"rows": rows, "columns": columns}

    def update(self, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        def mean(g: jax.Array, axis: int) -> jax.Array:
            return jnp.mean(g.astype(jnp.float32) ** 2, axis=axis) if g.ndim >= -axis else g.astype(jnp.float32) ** 2

        def moved(p: jax.Array, g: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
            scale = column
            if g.ndim > 1:
                scale = row[..., None] / (row.mean(-1)[..., None, None] + 1e-30) * column[..., None, :]
            return (p - 1e-3 * g.astype(jnp.float32) / (jnp.sqrt(scale) + 1e-8)).astype(p.dtype)

        rows = jax.tree.map(lambda n, g: 0.99 * n + 0.01 * mean(g, -1), state["rows"], grads)
        columns = jax.tree.map(lambda n, g: 0.99 * n + 0.01 * mean(g, -2), state["columns"], grads)
        return jax.tree.map(moved, params, grads, rows, columns), {"rows": rows, "columns": columns}


def abstract_step(size: Size, optimizer: Adam | Factored) -> tuple[Any, Tree, Tree]:
    """Return a train step, and the types of its state and its batch; parameters and gradients are in 16 bits."""
    dtype = jnp.float16
    layer = {
        "attention_norm": norm_params(size.width, dtype),
        "attention": attention_params(size.width, size.heads, dtype),
        "mlp_norm": norm_params(size.width, dtype),
        "router": weights(dtype, embed=size.width, choices=size.experts),
        "experts_up": weights(dtype, expert=size.experts, embed=size.width, mlp=size.hidden),
        "experts_down": weights(dtype, expert=size.experts, mlp=size.hidden, embed=size.width),
    }
    params = {
        "embedding": weights(dtype, vocabulary=size.vocabulary, embed=size.width),
        "layers": [layer] * size.layers,
        "norm": norm_params(size.width, dtype),
        "head": weights(dtype, embed=size.width, vocabulary=size.vocabulary),
    }
    params = jax.tree.map(lambda array: array.abstract, params)
    rows = size.num_devices * size.batch
    tokens = integers(size.vocabulary, batch=rows, length=size.length).abstract
    batch = {"tokens": tokens, "targets": tokens}

    def train_step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        params, opt_state = state
        value, grads = jax.value_and_grad(lambda params: _loss(size, params, batch))(params)
        return optimizer.update(grads, opt_state, params), value

    return train_step, (params, jax.eval_shape(optimizer.init, params)), batch


def _loss(size: Size, params: Tree, batch: Tree) -> jax.Array:
    x = params["embedding"][batch["tokens"]]
    for layer in params["layers"]:
        x = attend(layer, x, unmarked, causal=True)
        x = autopar.layer_boundary(x + _experts(size, layer, norm(layer["mlp_norm"], x)))
    return cross_entropy(norm(params["norm"], x) @ params["head"], batch["targets"])


def _experts(size: Size, layer: Tree, x: jax.Array) -> jax.Array:
    """Return what the experts make of x [batch, length, embed]."""
    tokens = x.reshape(-1, size.batch * size.length, size.width)  # [group, token, embed]
    gates = jax.nn.softmax((tokens @ layer["router"]).astype(jnp.float32))
    weight = jnp.max(gates, axis=-1)
    onehot = jax.nn.one_hot(jnp.argmax(gates, axis=-1), size.experts, dtype=x.dtype)
    places = max(1, int(SPARE * tokens.shape[1] / size.experts))
    place = ((jnp.cumsum(onehot, axis=1) - 1) * onehot).sum(-1)
    slot = jax.nn.one_hot(place.astype(jnp.int32), places, dtype=x.dtype)
    sent = onehot[..., None] * slot[:, :, None, :]  # [group, token, expert, place]
    inputs = jnp.einsum("gtec,gtd->egcd", sent, tokens)
    hidden = jax.nn.gelu(jnp.einsum("egcd,edf->egcf", inputs, layer["experts_up"]))
    done = jnp.einsum("egcf,efd->egcd", hidden, layer["experts_down"])
    mixed = jnp.einsum("gtec,egcd->gtd", sent * weight.astype(x.dtype)[..., None, None], done)
    return mixed.reshape(x.shape)
