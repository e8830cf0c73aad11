"""Train steps that other people wrote: models, losses and steps of released packages, each with arguments to call it.

Nothing of a package is kept here. A case takes the package's own step where it has one; where it has models and losses
only, the step is the one that its documentation shows: a gradient and an update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

SEED = 0
BATCH = 16


@dataclass(frozen=True, kw_only=True)
class Wild:
    """A train step of a package.

    `arguments()` are fresh ones for each run; `jit` is what its users put around it, and `around` the context in which
    they call it; `options` are those that `autopar.parallelize` is told beside the method.
    """

    step: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    jit: Callable[[Callable[..., Any]], Callable[..., Any]] = jax.jit
    options: dict[str, Any]
    keywords: Callable[[], dict[str, Any]]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


CASES: dict[str, tuple[str, Callable[[], Wild]]] = {}
"""Name of a case -> the distribution it comes from, and what builds it."""


def _case(package: str) -> Callable[[Callable[[], Wild]], Callable[[], Wild]]:
    def register(build: Callable[[], Wild]) -> Callable[[], Wild]:
        CASES[build.__name__] = (package, build)
        return build

    return register


def _wild(
    step: Callable[..., Any],
    arguments: Callable[[], tuple[Any, ...]],
    jit: Callable[..., Any] = jax.jit,
    keywords: Callable[[], dict[str, Any]] = dict,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    **options: Any,
) -> Wild:
    return Wild(step=step, arguments=arguments, jit=jit, options=options, keywords=keywords, around=around)


def _normal(*shape: int, seed: int = SEED) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def _ints(high: int, *shape: int, seed: int = SEED) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, high, shape), jnp.int32)


def _images() -> tuple[jax.Array, jax.Array]:
    return _normal(BATCH, 16, 16, 3), _ints(10, BATCH)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


# flax ---------------------------------------------------------------------------------------------------------------


@_case("flax")
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
    tokens, labels = _ints(50, BATCH, 12), _ints(10, BATCH)

    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: _cross_entropy(state.apply_fn({"params": p}, batch[0]), batch[1]))(
            state.params
        )
        return state.apply_gradients(grads=grads), loss

    def arguments() -> tuple[Any, ...]:
        params = model.init(jax.random.key(SEED), tokens)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1)), (tokens, labels)

    return _wild(step, arguments)


@_case("flax")
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
            return _cross_entropy(logits, batch["label"]), logits

        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        optimizer.update(model, grads)

    def arguments() -> tuple[Any, ...]:
        model = Net(nnx.Rngs(SEED))
        metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
        image, label = _images()
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
        return model, optimizer, metrics, {"image": image, "label": label}

    return _wild(step, arguments, nnx.jit)


@_case("flax")
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
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), _normal(BATCH, 16), _normal(BATCH, 4)

    return _wild(step, arguments, nnx.jit)


# optax --------------------------------------------------------------------------------------------------------------


@_case("optax")
def optax_differential_privacy() -> Wild:
    """`optax.contrib.dpsgd`: gradients of each example, clipped one by one."""
    optimizer = optax.contrib.dpsgd(0.1, l2_norm_clip=1.0, noise_multiplier=0.1, seed=SEED)

    def loss(params: Any, image: jax.Array, label: jax.Array) -> jax.Array:
        hidden = jax.lax.conv_general_dilated(
            image[None], params["conv"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return _cross_entropy(jax.nn.relu(hidden).mean((1, 2)) @ params["head"], label[None])

    def step(params: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
        grads = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(params, images, labels)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def arguments() -> tuple[Any, ...]:
        params = {"conv": _normal(3, 3, 3, 8) / 5, "head": _normal(8, 10)}
        return params, optimizer.init(params), *_images()

    return _wild(step, arguments)


def _two_layers() -> tuple[Callable[[Any, jax.Array, jax.Array], jax.Array], Any]:
    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2)

    return loss, {"in": _normal(8, 32) / 3, "out": _normal(32, 4) / 6}


@_case("optax")
def optax_sharpness_aware() -> Wild:
    """`optax.contrib.sam`: the gradient at a point that the gradient chose."""
    loss, params = _two_layers()
    optimizer = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2, opaque_mode=True)

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        grads = jax.grad(loss)(params, x, y)
        updates, state = optimizer.update(grads, state, params, grad_fn=lambda p, _: jax.grad(loss)(p, x, y))
        return optax.apply_updates(params, updates), state

    return _wild(step, lambda: (params, optimizer.init(params), _normal(BATCH, 8), _normal(BATCH, 4)))


@_case("optax")
def optax_accumulation() -> Wild:
    """`optax.MultiSteps`: gradients of two calls, then one update."""
    loss, params = _two_layers()
    optimizer = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2)

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return _wild(step, lambda: (params, optimizer.init(params), _normal(BATCH, 8), _normal(BATCH, 4)))


@_case("optax")
def optax_lbfgs() -> Wild:
    """`optax.lbfgs`: a line search inside of the step."""
    loss, params = _two_layers()
    optimizer = optax.lbfgs()

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        def value_fn(params: Any) -> jax.Array:
            return loss(params, x, y)

        value, grads = optax.value_and_grad_from_state(value_fn)(params, state=state)
        updates, state = optimizer.update(grads, state, params, value=value, grad=grads, value_fn=value_fn)
        return optax.apply_updates(params, updates), state

    return _wild(step, lambda: (params, optimizer.init(params), _normal(BATCH, 8), _normal(BATCH, 4)))


@_case("jmp")
def jmp_loss_scale() -> Wild:
    """Mixed precision by `jmp`: a policy, a `DynamicLossScale`, and an update only where the gradient is finite."""
    import jmp

    loss, params = _two_layers()
    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")

    def step(params: Any, scale: Any, x: jax.Array, y: jax.Array) -> Any:
        scaled = lambda params: scale.scale(policy.cast_to_output(loss(*policy.cast_to_compute((params, x, y)))))  # noqa: E731
        grads = scale.unscale(jax.grad(scaled)(params))
        finite = jmp.all_finite(grads)
        updated = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)
        return jmp.select_tree(finite, updated, params), scale.adjust(finite)

    return _wild(step, lambda: (params, jmp.DynamicLossScale(jnp.float32(2**15)), _normal(BATCH, 8), _normal(BATCH, 4)))


# dm-haiku, rlax, distrax, jraph ---------------------------------------------------------------------------------------


@_case("dm-haiku")
def haiku_resnet() -> Wild:
    """`hk.nets.ResNet` with its batch statistics."""
    import haiku as hk

    def forward(images: jax.Array) -> jax.Array:
        net = hk.nets.ResNet(
            blocks_per_group=(1, 1, 1, 1), num_classes=10, bottleneck=False, channels_per_group=(8, 16, 16, 32),
            resnet_v2=False, use_projection=(True, True, True, True),
        )  # fmt: skip
        return net(images, is_training=True)

    model = hk.transform_with_state(forward)

    def step(params: Any, state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            logits, new_state = model.apply(params, state, None, batch[0])
            return _cross_entropy(logits, batch[1]), new_state

        (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), state, loss

    def arguments() -> tuple[Any, ...]:
        batch = _images()
        return *model.init(jax.random.key(SEED), batch[0]), batch

    return _wild(step, arguments)


@_case("dm-haiku")
def haiku_vector_quantizer() -> Wild:
    """`hk.nets.VectorQuantizerEMA` between two multilayer perceptrons."""
    import haiku as hk

    def forward(x: jax.Array) -> Any:
        encoded = hk.nets.MLP((32, 8))(x)
        quantized = hk.nets.VectorQuantizerEMA(8, 16, 0.25, 0.9)(encoded, is_training=True)
        return hk.nets.MLP((32, 12))(quantized["quantize"]), quantized["loss"]

    model = hk.transform_with_state(forward)

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        def loss_fn(params: Any) -> Any:
            (made, loss), new_state = model.apply(params, state, None, x)
            return jnp.mean((made - x) ** 2) + loss, new_state

        (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), state, loss

    def arguments() -> tuple[Any, ...]:
        return *model.init(jax.random.key(SEED), _normal(BATCH, 12)), _normal(BATCH, 12)

    return _wild(step, arguments)


@_case("rlax")
def rlax_double_q_learning() -> Wild:
    """`rlax.double_q_learning` with online and target parameters, of a Haiku network."""
    import haiku as hk
    import rlax

    network = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP((32, 32, 4))(x)))

    def step(online: Any, target: Any, batch: Any) -> Any:
        def loss_fn(online: Any) -> jax.Array:
            errors = jax.vmap(rlax.double_q_learning)(
                network.apply(online, batch["observation"]),
                batch["action"],
                batch["reward"],
                batch["discount"],
                network.apply(target, batch["next"]),
                network.apply(online, batch["next"]),
            )
            return jnp.mean(rlax.l2_loss(errors))

        online = jax.tree.map(lambda p, g: p - 0.1 * g, online, jax.grad(loss_fn)(online))
        return online, optax.incremental_update(online, target, 0.01)

    def arguments() -> tuple[Any, ...]:
        first, second = (network.init(jax.random.key(i), _normal(1, 6)) for i in range(2))
        batch = {"observation": _normal(BATCH, 6), "action": _ints(4, BATCH), "reward": _normal(BATCH)}
        return first, second, batch | {"discount": jnp.full(BATCH, 0.9), "next": _normal(BATCH, 6, seed=1)}

    return _wild(step, arguments)


@_case("distrax")
def distrax_coupling_flow() -> Wild:
    """A flow of `distrax.MaskedCoupling` layers, trained by likelihood."""
    import distrax
    import haiku as hk

    def log_prob(x: jax.Array) -> jax.Array:
        layers = []
        for i in range(2):
            conditioner = hk.Sequential([hk.nets.MLP((16, 12)), hk.Reshape((6, 2), preserve_dims=-1)])
            layers.append(
                distrax.MaskedCoupling(
                    mask=jnp.arange(6) % 2 == i,
                    bijector=lambda p: distrax.ScalarAffine(p[..., 0], log_scale=jnp.tanh(p[..., 1])),
                    conditioner=conditioner,
                )
            )
        base = distrax.MultivariateNormalDiag(jnp.zeros(6), jnp.ones(6))
        return distrax.Transformed(base, distrax.Chain(layers)).log_prob(x)

    model = hk.without_apply_rng(hk.transform(log_prob))

    def step(params: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: -model.apply(p, x).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return _wild(step, lambda: (model.init(jax.random.key(SEED), _normal(1, 6)), _normal(BATCH, 6)))


@_case("jraph")
def jraph_graph_network() -> Wild:
    """`jraph.GraphNetwork` on a batch of graphs that lie in one list of nodes and one of edges."""
    import haiku as hk
    import jraph

    def forward(graph: Any) -> Any:
        network = jraph.GraphNetwork(
            update_edge_fn=jraph.concatenated_args(lambda x: hk.nets.MLP((16, 8))(x)),
            update_node_fn=jraph.concatenated_args(lambda x: hk.nets.MLP((16, 8))(x)),
            update_global_fn=jraph.concatenated_args(lambda x: hk.nets.MLP((16, 1))(x)),
        )
        return network(graph).globals

    model = hk.without_apply_rng(hk.transform(forward))
    draw = np.random.default_rng(SEED)
    graph = jraph.GraphsTuple(
        nodes=_normal(24, 8), edges=_normal(40, 4), senders=jnp.asarray(draw.integers(0, 24, 40)),
        receivers=jnp.asarray(draw.integers(0, 24, 40)), n_node=jnp.full(8, 3), n_edge=jnp.full(8, 5),
        globals=jnp.zeros((8, 1)),
    )  # fmt: skip

    def step(params: Any, graph: Any, labels: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((model.apply(p, graph)[:, 0] - labels) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return _wild(step, lambda: (model.init(jax.random.key(SEED), graph), graph, _normal(8)))


# equinox and what stands on it ----------------------------------------------------------------------------------------


@_case("equinox")
def equinox_perceptron() -> Wild:
    """`eqx.nn.MLP`, whose activations are functions among its leaves."""
    import equinox as eqx

    optimizer = optax.adam(1e-2)

    def step(model: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x) - y) ** 2))(model)
        updates, state = optimizer.update(grads, state, model)
        return eqx.apply_updates(model, updates), state, loss

    def arguments() -> tuple[Any, ...]:
        model = eqx.nn.MLP(8, 4, 16, 2, key=jax.random.key(SEED))
        return model, optimizer.init(eqx.filter(model, eqx.is_array)), _normal(BATCH, 8), _normal(BATCH, 4)

    return _wild(step, arguments, eqx.filter_jit)


@_case("equinox")
def equinox_batch_norm() -> Wild:
    """`eqx.nn.BatchNorm`: statistics over a mapped axis, kept in an `eqx.nn.State`."""
    import equinox as eqx

    class Net(eqx.Module):
        first: Any
        norm: Any
        last: Any

        def __init__(self, key: jax.Array) -> None:
            keys = jax.random.split(key)
            self.first = eqx.nn.Linear(8, 16, key=keys[0])
            self.norm = eqx.nn.BatchNorm(16, axis_name="batch", mode="batch")
            self.last = eqx.nn.Linear(16, 4, key=keys[1])

        def __call__(self, x: jax.Array, state: Any) -> Any:
            x, state = self.norm(self.first(x), state)
            return self.last(jax.nn.relu(x)), state

    def step(model: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss_fn(model: Any) -> Any:
            apply = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
            made, new_state = apply(x, state)
            return jnp.mean((made - y) ** 2), new_state

        (loss, state), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), state, loss

    def arguments() -> tuple[Any, ...]:
        model, state = eqx.nn.make_with_state(Net)(jax.random.key(SEED))
        return model, state, _normal(BATCH, 8), _normal(BATCH, 4)

    return _wild(step, arguments, eqx.filter_jit)


@_case("diffrax")
def diffrax_neural_ode() -> Wild:
    """A neural ODE: `diffrax.diffeqsolve` inside of the model, its adjoint in the gradient."""
    import diffrax
    import equinox as eqx

    def step(field: Any, start: jax.Array, end: jax.Array) -> Any:
        def solve(field: Any, y: jax.Array) -> jax.Array:
            term = diffrax.ODETerm(lambda t, y, args: field(y))
            return diffrax.diffeqsolve(term, diffrax.Tsit5(), 0.0, 1.0, 0.1, y, max_steps=16).ys[-1]

        def loss_fn(field: Any) -> jax.Array:
            return jnp.mean((jax.vmap(lambda y: solve(field, y))(start) - end) ** 2)

        loss, grads = eqx.filter_value_and_grad(loss_fn)(field)
        return eqx.apply_updates(field, jax.tree.map(lambda g: -0.1 * g, grads)), loss

    def arguments() -> tuple[Any, ...]:
        return eqx.nn.MLP(4, 4, 16, 1, key=jax.random.key(SEED)), _normal(BATCH, 4), _normal(BATCH, 4, seed=1)

    return _wild(step, arguments, eqx.filter_jit)


@_case("optimistix")
def optimistix_implicit_layer() -> Wild:
    """An implicit layer: `optimistix.root_find` by Newton's method, differentiated through Lineax's solve."""
    import optimistix

    predict = lambda params, x: jnp.tanh(x @ params["in"]) @ params["out"]  # noqa: E731
    _, params = _two_layers()

    def step(params: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            residual = lambda z, made: z - jnp.tanh(0.3 * z) - made  # noqa: E731
            solver = optimistix.Newton(rtol=1e-5, atol=1e-5)
            solve = lambda made: optimistix.root_find(residual, solver, made, args=made, throw=False).value  # noqa: E731
            return jnp.mean((jax.vmap(solve)(predict(params, x)) - y) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return _wild(step, lambda: (jax.tree.map(jnp.array, params), _normal(BATCH, 8), _normal(BATCH, 4, seed=1)))


@_case("flowjax")
def flowjax_step() -> Wild:
    """FlowJAX's own step, already under `eqx.filter_jit`, on a masked autoregressive flow."""
    import equinox as eqx
    from flowjax.distributions import Normal
    from flowjax.flows import masked_autoregressive_flow
    from flowjax.train.losses import MaximumLikelihoodLoss
    from flowjax.train.train_utils import step
    from paramax import NonTrainable

    def arguments() -> tuple[Any, ...]:
        flow = masked_autoregressive_flow(
            jax.random.key(SEED), base_dist=Normal(jnp.zeros(4)), flow_layers=2, nn_width=8, nn_depth=1
        )
        return eqx.partition(flow, eqx.is_inexact_array, is_leaf=lambda leaf: isinstance(leaf, NonTrainable)) + (
            _normal(BATCH, 4),
        )

    optimizer = optax.sgd(0.01)

    def keywords() -> dict[str, Any]:
        params = arguments()[0]
        state = optimizer.init(params)
        return {
            "optimizer": optimizer,
            "opt_state": state,
            "loss_fn": MaximumLikelihoodLoss(),
            "key": jax.random.key(1),
        }

    return _wild(step, arguments, lambda step: step, keywords)


