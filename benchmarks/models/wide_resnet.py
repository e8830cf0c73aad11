"""The Wide-ResNets of Alpa's evaluation: bottleneck blocks, 32 bits, SGD with momentum, each block recomputed.

Sizes and layers are those of benchmark/alpa/suite_wresnet.py and alpa/model/wide_resnet.py in alpa-projects/alpa:
depth 50 or 101, the middle convolution of a block `widening` times as wide as the block. FLOPs of a step are 3 times
those of the products of the forward pass (Alpa counts the products of the compiled program, which are these and what it
computes again); the first convolution needs no gradient of the images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from benchmarks.models.model import Array, Tree, constant, integers, weights
from benchmarks.models.transformer import cross_entropy
from benchmarks.models.workload import Workload

_BLOCKS = {26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
_MOMENTUM = 0.9


@dataclass(frozen=True, kw_only=True)
class ResNetSize:
    """The sizes of a model, and of its batch."""

    channels: int
    widening: int = 2
    depth: int = 50
    image: int = 224
    classes: int = 1024
    batch: int = 1536
    recomputed: bool = True
    """Every block is computed again in the backward pass."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks from first to last."""
        return tuple(_blocks(self))

    @property
    def flops(self) -> float:
        """FLOPs of a step."""
        side = self.image // 2
        stem = 2 * side**2 * 7 * 7 * 3 * self.channels
        blocks = sum(block.flops for block in self.blocks)
        head = 2 * self.blocks[-1].width * self.classes
        return float(self.batch) * (2 * stem + 3 * (blocks + head))


@dataclass(frozen=True, kw_only=True)
class Block:
    """A residual block: 1 x 1, 3 x 3 (widened) and 1 x 1 convolutions, and one beside them where shapes change."""

    narrow: int
    filters: int
    widening: int
    stride: int
    side: int  # of what comes in

    @property
    def width(self) -> int:
        """Channels of what comes out."""
        return 4 * self.filters

    @property
    def kernels(self) -> Mapping[str, tuple[int, int, int]]:
        """Side of the kernel, channels in and channels out, by name."""
        middle = self.filters * self.widening
        projection = {"beside": (1, self.narrow, self.width)} if self.changes_shape else {}
        return {
            "reduce": (1, self.narrow, self.filters),
            "middle": (3, self.filters, middle),
            "expand": (1, middle, self.width),
            **projection,
        }

    @property
    def changes_shape(self) -> bool:
        return self.stride > 1 or self.narrow != self.width

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass of one image."""
        out = self.side // self.stride
        sides = {"reduce": self.side, "middle": out, "expand": out, "beside": out}
        return sum(2.0 * sides[name] ** 2 * k**2 * i * o for name, (k, i, o) in self.kernels.items())


RESNET_SIZES: Mapping[str, ResNetSize] = {
    "250M": ResNetSize(channels=160),
    "500M": ResNetSize(channels=224),
    "1B": ResNetSize(channels=320),
    "2B": ResNetSize(channels=448),
    "4B": ResNetSize(channels=640),
    "6.8B": ResNetSize(channels=320, widening=16),
    "13B": ResNetSize(channels=320, widening=16, depth=101),
}


def wide_resnet(name: str, size: ResNetSize, dtype: Any = jnp.float32) -> Workload:
    """A train step of this size."""
    blocks = size.blocks

    def loss(params: Tree, statistics: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        kept: dict[str, Tree] = {}
        x = _convolve(batch["image"], params["stem"]["kernel"], 2)
        x, kept["stem"] = _normalise(params["stem"], statistics["stem"], x)
        x = lax.reduce_window(jax.nn.relu(x), -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for number, block in enumerate(blocks):
            key = f"h_{number}"
            with jax.named_scope(key):
                run = partial(_run_block, block)
                run = jax.checkpoint(run) if size.recomputed else run
                x, kept[key] = run(params[key], statistics[key], x)
        return cross_entropy(x.mean((1, 2)) @ params["head"], batch["label"]), kept

    params, statistics = _arrays(size, dtype)
    pixels = {"batch": size.batch, "height": size.image, "width": size.image, "colours": 3}
    image = Array(shape=tuple(pixels.values()), names=tuple(pixels), dtype=dtype, scale=1.0)
    return Workload(
        name=name,
        params=params,
        statistics=statistics,
        batch={"image": image, "label": integers(size.classes, batch=size.batch)},
        loss=loss,
        optimizer=optax.sgd(0.1, momentum=0.9, nesterov=True),
        flops=size.flops,
        tokens=size.batch,
    )


def _blocks(size: ResNetSize) -> Iterator[Block]:
    narrow, side = size.channels, size.image // 4
    for stage, count in enumerate(_BLOCKS[size.depth]):
        for number in range(count):
            stride = 2 if stage > 0 and number == 0 else 1
            filters = size.channels * 2**stage
            block = Block(narrow=narrow, filters=filters, widening=size.widening, stride=stride, side=side)
            yield block
            narrow, side = block.width, side // stride


def _arrays(size: ResNetSize, dtype: Any) -> tuple[Tree, Tree]:
    """The parameters, and the running statistics."""
    params: Tree = {"stem": _kernel(7, 3, size.channels, dtype)}
    statistics: Tree = {"stem": _running(size.channels, dtype)}
    for number, block in enumerate(size.blocks):
        kernels = block.kernels.items()
        params[f"h_{number}"] = {name: _kernel(k, i, o, dtype) for name, (k, i, o) in kernels}
        statistics[f"h_{number}"] = {name: _running(o, dtype) for name, (_, _, o) in kernels}
    params["head"] = weights(dtype, channels=size.blocks[-1].width, classes=size.classes)
    return params, statistics


def _kernel(side: int, narrow: int, wide: int, dtype: Any) -> Tree:
    return {
        "kernel": weights(dtype, rows=side, columns=side, narrow=narrow, channels=wide),
        "gain": constant(1, dtype, channels=wide),
        "bias": constant(0, dtype, channels=wide),
    }


def _running(channels: int, dtype: Any) -> Tree:
    return {"mean": constant(0, dtype, channels=channels), "variance": constant(1, dtype, channels=channels)}


def _run_block(block: Block, params: Tree, statistics: Tree, x: jax.Array) -> tuple[jax.Array, Tree]:
    kept: dict[str, Tree] = {}
    h = x
    for name, stride in (("reduce", 1), ("middle", block.stride), ("expand", 1)):
        h = _convolve(h, params[name]["kernel"], stride)
        h, kept[name] = _normalise(params[name], statistics[name], h)
        h = h if name == "expand" else jax.nn.relu(h)
    if block.changes_shape:
        x = _convolve(x, params["beside"]["kernel"], block.stride)
        x, kept["beside"] = _normalise(params["beside"], statistics["beside"], x)
    return jax.nn.relu(x + h), kept


def _convolve(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _normalise(params: Tree, running: Tree, x: jax.Array) -> tuple[jax.Array, Tree]:
    """Batch norm by the statistics of the batch, and the running ones after it."""
    mean, square = x.mean((0, 1, 2)), (x * x).mean((0, 1, 2))
    variance = square - mean * mean
    scaled = (x - mean) * lax.rsqrt(variance + 1e-5) * params["gain"] + params["bias"]
    found = {"mean": mean, "variance": variance}
    return scaled, jax.tree.map(lambda old, new: _MOMENTUM * old + (1 - _MOMENTUM) * new, running, found)
