"""Random train steps and random ways to cut them: what Hypothesis draws for `test_properties`.

A model is a directed acyclic graph: value 0 is the batch, value i is an operation on one or two earlier values and on
weights from a small pool, so that weights are shared and values skip over others by chance. Its printed form is all
that is needed to run a failing example again.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from autopar.compiler.frontend.trace import Trace
from autopar.compiler.pipeline.placement import layer_order
from autopar.compiler.pipeline.prepare import loop_pieces_for, prepare
from autopar.ir.plan import MeshPlan, Plan, StagePlan
from tests.equivalence import SCHEDULES

ROWS, WIDTH, TOKENS, LOOP = 8, 4, 7, 4
POOL = 3  # matrices, biases and stacks that operations choose from


@dataclass(frozen=True, kw_only=True)
class Operation:
    """`back` and `skip` say how many values before the last one the operands are."""

    name: str
    back: int
    skip: int
    weight: int
    wrapper: str


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model with its loss and its optimizer."""

    operations: tuple[Operation, ...]
    loss: str
    loss_wrapper: str
    optimizer: str
    num_updates: int  # the second update takes its gradient at the parameters of the first
    metrics: bool


@dataclass(frozen=True, kw_only=True)
class Cutting:
    """Random decisions of a plan; `seed` draws where layers and stages begin, in a program of unknown length."""

    num_stages: int
    more_layers: int
    num_microbatches: int
    schedule: str
    recomputed: tuple[int, ...]  # at most so many layers of stages 0, 1, ...
    split_loops: bool
    seed: int


def drop(p: Any, x: jax.Array, z: jax.Array, b: Any, k: int) -> jax.Array:
    key = jax.random.fold_in(p["key"], k)
    return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0.0)


def normalized(p: Any, x: jax.Array, z: jax.Array, b: Any, k: int) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(0.1 + (centred**2).mean(-1, keepdims=True)) * p["bias"][k]


def looped(p: Any, x: jax.Array, z: jax.Array, b: Any, k: int) -> jax.Array:
    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return h + 0.3 * jnp.tanh(h @ w), None

    return jax.lax.scan(layer, x, p["stack"][k])[0]


def branched(p: Any, x: jax.Array, z: jax.Array, b: Any, k: int) -> jax.Array:
    return jax.lax.cond(p["bias"][k][0] > 0, lambda h: h @ p["matrix"][k], jnp.sin, x)


# Of the parameters, two values, the batch, and the number of a weight.
OPERATIONS: dict[str, Callable[..., jax.Array]] = {
    "dense": lambda p, x, z, b, k: jnp.tanh(x @ p["matrix"][k] + p["bias"][k]),
    "transposed": lambda p, x, z, b, k: 0.5 * x @ p["matrix"][k].T,
    "shift": lambda p, x, z, b, k: x + p["bias"][k],
    "add": lambda p, x, z, b, k: x + 0.5 * z,
    "multiply": lambda p, x, z, b, k: jnp.sin(x) * z,
    "join": lambda p, x, z, b, k: jnp.concatenate([x, z], axis=-1)[:, 1::2],
    "choose": lambda p, x, z, b, k: jnp.where(b["label"][:, None] % 2 == 0, x, z),
    "softmax": lambda p, x, z, b, k: 2 * jax.nn.softmax(x),
    "gate": lambda p, x, z, b, k: x * jax.nn.sigmoid(z.sum(-1, keepdims=True)),
    "mix": lambda p, x, z, b, k: jnp.einsum("bi,bj,jk->bk", x, jnp.cos(z), p["matrix"][k]) / WIDTH,
    "embed": lambda p, x, z, b, k: x + p["table"][b["label"]],
    "pick": lambda p, x, z, b, k: x + jnp.take_along_axis(z, b["label"][:, None] % WIDTH, axis=1),
    "normalize": normalized,
    "drop": drop,
    "loop": looped,
    "branch": branched,
}
LOSSES: dict[str, Callable[..., jax.Array]] = {
    "mean": lambda p, x, b: jnp.mean((x - b["y"]) ** 2),
    "sum": lambda p, x, b: 0.1 * jnp.sum(jnp.cos(x - b["y"])),
    "masked": lambda p, x, b: jnp.sum(b["mask"] * (x**2).sum(-1)) / (1 + b["mask"].sum()),
    "tied": lambda p, x, b: -jnp.mean(jax.nn.log_softmax(x @ p["table"].T)[jnp.arange(x.shape[0]), b["label"]]),
    "decay": lambda p, x, b: jnp.mean(jnp.abs(x)) + 0.01 * sum(jnp.sum(leaf**2) for leaf in weights(p)),
}
WRAPPERS: dict[str, Callable[..., Any]] = {"plain": lambda f: f, "remat": jax.checkpoint, "jit": jax.jit}
OPTIMIZERS = ("sgd", "momentum", "clip", "frozen")


def weights(params: Any) -> list[jax.Array]:
    return jax.tree.leaves({name: leaf for name, leaf in params.items() if name != "key"})


