"""Denoising diffusion on points of two moons: the network learns the noise that was added, as in DDPM.

    python examples/diffusion.py --steps 20

The noise and the times are drawn inside of the step, from a key that is part of the state; so they are the same however
the batch is split. Ho et al., Denoising Diffusion Probabilistic Models, 2020, algorithm 1.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from beside_jit import Transform, compare

TIMES, WIDTH, LAYERS, BATCH = 100, 128, 4, 256
KEPT = np.cumprod(1 - np.linspace(1e-4, 0.05, TIMES)).astype(np.float32)
"""The share of a point's variance that is left at each time."""


class Denoiser(nn.Module):
    @nn.compact
    def __call__(self, points: jax.Array, times: jax.Array) -> jax.Array:
        angles = times[:, None] / TIMES * 2.0 ** jnp.arange(8)
        x = nn.Dense(WIDTH)(jnp.concatenate([points, jnp.sin(angles), jnp.cos(angles)], axis=-1))
        for number in range(LAYERS):
            x = x + nn.Dense(WIDTH, name=f"layer_{number}")(nn.silu(nn.LayerNorm()(x)))
        return nn.Dense(2)(x)


def make_step(tx: optax.GradientTransformation) -> Any:
    """Return the step: state and points (BATCH, 2) to the new state and the loss."""

    def train_step(state: dict[str, Any], points: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        key, for_times, for_noise = jax.random.split(state["key"], 3)
        times = jax.random.randint(for_times, (len(points),), 0, TIMES)
        noise = jax.random.normal(for_noise, points.shape)
        kept = jnp.asarray(KEPT)[times][:, None]
        noisy = jnp.sqrt(kept) * points + jnp.sqrt(1 - kept) * noise

        def loss_fn(params: Any) -> jax.Array:
            return jnp.mean((Denoiser().apply(params, noisy, times) - noise) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state, "key": key}, loss

    return train_step


def draw_moons(rng: np.random.Generator) -> np.ndarray:
    """Return points (BATCH, 2) of two half circles, with some noise."""
    angle, is_second = np.pi * rng.random(BATCH), rng.integers(0, 2, BATCH)
    moons = np.stack([np.cos(angle) + is_second, (1 - 2 * is_second) * np.sin(angle) + 0.5 * is_second], axis=1)
    return (moons - [0.5, 0.25] + 0.05 * rng.normal(size=moons.shape)).astype(np.float32)


def train(transform: Transform, steps: int) -> list[float]:
    """Return the loss of every step."""
    tx, rng = optax.adam(2e-3), np.random.default_rng(0)
    params = Denoiser().init(jax.random.key(0), jnp.zeros((1, 2)), jnp.zeros((1,)))
    state = {"params": params, "opt_state": tx.init(params), "key": jax.random.key(1)}
    step, losses = transform(make_step(tx)), []
    for _ in range(steps):
        state, loss = step(state, jnp.asarray(draw_moons(rng)))
        losses.append(float(loss))
    return losses


def main(argv: Sequence[str] | None = None) -> float:
    """Train beside `jax.jit`."""
    return compare(train, jax.jit, steps=20, argv=argv)


if __name__ == "__main__":
    main()
