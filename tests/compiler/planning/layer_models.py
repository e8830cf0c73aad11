"""Train steps that scan over layers: `make()` gives `(step, state, batch)`, a step `(state, rest)`."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

# Other than the number of layers, so that axes cannot be mistaken for each other.
WIDTH, ROWS = 6, 5
Make = Callable[[], tuple[Callable[..., Any], Any, Any]]


def draw(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(0.5 * np.random.default_rng(seed).normal(size=shape))


def dense_stack(length: int, seed: int = 0) -> dict[str, jax.Array]:
    return {"w": draw(seed, length, WIDTH, WIDTH), "b": draw(seed + 1, length, WIDTH)}


def unstacked(length: int) -> list[dict[str, jax.Array]]:
    return [{"w": draw(i, WIDTH, WIDTH), "b": draw(length + i, WIDTH)} for i in range(length)]


def dense(h: jax.Array, layer: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    return jnp.tanh(h @ layer["w"] + layer["b"]), None


def trained(
    loss: Callable[..., Any], params: Any, tx: optax.GradientTransformation | None = None, batch: Any = None
) -> tuple[Callable[..., Any], Any, Any]:
    """The plain train step of a loss that returns `(loss, rest)`."""
    optimizer = optax.sgd(0.1) if tx is None else tx

    def step(state, batch):
        params, opt_state = state
        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (value, rest)

    return step, (params, optimizer.init(params)), draw(9, ROWS, WIDTH) if batch is None else batch


def mlp(
    length: int = 4,
    tx: optax.GradientTransformation | None = None,
    unroll: int | bool = 1,
    remat: bool = False,
) -> Make:
    def loss(params, x):
        h, _ = lax.scan(jax.checkpoint(dense) if remat else dense, x, params, unroll=unroll)
        return jnp.mean((h - 1) ** 2), ()

    return lambda: trained(loss, dense_stack(length), tx)


def adamw() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3))


def penalty(params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    h, _ = lax.scan(dense, x, params)
    squares = jax.tree.map(lambda p: jnp.sum(p**2) + jnp.max(jnp.abs(p)) + jnp.vdot(p.ravel(), p.ravel()), params)
    return jnp.mean(h**2) + 0.1 * sum(jax.tree.leaves(squares)), ()


def bfloat16(params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    h, _ = lax.scan(dense, x.astype(jnp.bfloat16), low)
    return jnp.mean(h.astype(jnp.float64) ** 2), ()


def outputs_per_layer(params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    stack, gains = params

    def layer(h, xs):
        weights, gain = xs
        h = dense(h, weights)[0] * gain
        return h, (jnp.mean(h), h)

    h, (means, hidden) = lax.scan(layer, x, (stack, gains))
    return jnp.mean(h**2) + jnp.sum(means * gains) + jnp.mean(hidden**2), (means, hidden[-1])


def shared_weights(params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    stack, shared = params
    h, _ = lax.scan(lambda h, layer: (dense(h, layer)[0] @ shared, None), x, stack)
    return jnp.mean(h**2), ()


def two_scans_over_slices(params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    first, last = (jax.tree.map(lambda p, s=s: p[s], params) for s in (slice(0, 4), slice(4, 6)))
    h, _ = lax.scan(dense, x, first)
    h, _ = lax.scan(dense, jnp.sin(h), last)
    return jnp.mean(h**2), ()


def stacked_in_the_step(params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    h, _ = lax.scan(dense, x, jax.tree.map(lambda *ps: jnp.stack(ps), *params))
    return jnp.mean(h**2), ()


def first_layer_alone(params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    h, _ = dense(x, jax.tree.map(lambda p: p[0], params))
    h, _ = lax.scan(dense, h, params)
    return jnp.mean(h**2), ()


def neighbours(params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    h, _ = lax.scan(dense, x, params)
    return jnp.mean(h**2) + sum(jnp.sum((p[1:] - p[:-1]) ** 2) for p in jax.tree.leaves(params)), ()


def encoder_decoder(params: Any, batch: Any) -> tuple[jax.Array, Any]:
    memory, _ = lax.scan(dense, batch["source"], params["encoder"])

    def layer(h, weights):
        attended = jax.nn.softmax((h @ weights["query"]) @ memory.T) @ memory
        return dense(h + attended, weights["dense"])[0], None

    h, _ = lax.scan(jax.checkpoint(layer), batch["target"], params["decoder"])
    return jnp.mean(h**2), ()


def make_encoder_decoder() -> tuple[Any, ...]:
    decoder = {"dense": dense_stack(6, 3), "query": draw(5, 6, WIDTH, WIDTH)}
    params = {"encoder": dense_stack(4), "decoder": decoder}
    batch = {"source": draw(7, ROWS, WIDTH), "target": draw(8, ROWS, WIDTH)}
    return trained(encoder_decoder, params, adamw(), batch)


def make_averaged() -> tuple[Any, ...]:
    step, state, x = mlp()()

    def averaged_step(state, x):
        inner, average = state
        inner, rest = step(inner, x)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, inner[0])
        return (inner, average), rest

    return averaged_step, (state, state[0]), x


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.LayerNorm(param_dtype=jnp.float64)(x)
        h = nn.MultiHeadDotProductAttention(2, param_dtype=jnp.float64, dropout_rate=0.2, deterministic=False)(h)
        x = x + nn.Dropout(0.2, deterministic=False)(h)
        return x + nn.Dense(WIDTH, param_dtype=jnp.float64)(nn.gelu(x)), None


class Transformer(nn.Module):
    length: int

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(7, WIDTH, param_dtype=jnp.float64)(tokens)
        rngs = {"params": True, "dropout": True}
        stack = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs=rngs, length=self.length)
        x, _ = stack(name="blocks")(x, None)
        return nn.Dense(7, param_dtype=jnp.float64)(x)


def make_transformer() -> tuple[Any, ...]:
    model, tokens = Transformer(length=4), jnp.arange(ROWS * 3).reshape(ROWS, 3) % 7
    key = jax.random.key(0)
    params = model.init({"params": key, "dropout": key}, tokens)
    tx = adamw()

    def step(state, tokens):
        params, opt_state, count = state

        def loss(params):
            rngs = {"dropout": jax.random.fold_in(jax.random.key(1), count)}
            logits = model.apply(params, tokens, rngs=rngs)
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, count + 1), value

    return step, (params, tx.init(params), 0), tokens


MODELS: dict[str, Make] = {
    "adamw with clipping": mlp(tx=adamw()),
    "remat in the body": mlp(tx=adamw(), remat=True),
    "five layers": mlp(length=5, tx=adamw()),
    "unrolled by two": mlp(length=5, unroll=2),
    "unrolled whole": mlp(length=4, unroll=True),
    "adafactor": mlp(tx=optax.adafactor(1e-2, min_dim_size_to_factor=2)),
    "lamb": mlp(tx=optax.lamb(1e-2)),
    "one flat vector": mlp(tx=optax.flatten(optax.adam(1e-2))),
    "L2 penalty": lambda: trained(penalty, dense_stack(4), adamw()),
    "bfloat16 copies": lambda: trained(bfloat16, dense_stack(4)),
    "outputs per layer": lambda: trained(outputs_per_layer, (dense_stack(4), draw(3, 4)), adamw()),
    "shared weights": lambda: trained(shared_weights, (dense_stack(4), draw(3, WIDTH, WIDTH))),
    "scans over slices": lambda: trained(two_scans_over_slices, dense_stack(6), adamw()),
    "stacked in the step": lambda: trained(stacked_in_the_step, unstacked(4), adamw()),
    "first layer alone": lambda: trained(first_layer_alone, dense_stack(4), adamw()),
    "differences of neighbours": lambda: trained(neighbours, dense_stack(4)),
    "encoder and decoder": make_encoder_decoder,
    "moving average": make_averaged,
    "flax transformer": make_transformer,
}
