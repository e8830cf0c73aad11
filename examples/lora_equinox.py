"""Fine-tuning by low-rank adapters (LoRA) in Equinox: the weights that were trained before stay as they are.

    python examples/lora_equinox.py --steps 20

The frozen weights are an argument like any other, and the plan splits them over the devices as it does the batch.
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from beside_jit import Transform, compare
from corpus import VOCABULARY, draw_batches, read_standard_library

WIDTH, LENGTH, LAYERS, RANK, BATCH = 128, 32, 3, 4, 32


class Adapted(eqx.Module):
    """A matrix that stays, and a product of two narrow ones that learns."""

    weight: jax.Array
    down: jax.Array
    up: jax.Array

    def __init__(self, rows: int, columns: int, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.weight = jax.random.normal(first, (rows, columns)) / rows**0.5
        self.down = jax.random.normal(second, (rows, RANK)) / rows**0.5
        self.up = jnp.zeros((RANK, columns))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.weight + (x @ self.down) @ self.up


class LanguageModel(eqx.Module):
    """Each position sees the mean of those before it."""

    embed: jax.Array
    layers: list[tuple[Adapted, Adapted]]

    def __init__(self, key: jax.Array) -> None:
        first, *rest = jax.random.split(key, 1 + 2 * LAYERS)
        self.embed = jax.random.normal(first, (VOCABULARY, WIDTH))
        keys = iter(rest)
        self.layers = [
            (Adapted(2 * WIDTH, WIDTH, next(keys)), Adapted(WIDTH, WIDTH, next(keys))) for _ in range(LAYERS)
        ]

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed[tokens]
        for mix, out in self.layers:
            before = jnp.cumsum(x, axis=1) / jnp.arange(1, x.shape[1] + 1)[:, None]
            x = x + out(jax.nn.gelu(mix(jnp.concatenate([x, before], axis=-1))))
        return x @ self.embed.T / WIDTH


def learns(model: LanguageModel) -> Any:
    """Return the model's tree with True where a value is trained."""
    nothing = jax.tree.map(lambda _: False, model)
    adapters = lambda tree: [each for pair in tree.layers for layer in pair for each in (layer.down, layer.up)]  # noqa: E731
    return eqx.tree_at(adapters, nothing, replace_fn=lambda _: True)


def make_step(tx: optax.GradientTransformation) -> Any:
    """Return the step: (frozen, adapters, optimizer's state, tokens) to the new adapters and state, and the loss."""

    def train_step(frozen: Any, adapters: Any, opt_state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss_fn(adapters: Any) -> jax.Array:
            logits = eqx.combine(frozen, adapters)(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(adapters)
        updates, opt_state = tx.update(grads, opt_state, adapters)
        return eqx.apply_updates(adapters, updates), opt_state, loss

    return train_step


def train(transform: Transform, steps: int) -> list[float]:
    """Return the loss of every step."""
    model, tx = LanguageModel(jax.random.key(0)), optax.adam(1e-2)
    adapters, frozen = eqx.partition(model, learns(model))
    opt_state, step, losses = tx.init(adapters), transform(make_step(tx)), []
    for tokens in draw_batches(read_standard_library(), num_batches=steps, batch_size=BATCH, length=LENGTH):
        adapters, opt_state, loss = step(frozen, adapters, opt_state, jnp.asarray(tokens))
        losses.append(float(loss))
    return losses


def main(argv: Sequence[str] | None = None) -> float:
    """Train beside `eqx.filter_jit`."""
    return compare(train, eqx.filter_jit, steps=20, argv=argv)


if __name__ == "__main__":
    main()
