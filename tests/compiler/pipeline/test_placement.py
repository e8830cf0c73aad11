"""State lives where it is used, gradients are added where the state is, and only activations and scalars travel."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.compiler.pipeline.stage_graph import StageGraph
from tests.small_steps import (
    WIDTH,
    adam,
    adam_state,
    cut,
    draw,
    gpt_batch,
    gpt_loss,
    gpt_params,
    lowered,
    mlp_batch,
    mlp_loss,
    mlp_params,
    mlp_step,
    sgd,
)


def homes(graph: StageGraph) -> dict[str, tuple[int, ...]]:
    """The stages that read each input of the step, its owner first."""
    return {i.value: i.stages for i in graph.inputs}


def successors(graph: StageGraph) -> dict[str, int]:
    """The stage on which the successor of each piece of state is."""
    return {out.replaces: out.stage for out in graph.outputs if out.replaces is not None}


def crossing(graph: StageGraph, *, per_microbatch: bool) -> dict[str, tuple[Any, ...]]:
    return {n: ends for n, ends in graph.crossing.items() if graph.values[n].per_microbatch == per_microbatch}


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("remat", [False, True])
def test_parameters_live_on_the_one_stage_that_uses_them(num_microbatches, remat):
    graph = cut(mlp_step, mlp_params(4), mlp_batch(), num_microbatches=num_microbatches, remat=remat)
    expected = {f"a.{layer}.{name}": (layer // 2,) for layer in range(4) for name in "bw"}
    assert {n: stages for n, stages in homes(graph).items() if n in expected} == expected
    assert successors(graph) == {name: stage for name, (stage,) in expected.items()}
    assert not crossing(graph, per_microbatch=False)


def test_stages_of_a_pass_that_waits_for_batch_statistics_have_the_layers_behind_them_too():
    def loss(params, batch):
        h = batch[0]
        for layer in params:
            h = h @ layer["w"]
            h = jnp.tanh(h - h.mean(0)) + layer["b"]
        return jnp.mean((h - batch[1]) ** 2)

    graph = cut(sgd(loss), mlp_params(4), mlp_batch(), num_microbatches=2)
    assert graph.num_rounds > 4
    assert [homes(graph)[f"a.{layer}.w"] for layer in range(4)] == [(0,), (0,), (1,), (1,)]


def test_a_sum_that_microbatches_wait_for_is_not_put_off_to_the_end_of_the_step():
    def normalized(h):
        mean = jax.lax.pmean(h, "rows")
        return (h - mean) / jnp.sqrt(jax.lax.pmean((h - mean) ** 2, "rows") + 0.1)

    def loss(params, batch):
        h = jax.vmap(lambda row: normalized(row @ params[0]["w"]), axis_name="rows")(batch[0])
        return jnp.mean((h @ params[1]["w"] - batch[1]) ** 2)

    lowered(sgd(loss), mlp_params(), mlp_batch(), num_microbatches=2).verify()


def test_batch_goes_to_the_stages_that_read_it():
    graph = cut(mlp_step, mlp_params(), mlp_batch())
    assert (homes(graph)["b.0"], homes(graph)["b.1"]) == ((0,), (1,))


@pytest.mark.parametrize(
    ("step", "args"), [(mlp_step, (mlp_params(4), mlp_batch())), (sgd(gpt_loss), (gpt_params(), gpt_batch()))]
)
def test_per_microbatch_one_activation_goes_up_and_its_cotangent_comes_down(step, args):
    graph = cut(step, *args, num_microbatches=2)
    travelling = crossing(graph, per_microbatch=True)
    assert sorted(travelling.values()) == [(0, (1,)), (1, (0,))]
    assert len({graph.values[n].shape for n in travelling}) == 1


def test_moments_live_with_their_parameter_and_the_counter_everywhere():
    graph = cut(adam(mlp_loss), adam_state(mlp_params()), mlp_batch())
    for layer in range(2):
        for tree in ("params", "mu", "nu"):
            assert homes(graph)[f"a.{tree}.{layer}.w"] == (layer,)
            assert successors(graph)[f"a.{tree}.{layer}.w"] == layer
    assert set(homes(graph)["a.count"]) == {0, 1}
    assert not next(i for i in graph.inputs if i.value == "a.count").owned


def test_learning_rate_is_computed_again_on_every_stage_and_nothing_is_sent_for_it():
    graph = cut(adam(mlp_loss), adam_state(mlp_params()), mlp_batch())
    updates = [task for task in graph.tasks if task.kind == "U"]
    assert [task.stage for task in updates] == [0, 1]
    for task in updates:
        assert "a.count" in task.inputs
        assert any(e.primitive.name in ("sqrt", "rsqrt") and not e.outvars[0].aval.shape for e in task.jaxpr.jaxpr.eqns)
    assert not crossing(graph, per_microbatch=False)


def test_only_one_stage_gives_back_the_counter():
    graph = cut(adam(mlp_loss), adam_state(mlp_params()), mlp_batch())
    assert len([out for out in graph.outputs if out.replaces == "a.count"]) == 1


# --- parameters of several stages ---------------------------------------------------------------------------------


def test_tied_table_lives_on_its_first_stage_and_its_gradients_are_added_there_once():
    graph = cut(sgd(gpt_loss), gpt_params(), gpt_batch(), num_microbatches=4)
    assert homes(graph)["a.embed"] == (0, 1) and successors(graph)["a.embed"] == 0
    per_step = crossing(graph, per_microbatch=False)
    (total,) = [name for name, ends in per_step.items() if ends == (1, (0,))]
    assert graph.values[total].shape == gpt_params()["embed"].shape
    assert set(per_step) == {"a.embed", total}
    tied = [a.result for task in graph.tasks for a in task.accumulations if graph.values[a.result].shape == (11, 4)]
    (update,) = [task for task in graph.tasks if task.kind == "U" and task.stage == 0]
    assert total in tied and set(tied) <= set(update.inputs)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_weights_shared_by_all_stages_are_added_once_per_step(num_stages):
    def loss(params, batch):
        h = batch[0]
        for _ in range(8):
            h = jnp.tanh(h @ params["w"])
        return jnp.mean((h - batch[1]) ** 2)

    graph = cut(sgd(loss), {"w": draw(0, WIDTH, WIDTH)}, mlp_batch(), num_devices=num_stages, num_stages=num_stages)
    assert homes(graph)["a.w"] == tuple(range(num_stages))
    downwards = [ends for ends in crossing(graph, per_microbatch=False).values() if ends[0] != 0]
    assert sorted(downwards) == [(stage, (stage - 1,)) for stage in range(1, num_stages)]
    assert all(graph.values[out.value].shape == (WIDTH, WIDTH) for out in graph.outputs if out.replaces)


# --- state beside the model ---------------------------------------------------------------------------------------


def with_average(state, batch):
    params, loss = mlp_step(state["params"], batch)
    average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state["average"], params)
    return {"params": params, "average": average, "unused": state["unused"] * 2, "kept": state["kept"]}, loss


def test_average_lives_with_its_parameter_and_what_nothing_uses_on_the_first_stage():
    state = {"params": mlp_params(), "average": mlp_params(), "unused": draw(0, 5, 5), "kept": draw(1, 6, 6)}
    graph = cut(with_average, state, mlp_batch())
    for layer in range(2):
        assert homes(graph)[f"a.average.{layer}.w"] == (layer,)
        assert successors(graph)[f"a.average.{layer}.w"] == layer
    assert homes(graph)["a.unused"] == homes(graph)["a.kept"] == (0,)
    assert successors(graph)["a.unused"] == successors(graph)["a.kept"] == 0


def test_clipping_sends_one_scalar_from_every_stage():
    graph = cut(adam(mlp_loss, clip=0.1), adam_state(mlp_params(4)), mlp_batch())
    sent = crossing(graph, per_microbatch=False)
    assert sent and all(graph.values[name].shape == () for name in sent)
    assert not [out for out in graph.outputs if out.replaces and out.stage not in homes(graph)[out.replaces]]


def test_metric_of_each_example_is_made_where_its_activation_is():
    def step(params, batch):
        def loss(params):
            h = batch[0]
            for layer in params:
                h = jnp.tanh(h @ layer["w"])
            return jnp.mean((h - batch[1]) ** 2), h

        grads, h = jax.grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), jnp.argmax(h, axis=-1)

    graph = cut(step, mlp_params(), mlp_batch())
    assert graph.outputs[-1].stage == 1
    assert len(crossing(graph, per_microbatch=True)) == 2
