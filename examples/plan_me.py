"""A step to plan for machines that need not be there: shapes in place of arrays.

    autopar plan examples.plan_me:make_step --cluster "8x dgx-h100" --view plan.html

A transformer of 400 million parameters in bfloat16 with AdamW, on sequences of 2048 tokens.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 8, 2048, 16, 32_000, 2048, 512


def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
    """Return the mean loss of the next token."""
    x = params["embed"][tokens]
    for number in range(LAYERS):
        with jax.named_scope(f"layer_{number}"):
            x = layer(params[f"layer_{number}"], x)
    logits = (x @ params["embed"].T)[:, :-1].astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def layer(params: Any, x: jax.Array) -> jax.Array:
    """Return one layer's result: attention, then a perceptron."""
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, params[name]) for name in ("query", "key", "value"))
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + jnp.einsum("bthk,hkd->btd", attended, params["out"])
    return x + jax.nn.gelu(x @ params["up"]) @ params["down"]


def make_step() -> tuple[Callable[..., Any], Any, jax.ShapeDtypeStruct]:
    """Return the step, and its arguments without their values."""
    tx = optax.adamw(1e-4)

    def train_step(state: Any, tokens: jax.Array) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def weight(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    head = WIDTH // HEADS
    params: dict[str, Any] = {"embed": weight(VOCABULARY, WIDTH)}
    for number in range(LAYERS):
        projections = {name: weight(WIDTH, HEADS, head) for name in ("query", "key", "value")}
        rest = {"out": weight(HEADS, head, WIDTH), "up": weight(WIDTH, 4 * WIDTH), "down": weight(4 * WIDTH, WIDTH)}
        params[f"layer_{number}"] = {**projections, **rest}
    return train_step, (params, jax.eval_shape(tx.init, params)), jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
