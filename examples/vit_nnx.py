"""A small vision transformer in Flax NNX, changed in place by its step: which quarter of an image is the brightest?

python examples/vit_nnx.py --steps 20
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from beside_jit import Transform, compare
from flax import nnx

IMAGE, PATCH, WIDTH, HEADS, LAYERS, BATCH = 16, 4, 64, 4, 2, 64


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, use_bias=False, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class VisionTransformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.patches = nnx.Conv(3, WIDTH, (PATCH, PATCH), strides=PATCH, rngs=rngs)
        self.positions = nnx.Param(0.02 * rngs.params.normal(((IMAGE // PATCH) ** 2, WIDTH)))
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images).reshape(len(images), -1, WIDTH) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def train_step(model: VisionTransformer, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array) -> jax.Array:
    """One step as for `nnx.jit`: the model and the optimizer are changed in place."""

    def loss_fn(model: VisionTransformer) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def draw_images(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return noise (BATCH, IMAGE, IMAGE, 3) with one brighter quarter, and which (BATCH,)."""
    images = rng.normal(size=(BATCH, IMAGE, IMAGE, 3)).astype(np.float32)
    labels = rng.integers(0, 4, BATCH)
    half = IMAGE // 2
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 2)
        image[row * half : (row + 1) * half, column * half : (column + 1) * half] += 2
    return images, labels


def train(transform: Transform, steps: int) -> list[float]:
    """Return the loss of every step."""
    model = VisionTransformer(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    step, rng = transform(train_step), np.random.default_rng(0)
    return [float(step(model, optimizer, *map(jnp.asarray, draw_images(rng)))) for _ in range(steps)]


def main(argv: Sequence[str] | None = None) -> float:
    """Train beside `nnx.jit`."""
    return compare(train, nnx.jit, steps=20, argv=argv)


if __name__ == "__main__":
    main()
