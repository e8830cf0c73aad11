"""Models with control flow and derivatives of their own: cond, loops, scan, custom_jvp, custom_vjp."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.zoo.case import Case, draw
from tests.zoo.mlp import LAYERS, WIDTH, init_layers, regression_batch


@jax.custom_jvp
def softsign(x):
    return x / (1 + jnp.abs(x))


@softsign.defjvp
def softsign_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    return softsign(x), dx / (1 + jnp.abs(x)) ** 2


@jax.custom_vjp
def clipped_sine(x):
    return jnp.sin(x)


def clipped_sine_forward(x):
    return jnp.sin(x), jnp.cos(x)


def clipped_sine_backward(cosine, g):
    return (jnp.clip(g * cosine, -1.0, 1.0),)


clipped_sine.defvjp(clipped_sine_forward, clipped_sine_backward)


def largest_singular_value(w):
    """Power iteration until it stands still; no gradient flows through a while_loop."""

    def unfinished(carry):
        i, _, before, now = carry
        return (i < 50) & (jnp.abs(now - before) > 1e-6)

    def iterate(carry):
        i, v, _, now = carry
        v = w.T @ (w @ v)
        return i + 1, v / jnp.linalg.norm(v), now, jnp.linalg.norm(v) ** 0.5

    w = jax.lax.stop_gradient(w)
    start = (0, jnp.ones(WIDTH, w.dtype), jnp.zeros((), w.dtype), jnp.ones((), w.dtype))
    return jax.lax.while_loop(unfinished, iterate, start)[-1]


def make_control_flow() -> tuple[Any, ...]:
    params, tx = init_layers(80), optax.adam(1e-2)

    def loss_fn(params, batch, count):
        h = softsign(batch["x"] @ params[0]["w"])
        h = jax.lax.cond(count % 2 == 0, lambda h: h @ params[1]["w"], lambda h: 0.5 * h, h)
        h = clipped_sine(h @ params[2]["w"] / largest_singular_value(params[2]["w"]))
        h = jax.lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ params[3]["w"] + params[3]["b"]), h)
        return jnp.mean((h - batch["y"]) ** 2)

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch, state["count"])
        updates, opt_state = tx.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "count": state["count"] + 1}, {"loss": loss}

    return step, {"params": params, "opt_state": tx.init(params), "count": jnp.int32(0)}, regression_batch(81)


def make_scan() -> tuple[Any, ...]:
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *init_layers(82, 2 * LAYERS))
    tx = optax.adamw(1e-2)

    def layer(h, params):
        return h + jnp.tanh(h @ params["w"] + params["b"]), jnp.mean(h**2)

    def loss_fn(params, batch):
        h, squares = jax.lax.scan(layer, batch["x"], params)
        return jnp.mean((h - batch["y"]) ** 2) + 1e-3 * jnp.sum(squares)

    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step, (params, tx.init(params)), regression_batch(83)


def make_nested_jit() -> tuple[Any, ...]:
    params = {"layers": init_layers(84), "unused": jnp.ones(3, jnp.float64)}
    mixing = draw(85).normal(size=(WIDTH, WIDTH)) / WIDTH**0.5  # numpy: becomes a constant of the trace

    @jax.jit
    def layer(params, h):
        return jnp.tanh(h @ params["w"] + params["b"])

    @jax.jit
    def loss_fn(params, batch):
        h = first = batch["x"] @ mixing
        for one in params["layers"]:
            h = layer(one, h)
        return jnp.mean((h + first * np.float64(0.1) - batch["y"]) ** 2)

    def step(params, batch):
        grads = jax.grad(loss_fn)(params, batch)
        loss = loss_fn(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}

    return step, params, regression_batch(86)


CASES = (
    Case(
        name="control_flow",
        make=make_control_flow,
        note="cond on a counter, while_loop, fori_loop, custom_jvp, custom_vjp",
        loss_falls=False,  # the branch alternates with the step
    ),
    Case(
        name="scan_layers",
        make=make_scan,
        note="lax.scan over eight stacked layers, with an output per layer",
    ),
    Case(
        name="nested_jit",
        make=make_nested_jit,
        note="a jitted layer called four times in a jitted loss, a captured constant, a skip connection over"
        " all layers, a parameter without a use; jax.grad, and the loss once more without it",
    ),
)
