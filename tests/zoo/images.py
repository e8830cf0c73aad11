"""Models of images in flax linen: convolutions with two kinds of norms, and a vision transformer."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from tests.zoo.case import BATCH, Case, draw

CLASSES, WIDTH = 8, 16
TYPE = {"param_dtype": jnp.float64}


class ConvNet(nn.Module):
    """Four residual convolutions; `norm` is "group" (per example) or "batch" (over the whole batch)."""

    norm: str

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(WIDTH, (3, 3), **TYPE, name="stem")(x)
        for i in range(4):
            h = nn.relu(self.normalize(nn.Conv(WIDTH, (3, 3), use_bias=False, **TYPE, name=f"conv_{i}")(x), i))
            x = nn.avg_pool(x + h, (2, 2), strides=(2, 2)) if i == 1 else x + h
        return nn.Dense(CLASSES, **TYPE, name="head")(x.mean(axis=(1, 2)))

    def normalize(self, x, i):
        if self.norm == "group":
            return nn.GroupNorm(num_groups=4, **TYPE, name=f"norm_{i}")(x)
        return nn.BatchNorm(use_running_average=False, momentum=0.9, **TYPE, name=f"norm_{i}")(x)


class ViT(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = nn.Conv(WIDTH, (4, 4), strides=(4, 4), **TYPE, name="patches")(images)
        x = x.reshape(x.shape[0], -1, WIDTH)
        first = self.param("class_token", nn.initializers.normal(0.02), (1, 1, WIDTH), jnp.float64)
        x = jnp.concatenate([jnp.broadcast_to(first, (x.shape[0], 1, WIDTH)), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], WIDTH), jnp.float64)
        for i in range(2):
            h = nn.LayerNorm(**TYPE, name=f"ln_1_{i}")(x)
            x = x + nn.MultiHeadAttention(num_heads=2, **TYPE, name=f"attention_{i}")(h)
            h = nn.LayerNorm(**TYPE, name=f"ln_2_{i}")(x)
            h = nn.gelu(nn.Dense(2 * WIDTH, **TYPE, name=f"up_{i}")(h))
            x = x + nn.Dense(WIDTH, **TYPE, name=f"down_{i}")(h)
        return nn.Dense(CLASSES, **TYPE, name="head")(x[:, 0])


def image_batch() -> dict[str, jax.Array]:
    rng = draw(50)
    labels = jnp.asarray(rng.integers(0, CLASSES, size=BATCH), jnp.int32)
    return {"image": jnp.asarray(rng.normal(size=(BATCH, 8, 8, 3))), "label": labels}


def make_stateless(model: nn.Module) -> tuple[Any, ...]:
    """A step for a model that has parameters only."""
    batch = image_batch()
    params = jax.jit(model.init)(jax.random.key(50), batch["image"])["params"]
    tx = optax.sgd(0.05, momentum=0.9, nesterov=True)

    def step(state, batch):
        def loss_fn(params):
            logits = model.apply({"params": params}, batch["image"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"])
        correct = jnp.argmax(logits, axis=-1) == batch["label"]
        metrics = {"loss": loss, "accuracy": correct.mean(), "logits": logits}
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, metrics

    return step, {"params": params, "opt_state": tx.init(params)}, batch


def make_batch_norm() -> tuple[Any, ...]:
    """A step whose state holds running statistics beside the parameters."""
    model, batch = ConvNet(norm="batch"), image_batch()
    variables = jax.jit(model.init)(jax.random.key(51), batch["image"])
    # flax starts the running statistics in float32 whatever the parameters are.
    variables = jax.tree.map(lambda v: v.astype(jnp.float64), variables)
    tx = optax.sgd(0.05, momentum=0.9)

    def step(state, batch):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state["batch_stats"]}
            logits, changed = model.apply(variables, batch["image"], mutable=["batch_stats"])
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
            return loss, changed["batch_stats"]

        (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "batch_stats": batch_stats, "opt_state": opt_state}, {"loss": loss}

    return step, {**variables, "opt_state": tx.init(variables["params"])}, batch


CASES = (
    Case(
        name="convnet",
        make=lambda: make_stateless(ConvNet(norm="group")),
        note="convolutions, group norm, pooling; the logits of every example are an output",
    ),
    Case(
        name="convnet_batch_norm",
        make=make_batch_norm,
        note="statistics of the whole batch, and their running average in the state",
        batch_statistics="per_microbatch",
    ),
    Case(name="vit", make=lambda: make_stateless(ViT()), note="patches by convolution, a class token, nesterov"),
)
