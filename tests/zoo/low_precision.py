"""Perceptrons that compute in float16, their loss scaled, and in 8 bits with delayed scales; parameters in float32."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT, Fp8DirectDotGeneralOp
from flax.training.train_state import TrainState

from tests.zoo.case import BATCH, Case, draw

WIDTH, LAYERS = 16, 3


def batch_of(seed: int) -> dict[str, jax.Array]:
    rng = draw(seed)
    return {name: jnp.asarray(rng.normal(size=(BATCH, WIDTH)), jnp.float32) for name in ("x", "y")}


def make_scaled() -> tuple[Any, ...]:
    tx, rng = optax.sgd(1e-1, momentum=0.9), draw(0)
    params = [
        {
            "w": jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5, jnp.float32),
            "b": jnp.zeros(WIDTH, jnp.float32),
        }
        for _ in range(LAYERS)
    ]

    def loss_fn(params, batch):
        h = batch["x"].astype(jnp.float16)
        for layer in jax.tree.map(lambda p: p.astype(jnp.float16), params):
            h = jnp.tanh(h @ layer["w"] + layer["b"])
        return jnp.mean((h.astype(jnp.float32) - batch["y"]) ** 2)

    def step(state, batch):
        def scaled(params):
            loss = loss_fn(params, batch)
            return loss * state["scale"], loss

        grads, loss = jax.grad(scaled, has_aux=True)(state["params"])
        grads = jax.tree.map(lambda g: g / state["scale"], grads)
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        new = {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}
        old = {name: state[name] for name in new}
        kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        scale = jnp.where(finite, state["scale"] * 2, state["scale"] / 2)
        return {**kept, "scale": jnp.clip(scale, 1, 2.0**15)}, {"loss": loss, "finite": finite}

    return step, {"params": params, "opt_state": tx.init(params), "scale": jnp.float32(2.0**10)}, batch_of(1)


class EightBits(nn.Module):
    """Layers whose products read their operands in float8, with scales by what earlier steps met."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(LAYERS):
            dense = nn.Dense(WIDTH, dtype=jnp.float32, param_dtype=jnp.float32, dot_general_cls=Fp8DirectDotGeneralOp)
            x = jnp.tanh(dense(x))
        return x


def make_eight_bits() -> tuple[Any, ...]:
    model, batch = EightBits(), batch_of(2)
    variables = model.init(jax.random.key(0), batch["x"])
    state = TrainState.create(apply_fn=model.apply, params=variables, tx=optax.sgd(1e-1, momentum=0.9))

    def step(state, batch):
        def loss_fn(params):
            return jnp.mean((state.apply_fn(params, batch["x"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    assert OVERWRITE_WITH_GRADIENT in variables
    return step, state, batch


CASES = (
    Case(name="mlp_float16", make=make_scaled, note="the loss scaled by what keeps gradients finite", tolerance=2e-2),
    Case(
        name="mlp_float8",
        make=make_eight_bits,
        note="delayed scaling: maxima are state that gradients carry",
        tolerance=1e-3,
    ),
)