def make_arguments() -> tuple[Any, Any]:
    """The state and the batch of every random step."""
    rng = np.random.default_rng(0)
    params = {
        "matrix": [jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) * 0.7) for _ in range(POOL)],
        "bias": [jnp.asarray(rng.normal(size=WIDTH)) for _ in range(POOL)],
        "stack": [jnp.asarray(rng.normal(size=(LOOP, WIDTH, WIDTH)) * 0.7) for _ in range(POOL)],
        "table": jnp.asarray(rng.normal(size=(TOKENS, WIDTH))),
    }
    velocity = jax.tree.map(jnp.zeros_like, params)
    batch = {
        "x": jnp.asarray(rng.normal(size=(ROWS, WIDTH))),
        "y": jnp.asarray(rng.normal(size=(ROWS, WIDTH))),
        "label": jnp.asarray(rng.integers(0, TOKENS, size=ROWS), jnp.int32),
        "mask": jnp.asarray(rng.integers(0, 2, size=ROWS), jnp.float64),
    }
    return {"params": params, "velocity": velocity, "key": jax.random.key(3), "count": jnp.int32(0)}, batch


def make_step(model: Model) -> Callable[..., Any]:
    """The train step `(state, batch) -> (state, metrics)` of a model."""

    def loss_fn(params: Any, key: Any, batch: Any) -> Any:
        params, values = {**params, "key": key}, [batch["x"]]
        for operation in model.operations:
            x, z = (values[max(0, len(values) - 1 - back)] for back in (operation.back, operation.skip))
            fun = OPERATIONS[operation.name]
            apply = WRAPPERS[operation.wrapper](lambda p, x, z, b, fun=fun, k=operation.weight: fun(p, x, z, b, k))
            values.append(apply(params, x, z, batch))
        aux = {"rows": values[-1].sum(axis=1), "right": jnp.mean(values[-1].argmax(axis=1) == batch["label"])}
        return LOSSES[model.loss](params, values[-1], batch), aux

    def step(state: Any, batch: Any) -> Any:
        key, used = jax.random.split(state["key"])
        state = {**state, "key": key, "count": state["count"] + 1}
        metrics: dict[str, Any] = {}
        for number in range(model.num_updates):
            value_and_grad = jax.value_and_grad(WRAPPERS[model.loss_wrapper](loss_fn), has_aux=True)
            (loss, aux), grads = value_and_grad(state["params"], used, batch)
            metrics[f"loss_{number}"] = loss
            if model.metrics:
                metrics |= {**aux, "norm": jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))}
            state = _update(model.optimizer, state, grads)
        return state, metrics

    return step


def _update(optimizer: str, state: Any, grads: Any) -> Any:
    if optimizer == "clip":
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.5 / norm), grads)
    if optimizer == "frozen":
        grads = {**grads, "bias": jax.tree.map(jnp.zeros_like, grads["bias"])}
    velocity = state["velocity"]
    if optimizer == "momentum":
        grads = velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return {**state, "params": params, "velocity": velocity}


def make_plan(trace: Trace, cutting: Cutting) -> Plan | None:
    """The plan of a cutting, one device per mesh; None if the program is too short for it."""
    num_layers = cutting.num_stages + cutting.more_layers
    decisions: dict[str, Any] = {
        "num_microbatches": cutting.num_microbatches,
        "loop_pieces": loop_pieces_for(trace, num_layers) if cutting.split_loops else 1,
        "batch_statistics": "exact",
        "random": "full_batch",
    }
    prepared = prepare(trace, num_layers=num_layers, **decisions)
    length, rng = len(layer_order(prepared.phases)), Random(cutting.seed)
    if length < num_layers:
        return None
    borders = [0, *sorted(rng.sample(range(1, num_layers), cutting.num_stages - 1)), num_layers]
    num_meshes = cutting.num_stages // 2 if cutting.schedule == "interleaved" else cutting.num_stages
    return Plan(
        fingerprint="",
        method="random",
        meshes=tuple(MeshPlan(devices=(i,), shape=(1,), axis_names=("data",)) for i in range(num_meshes)),
        stages=tuple(
            StagePlan(layers=(start, stop), mesh=s % num_meshes, recomputed=min(cutting.recomputed[s], stop - start))
            for s, (start, stop) in enumerate(itertools.pairwise(borders))
        ),
        cuts=tuple(sorted(rng.sample(range(1, length), num_layers - 1))),
        schedule=cutting.schedule,
        input_specs={},
        **decisions,
    )


operations = st.builds(
    Operation,
    name=st.sampled_from(sorted(OPERATIONS)),
    back=st.sampled_from([0, 0, 0, 1, 3]),
    skip=st.integers(0, 4),
    weight=st.integers(0, POOL - 1),
    wrapper=st.sampled_from(["plain", "plain", "remat", "jit"]),
)
models = st.builds(
    Model,
    operations=st.lists(operations, min_size=2, max_size=6).map(tuple),
    loss=st.sampled_from(sorted(LOSSES)),
    loss_wrapper=st.sampled_from(["plain", "plain", "plain", "remat", "jit"]),
    optimizer=st.sampled_from(OPTIMIZERS),
    num_updates=st.sampled_from([1, 1, 1, 2]),
    metrics=st.booleans(),
)


def cuttings(schedules: tuple[str, ...] = SCHEDULES) -> st.SearchStrategy[Cutting]:
    return st.builds(
        lambda num_stages, schedule, **fields: Cutting(
            # Interleaved stages come two per mesh.
            num_stages=num_stages + num_stages % 2 if schedule == "interleaved" else num_stages,
            schedule=schedule,
            **fields,
        ),
        num_stages=st.integers(2, 4),
        more_layers=st.integers(0, 2),
        num_microbatches=st.sampled_from([1, 2, 4]),
        schedule=st.sampled_from(schedules),
        recomputed=st.tuples(*[st.sampled_from([0, 1, 9])] * 4),
        split_loops=st.booleans(),
        seed=st.integers(0, 1000),
    )
