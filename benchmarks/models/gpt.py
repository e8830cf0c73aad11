"""A decoder-only transformer in the manner of GPT-2: learned positions, the embedding used again for the logits."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.models.model import Mark, Model, Tree, integers, weights
from benchmarks.models.transformer import OUTSIDE, block, block_params, cross_entropy, norm, norm_params


def gpt(
    *,
    layers: int = 4,
    width: int = 256,
    heads: int = 8,
    hidden: int = 0,
    vocabulary: int = 1024,
    length: int = 128,
    batch: int = 32,
    remat: bool = False,
    scan: bool = False,
    dtype: Any = jnp.float32,
) -> Model:
    """`hidden` of 0: four times the width. `remat` recomputes each layer; `scan` stacks the layers' parameters."""
    layer = block_params(width, heads, hidden or 4 * width, dtype)

    def loss(params: Tree, batch: Tree, mark: Mark) -> jax.Array:
        run = partial(block, mark=mark, causal=True)
        run = jax.checkpoint(run) if remat else run
        x = mark(params["embedding"][batch["tokens"]] + params["positions"], *OUTSIDE)
        if scan:
            x, _ = jax.lax.scan(lambda x, layer: (run(layer, x), None), x, params["layers"])
        else:
            for layer in params["layers"]:
                x = run(layer, x)
        logits = norm(params["norm"], x) @ params["embedding"].T
        return cross_entropy(mark(logits, "batch", "length", "vocabulary"), batch["targets"])

    return Model(
        name="gpt",
        params={
            "embedding": weights(dtype, vocabulary=vocabulary, embed=width),
            "positions": weights(dtype, positions=length, embed=width),
            "layers": stacked(layer, layers) if scan else [layer] * layers,
            "norm": norm_params(width, dtype),
        },
        batch={name: integers(vocabulary, batch=batch, length=length) for name in ("tokens", "targets")},
        loss=loss,
    )


def stacked(layer: Tree, layers: int) -> Tree:
    """The parameters of equal layers, as one tree with a dimension more."""
    return jax.tree.map(lambda a: dataclasses.replace(a, shape=(layers, *a.shape), names=("layers", *a.names)), layer)
