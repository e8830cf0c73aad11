"""State that only updates read can live on the host, in parts of what is updated together."""

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar.compiler import passes
from autopar.compiler.pipeline.host_state import offered_state, state_on_host
from autopar.compiler.pipeline.stage_graph import StageGraph, evaluate
from autopar.errors import PlanMismatch, Unsupported
from autopar.ir.plan import Plan
from tests.small_steps import adam, adam_state, mlp_batch, mlp_step

ROWS = 8


def params(num_layers: int = 4):
    return [jax.random.normal(key, (ROWS, 16)) for key in jax.random.split(jax.random.key(0), num_layers)]


def loss(params, batch):
    return sum(jnp.mean((batch @ w) ** 2) for w in params)


def step_of(tx, metrics=lambda updates: {}):
    def train_step(state, batch):
        params, opt_state = state
        grads = jax.grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), metrics(updates)

    return train_step


def planned(step, state, batch, **fields):
    traced = autopar.parallelize(step, devices=jax.devices()[:2]).trace(state, batch)
    return traced.plan(autopar.Megatron(**fields))


def graph_of(step, state, batch, **fields) -> tuple[StageGraph, Plan]:
    made = planned(step, state, batch, **fields)
    return passes.cut_step(made.trace, made.plan), made.plan


BATCH = jnp.arange(2.0 * ROWS * ROWS).reshape(2 * ROWS, ROWS) / 100


def test_moments_and_no_parameters_or_counters_are_offered_each_with_what_replaces_it():
    tx = optax.adam(1e-3)
    graph, _ = graph_of(step_of(tx), (params(), tx.init(params())), BATCH)
    offered = offered_state(graph)
    assert sorted(offered) == [f"state.1.0.{moment}.{n}" for moment in ("mu", "nu") for n in range(4)]
    assert all(out.replaces == name for name, out in offered.items())


@pytest.mark.parametrize(
    ("tx", "metrics", "num_parts"),
    [
        (optax.adam(1e-3), lambda updates: {}, 4),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), lambda updates: {}, 4),
        # The norm of what all parts make joins them at the end, and ties none to another.
        (optax.adam(1e-3), optax.tree.norm, 4),
        # What takes all state at once needs all of it on the devices.
        (optax.MultiSteps(optax.adam(1e-3), 2), lambda updates: {}, 1),
    ],
    ids=["adam", "clipped", "norm of updates", "all at once"],
)
def test_parts_are_what_is_updated_together_and_the_graph_computes_the_same(tx, metrics, num_parts):
    step, args = step_of(tx, metrics), ((params(), tx.init(params())), BATCH)
    graph, plan = graph_of(step, *args, offload="optimizer")
    graph.verify()
    assert len(plan.host_state) == num_parts
    found, expected = evaluate(graph, jax.tree.leaves(args)), jax.tree.leaves(step(*args))
    for one, other in zip(found, expected, strict=True):
        assert jnp.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_each_part_has_an_update_that_reads_no_other():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    graph, plan = graph_of(step_of(tx), (params(), tx.init(params())), BATCH, offload="optimizer")
    read = [{n for n in task.inputs if "mu" in n or "nu" in n} for task in graph.tasks if task.kind == "U"]
    assert read == [set(), *map(set, plan.host_state)]
    # What only one part reads is computed with it, so that nothing of the size of a gradient is made for all before.
    first = next(task for task in graph.tasks if task.kind == "U")
    assert all(graph.values[name].shape == () for name in first.outputs)


def test_many_small_arrays_share_a_part():
    tx = optax.adam(1e-3)
    many = params(64)
    made = planned(step_of(tx), (many, tx.init(many)), BATCH, offload="optimizer")
    assert [len(part) for part in made.plan.host_state] == [8] * 16


def test_a_step_without_such_state_is_refused():
    with pytest.raises(Unsupported, match=r'offload="optimizer" keeps state .* train_step has none'):
        planned(mlp_step, params_of_mlp(), mlp_batch(), offload="optimizer")


def params_of_mlp():
    return [{"w": jnp.ones((4, 4)), "b": jnp.ones(4)}]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("state.count", "keeps state.count of .* no state that the updates of one stage replace"),
        ("state.9", "keeps state.9 of .* none of its inputs"),
    ],
)
def test_a_plan_that_keeps_on_the_host_what_cannot_be_there_is_refused(name, message):
    state = adam_state(params())
    made = planned(adam(loss), state, BATCH, offload="optimizer")
    with pytest.raises(PlanMismatch, match=message):
        passes.lower_step(made.trace, Plan(**{**vars(made.plan), "host_state": (*made.plan.host_state, (name,))}))


def test_stages_keep_their_own_state_on_their_hosts():
    tx = optax.adam(1e-3)

    def deep(params, batch):
        h = batch
        for w in params:
            h = autopar.layer_boundary(jnp.tanh(h @ w))
        return jnp.mean(h**2)

    def train_step(state, batch):
        updates, opt_state = tx.update(jax.grad(deep)(state[0], batch), state[1])
        return (optax.apply_updates(state[0], updates), opt_state), ()

    square = [jnp.eye(16) * n for n in range(1, 5)]
    graph, plan = graph_of(
        train_step, (square, tx.init(square)), jnp.ones((8, 16)), pipeline=2, num_microbatches=2, offload="optimizer"
    )
    stages = {i.name: i.stages for i in graph.inputs}
    assert [{stages[name] for name in part} for part in plan.host_state] == [{(0,)}, {(0,)}, {(1,)}, {(1,)}]
    assert state_on_host(graph) == plan.host_state