# dynamax ------------------------------------------------------------------------------------------------------------


@_case("dynamax")
def dynamax_hidden_markov() -> Wild:
    """The likelihood of `dynamax`'s Gaussian hidden Markov model, over a batch of sequences."""
    from dynamax.hidden_markov_model import GaussianHMM
    from dynamax.parameters import from_unconstrained, to_unconstrained

    model, optimizer = GaussianHMM(3, 2), optax.adam(1e-2)
    initial, properties = model.initialize(jax.random.key(SEED))

    def step(params: Any, state: Any, emissions: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            known = from_unconstrained(params, properties)
            return -jax.vmap(lambda each: model.marginal_log_prob(known, each))(emissions).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def arguments() -> tuple[Any, ...]:
        params = to_unconstrained(initial, properties)
        return params, optimizer.init(params), _normal(BATCH, 10, 2)

    return _wild(step, arguments)


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

    return _wild(model.train_step, lambda: (state(), (images, labels)))


@_case("keras")
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
    return _keras_step(model, *_images())


@_case("keras")
def keras_mobilenet() -> Wild:
    """`train_step` of `keras.applications.MobileNet`."""
    import keras

    keras.utils.set_random_seed(SEED)
    model = keras.applications.MobileNet(input_shape=(32, 32, 3), weights=None, classes=10, dropout=0.0, alpha=0.25)
    return _keras_step(model, _normal(BATCH, 32, 32, 3) * 64 + 128, _ints(10, BATCH))


# numpyro, jaxopt, blackjax --------------------------------------------------------------------------------------------


@_case("numpyro")
def numpyro_variational() -> Wild:
    """`SVI.update`: stochastic variational inference of a logistic regression."""
    import numpyro
    from numpyro.distributions import Bernoulli, Normal
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    def model(x: jax.Array, y: jax.Array) -> None:
        weight = numpyro.sample("weight", Normal(jnp.zeros(8), 1.0).to_event(1))
        bias = numpyro.sample("bias", Normal(0.0, 1.0))
        with numpyro.plate("examples", len(x)):
            numpyro.sample("y", Bernoulli(logits=x @ weight + bias), obs=y)

    svi = SVI(model, AutoNormal(model), numpyro.optim.SGD(0.01), Trace_ELBO())
    x, y = _normal(BATCH, 8), _ints(2, BATCH)

    return _wild(svi.update, lambda: (svi.init(jax.random.PRNGKey(SEED), x, y), x, y))


@_case("jaxopt")
def jaxopt_optax_solver() -> Wild:
    """`jaxopt.OptaxSolver.update` on a multiclass logistic loss with a penalty."""
    import jaxopt

    def objective(params: Any, data: Any) -> jax.Array:
        x, y = data
        losses = jax.vmap(jaxopt.loss.multiclass_logistic_loss)(y, x @ params["w"] + params["b"])
        return losses.mean() + 0.01 * jnp.sum(params["w"] ** 2)

    solver = jaxopt.OptaxSolver(objective, optax.sgd(0.1))
    params = {"w": _normal(8, 5), "b": jnp.zeros(5)}

    def arguments() -> tuple[Any, ...]:
        data = (_normal(BATCH, 8), _ints(5, BATCH))
        return params, solver.init_state(params, data=data), data

    return _wild(solver.update, arguments)


@_case("blackjax")
def blackjax_langevin() -> Wild:
    """A step of `blackjax.sgld`: stochastic gradient Langevin dynamics on a minibatch."""
    import blackjax

    def log_density(weight: jax.Array, batch: Any) -> jax.Array:
        x, y = batch
        return -0.5 * jnp.sum(weight**2) - 10 * jnp.mean((x @ weight - y) ** 2)

    kernel = blackjax.sgld(jax.grad(log_density))

    def step(key: jax.Array, weight: jax.Array, batch: Any, step_size: float) -> jax.Array:
        return kernel.step(key, weight, batch, step_size)

    return _wild(step, lambda: (jax.random.key(SEED), _normal(8), (_normal(BATCH, 8), _normal(BATCH)), 1e-3))


# brax -----------------------------------------------------------------------------------------------------------------


@_case("brax")
def brax_proximal_policy() -> Wild:
    """Brax's own update of PPO: its loss, its networks, its `gradient_update_fn`."""
    from brax.training import gradients, types
    from brax.training.agents.ppo import losses, networks

    net = networks.make_ppo_networks(6, 2, policy_hidden_layer_sizes=(16, 16), value_hidden_layer_sizes=(16, 16))
    optimizer = optax.sgd(0.01)
    loss = lambda params, data, key: losses.compute_ppo_loss(params, None, data, key, ppo_network=net)  # noqa: E731
    update = gradients.gradient_update_fn(loss, optimizer, pmap_axis_name=None, has_aux=True)

    def step(params: Any, state: Any, data: Any, key: jax.Array) -> Any:
        (_, metrics), params, state = update(params, data, key, optimizer_state=state)
        return params, state, metrics

    def arguments() -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(SEED))
        params = losses.PPONetworkParams(policy=net.policy_network.init(keys[0]), value=net.value_network.init(keys[1]))
        shape = (BATCH, 5)
        data = types.Transition(
            observation=_normal(*shape, 6), action=_normal(*shape, 2), reward=_normal(*shape), discount=jnp.ones(shape),
            next_observation=_normal(*shape, 6, seed=1),
            extras={
                "state_extras": {"truncation": jnp.zeros(shape)},
                "policy_extras": {
                    "raw_action": _normal(*shape, 2), "log_prob": _normal(*shape),
                    "distribution_params": _normal(*shape, 4),
                },
            },
        )  # fmt: skip
        return params, optimizer.init(params), data, jax.random.key(2)

    return _wild(step, arguments)


