"""Proximal policy optimization on a pole that is to be balanced: several updates over one buffer in a step.

    python examples/ppo.py --steps 10

The policy plays 64 poles for 32 moments under `jax.jit`; the step that learns from them is the one that is planned.
Schulman et al., Proximal Policy Optimization Algorithms, 2017, equations 7, 9 and 11.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from beside_jit import Transform, compare

POLES, MOMENTS, EPOCHS, WIDTH = 64, 32, 2, 64
DISCOUNT, TRACE, CLIP = 0.99, 0.95, 0.2


class Player(nn.Module):
    """The logits of pushing left and right, and what the state is worth."""

    @nn.compact
    def __call__(self, observed: jax.Array) -> tuple[jax.Array, jax.Array]:
        policy, value = (nn.tanh(nn.Dense(WIDTH)(nn.tanh(nn.Dense(WIDTH)(observed)))) for _ in range(2))
        return nn.Dense(2, kernel_init=nn.initializers.normal(0.01))(policy), nn.Dense(1)(value)[..., 0]


def push(pole: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the state (place, speed, angle, turn) after 20 ms, and if the pole fell; Barto et al., 1983."""
    _, speed, angle, turn = pole
    force, length, gravity, mass, whole = 20.0 * action - 10.0, 0.5, 9.8, 0.1, 1.1
    inner = (force + mass * length * turn**2 * jnp.sin(angle)) / whole
    turning = (gravity * jnp.sin(angle) - jnp.cos(angle) * inner) / (
        length * (4 / 3 - mass * jnp.cos(angle) ** 2 / whole)
    )
    moving = inner - mass * length * turning * jnp.cos(angle) / whole
    pole = pole + 0.02 * jnp.stack([speed, moving, turn, turning])
    return pole, (jnp.abs(pole[0]) > 2.4) | (jnp.abs(pole[2]) > 0.21)


def upright(key: jax.Array) -> jax.Array:
    """Return poles (POLES, 4) that nearly stand."""
    return jax.random.uniform(key, (POLES, 4), minval=-0.05, maxval=0.05)


@jax.jit
def play(params: Any, poles: jax.Array, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the poles (POLES, 4) as they stand at the end, and a buffer of POLES times MOMENTS rows."""

    def moment(poles: jax.Array, key: jax.Array) -> Any:
        for_action, for_start = jax.random.split(key)
        logits, value = Player().apply(params, poles)
        action = jax.random.categorical(for_action, logits)
        moved, fell = jax.vmap(push)(poles, action)
        fresh = upright(for_start)
        chance = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], axis=1)[:, 0]
        seen = {"observed": poles, "action": action, "chance": chance, "value": value, "fell": fell}
        return jnp.where(fell[:, None], fresh, moved), seen

    poles, seen = jax.lax.scan(moment, poles, jax.random.split(key, MOMENTS))
    last = Player().apply(params, poles)[1]

    def back(carry: Any, row: Any) -> Any:
        advantage, later = carry
        value, goes_on = row["value"], 1.0 - row["fell"]
        advantage = 1.0 + DISCOUNT * goes_on * later - value + DISCOUNT * TRACE * goes_on * advantage
        return (advantage, value), advantage

    _, advantage = jax.lax.scan(back, (jnp.zeros(POLES), last), seen, reverse=True)
    buffer = {**seen, "advantage": advantage, "target": advantage + seen["value"]}
    return poles, {name: each.reshape(POLES * MOMENTS, *each.shape[2:]) for name, each in buffer.items()}


def loss_fn(params: Any, buffer: dict[str, jax.Array]) -> jax.Array:
    """Return the clipped loss of the policy, that of the values, and less of it where the policy stays open."""
    logits, value = Player().apply(params, buffer["observed"])
    chances = jax.nn.log_softmax(logits)
    ratio = jnp.exp(jnp.take_along_axis(chances, buffer["action"][:, None], axis=1)[:, 0] - buffer["chance"])
    gain = buffer["advantage"] / 10
    policy = -jnp.minimum(ratio * gain, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * gain).mean()
    entropy = -(jnp.exp(chances) * chances).sum(-1).mean()
    return policy + 0.01 * ((value - buffer["target"]) ** 2).mean() - 0.01 * entropy


def make_step(tx: optax.GradientTransformation) -> Any:
    """Return the step: state and buffer to the new state and the loss of the last of its updates."""

    def train_step(state: Any, buffer: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss = jnp.zeros(())
        for _ in range(EPOCHS):
            loss, grads = jax.value_and_grad(loss_fn)(params, buffer)
            updates, opt_state = tx.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        return (params, opt_state), loss

    return train_step


def train(transform: Transform, steps: int) -> list[float]:
    """Return the loss of every step."""
    tx, key = optax.adam(3e-3), jax.random.key(0)
    poles = upright(key)
    params = Player().init(key, poles)
    state, step, losses = (params, tx.init(params)), transform(make_step(tx)), []
    for number in range(steps):
        # The poles are played on one device, wherever the plan has put the parameters.
        poles, buffer = play(jax.device_get(state[0]), poles, jax.random.fold_in(key, number))
        state, loss = step(state, buffer)
        losses.append(float(loss))
    return losses


def main(argv: Sequence[str] | None = None) -> float:
    """Train beside `jax.jit`."""
    return compare(train, jax.jit, steps=10, argv=argv)


if __name__ == "__main__":
    main()
