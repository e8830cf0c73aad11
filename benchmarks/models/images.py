"""Two classifiers of images: a residual network of convolutions with batch statistics, and a vision transformer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.models.model import Array, Mark, Model, Tree, constant, integers, weights
from benchmarks.models.transformer import OUTSIDE, block, block_params, cross_entropy, norm, norm_params

PIXELS = ("batch", "height", "width", "channels")


def convnet(
    *,
    stages: int = 3,
    blocks: int = 2,
    channels: int = 32,
    image: int = 32,
    classes: int = 128,
    batch: int = 64,
    dtype: Any = jnp.float32,
) -> Model:
    """Each stage after the first has half the height and width and twice the channels."""

    def loss(params: Tree, batch: Tree, mark: Mark) -> jax.Array:
        x = mark(_convolve(batch["image"], params["stem"]), *PIXELS)
        for number, stage in enumerate(params["stages"]):
            if number:
                x = mark(_convolve(x, stage["widen"], stride=2), *PIXELS)
            for layer in stage["blocks"]:
                h = jax.nn.relu(_normalise(layer["norm1"], _convolve(x, layer["conv1"])))
                h = mark(h, "batch", "height", "width", "mlp")
                h = _normalise(layer["norm2"], _convolve(h, layer["conv2"]))
                x = mark(jax.nn.relu(x + h), *PIXELS)
        return cross_entropy(x.mean((1, 2)) @ params["head"], batch["label"])

    widths = [channels * 2**number for number in range(stages)]
    return Model(
        name="convnet",
        params={
            "stem": _kernel(dtype, colours=3, channels=channels),
            "stages": [
                {
                    "blocks": [_residual_block(wide, dtype)] * blocks,
                    **({"widen": _kernel(dtype, narrow=wide // 2, channels=wide)} if number else {}),
                }
                for number, wide in enumerate(widths)
            ],
            "head": weights(dtype, channels=widths[-1], vocabulary=classes),
        },
        batch=_images(batch, image, classes, dtype),
        loss=loss,
    )


def _residual_block(channels: int, dtype: Any) -> Tree:
    return {
        "conv1": _kernel(dtype, channels=channels, mlp=channels),
        "norm1": {"gain": constant(1, dtype, mlp=channels), "bias": constant(0, dtype, mlp=channels)},
        "conv2": _kernel(dtype, mlp=channels, channels=channels),
        "norm2": {"gain": constant(1, dtype, channels=channels), "bias": constant(0, dtype, channels=channels)},
    }


def _kernel(dtype: Any, **dims: int) -> Array:
    return weights(dtype, rows=3, columns=3, **dims)


def _convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _normalise(params: Tree, x: jax.Array) -> jax.Array:
    """Batch norm by the statistics of the whole batch."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean((0, 1, 2))
    scaled = centred * jax.lax.rsqrt((centred**2).mean((0, 1, 2)) + 1e-5)
    return scaled.astype(x.dtype) * params["gain"] + params["bias"]


def vit(
    *,
    layers: int = 4,
    width: int = 192,
    heads: int = 8,
    image: int = 64,
    patch: int = 8,
    classes: int = 128,
    batch: int = 32,
    dtype: Any = jnp.float32,
) -> Model:
    """Patches of an image as the tokens of a transformer; their mean is classified."""
    side = image // patch
    layer = block_params(width, heads, 4 * width, dtype)

    def loss(params: Tree, batch: Tree, mark: Mark) -> jax.Array:
        pixels = batch["image"].reshape(-1, side, patch, side, patch, 3).swapaxes(2, 3)
        patches = pixels.reshape(-1, side * side, patch * patch * 3)
        x = mark(patches @ params["patches"] + params["positions"], *OUTSIDE)
        for layer in params["layers"]:
            x = block(layer, x, mark, causal=False)
        return cross_entropy(norm(params["norm"], x).mean(1) @ params["head"], batch["label"])

    return Model(
        name="vit",
        params={
            "patches": weights(dtype, pixels=patch * patch * 3, embed=width),
            "positions": weights(dtype, positions=side * side, embed=width),
            "layers": [layer] * layers,
            "norm": norm_params(width, dtype),
            "head": weights(dtype, embed=width, vocabulary=classes),
        },
        batch=_images(batch, image, classes, dtype),
        loss=loss,
    )


def _images(batch: int, image: int, classes: int, dtype: Any) -> dict[str, Array]:
    pixels = Array(shape=(batch, image, image, 3), names=(*PIXELS[:3], "colours"), dtype=dtype, scale=1.0)
    return {"image": pixels, "label": integers(classes, batch=batch)}
