"""A perceptron whose layers widen and narrow in turn: column- and row-parallel pairs for whoever splits it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.models.model import Array, Mark, Model, Tree, constant, weights


def mlp(*, layers: int = 4, width: int = 512, hidden: int = 2048, batch: int = 256, dtype: Any = jnp.float32) -> Model:
    """`layers` (an even number) matrices, [width, hidden] and [hidden, width] in turn."""

    def loss(params: Tree, batch: Tree, mark: Mark) -> jax.Array:
        x = mark(batch["x"], "batch", "embed")
        for up, down in zip(params["up"], params["down"], strict=True):
            h = mark(jax.nn.relu(x @ up["w"] + up["b"]), "batch", "mlp")
            x = mark(x + jnp.tanh(h @ down["w"] + down["b"]), "batch", "embed")
        return jnp.mean((x - batch["y"]).astype(jnp.float32) ** 2)

    up = {"w": weights(dtype, embed=width, mlp=hidden), "b": constant(0, dtype, mlp=hidden)}
    down = {"w": weights(dtype, mlp=hidden, embed=width), "b": constant(0, dtype, embed=width)}
    example = Array(shape=(batch, width), names=("batch", "embed"), dtype=dtype, scale=1.0)
    return Model(
        name="mlp",
        params={"up": [up] * (layers // 2), "down": [down] * (layers // 2)},
        batch={"x": example, "y": example},
        loss=loss,
    )