# haliax, gpjax -------------------------------------------------------------------------------------------------------


@_case("haliax")
def haliax_language_model() -> Wild:
    """Named axes: `hnn.Embedding`, blocks of attention in a `hnn.Stacked`, `hnn.cross_entropy_loss`."""
    import equinox as eqx
    import haliax as hax
    import haliax.nn as hnn

    Batch, Pos, Embed, Mlp, Vocab, Layers = hax.make_axes(batch=BATCH, pos=8, embed=16, mlp=32, vocab=32, layers=2)
    KeyPos = Pos.alias("key_pos")

    class Block(eqx.Module):
        norm: hnn.LayerNorm
        mlp: hnn.MLP

        @staticmethod
        def init(*, key: jax.Array) -> Block:
            return Block(hnn.LayerNorm.init(Embed), hnn.MLP.init(Embed, Embed, Mlp, 1, key=key))

        def __call__(self, x: Any) -> Any:
            mask = hnn.attention.causal_mask(Pos, KeyPos)
            keys = self.norm(x).rename({Pos: KeyPos})
            return x + self.mlp(hnn.attention.dot_product_attention(KeyPos, Embed, self.norm(x), keys, keys, mask))

    optimizer = optax.sgd(0.1)

    def step(model: Any, state: Any, tokens: Any) -> Any:
        def loss_fn(model: Any) -> jax.Array:
            embed, blocks = model
            logits = embed.unembed(blocks.fold(embed(tokens)))
            wanted = hnn.one_hot(hax.roll(tokens, -1, Pos), Vocab)
            return hnn.cross_entropy_loss(logits, Vocab, wanted).mean().scalar()

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        updates, state = optimizer.update(grads, state, model)
        return eqx.apply_updates(model, updates), state, loss

    def arguments() -> tuple[Any, ...]:
        first, second = jax.random.split(jax.random.key(SEED))
        stacked = hnn.Stacked.init(Layers, Block, gradient_checkpointing=True)(key=jax.random.split(second, 2))
        model = hnn.Embedding.init(Vocab, Embed, key=first), stacked
        return model, optimizer.init(model), hax.named(_ints(32, BATCH, 8), (Batch, Pos))

    return _wild(step, arguments, eqx.filter_jit)


