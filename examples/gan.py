"""A generative adversarial network on a ring of eight spots: two networks, two optimizers, two losses in one step.

    python examples/gan.py --steps 20

The losses are those of Goodfellow et al., Generative Adversarial Nets, 2014, with the one for the generator that does
not vanish (section 3).
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from beside_jit import Transform, compare

NOISE, WIDTH, BATCH = 16, 128, 256


class Network(nn.Module):
    """A perceptron of two hidden layers."""

    outputs: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nn.leaky_relu(nn.Dense(WIDTH)(x), 0.2)
        return nn.Dense(self.outputs)(x)


GENERATOR, CRITIC = Network(2), Network(1)


def make_step(tx: optax.GradientTransformation) -> Any:
    """Return the step: state, points and noise to the new state and both losses, added."""

    def is_real(params: Any, points: jax.Array) -> jax.Array:
        return CRITIC.apply(params, points)[:, 0]

    def critic_loss(params: Any, points: jax.Array, made: jax.Array) -> jax.Array:
        return jnp.mean(nn.softplus(-is_real(params, points))) + jnp.mean(nn.softplus(is_real(params, made)))

    def generator_loss(params: Any, critic: Any, noise: jax.Array) -> jax.Array:
        return jnp.mean(nn.softplus(-is_real(critic, GENERATOR.apply(params, noise))))

    def update(state: dict[str, Any], name: str, grads: Any) -> dict[str, Any]:
        params, opt_state = state[name]
        updates, opt_state = tx.update(grads, opt_state, params)
        return {**state, name: (optax.apply_updates(params, updates), opt_state)}

    def train_step(state: dict[str, Any], points: jax.Array, noise: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        made = GENERATOR.apply(state["generator"][0], noise)
        first, grads = jax.value_and_grad(critic_loss)(state["critic"][0], points, made)
        state = update(state, "critic", grads)
        second, grads = jax.value_and_grad(generator_loss)(state["generator"][0], state["critic"][0], noise)
        return update(state, "generator", grads), first + second

    return train_step


def draw_spots(rng: np.random.Generator) -> np.ndarray:
    """Return points (BATCH, 2) around eight places on a circle."""
    angle = 2 * np.pi * rng.integers(0, 8, BATCH) / 8
    return (np.stack([np.cos(angle), np.sin(angle)], axis=1) + 0.05 * rng.normal(size=(BATCH, 2))).astype(np.float32)


def train(transform: Transform, steps: int) -> list[float]:
    """Return the sum of both losses of every step."""
    tx, rng = optax.adam(1e-3, b1=0.5), np.random.default_rng(0)
    generator = GENERATOR.init(jax.random.key(0), jnp.zeros((1, NOISE)))
    critic = CRITIC.init(jax.random.key(1), jnp.zeros((1, 2)))
    state = {"generator": (generator, tx.init(generator)), "critic": (critic, tx.init(critic))}
    step, losses = transform(make_step(tx)), []
    for _ in range(steps):
        noise = rng.normal(size=(BATCH, NOISE)).astype(np.float32)
        state, loss = step(state, jnp.asarray(draw_spots(rng)), jnp.asarray(noise))
        losses.append(float(loss))
    return losses


def main(argv: Sequence[str] | None = None) -> float:
    """Train beside `jax.jit`."""
    return compare(train, jax.jit, steps=20, argv=argv)


if __name__ == "__main__":
    main()
