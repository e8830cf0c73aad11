"""Tiny train steps for tests of the compiler: an MLP, a GPT with tied embeddings, and what to compare them with."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.arguments import abstract
from autopar.compiler import passes
from autopar.compiler.frontend.leaf_names import leaf_name
from autopar.compiler.frontend.trace import Leaf, Trace
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.hardware.cluster import Cluster
from autopar.hardware.machine import Link, Machine
from autopar.ir.program import Program

ROWS, WIDTH, VOCABULARY, LENGTH = 8, 4, 11, 3
SEPARATE = replace(
    Machine.named("cpu"),
    memory_bandwidth=2e9,
    peak_flops={"float32": 8e9, "float16": 4e9, "bfloat16": 4e9},
    kernel_s=0.0,
    execution_s=0.0,
    concurrent_devices=0.0,
    intra=Link(latency_s=4.3e-5, bandwidth=1e9, ramp_bytes=0.0),
    inter=Link(latency_s=4.3e-5, bandwidth=1e9, ramp_bytes=0.0),
)
"""A host of eight devices with round figures, each with compute of its own, for closed forms."""


def draw(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(0.5 * np.random.default_rng(seed).normal(size=shape), jnp.float32)


def mlp_params(num_layers: int = 2) -> list[dict[str, jax.Array]]:
    return [{"w": draw(i, WIDTH, WIDTH), "b": draw(9 + i, WIDTH)} for i in range(num_layers)]


def mlp_loss(params: Any, batch: Any) -> jax.Array:
    h, y = batch
    for layer in params:
        h = jnp.tanh(h @ layer["w"] + layer["b"])
    return jnp.mean((h - y) ** 2)


@jax.tree_util.register_pytree_node_class
class ArrayLayer:
    """A layer of `mlp_loss` as a node that takes nothing but arrays and their types."""

    def __init__(self, w: Any, b: Any) -> None:
        if not (hasattr(w, "dtype") and hasattr(b, "dtype")):
            raise TypeError(f"no arrays: {w}, {b}")
        self.w, self.b = w, b

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def tree_flatten(self) -> tuple[tuple[Any, Any], None]:
        return (self.w, self.b), None

    @classmethod
    def tree_unflatten(cls, _: None, leaves: tuple[Any, Any]) -> "ArrayLayer":
        return cls(*leaves)


def tanh_loss(weights: Sequence[jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Layers of one weight each."""
    h, y = batch
    for weight in weights:
        h = jnp.tanh(h @ weight)
    return jnp.mean((h - y) ** 2)


def sgd(loss: Callable[..., Any], learning_rate: float = 0.1) -> Callable[..., Any]:
    """The plain train step `(params, batch) -> (params, loss)`."""

    def train_step(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - learning_rate * g, params, grads), value

    return train_step


mlp_step = sgd(mlp_loss)


def mlp_batch(rows: int = ROWS) -> tuple[jax.Array, jax.Array]:
    return draw(20, rows, WIDTH), draw(21, rows, WIDTH)


class Adam(NamedTuple):
    """State of an optimizer: parameters, moments, and the number of steps."""

    params: Any
    mu: Any
    nu: Any
    count: Any


def adam_state(params: Any) -> Adam:
    zeros = jax.tree.map(jnp.zeros_like, params)
    return Adam(params=params, mu=zeros, nu=jax.tree.map(jnp.copy, zeros), count=jnp.int32(0))


def adam(loss: Callable[..., Any], clip: float | None = None) -> Callable[..., Any]:
    """The plain train step `(state, batch) -> (state, loss)`, its gradients clipped by their global norm."""

    def train_step(state: Adam, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state.params, batch)
        if clip is not None:
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
            grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, clip / norm), grads)
        count = state.count + 1
        rate = 0.01 / jnp.sqrt(count.astype(jnp.float32))
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mu, grads)
        nu = jax.tree.map(lambda n, g: 0.99 * n + 0.01 * g**2, state.nu, grads)
        params = jax.tree.map(lambda p, m, n: p - rate * m / (jnp.sqrt(n) + 1e-2), state.params, mu, nu)
        return Adam(params=params, mu=mu, nu=nu, count=count), value

    return train_step


def gpt_params(num_blocks: int = 2) -> dict[str, Any]:
    def block(i: int) -> dict[str, jax.Array]:
        return {"qkv": draw(30 + i, WIDTH, 3 * WIDTH), "up": draw(40 + i, WIDTH, 8), "down": draw(50 + i, 8, WIDTH)}

    return {"embed": draw(60, VOCABULARY, WIDTH), "blocks": [block(i) for i in range(num_blocks)]}