@_case("gpjax")
def gpjax_fit() -> Wild:
    """`gpjax.fit` as the step: three iterations in a scan, each on a minibatch that it draws."""
    import equinox as eqx
    import gpjax as gpx

    def step(model: Any, data: Any, key: jax.Array) -> Any:
        objective = lambda model, batch: -gpx.objectives.elbo(model, batch)  # noqa: E731
        return gpx.fit(model=model, objective=objective, train_data=data, optim=optax.sgd(1e-3), num_iters=3,
                       batch_size=8, key=key, verbose=False, safe=False)  # fmt: skip

    def arguments() -> tuple[Any, ...]:
        prior = gpx.gps.Prior(mean_function=gpx.mean_functions.Zero(), kernel=gpx.kernels.RBF())
        model = gpx.variational_families.VariationalGaussian(
            model=prior * gpx.likelihoods.Gaussian(), inducing_inputs=jnp.linspace(-2, 2, 6)[:, None]
        )
        return model, gpx.Dataset(X=_normal(BATCH, 1), y=jnp.sin(_normal(BATCH, 1))), jax.random.key(1)

    return _wild(step, arguments, eqx.filter_jit)


# rax, ott, e3nn -------------------------------------------------------------------------------------------------------


@_case("rax")
def rax_lambda_rank() -> Wild:
    """`rax.pairwise_logistic_loss` weighted by `rax.dcg_lambdaweight`, and `rax.ndcg_metric`, of lists with masks."""
    import rax

    score = lambda params, x: (jnp.tanh(x @ params["in"]) @ params["out"])[..., 0]  # noqa: E731

    def step(params: Any, x: jax.Array, labels: jax.Array, where: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            weights = rax.dcg_lambdaweight
            return rax.pairwise_logistic_loss(score(params, x), labels, where=where, lambdaweight_fn=weights)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, loss, rax.ndcg_metric(score(params, x), labels, where=where, topn=5)

    def arguments() -> tuple[Any, ...]:
        params = {"in": _normal(6, 16) / 3, "out": _normal(16, 1) / 4}
        return params, _normal(BATCH, 8, 6), _ints(4, BATCH, 8).astype(jnp.float32), _ints(4, BATCH, 8, seed=1) > 0

    return _wild(step, arguments)


@_case("ott-jax")
def ott_implicit_sinkhorn() -> Wild:
    """The transport cost of Sinkhorn's solver, differentiated implicitly, between a network's points and others."""
    from ott.geometry import pointcloud
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import implicit_differentiation, sinkhorn

    solve = sinkhorn.Sinkhorn(implicit_diff=implicit_differentiation.ImplicitDiff())

    def step(params: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            made = jnp.tanh(x @ params["in"]) @ params["out"]
            geometry = pointcloud.PointCloud(made, y, epsilon=1.0)
            return jnp.sum(solve(linear_problem.LinearProblem(geometry)).matrix * geometry.cost_matrix)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return _wild(step, lambda: (_two_layers()[1], _normal(BATCH, 8), _normal(BATCH, 4)))


@_case("e3nn-jax")
def e3nn_forces() -> Wild:
    """An equivariant network on spherical harmonics, trained on energies and forces, which are its gradients."""
    import e3nn_jax as e3nn
    from flax import linen

    class Net(linen.Module):
        @linen.compact
        def __call__(self, positions: jax.Array) -> jax.Array:
            apart = e3nn.IrrepsArray("1o", positions[:, None] - jnp.roll(positions, 1, 0)[None])
            sent = e3nn.concatenate([apart, e3nn.tensor_product(apart, e3nn.spherical_harmonics([1, 2], apart, True))])
            weights = e3nn.flax.MultiLayerPerceptron([8, sent.irreps.num_irreps], jax.nn.gelu)(e3nn.norm(apart).array)
            nodes = e3nn.flax.Linear("8x0e + 4x1o")(e3nn.mean(sent.regroup() * weights, axis=1))
            return e3nn.flax.Linear("0e")(
                e3nn.gate(e3nn.concatenate([nodes, e3nn.flax.Linear("4x0e")(nodes)]))
            ).array.sum()

    model = Net()

    def step(params: Any, positions: jax.Array, energies: jax.Array, forces: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            made, slopes = jax.vmap(jax.value_and_grad(model.apply, argnums=1), (None, 0))(params, positions)
            return jnp.mean((made - energies) ** 2) + jnp.mean((slopes + forces) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.001 * g, params, grads), loss

    def arguments() -> tuple[Any, ...]:
        positions = 2 * _normal(BATCH, 5, 3)
        return model.init(jax.random.key(SEED), positions[0]), positions, _normal(BATCH), _normal(BATCH, 5, 3)

    return _wild(step, arguments)


# evosax, mctx, gymnax -------------------------------------------------------------------------------------------------


@_case("evosax")
def evosax_strategy() -> Wild:
    """`ask` and `tell` of `evosax`'s Open_ES, whose population is tried on a batch: a step without a gradient."""
    from evosax.algorithms import Open_ES

    loss, solution = _two_layers()
    strategy = Open_ES(population_size=32, solution=solution)
    params = strategy.default_params

    def step(key: jax.Array, state: Any, x: jax.Array, y: jax.Array) -> Any:
        key, first, second = jax.random.split(key, 3)
        population, state = strategy.ask(first, state, params)
        fitness = jax.vmap(loss, in_axes=(0, None, None))(population, x, y)
        state, metrics = strategy.tell(second, population, fitness, state, params)
        return key, state, metrics

    def arguments() -> tuple[Any, ...]:
        state = strategy.init(jax.random.key(SEED), solution, params)
        return jax.random.key(1), state, _normal(BATCH, 8), _normal(BATCH, 4)

    return _wild(step, arguments)


@_case("mctx")
def mctx_policy_improvement() -> Wild:
    """`mctx.gumbel_muzero_policy`: a tree search by the model, and a gradient toward what it chose."""
    import mctx

    def predict(params: Any, seen: jax.Array) -> Any:
        hidden = jnp.tanh(seen @ params["in"])
        return hidden @ params["policy"], (hidden @ params["value"])[:, 0]

    def recurrent(params: Any, key: jax.Array, action: jax.Array, seen: jax.Array) -> Any:
        seen = jnp.tanh(seen + params["act"][action])
        logits, value = predict(params, seen)
        discount = jnp.full_like(value, 0.9)
        return mctx.RecurrentFnOutput(reward=seen[:, 0], discount=discount, prior_logits=logits, value=value), seen

    def step(params: Any, key: jax.Array, seen: jax.Array) -> Any:
        logits, value = predict(params, seen)
        root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=seen)
        found = mctx.gumbel_muzero_policy(params, key, root, recurrent, num_simulations=8)

        def loss_fn(params: Any) -> jax.Array:
            logits, value = predict(params, seen)
            wanted = found.search_tree.summary().value
            return jnp.mean(optax.softmax_cross_entropy(logits, found.action_weights) + (value - wanted) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss, found.action

    def arguments() -> tuple[Any, ...]:
        params = {"in": _normal(6, 16) / 3, "policy": _normal(16, 4), "value": _normal(16, 1), "act": _normal(4, 6)}
        return params, jax.random.PRNGKey(1), _normal(BATCH, 6)

    return _wild(step, arguments)


@_case("gymnax")
def gymnax_policy_gradient() -> Wild:
    """Rollouts of `gymnax`'s CartPole in a scan inside of the step, and the policy gradient of what they gave."""
    import gymnax

    environment, settings = gymnax.make("CartPole-v1")
    logits = lambda params, seen: jnp.tanh(seen @ params["in"]) @ params["out"]  # noqa: E731

    def step(params: Any, worlds: Any, seen: jax.Array, key: jax.Array) -> Any:
        def act(carry: Any, key: jax.Array) -> Any:
            worlds, seen = carry
            first, second = jax.random.split(key)
            action = jax.random.categorical(first, logits(params, seen))
            move = jax.vmap(environment.step, (0, 0, 0, None))
            after, worlds, reward, *_ = move(jax.random.split(second, len(seen)), worlds, action, settings)
            return (worlds, after), (seen, action, reward)

        key, now = jax.random.split(key)
        (worlds, seen), (was, action, reward) = jax.lax.scan(act, (worlds, seen), jax.random.split(now, 4))
        ahead = jnp.cumsum(reward[::-1], 0)[::-1]

        def loss_fn(params: Any) -> jax.Array:
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits(params, was)), action[..., None], -1)[..., 0]
            return -jnp.mean(chosen * (ahead - ahead.mean()))

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), worlds, seen, key, loss

    def arguments() -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(SEED), BATCH)
        seen, worlds = jax.vmap(environment.reset, (0, None))(keys, settings)
        return {"in": _normal(4, 16) / 3, "out": _normal(16, 2) / 4}, worlds, seen, jax.random.key(1)

    return _wild(step, arguments, batch_argnums=(1, 2))


