"""A GPT in flax nnx, split into a graph definition and its parameters so that the step stays a function."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tests.zoo.case import ADAM_EPS, BATCH, Case, draw

VOCABULARY, LENGTH, WIDTH, LAYERS = 32, 8, 16, 2


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        types = {"param_dtype": jnp.float64, "rngs": rngs}
        self.ln_1 = nnx.LayerNorm(WIDTH, **types)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, use_bias=False, **types)
        self.ln_2 = nnx.LayerNorm(WIDTH, **types)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, **types)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, **types)

    def __call__(self, x):
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]), dtype=bool)
        x = x + self.attention(self.ln_1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.ln_2(x))))


class GPT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, param_dtype=jnp.float64, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make() -> tuple[Any, ...]:
    graphdef, params = nnx.split(GPT(nnx.Rngs(0)), nnx.Param)
    tx = optax.adamw(1e-2, eps=ADAM_EPS)
    tokens = jnp.asarray(draw(20).integers(0, VOCABULARY, size=(BATCH, LENGTH + 1)), jnp.int32)

    def loss_fn(params, tokens):
        logits = nnx.merge(graphdef, params)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(state, tokens):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    return step, (params, tx.init(params)), tokens


CASES = (
    Case(
        name="gpt_nnx",
        make=make,
        note="nnx.split and nnx.merge; parameters in an nnx.State",
        tolerance=1e-5,  # nnx takes the softmax of its attention in float32
    ),
)