def gpt_loss(params: Any, tokens: jax.Array) -> jax.Array:
    """Next-token loss of a GPT whose embedding table is also its output layer."""
    h = params["embed"][tokens]
    for block in params["blocks"]:
        q, k, v = jnp.split(h @ block["qkv"], 3, axis=-1)
        scores = jnp.where(jnp.tri(LENGTH, dtype=bool), q @ jnp.swapaxes(k, -1, -2), -1e9)
        h = h + jax.nn.softmax(scores) @ v
        h = h + jax.nn.relu(h @ block["up"]) @ block["down"]
    logits = jax.nn.log_softmax(h @ params["embed"].T)
    return -jnp.mean(jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], axis=-1))


def gpt_batch(rows: int = ROWS) -> jax.Array:
    return jnp.asarray(np.random.default_rng(70).integers(0, VOCABULARY, size=(rows, LENGTH)), jnp.int32)


def two_stages(**options: Any) -> autopar.PipelineParallel:
    """A pipeline of two stages and two microbatches."""
    return autopar.PipelineParallel(**{"num_stages": 2, "num_microbatches": 2} | options)


def devices(count: int = 2) -> list[Any]:
    return jax.devices()[:count]


def gan_params() -> dict[str, Any]:
    return {"generator": mlp_params(2), "critic": [jax.tree.map(lambda p: p + 0.1, layer) for layer in mlp_params(2)]}


def gan_step(params: dict[str, Any], batch: Any) -> Any:
    """A step of two gradients: the generator's meets the critic that the first one has updated."""

    def generate(generator: Any, noise: jax.Array) -> jax.Array:
        for layer in generator:
            noise = jnp.tanh(noise @ layer["w"] + layer["b"])
        return noise

    def judge(critic: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.sum(generate(critic, x), axis=-1))

    def critic_loss(critic: Any) -> jax.Array:
        return judge(critic, generate(params["generator"], batch[0])) - judge(critic, batch[1])

    loss, grads = jax.value_and_grad(critic_loss)(params["critic"])
    critic = jax.tree.map(lambda p, g: p - 0.1 * g, params["critic"], grads)
    grads = jax.grad(lambda generator: -judge(critic, generate(generator, batch[0])))(params["generator"])
    generator = jax.tree.map(lambda p, g: p - 0.1 * g, params["generator"], grads)
    return {"generator": generator, "critic": critic}, loss


def traced(step: Callable[..., Any], *args: Any, batch: Sequence[int] = (1,), donated: Sequence[int] = ()) -> Trace:
    """The trace of a step, its leaves named like `args` of one letter each: `a.w`, `b`."""
    leaves: list[Leaf] = []
    for number, arg in enumerate(args):
        for path, leaf in jax.tree_util.tree_leaves_with_path(arg):
            name = leaf_name("abcdef"[number], path)
            leaves.append(Leaf(name=name, argument=number, aval=abstract(leaf, name)))
    tree = jax.tree.structure(args)

    def flat(*values: Any) -> Any:
        return step(*jax.tree.unflatten(tree, values))

    return passes.trace_step(
        flat,
        leaves,
        name=getattr(step, "__name__", "step"),
        batch_inputs=[i for i, leaf in enumerate(leaves) if leaf.argument in batch],
        donated_inputs=[i for i, leaf in enumerate(leaves) if leaf.argument in donated],
    )


def cut(step: Callable[..., Any], *args: Any, num_devices: int = 2, **options: Any) -> StageGraph:
    """The stages of a step; `options` are those of `PipelineParallel`."""
    trace = traced(step, *args)
    return passes.cut_step(
        trace, passes.make_plan(trace, two_stages(**options), cluster=Cluster(num_devices=num_devices, kind="cpu"))
    )


def lowered(
    step: Callable[..., Any], *args: Any, num_devices: int = 2, donated: Sequence[int] = (), **options: Any
) -> Program:
    """The program of a step; `options` are those of `PipelineParallel`."""
    trace = traced(step, *args, donated=donated)
    return passes.lower_step(
        trace, passes.make_plan(trace, two_stages(**options), cluster=Cluster(num_devices=num_devices, kind="cpu"))
    )


def assert_same(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    """Equal trees, up to the order of sums in float32."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jnp.asarray(a).dtype == jnp.asarray(b).dtype
        if jax.dtypes.issubdtype(jnp.asarray(b).dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)