# transformers ---------------------------------------------------------------------------------------------------------


def _transformer(model: Any, loss_fn: Callable[[Any, Any], jax.Array], batch: Any) -> Wild:
    """The step of the package's Flax examples: a loss of the model's outputs, plain SGD."""

    def step(params: Any, batch: Any, key: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: loss_fn(model(**batch["inputs"], params=p, dropout_rng=key,
                                                                train=True), batch))(params)  # fmt: skip
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return _wild(step, lambda: (jax.tree.map(jnp.array, model.params), batch, jax.random.PRNGKey(SEED)))


@_case("transformers")
def transformers_gpt2() -> Wild:
    """`FlaxGPT2LMHeadModel`, two blocks, with dropout."""
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    model = FlaxGPT2LMHeadModel(GPT2Config(vocab_size=101, n_positions=16, n_embd=32, n_layer=2, n_head=4))
    tokens = _ints(101, BATCH, 16)
    loss = lambda out, batch: _cross_entropy(out.logits[:, :-1], batch["inputs"]["input_ids"][:, 1:])  # noqa: E731
    return _transformer(model, loss, {"inputs": {"input_ids": tokens}})


@_case("transformers")
def transformers_bert() -> Wild:
    """`FlaxBertForSequenceClassification` with an attention mask."""
    from transformers import BertConfig, FlaxBertForSequenceClassification

    config = BertConfig(vocab_size=101, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                        intermediate_size=64, max_position_embeddings=16, num_labels=5)  # fmt: skip
    inputs = {"input_ids": _ints(101, BATCH, 12), "attention_mask": _ints(2, BATCH, 12).at[:, 0].set(1)}
    batch = {"inputs": inputs, "labels": _ints(5, BATCH)}
    return _transformer(
        FlaxBertForSequenceClassification(config), lambda out, batch: _cross_entropy(out.logits, batch["labels"]), batch
    )


