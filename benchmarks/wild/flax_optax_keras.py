"""Steps of Flax, Optax, jmp and Keras."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.wild.case import BATCH, SEED, Wild, case, cross_entropy, images, ints, normal, two_layers, wild

# flax ---------------------------------------------------------------------------------------------------------------


@case("flax")
def flax_linen_lstm() -> Wild:
    """`linen.RNN` over an LSTM cell in a `TrainState`."""
    from flax import linen
    from flax.training.train_state import TrainState

    class Classifier(linen.Module):
        @linen.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            hidden = linen.RNN(linen.LSTMCell(16))(linen.Embed(50, 16)(tokens))
            return linen.Dense(10)(hidden[:, -1])

    model = Classifier()
    tokens, labels = ints(50, BATCH, 12), ints(10, BATCH)

    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: cross_entropy(state.apply_fn({"params": p}, batch[0]), batch[1]))(
            state.params
        )
        return state.apply_gradients(grads=grads), loss

    def arguments() -> tuple[Any, ...]:
        params = model.init(jax.random.key(SEED), tokens)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1)), (tokens, labels)

    return wild(step, arguments)


@case("flax")
def flax_nnx_convnet() -> Wild:
    """An `nnx` module with batch norm and dropout, its `nnx.Optimizer` and `nnx.MultiMetric`, changed in place."""
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)
            self.head = nnx.Linear(8, 10, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = nnx.relu(self.norm(self.conv(x))).mean((1, 2))
            return self.head(self.dropout(x))

    def step(model: Any, optimizer: Any, metrics: Any, batch: Any) -> None:
        def loss_fn(model: Any) -> Any:
            logits = model(batch["image"])
            return cross_entropy(logits, batch["label"]), logits

        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        optimizer.update(model, grads)

    def arguments() -> tuple[Any, ...]:
        model = Net(nnx.Rngs(SEED))
        metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
        image, label = images()
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
        return model, optimizer, metrics, {"image": image, "label": label}

    return wild(step, arguments, nnx.jit)


@case("flax")
def flax_nnx_scanned() -> Wild:
    """Layers of `nnx` made by `nnx.vmap` and run by `nnx.scan`, each computed again, with dropout."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norm, self.dropout = nnx.LayerNorm(16, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
            self.wide, self.narrow = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.dropout(self.narrow(nnx.gelu(self.wide(self.norm(x)))))

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.blocks = nnx.split_rngs(splits=4)(nnx.vmap(Block))(rngs)
            self.last = nnx.Linear(16, 4, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            run = nnx.scan(nnx.remat(lambda block, x: block(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            return self.last(run(self.blocks, x))

    def step(model: Any, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    def arguments() -> tuple[Any, ...]:
        model = Net(nnx.Rngs(SEED))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), normal(BATCH, 16), normal(BATCH, 4)

    return wild(step, arguments, nnx.jit)


# optax --------------------------------------------------------------------------------------------------------------


@case("optax")
def optax_differential_privacy() -> Wild:
    """`optax.contrib.dpsgd`: gradients of each example, clipped one by one."""
    optimizer = optax.contrib.dpsgd(0.1, l2_norm_clip=1.0, noise_multiplier=0.1, seed=SEED)

    def loss(params: Any, image: jax.Array, label: jax.Array) -> jax.Array:
        hidden = jax.lax.conv_general_dilated(
            image[None], params["conv"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return cross_entropy(jax.nn.relu(hidden).mean((1, 2)) @ params["head"], label[None])

    def step(params: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
        grads = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(params, images, labels)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def arguments() -> tuple[Any, ...]:
        params = {"conv": normal(3, 3, 3, 8) / 5, "head": normal(8, 10)}
        return params, optimizer.init(params), *images()

    return wild(step, arguments)


@case("optax")
def optax_sharpness_aware() -> Wild:
    """`optax.contrib.sam`: the gradient at a point that the gradient chose."""
    loss, params = two_layers()
    optimizer = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2, opaque_mode=True)

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        grads = jax.grad(loss)(params, x, y)
        updates, state = optimizer.update(grads, state, params, grad_fn=lambda p, _: jax.grad(loss)(p, x, y))
        return optax.apply_updates(params, updates), state

    return wild(step, lambda: (params, optimizer.init(params), normal(BATCH, 8), normal(BATCH, 4)))


@case("optax")
def optax_accumulation() -> Wild:
    """`optax.MultiSteps`: gradients of two calls, then one update."""
    loss, params = two_layers()
    optimizer = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2)

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return wild(step, lambda: (params, optimizer.init(params), normal(BATCH, 8), normal(BATCH, 4)))


@case("optax")
def optax_epochs() -> Wild:
    """Two epochs over shuffled quarters of the batch, in scans inside of the step, as updates of PPO have them."""
    loss, params = two_layers()
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1))

    def update(carry: Any, rows: Any) -> Any:
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, *rows)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    def step(params: Any, state: Any, key: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        def epoch(carry: Any, key: jax.Array) -> Any:
            order = jax.random.permutation(key, len(x))
            return jax.lax.scan(update, carry, [rows[order].reshape(4, -1, rows.shape[1]) for rows in (x, y)])

        key, shuffles = jax.random.split(key)
        (params, state), values = jax.lax.scan(epoch, (params, state), jax.random.split(shuffles, 2))
        return params, state, key, values.mean()

    def arguments() -> tuple[Any, ...]:
        return params, optimizer.init(params), jax.random.key(SEED), normal(4 * BATCH, 8), normal(4 * BATCH, 4)

    return wild(step, arguments)


@case("optax")
def optax_lbfgs() -> Wild:
    """`optax.lbfgs`: a line search inside of the step."""
    loss, params = two_layers()
    optimizer = optax.lbfgs()

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        def value_fn(params: Any) -> jax.Array:
            return loss(params, x, y)

        value, grads = optax.value_and_grad_from_state(value_fn)(params, state=state)
        updates, state = optimizer.update(grads, state, params, value=value, grad=grads, value_fn=value_fn)
        return optax.apply_updates(params, updates), state

    return wild(step, lambda: (params, optimizer.init(params), normal(BATCH, 8), normal(BATCH, 4)))


@case("jmp")
def jmp_loss_scale() -> Wild:
    """Mixed precision by `jmp`: a policy, a `DynamicLossScale`, and an update only where the gradient is finite."""
    import jmp

    loss, params = two_layers()
    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")

    def step(params: Any, scale: Any, x: jax.Array, y: jax.Array) -> Any:
        scaled = lambda params: scale.scale(policy.cast_to_output(loss(*policy.cast_to_compute((params, x, y)))))  # noqa: E731
        grads = scale.unscale(jax.grad(scaled)(params))
        finite = jmp.all_finite(grads)
        updated = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)
        return jmp.select_tree(finite, updated, params), scale.adjust(finite)

    return wild(step, lambda: (params, jmp.DynamicLossScale(jnp.float32(2**15)), normal(BATCH, 8), normal(BATCH, 4)))


# keras ----------------------------------------------------------------------------------------------------------------


def _keras_step(model: Any, images: Any, labels: Any) -> Wild:
    import keras

    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    model.build(images.shape)
    model.optimizer.build(model.trainable_variables)
    model._symbolic_build(data_batch=(images, labels))

    def state() -> tuple[Any, ...]:
        groups = (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
        return tuple([jnp.array(v.value) for v in group] for group in groups)

    return wild(model.train_step, lambda: (state(), (images, labels)))


@case("keras")
def keras_convnet() -> Wild:
    """`train_step` of a Keras model with batch norm and dropout, on the JAX backend."""
    import keras

    keras.utils.set_random_seed(SEED)
    model = keras.Sequential(
        [
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    return _keras_step(model, *images())


@case("keras")
def keras_mobilenet() -> Wild:
    """`train_step` of `keras.applications.MobileNet`."""
    import keras

    keras.utils.set_random_seed(SEED)
    model = keras.applications.MobileNet(input_shape=(32, 32, 3), weights=None, classes=10, dropout=0.0, alpha=0.25)
    return _keras_step(model, normal(BATCH, 32, 32, 3) * 64 + 128, ints(10, BATCH))


# aqtp -----------------------------------------------------------------------------------------------------------------


@case("aqtp")
def aqt_eight_bits() -> Wild:
    """Two layers whose products AQT computes in 8 bits, with scales that it takes of each row."""
    from aqt.jax.v2 import config

    product = config.config_v4(fwd_bits=8, dlhs_bits=None, drhs_bits=None)
    times = lambda x, w: product(x, w, (((1,), (0,)), ((), ())))  # noqa: E731
    _, params = two_layers()

    def step(params: Any, x: jax.Array, y: jax.Array) -> Any:
        loss_fn = lambda p: jnp.mean((times(jnp.tanh(times(x, p["in"])), p["out"]) - y) ** 2)  # noqa: E731
        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return wild(step, lambda: (params, normal(BATCH, 8), normal(BATCH, 4)))
