"""A mixture of experts: two experts per token, dispatch by einsum with a capacity for each sequence."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.zoo.case import BATCH, Case, draw

VOCABULARY, LENGTH, WIDTH, EXPERTS, LAYERS = 32, 8, 16, 4, 2
CAPACITY = 5  # per expert and sequence; 2 * LENGTH / EXPERTS = 4 would be the even share


def route(gates):
    """Dispatch and combine weights (B, T, E, C) of the two best experts; the capacity is per sequence."""
    weights, chosen = jax.lax.top_k(gates, 2)
    weights = weights / weights.sum(-1, keepdims=True)
    onehot = jax.nn.one_hot(chosen, EXPERTS, dtype=gates.dtype)
    # First choices take their places before second ones.
    queue = onehot.swapaxes(1, 2).reshape(gates.shape[0], 2 * LENGTH, EXPERTS)
    place = (jnp.cumsum(queue, axis=1) - 1) * queue
    place = place.sum(-1).reshape(gates.shape[0], 2, LENGTH).swapaxes(1, 2)
    slot = jax.nn.one_hot(place.astype(jnp.int32), CAPACITY, dtype=gates.dtype)
    combine = jnp.einsum("btk,btke,btkc->btec", weights, onehot, slot)
    return (combine > 0).astype(gates.dtype), combine, onehot[:, :, 0]


def experts_layer(params, x):
    gates = jax.nn.softmax(x @ params["router"])
    dispatch, combine, first = route(gates)
    inputs = jnp.einsum("btec,btd->ebcd", dispatch, x)
    hidden = jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", inputs, params["up"]))
    outputs = jnp.einsum("ebcf,efd->ebcd", hidden, params["down"])
    balance = EXPERTS * jnp.sum(gates.mean(axis=1) * first.mean(axis=1), axis=-1)
    return x + jnp.einsum("btec,ebcd->btd", combine, outputs), balance.mean()


def loss_fn(params, tokens):
    x = params["embedding"][tokens[:, :-1]]
    auxiliary = 0.0
    for layer in params["layers"]:
        x, balance = experts_layer(layer, x)
        auxiliary += balance
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], tokens[:, 1:]).mean()
    return cross_entropy + 0.01 * auxiliary, {"cross_entropy": cross_entropy, "auxiliary": auxiliary}


def init_params(rng) -> dict[str, Any]:
    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) / shape[-2] ** 0.5)

    layers = [
        {
            "router": normal(WIDTH, EXPERTS),
            "up": normal(EXPERTS, WIDTH, 2 * WIDTH),
            "down": normal(EXPERTS, 2 * WIDTH, WIDTH),
        }
        for _ in range(LAYERS)
    ]
    return {"embedding": normal(VOCABULARY, WIDTH), "layers": layers, "head": normal(WIDTH, VOCABULARY)}


def make() -> tuple[Any, ...]:
    rng = draw(40)
    params = init_params(rng)
    tokens = jnp.asarray(rng.integers(0, VOCABULARY, size=(BATCH, LENGTH + 1)), jnp.int32)
    tx = optax.adam(1e-2)

    def step(state, tokens):
        params, opt_state = state
        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss, **aux}

    return step, (params, tx.init(params)), tokens


CASES = (Case(name="moe", make=make, note="top-2 of four experts, einsum dispatch, auxiliary loss per sequence"),)