@_case("transformers")
def transformers_llama() -> Wild:
    """`FlaxLlamaForCausalLM`: rotary positions, fewer key heads than query heads."""
    from transformers import FlaxLlamaForCausalLM, LlamaConfig

    config = LlamaConfig(vocab_size=101, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16)  # fmt: skip
    tokens = _ints(101, BATCH, 12)
    loss = lambda out, batch: _cross_entropy(out.logits[:, :-1], batch["inputs"]["input_ids"][:, 1:])  # noqa: E731
    return _transformer(FlaxLlamaForCausalLM(config), loss, {"inputs": {"input_ids": tokens}})


@_case("transformers")
def transformers_vit() -> Wild:
    """`FlaxViTForImageClassification`."""
    from transformers import FlaxViTForImageClassification, ViTConfig

    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16,
                       patch_size=8, num_labels=10)  # fmt: skip
    image, label = _images()
    batch = {"inputs": {"pixel_values": image.transpose(0, 3, 1, 2)}, "labels": label}
    return _transformer(
        FlaxViTForImageClassification(config), lambda out, batch: _cross_entropy(out.logits, batch["labels"]), batch
    )


# penzai ---------------------------------------------------------------------------------------------------------------


@_case("penzai")
def penzai_trainer() -> Wild:
    """The step function of Penzai's `StatefulTrainer`, already under `jax.jit` with static arguments by name."""
    from penzai import pz
    from penzai.models.simple_mlp import MLP
    from penzai.toolshed.basic_training import StatefulTrainer

    def loss_fn(model: Any, state: Any, rng: jax.Array, xs: Any, labels: jax.Array) -> Any:
        logits = model(xs).unwrap("batch", "features")
        return _cross_entropy(logits, labels), state, {}

    def keywords() -> dict[str, Any]:
        model = MLP.from_config(init_base_rng=jax.random.key(SEED), feature_sizes=[8, 16, 5])
        trainer = StatefulTrainer.build(jax.random.key(1), model, optax.sgd(0.1), loss_fn)
        stateless, variables = pz.unbind_variables(trainer.model)
        return {
            "root_rng": trainer.root_rng, "state": trainer.state.value, "stateless_model": stateless,
            "trainable_params": pz.freeze_variables(tuple(variables)), "frozen_params": (), "state_vars": (),
            "loss_fn": trainer.loss_fn, "optimizer_def": trainer.optimizer_def,
            "kwargs": {"xs": pz.nx.wrap(_normal(BATCH, 8), "batch", "features"), "labels": _ints(5, BATCH)},
        }  # fmt: skip

    step = StatefulTrainer.build(jax.random.key(1), MLP.from_config(jax.random.key(SEED), [8, 5]), optax.sgd(0.1),
                                 loss_fn).step_fn  # fmt: skip
    return _wild(step, tuple, lambda step: step, keywords)


