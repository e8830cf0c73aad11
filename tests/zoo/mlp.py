"""Perceptrons in plain jnp: first experiments, and the variants that break careless splitters."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.zoo.case import BATCH, Case, draw

WIDTH, CLASSES, LAYERS = 16, 8, 4


def init_layers(seed: int, num_layers: int = LAYERS) -> list[dict[str, jax.Array]]:
    rng = draw(seed)
    return [
        {"w": jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5), "b": jnp.zeros(WIDTH, jnp.float64)}
        for _ in range(num_layers)
    ]


def regression_batch(seed: int) -> dict[str, jax.Array]:
    rng = draw(seed)
    return {
        "x": jnp.asarray(rng.normal(size=(BATCH, WIDTH))),
        "y": jnp.asarray(rng.normal(size=(BATCH, WIDTH))),
    }


def make_mlp() -> tuple[Any, ...]:
    tx = optax.adamw(1e-2)
    params = init_layers(0)

    def loss_fn(params, batch):
        h = batch["x"]
        for layer in params[:-1]:
            h = jnp.tanh(h @ layer["w"] + layer["b"])
        return jnp.mean((h @ params[-1]["w"] + params[-1]["b"] - batch["y"]) ** 2)

    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step, (params, tx.init(params)), regression_batch(1)


def make_tied() -> tuple[Any, ...]:
    tx = optax.adam(1e-2)
    rng = draw(2)
    params = {"embedding": jnp.asarray(rng.normal(size=(32, WIDTH)) * 0.3), "layers": init_layers(3)}
    tokens = jnp.asarray(rng.integers(0, 32, size=(BATCH, 9)), jnp.int32)

    def loss_fn(params, tokens):
        h = params["embedding"][tokens[:, :-1]]
        for layer in params["layers"]:
            h = h + jax.nn.gelu(h @ layer["w"] + layer["b"])
        logits = h @ params["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], tokens)
        updates, opt_state = tx.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {
            "loss": loss,
            "grad_norm": optax.tree.norm(grads),
        }

    return step, {"params": params, "opt_state": tx.init(params)}, tokens


def make_sum_loss() -> tuple[Any, ...]:
    tx = optax.sgd(1e-3, momentum=0.9)
    rng = draw(4)
    params = {"embedding": jnp.asarray(rng.normal(size=(32, WIDTH)) * 0.3), "layers": init_layers(5)}
    ids = jnp.asarray(rng.integers(0, 32, size=(BATCH, 6)), jnp.int32)
    keep = jnp.asarray(rng.random((BATCH, 6)) < 0.7)
    target = jnp.asarray(rng.integers(0, WIDTH, size=BATCH), jnp.int32)

    def loss_fn(params, ids, keep, target):
        h = jnp.where(keep[..., None], params["embedding"][ids], 0.0).sum(axis=1)
        for layer in params["layers"]:
            h = jax.nn.relu(h @ layer["w"] + layer["b"]) + h
        return jnp.sum(jax.nn.logsumexp(h, axis=-1) - jnp.take_along_axis(h, target[:, None], axis=-1)[:, 0])

    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss, "kept": batch[1].sum()}

    return step, (params, tx.init(params)), (ids, keep, target)


def make_arange_loss() -> tuple[Any, ...]:
    rng = draw(6)
    params = init_layers(7)
    batch = (jnp.asarray(rng.normal(size=(BATCH, WIDTH))), jnp.asarray(rng.integers(0, CLASSES, size=BATCH)))

    def loss_fn(params, x, labels):
        for layer in params:
            x = jax.nn.silu(x @ layer["w"] + layer["b"])
        logits = jax.nn.log_softmax(x[:, :CLASSES])
        accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == labels)
        return -jnp.mean(logits[jnp.arange(x.shape[0]), labels]), accuracy

    def step(params, batch):
        (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, *batch)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, {"loss": loss, "accuracy": accuracy}

    return step, params, batch


def make_regularized() -> tuple[Any, ...]:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-2, warmup_steps=2, decay_steps=20)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.scale_by_learning_rate(schedule))
    params = init_layers(8)

    def loss_fn(params, batch):
        h = batch["x"]
        for layer in params:
            h = jnp.tanh(h @ layer["w"] + layer["b"])
        fit = jnp.mean((h - batch["y"]) ** 2)
        penalty = sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
        return fit + 1e-3 * penalty, {"fit": fit, "penalty": penalty}

    def step(state, batch):
        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        average = jax.tree.map(lambda a, p: 0.99 * a + 0.01 * p, state["average"], params)
        metrics = {"loss": loss, "learning_rate": schedule(state["step"]), **aux}
        return {
            "params": params,
            "average": average,
            "opt_state": opt_state,
            "step": state["step"] + 1,
        }, metrics

    average = jax.tree.map(jnp.copy, params)  # A copy: the state is donated, and a buffer cannot be twice.
    state = {"params": params, "average": average, "opt_state": tx.init(params), "step": jnp.int32(0)}
    return step, state, regression_batch(9)


def make_remat_whole() -> tuple[Any, ...]:
    params = init_layers(10)

    @jax.checkpoint
    def loss_fn(params, batch):
        h = batch["x"]
        for layer in params:
            h = jnp.sin(h @ layer["w"] + layer["b"])
        return jnp.mean(jnp.abs(h - batch["y"]))

    def step(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), loss

    return step, params, regression_batch(11)


def make_several_arguments() -> tuple[Any, ...]:
    tx = optax.adam(1e-2)
    params = init_layers(12)
    x, targets = (
        regression_batch(13)["x"],
        {"value": regression_batch(14)["y"], "weight": jnp.ones(BATCH) * 0.5},
    )

    def loss_fn(params, x, targets, scale):
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return scale * jnp.mean(targets["weight"][:, None] * (x - targets["value"]) ** 2)

    @jax.jit
    def step(state, x, targets, *, scale):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], x, targets, scale)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, {"loss": loss}

    return step, {"params": params, "opt_state": tx.init(params)}, x, targets


CASES = (
    Case(name="mlp", make=make_mlp, note="AdamW; the state is a tuple; the metrics are one bare scalar"),
    Case(name="tied_embedding", make=make_tied, note="one table on the first and the last layer; gradient norm"),
    Case(name="sum_loss", make=make_sum_loss, note="summed, not averaged; integer and boolean inputs; momentum"),
    Case(
        name="arange_loss",
        make=make_arange_loss,
        note="logits[arange(B), labels]; accuracy through has_aux; SGD",
    ),
    Case(name="regularized", make=make_regularized, note="weight decay in the loss, moving average, schedule"),
    Case(name="remat_whole", make=make_remat_whole, note="jax.checkpoint around the whole loss"),
    Case(
        name="several_arguments",
        make=make_several_arguments,
        note="the step is under jax.jit already; two batch arguments, one a dict; a keyword argument",
        batch_argnums=(1, 2),
        kwargs={"scale": 2.0},
    ),
)
