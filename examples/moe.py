"""A mixture of experts on Python's own source files: every token goes to the expert that its router likes best.

    python examples/moe.py --steps 20

Tokens are given to experts by products with masks, as in Fedus et al., Switch Transformers, 2021, section 2 and
equation 4; so a plan can split the experts over devices, and the exchange of tokens is its to place.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from beside_jit import Transform, compare
from corpus import VOCABULARY, draw_batches, read_standard_library

WIDTH, LENGTH, LAYERS, EXPERTS, BATCH = 64, 32, 2, 8, 32
CAPACITY = 2 * LENGTH // EXPERTS
"""Tokens of one sequence that an expert takes; those behind them skip the layer."""


def layer(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return one layer's result (BATCH, LENGTH, WIDTH), and how unevenly its experts are used."""
    before = jnp.cumsum(x, axis=1) / jnp.arange(1, x.shape[1] + 1)[:, None]
    x = x + jnp.tanh(before @ params["mix"])
    chances = jax.nn.softmax(x @ params["router"])
    chosen = jax.nn.one_hot(chances.argmax(-1), EXPERTS, dtype=jnp.int32)
    place = jnp.cumsum(chosen, axis=1) * chosen - 1
    sent = chosen[..., None] * jax.nn.one_hot(place, CAPACITY)
    taken = jnp.einsum("btec,btd->becd", sent, x)
    made = jnp.einsum("becf,efd->becd", jax.nn.gelu(jnp.einsum("becd,edf->becf", taken, params["up"])), params["down"])
    back = jnp.einsum("btec,bte->btec", sent, chances)
    uneven = EXPERTS * (chosen.mean(1) * chances.mean(1)).sum(-1).mean()
    return x + jnp.einsum("btec,becd->btd", back, made), uneven


def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
    """Return the mean loss of the next byte, and a hundredth of the experts' unevenness."""
    x, total = params["embed"][tokens[:, :-1]], jnp.zeros(())
    for number in range(LAYERS):
        with jax.named_scope(f"layer_{number}"):
            x, uneven = layer(params[f"layer_{number}"], x)
        total += uneven
    logits = x @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean() + 0.01 * total


def make_params(key: jax.Array) -> dict[str, Any]:
    """Return the weights, each drawn with a deviation of one over the root of its inputs."""

    def draw(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape) / shape[-2] ** 0.5

    params: dict[str, Any] = {"embed": 0.1 * jax.random.normal(key, (VOCABULARY, WIDTH))}
    for number in range(LAYERS):
        keys = jax.random.split(jax.random.fold_in(key, number), 4)
        params[f"layer_{number}"] = {
            "mix": draw(keys[0], WIDTH, WIDTH),
            "router": draw(keys[1], WIDTH, EXPERTS),
            "up": draw(keys[2], EXPERTS, WIDTH, 4 * WIDTH),
            "down": draw(keys[3], EXPERTS, 4 * WIDTH, WIDTH),
        }
    return params


def make_step(tx: optax.GradientTransformation) -> Any:
    """Return the step: state and tokens to the new state and the loss."""

    def train_step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return train_step


def train(transform: Transform, steps: int) -> list[float]:
    """Return the loss of every step."""
    params, tx = make_params(jax.random.key(0)), optax.adam(3e-3)
    state, step, losses = (params, tx.init(params)), transform(make_step(tx)), []
    for tokens in draw_batches(read_standard_library(), num_batches=steps, batch_size=BATCH, length=LENGTH):
        state, loss = step(state, jnp.asarray(tokens))
        losses.append(float(loss))
    return losses


def main(argv: Sequence[str] | None = None) -> float:
    """Train beside `jax.jit`."""
    return compare(train, jax.jit, steps=20, argv=argv)


if __name__ == "__main__":
    main()