# tunix ----------------------------------------------------------------------------------------------------------------


def _tunix_step(adapted: bool) -> Wild:
    from flax import nnx
    from tunix.models.llama3 import model as llama
    from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

    config = llama.ModelConfig(num_layers=2, vocab_size=64, embed_dim=32, hidden_dim=64, num_heads=4, head_dim=8,
                               num_kv_heads=2, rope_theta=10_000, norm_eps=1e-5)  # fmt: skip

    def trainer() -> Any:
        model = llama.Llama3(config, rngs=nnx.Rngs(SEED))
        if adapted:
            import qwix

            provider = qwix.LoraProvider(module_path=".*q_proj|.*kv_proj|.*gate_proj", rank=4, alpha=2.0)
            model = qwix.apply_lora_to_model(model, provider, **model.get_model_input())
        return PeftTrainer(model, optax.adamw(1e-3), TrainingConfig(eval_every_n_steps=100, max_steps=10))

    def arguments() -> tuple[Any, ...]:
        mine, length = trainer(), 12
        batch = {
            "input_tokens": _ints(64, BATCH, length),
            "input_mask": jnp.ones((BATCH, length), bool),
            "positions": jnp.tile(jnp.arange(length), (BATCH, 1)),
            "attention_mask": jnp.tile(jnp.tril(jnp.ones((length, length), bool)), (BATCH, 1, 1)),
        }
        return mine.model, mine.optimizer, batch

    return _wild(trainer().create_train_step_fn(), arguments, nnx.jit)


