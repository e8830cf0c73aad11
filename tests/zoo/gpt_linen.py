"""GPTs in flax linen: a TrainState, a tied embedding, remat per block; as a loop and as a scan."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from tests.zoo.case import ADAM_EPS, BATCH, Case, draw

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 32, 8, 16, 2, 4
ADAMW = optax.adamw(1e-2, eps=ADAM_EPS)


class Block(nn.Module):
    dtype: Any = jnp.float64
    param_dtype: Any = jnp.float64
    use_bias: bool = True  # in attention

    @nn.compact
    def __call__(self, x):
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]), dtype=bool)
        h = nn.LayerNorm(**types, name="ln_1")(x)
        attention = nn.MultiHeadDotProductAttention(num_heads=HEADS, use_bias=self.use_bias, **types, name="attention")
        x = x + attention(h, h, mask=mask)
        h = nn.LayerNorm(**types, name="ln_2")(x)
        h = nn.gelu(nn.Dense(4 * WIDTH, **types, name="up")(h))
        return x + nn.Dense(WIDTH, **types, name="down")(h)


class ScannedBlock(Block):
    @nn.compact
    def __call__(self, x, _):
        return Block(self.dtype, self.param_dtype, self.use_bias, name="block")(x), None


class GPT(nn.Module):
    dtype: Any = jnp.float64
    param_dtype: Any = jnp.float64
    use_bias: bool = True
    scan: bool = False
    num_layers: int = LAYERS

    @nn.compact
    def __call__(self, tokens):
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        block_types = {**types, "use_bias": self.use_bias}
        embed = nn.Embed(VOCABULARY, WIDTH, **types, name="embed")
        positions = self.param("positions", nn.initializers.normal(0.02), (LENGTH, WIDTH), self.param_dtype)
        x = embed(tokens) + positions.astype(self.dtype)
        if self.scan:
            rematted = nn.remat(ScannedBlock, prevent_cse=False)
            stack = nn.scan(rematted, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.num_layers)
            x, _ = stack(**block_types, name="layers")(x, None)
        else:
            for i in range(self.num_layers):
                x = nn.remat(Block)(**block_types, name=f"h_{i}")(x)
        return embed.attend(nn.LayerNorm(**types, name="ln_f")(x))


def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["inputs"]).astype(batch["weights"].dtype)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.mean(losses * batch["weights"])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "step": state.step}


def make_gpt(model: GPT, tx: optax.GradientTransformation) -> tuple[Any, ...]:
    tokens = jnp.asarray(draw(0).integers(0, VOCABULARY, size=(BATCH, LENGTH + 1)), jnp.int32)
    weights = jnp.ones((BATCH, LENGTH), model.param_dtype)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
    tx = optax.chain(optax.clip_by_global_norm(1.0), tx)
    params = jax.jit(model.init)(jax.random.key(0), batch["inputs"])["params"]
    return train_step, TrainState.create(apply_fn=model.apply, params=params, tx=tx), batch


# The bias on all keys has a gradient of zero; computed in 8 bits, what comes out is noise.
BFLOAT16 = GPT(dtype=jnp.bfloat16, param_dtype=jnp.float32, use_bias=False, num_layers=2)

CASES = (
    Case(
        name="gpt_linen",
        make=lambda: make_gpt(GPT(num_layers=2), ADAMW),
        note="TrainState, tied embedding, clip by norm, remat",
    ),
    Case(
        name="gpt_scan",
        make=lambda: make_gpt(GPT(scan=True), ADAMW),
        note="nn.scan over stacked layers, remat inside",
    ),
    Case(
        name="gpt_bfloat16",
        make=lambda: make_gpt(BFLOAT16, optax.sgd(0.1, momentum=0.9)),
        note="computes in bfloat16 on float32 parameters",
        # The plain step is 2.1e-2 away from the same step in float32; sums in another order may be as far off again
        # (`tests/test_bfloat16.py` holds both against float64).
        tolerance=4e-2,
    ),
)
