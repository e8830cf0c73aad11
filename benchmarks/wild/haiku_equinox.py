"""Steps of Haiku and Equinox, and of packages that stand on them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.wild.case import BATCH, SEED, Wild, case, cross_entropy, images, ints, normal, two_layers, wild

# dm-haiku, rlax, distrax, jraph ---------------------------------------------------------------------------------------


@case("dm-haiku")
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
            return cross_entropy(logits, batch[1]), new_state

        (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), state, loss

    def arguments() -> tuple[Any, ...]:
        batch = images()
        return *model.init(jax.random.key(SEED), batch[0]), batch

    return wild(step, arguments)


@case("dm-haiku")
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
        return *model.init(jax.random.key(SEED), normal(BATCH, 12)), normal(BATCH, 12)

    return wild(step, arguments)


@case("rlax")
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
        first, second = (network.init(jax.random.key(i), normal(1, 6)) for i in range(2))
        batch = {"observation": normal(BATCH, 6), "action": ints(4, BATCH), "reward": normal(BATCH)}
        return first, second, batch | {"discount": jnp.full(BATCH, 0.9), "next": normal(BATCH, 6, seed=1)}

    return wild(step, arguments)


@case("distrax")
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

    return wild(step, lambda: (model.init(jax.random.key(SEED), normal(1, 6)), normal(BATCH, 6)))


@case("jraph")
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
        nodes=normal(24, 8), edges=normal(40, 4), senders=jnp.asarray(draw.integers(0, 24, 40)),
        receivers=jnp.asarray(draw.integers(0, 24, 40)), n_node=jnp.full(8, 3), n_edge=jnp.full(8, 5),
        globals=jnp.zeros((8, 1)),
    )  # fmt: skip

    def step(params: Any, graph: Any, labels: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((model.apply(p, graph)[:, 0] - labels) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return wild(step, lambda: (model.init(jax.random.key(SEED), graph), graph, normal(8)))


# equinox and what stands on it ----------------------------------------------------------------------------------------


@case("equinox")
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
        return model, optimizer.init(eqx.filter(model, eqx.is_array)), normal(BATCH, 8), normal(BATCH, 4)

    return wild(step, arguments, eqx.filter_jit)


@case("equinox")
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
        return model, state, normal(BATCH, 8), normal(BATCH, 4)

    return wild(step, arguments, eqx.filter_jit)


@case("diffrax")
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
        return eqx.nn.MLP(4, 4, 16, 1, key=jax.random.key(SEED)), normal(BATCH, 4), normal(BATCH, 4, seed=1)

    return wild(step, arguments, eqx.filter_jit)


@case("optimistix")
def optimistix_implicit_layer() -> Wild:
    """An implicit layer: `optimistix.root_find` by Newton's method, differentiated through Lineax's solve."""
    import optimistix

    predict = lambda params, x: jnp.tanh(x @ params["in"]) @ params["out"]  # noqa: E731
    _, params = two_layers()

    def step(params: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            residual = lambda z, made: z - jnp.tanh(0.3 * z) - made  # noqa: E731
            solver = optimistix.Newton(rtol=1e-5, atol=1e-5)
            solve = lambda made: optimistix.root_find(residual, solver, made, args=made, throw=False).value  # noqa: E731
            return jnp.mean((jax.vmap(solve)(predict(params, x)) - y) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return wild(step, lambda: (jax.tree.map(jnp.array, params), normal(BATCH, 8), normal(BATCH, 4, seed=1)))


@case("flowjax")
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
            normal(BATCH, 4),
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

    return wild(step, arguments, lambda step: step, keywords)


# quax ---------------------------------------------------------------------------------------------------------------


@case("quax")
def quax_low_rank() -> Wild:
    """Low-rank adapters as array types of Quax, which `quax.quaxify` has the model compute with."""
    import equinox as eqx
    import quax
    from quax.examples import lora

    optimizer = optax.adam(0.01)

    def adapted() -> Any:
        model = eqx.nn.MLP(8, 4, 16, 2, key=jax.random.key(SEED))
        return lora.loraify(model, rank=2, scale=0.1, allow_materialise=True, key=jax.random.key(1))

    def step(model: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss_fn(model: Any) -> jax.Array:
            return jnp.mean((jax.vmap(quax.quaxify(model))(x) - y) ** 2)

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, loss

    def arguments() -> tuple[Any, ...]:
        model = adapted()
        return model, optimizer.init(eqx.filter(model, eqx.is_array)), normal(BATCH, 8), normal(BATCH, 4)

    return wild(step, arguments, eqx.filter_jit)