@_case("google-tunix")
def tunix_llama() -> Wild:
    """The step of Tunix's `PeftTrainer` on its Llama 3, every parameter trained."""
    return _tunix_step(adapted=False)


@_case("google-tunix")
def tunix_llama_lora() -> Wild:
    """The same with low-rank adapters by Qwix, which alone are trained."""
    return _tunix_step(adapted=True)


# maxtext --------------------------------------------------------------------------------------------------------------


def _maxtext_step(**options: Any) -> Wild:
    import maxtext
    from flax import nnx
    from flax.core.spmd import logical_axis_rules
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train.train import train_step
    from maxtext.utils import sharding, train_utils

    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    given = {
        "run_name": "wild", "base_output_directory": "", "dataset_type": "synthetic", "enable_checkpointing": False,
        "enable_goodput_recording": False, "skip_jax_distributed_system": True, "log_config": False, "steps": 5,
        "base_num_decoder_layers": 2, "base_emb_dim": 32, "base_mlp_dim": 64, "base_num_query_heads": 4,
        "base_num_kv_heads": 2, "head_dim": 8, "vocab_size": 64, "max_target_length": 16, "per_device_batch_size": 2,
        "attention": "dot_product", "dtype": "float32", "decoder_block": "llama2", "gradient_clipping_threshold": 1.0,
    }  # fmt: skip
    config = pyconfig.initialize(["wild", str(base)], **given, **options)

    def prepared() -> tuple[Any, ...]:
        _, _, shardings, _, mesh, *_, state = train_utils.setup_train_loop(config, None)
        return *nnx.split(state), mesh, *sharding.maybe_update_params_sharding_with_opt(config, shardings)

    graph, _, mesh, params_shardings, shardings = prepared()

    @contextmanager
    def around() -> Iterator[None]:
        with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
            yield

    def arguments() -> tuple[Any, ...]:
        batch: dict[str, jax.Array] = {}
        for number, name in enumerate(("inputs", "targets")):
            batch[name] = 1 + _ints(63, BATCH, 16, seed=number)
            batch[f"{name}_position"] = jnp.tile(jnp.arange(16, dtype=jnp.int32), (BATCH, 1))
            batch[f"{name}_segmentation"] = jnp.ones((BATCH, 16), jnp.int32)
        return prepared()[1], batch

    step = partial(train_step, graph, config, shardings, params_shardings)
    return _wild(lambda state, data: step(state, data), arguments, around=around)


@_case("maxtext")
def maxtext_llama() -> Wild:
    """MaxText's `train_step` on its Llama 2 decoder, called under its mesh and its logical axis rules."""
    return _maxtext_step(scan_layers=False)


@_case("maxtext")
def maxtext_llama_scanned() -> Wild:
    """The same with its layers in a scan and computed again."""
    return _maxtext_step(scan_layers=True, remat_policy="full")
