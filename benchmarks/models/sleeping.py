"""A train step whose layers sleep: it needs no core, so that a pipeline of it overlaps as far as its runtime lets it.

One layer sleeps at a time in each process, as a device computes one task at a time.
"""

import threading
import time
from typing import Any

import jax
import jax.numpy as jnp

FORWARD_S, BACKWARD_S = 0.02, 0.04
_ONE_AT_A_TIME = threading.Lock()


def sleep_step(state: list[jax.Array], batch: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Scale the batch by each layer's weights in turn; every layer sleeps, forward and backward."""

    def loss_fn(weights: list[jax.Array]) -> jax.Array:
        x = batch
        for number, weight in enumerate(weights):
            with jax.named_scope(f"layer_{number}"):
                x = _sleeping(jnp.sin(x * weight))
        return (x * x).mean()

    loss, gradients = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), loss


@jax.custom_vjp
def _sleeping(x: jax.Array) -> jax.Array:
    return _after(FORWARD_S, x)


def _after(seconds: float, x: jax.Array) -> jax.Array:
    def sleep(_: Any) -> None:
        with _ONE_AT_A_TIME:
            time.sleep(seconds)

    jax.debug.callback(sleep, x)
    return x * 0.999  # what follows the callback keeps it within its layer


_sleeping.defvjp(lambda x: (_after(FORWARD_S, x), None), lambda _, g: (_after(BACKWARD_S, g),))
