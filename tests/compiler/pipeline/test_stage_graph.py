"""A stage graph evaluates to the step it was cut from, and every task holds what its kind promises."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.compiler import passes
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.pipeline.stage_graph import StageGraph, StageTask, evaluate
from autopar.hardware.cluster import Cluster
from autopar.methods import DataParallel
from tests.small_steps import (
    WIDTH,
    adam,
    adam_state,
    assert_same,
    cut,
    draw,
    gan_params,
    gan_step,
    gpt_batch,
    gpt_loss,
    gpt_params,
    mlp_batch,
    mlp_loss,
    mlp_params,
    mlp_step,
    sgd,
    traced,
)


def task(graph: StageGraph, name: str) -> StageTask:
    return next(t for t in graph.tasks if t.name == name)


def primitives(stage_task: StageTask) -> list[str]:
    return [eqn.primitive.name for eqn in stage_task.jaxpr.jaxpr.eqns]


def with_metrics(state, batch):
    """Results of every kind: per example, the largest, the smallest, all, any, and of random draws."""
    key, params = state

    def loss(params):
        h = batch[0]
        for layer in params:
            h = jnp.tanh(h @ layer["w"] + layer["b"])
            h = h * jax.random.bernoulli(key, 0.7, h.shape)
        return jnp.mean((h - batch[1]) ** 2), h

    (value, h), grads = jax.value_and_grad(loss, has_aux=True)(params)
    metrics = {
        "loss": value,
        "predictions": jnp.argmax(h, axis=-1),
        "transposed": h.T,
        "largest": jnp.max(h),
        "smallest": jnp.min(h),
        "all": jnp.all(h < 2),
        "any": jnp.any(h > 2),
        "rows": jnp.int32(h.shape[0]),
    }
    return (jax.random.split(key)[0], jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)), metrics


def shared_weights(params, batch):
    h = batch[0]
    for _ in range(4):
        h = jnp.tanh(h @ params["w"])
    return jnp.mean((h - batch[1]) ** 2)


def layers_as_loop(params, batch):
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch[0], params)
    return jnp.mean((h - batch[1]) ** 2)


STEPS = {
    "mlp": (mlp_step, (mlp_params(), mlp_batch())),
    "gpt, clipped": (adam(gpt_loss, clip=0.1), (adam_state(gpt_params()), gpt_batch())),
    "metrics and dropout": (with_metrics, ((jax.random.key(0), mlp_params()), mlp_batch())),
    "two gradients": (gan_step, (gan_params(), mlp_batch())),
    "shared weights": (adam(shared_weights), (adam_state({"w": draw(0, WIDTH, WIDTH)}), mlp_batch())),
    "loop over layers": (adam(layers_as_loop), (adam_state(draw(0, 4, WIDTH, WIDTH)), mlp_batch())),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "two microbatches": {},
    "whole batch": {"num_microbatches": 1},
    "remat": {"remat": True},
    "weight gradients apart": {"schedule": "zero-bubble", "num_microbatches": 4},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("step", "args"), STEPS.values(), ids=STEPS)
def test_stage_graph_evaluates_to_the_step(step, args, options):
    graph = cut(step, *args, **options)
    want = jax.jit(step)(*args)
    got = jax.jit(lambda *leaves: evaluate(graph, leaves))(*jax.tree.leaves(args))
    assert_same(jax.tree.unflatten(jax.tree.structure(want), got), want, tolerance=2e-5)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("step", "args"), STEPS.values(), ids=STEPS)
def test_every_value_is_there_when_a_task_reads_it(step, args, options):
    graph = cut(step, *args, **options)
    there = {i.value for i in graph.inputs}
    for t in graph.tasks:
        assert set(t.inputs) <= there, t.name
        there.update(t.outputs, (a.result for a in t.accumulations))
        assert [v.aval.shape for v in t.jaxpr.jaxpr.invars] == [graph.values[n].shape for n in t.inputs]
    assert {out.value for out in graph.outputs if out.value is not None} <= there


# --- forward and backward -----------------------------------------------------------------------------------------


def test_tasks_stand_in_an_order_in_which_they_may_run():
    names = [t.name for t in cut(mlp_step, mlp_params(4), mlp_batch(), num_devices=4, num_stages=4).tasks]
    assert names == ["F0", "F1", "F2", "F3", "B3", "B2", "B1", "B0", "U0'", "U1'", "U2'", "U3'"]


def test_one_stage_has_no_separate_backward_task():
    trace = traced(mlp_step, mlp_params(), mlp_batch())
    plan = passes.make_plan(trace, DataParallel(num_microbatches=2), cluster=Cluster(num_devices=2, kind="cpu"))
    assert [t.name for t in passes.cut_step(trace, plan).tasks] == ["F0", "U0'"]


def test_plain_backward_reads_what_the_forward_kept_and_makes_nothing_again():
    graph = cut(mlp_step, mlp_params(4), mlp_batch())
    kept = set(task(graph, "F0").outputs) & set(task(graph, "B0").inputs)
    assert len(kept) > 1
    assert "tanh" in primitives(task(graph, "F0")) and "tanh" not in primitives(task(graph, "B0"))


def test_rematerialised_backward_computes_the_forward_again_and_the_forward_keeps_only_what_it_sends():
    graph = cut(mlp_step, mlp_params(4), mlp_batch(), remat=True)
    (region,) = (eqn for eqn in task(graph, "B0").jaxpr.jaxpr.eqns if eqn.primitive.name == "remat2")
    assert [eqn.primitive.name for eqn in jc.all_equations(region.params["jaxpr"])].count("tanh") == 2
    sent = {name for name, (source, _) in graph.crossing.items() if source == 0}
    assert set(task(graph, "F0").outputs) == sent
    assert "b.0" in task(graph, "B0").inputs


def dropout(params, batch):
    key, (x, y) = jax.random.key(0), batch
    for i, layer in enumerate(params):
        x = jnp.tanh(x @ layer["w"]) * jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, x.shape)
    return jnp.mean((x - y) ** 2)


@pytest.mark.parametrize(("remat", "draws_again"), [(False, False), (True, True)])
def test_random_bits_are_drawn_once_unless_the_stage_is_rematerialised(remat, draws_again):
    graph = cut(sgd(dropout), mlp_params(4), mlp_batch(), remat=remat)
    assert "random_bits" in primitives(task(graph, "F0"))
    again = {eqn.primitive.name for eqn in jc.all_equations(task(graph, "B0").jaxpr.jaxpr)}
    assert ("random_bits" in again) == draws_again


def low_precision(params, batch):
    h = batch[0].astype(jnp.bfloat16)
    for layer in params:
        h = jnp.tanh(h @ layer["w"].astype(jnp.bfloat16))
    return jnp.mean((h.astype(jnp.float32) - batch[1]) ** 2)


def test_casts_of_parameters_are_made_where_they_are_needed_and_not_kept():
    graph = cut(sgd(low_precision), mlp_params(4), mlp_batch(), num_microbatches=4)
    kept = [graph.values[n].shape for n in task(graph, "F0").outputs]
    assert kept and set(kept) == {(2, WIDTH)}
    assert {"a.1.w"} == {n for n in task(graph, "B0").inputs if n.startswith("a")}


def test_weight_gradients_apart_are_what_no_earlier_stage_waits_for():
    graph = cut(mlp_step, mlp_params(4), mlp_batch(), schedule="zero-bubble", num_microbatches=4)
    backward, weights = task(graph, "B1"), task(graph, "W1")
    assert not backward.accumulations and len(weights.accumulations) == 4
    assert {n for n, ends in graph.crossing.items() if ends == (1, (0,))} <= set(backward.outputs)
    assert primitives(weights).count("dot_general") == 2  # one for each weight
    assert primitives(backward).count("dot_general") == 2  # one for each cotangent


def test_first_stage_has_all_gradients_in_one_task_because_nobody_waits_for_it():
    graph = cut(mlp_step, mlp_params(4), mlp_batch(), schedule="zero-bubble", num_microbatches=4)
    assert [t.name for t in graph.tasks if t.kind in "BW"] == ["B1", "W1", "B0"]
    assert all(t.jaxpr.jaxpr.eqns for t in graph.tasks)


# --- updates ------------------------------------------------------------------------------------------------------


def update_tasks(graph: StageGraph) -> list[str]:
    return [t.name for t in graph.tasks if t.kind == "U"]


def test_update_without_exchange_is_one_round():
    assert update_tasks(cut(adam(mlp_loss), adam_state(mlp_params()), mlp_batch())) == ["U0'", "U1'"]


@pytest.mark.parametrize("num_stages", [2, 4])
def test_clipping_by_the_global_norm_is_one_exchange(num_stages):
    graph = cut(
        adam(mlp_loss, clip=0.1),
        adam_state(mlp_params(4)),
        mlp_batch(),
        num_devices=num_stages,
        num_stages=num_stages,
    )
    first, second = ([t for t in graph.tasks if t.kind == "U" and t.update_round == number] for number in (0, 1))
    assert len(update_tasks(graph)) == len(first) + len(second) and len(first) == len(second) == num_stages
    exchanged = [n for n, v in graph.crossing.items() if not graph.values[n].per_microbatch]
    assert all(graph.values[n].shape == () for n in exchanged)
    assert {n for t in first for n in t.outputs} >= set(exchanged)


def test_update_of_a_second_gradient_waits_for_the_first():
    graph = cut(gan_step, gan_params(), mlp_batch())
    assert graph.num_rounds == 2
    rounds = [(t.round, t.kind == "U") for t in graph.tasks]
    # The first round, the critic's update, the second round, the generator's update.
    assert list(dict.fromkeys(rounds)) == [(0, False), (1, True), (1, False), (2, True)]


# --- values -------------------------------------------------------------------------------------------------------


def test_accumulations_are_of_the_kind_of_their_result():
    graph = cut(with_metrics, (jax.random.key(0), mlp_params()), mlp_batch())
    kinds = {
        out.leaf: a.kind for out in graph.outputs for t in graph.tasks for a in t.accumulations if a.result == out.value
    }
    names = sorted(["all", "any", "largest", "loss", "predictions", "rows", "smallest", "transposed"])
    metrics = {name: kinds.get(5 + i) for i, name in enumerate(names)}
    assert metrics == {
        "all": "and",
        "any": "or",
        "largest": "max",
        "loss": "sum",
        "predictions": "concatenate",
        "rows": None,
        "smallest": "min",
        "transposed": "concatenate",
    }
    axes = {a.operand: a.axis for t in graph.tasks for a in t.accumulations if a.kind == "concatenate"}
    assert sorted(axes.values()) == [0, 1]


def test_values_of_a_loop_over_layers_are_pieces_of_the_stacked_leaves():
    graph = cut(adam(layers_as_loop), adam_state(draw(0, 4, WIDTH, WIDTH)), mlp_batch())
    pieces = {i.value: (i.start, i.stop, i.stages) for i in graph.inputs if i.name == "a.params"}
    assert pieces == {"a.params[0:2]": (0, 2, (0,)), "a.params[2:4]": (2, 4, (1,))}
    assert [(out.start, out.stop, out.stage) for out in graph.outputs if out.leaf == 0] == [(0, 2, 0), (2, 4, 1)]


def test_at_signs_in_names_do_not_meet_those_of_microbatches():
    params = {"w@1": draw(0, WIDTH, WIDTH), "v": draw(1, WIDTH, WIDTH)}
    graph = cut(sgd(lambda p, b: mlp_loss([{"w": p["w@1"] @ p["v"], "b": 0.0}] * 2, b)), params, mlp_batch())
    assert not any("@" in name for name in graph.values)


def test_constant_results_are_literals():
    graph = cut(lambda p, b: (*mlp_step(p, b), 3, np.arange(2)), mlp_params(), mlp_batch())
    assert [out.value for out in graph.outputs[-2:]] == [None, None]
    assert [np.asarray(out.literal).tolist() for out in graph.outputs[-2:]] == [3, [0, 1]]
