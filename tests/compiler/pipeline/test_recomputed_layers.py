"""A stage that is computed again makes its layers one by one, each just before its backward pass."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.compiler import passes
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.pipeline.stage_graph import StageGraph, evaluate
from autopar.hardware.cluster import Cluster
from tests.small_steps import (
    WIDTH,
    assert_same,
    cut,
    draw,
    gan_params,
    gan_step,
    gpt_batch,
    gpt_loss,
    gpt_params,
    mlp_batch,
    sgd,
    traced,
)

WIDE = 4 * WIDTH
LAYERS = [{"w": draw(n, WIDTH, WIDE), "v": draw(10 + n, WIDE, WIDTH)} for n in range(4)]


def residual(act):
    def loss(params, batch):
        h, mask = batch[0], jax.random.bernoulli(jax.random.key(1), 0.9, (*batch[0].shape[:-1], WIDE))
        for number, layer in enumerate(params):
            with jax.named_scope(f"block_{number}"):
                h = h + act(h @ layer["w"], number, mask) @ layer["v"]
        return jnp.mean((h - batch[1]) ** 2)

    return sgd(loss)


def tanh(h, *_):
    return jnp.tanh(h)


def own_dropout(h, number, _):
    return jnp.tanh(h) * jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), number), 0.9, h.shape)


def one_dropout(h, _, mask):
    return jnp.tanh(h) * mask


def equations(graph: StageGraph, name: str) -> list[jc.JaxprEqn]:
    (mine,) = (task for task in graph.tasks if task.name == name)
    return mine.jaxpr.jaxpr.eqns


def names(eqns) -> list[str]:
    return [eqn.primitive.name for eqn in eqns]


def regions(eqns) -> list[list[str]]:
    """The primitives in each region."""
    return [names(jc.all_equations(eqn.params["jaxpr"])) for eqn in eqns if eqn.primitive.name == "remat2"]


def test_a_backward_task_has_a_region_for_each_layer_and_is_handed_no_more_than_what_goes_into_layers():
    graph = cut(residual(tanh), LAYERS, mlp_batch(), remat=True, layers=4)
    for stage in range(2):
        eqns = equations(graph, f"B{stage}")
        found = regions(eqns)
        assert [each.count("tanh") for each in found] == [1, 1] and "tanh" not in names(eqns)
        made = {value for task in graph.tasks if task.name == f"F{stage}" for value in task.outputs}
        read = {value for task in graph.tasks if task.name == f"B{stage}" for value in task.inputs}
        handed = [graph.values[name].shape for name in made & read if graph.values[name].per_microbatch]
        assert all(shape[-1:] != (WIDE,) for shape in handed) and (4, WIDTH) in handed


def test_the_regions_of_a_task_run_from_the_last_layer_to_the_first():
    graph = cut(residual(tanh), LAYERS, mlp_batch(), remat=True, layers=4)
    first, second = (eqn for eqn in equations(graph, "B1") if eqn.primitive.name == "remat2")
    (mine,) = (task for task in graph.tasks if task.name == "B1")
    inputs = dict(zip(mine.jaxpr.jaxpr.invars, mine.inputs, strict=True))

    def weights(eqn):
        return {inputs[v] for v in jc.operands(eqn) if inputs.get(v, "").startswith("a.")}

    assert "a.3.w" in weights(first) <= {"a.3.v", "a.3.w"} and "a.2.w" in weights(second) <= {"a.2.v", "a.2.w"}
    sent = set(first.outvars)
    for eqn in equations(graph, "B1"):
        if eqn is not first and not sent.isdisjoint(jc.operands(eqn)):
            sent.update(eqn.outvars)
    assert not sent.isdisjoint(jc.operands(second))  # so that it cannot begin before


def test_alone_all_layers_but_the_last_are_computed_again_in_the_one_task():
    plain, again = (
        cut(residual(tanh), LAYERS, mlp_batch(), num_devices=1, num_stages=1, layers=4, remat=remat)
        for remat in (False, True)
    )
    assert not regions(equations(plain, "F0"))
    assert [each.count("tanh") for each in regions(equations(again, "F0"))] == [1, 1, 1]
    assert names(equations(again, "F0")).count("tanh") == 4


def test_without_layers_of_its_own_a_stage_alone_has_those_of_the_model():
    graph = cut(residual(tanh), LAYERS, mlp_batch(), num_devices=1, num_stages=1, remat=True)
    assert [each.count("tanh") for each in regions(equations(graph, "F0"))][-3:] == [1, 1, 1]


@pytest.mark.parametrize(("act", "inside", "beside"), [(own_dropout, 1, 0), (one_dropout, 0, 1)])
def test_draws_are_made_in_the_region_that_alone_needs_them_and_else_once(act, inside, beside):
    eqns = equations(cut(residual(act), LAYERS, mlp_batch(), remat=True, layers=4), "B0")
    assert [each.count("random_bits") for each in regions(eqns)] == [inside] * 2
    assert names(eqns).count("random_bits") == beside


@jax.custom_vjp
def told(h):
    return jnp.sin(h)


def told_forward(h):
    return jnp.sin(h), h


def told_backward(h, g):
    jax.debug.callback(lambda _: None, g, ordered=True)
    return (g * jnp.cos(h),)


told.defvjp(told_forward, told_backward)


def test_equations_that_keep_an_order_stay_where_they_are_and_all_layers_run_again_at_once():
    step = residual(lambda h, *_: told(jnp.tanh(h)))
    eqns = equations(cut(step, LAYERS, mlp_batch(), remat=True, layers=4), "B0")
    assert not regions(eqns) and names(eqns).count("tanh") == 2


def contrastive(params, batch):
    """Every example meets all others at the end, so that the backward pass waits for the last microbatch."""

    def tower(h):
        for layer in params:
            h = h + jnp.tanh(h @ layer["w"]) @ layer["v"]
        return h

    return -jnp.mean(jnp.diag(jax.nn.log_softmax(tower(batch[0]) @ tower(batch[1]).T)))


@pytest.mark.parametrize("num_stages", [1, 2])
def test_layers_are_computed_again_in_a_backward_pass_that_waits_for_all_microbatches(num_stages):
    graph = cut(
        sgd(contrastive), LAYERS, mlp_batch(), num_devices=num_stages, num_stages=num_stages, remat=True, layers=4
    )
    tasks = [task for task in graph.tasks if task.kind in "FB"]
    last = [task for task in tasks if task.round == 1]
    assert {task.stage for task in last} == set(range(num_stages))
    assert all(any("tanh" in each for each in regions(task.jaxpr.jaxpr.eqns)) for task in last)
    read = {name for task in last for name in task.inputs}
    handed = read.intersection(name for task in tasks if not task.round for name in task.outputs)
    assert handed and not any(graph.values[name].shape[-1:] == (WIDE,) for name in handed)


def generator_step(params, batch):
    """A critic's step and a generator's, of which the second reads what the forward pass of the first made."""
    made, critic = params[:2], params[2:]

    def through(layers, h, act=jnp.tanh):
        for layer in layers:
            h = h + act(jnp.tanh(h @ layer["w"])) @ layer["v"]
        return h

    def judged(critic, made):
        return jnp.mean(through(critic, through(made, batch[0], told)) ** 2)

    critic = jax.tree.map(lambda p, g: p - 0.1 * g, critic, jax.grad(judged)(critic, made))
    for _ in range(2):
        made = jax.tree.map(lambda p, g: p - 0.1 * g, made, jax.grad(judged, argnums=1)(critic, made))
    return made + critic, 0.0


def test_what_an_earlier_round_has_handed_on_no_later_one_hands_on_again():
    step, args = generator_step, (LAYERS, mlp_batch())
    graph = cut(step, *args, remat=True, layers=4, num_microbatches=1)
    handed = [name for task in graph.tasks for name in task.outputs]
    assert len(handed) == len(set(handed))
    assert_same(
        jax.tree.unflatten(jax.tree.structure(step(*args)), evaluate(graph, jax.tree.leaves(args))), step(*args)
    )


CASES = {
    "tanh": (residual(tanh), LAYERS, mlp_batch()),
    "a mask of each layer": (residual(own_dropout), LAYERS, mlp_batch()),
    "one mask": (residual(one_dropout), LAYERS, mlp_batch()),
    "two gradients": (gan_step, gan_params(), mlp_batch()),
    "tied weights": (sgd(gpt_loss), gpt_params(4), gpt_batch()),
    "every example with all others": (sgd(contrastive), LAYERS, mlp_batch()),
}


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_the_step_is_the_same(name, num_stages, schedule):
    step, *args = CASES[name]
    graph = cut(step, *args, num_devices=num_stages, num_stages=num_stages, remat=True, layers=4, schedule=schedule)
    assert any(regions(task.jaxpr.jaxpr.eqns) for task in graph.tasks)
    assert_same(
        jax.tree.unflatten(jax.tree.structure(step(*args)), evaluate(graph, jax.tree.leaves(args))), step(*args)
    )


def test_a_stage_needs_less_memory_the_more_layers_it_computes_again():
    layers = [{"w": draw(n, 64, 256), "v": draw(20 + n, 256, 64)} for n in range(8)]
    batch = draw(40, 512, 64), draw(41, 512, 64)
    peaks = []
    for options in ({}, {"remat": True, "layers": 2}, {"remat": True, "layers": 8}):
        method = autopar.PipelineParallel(num_stages=2, num_microbatches=4, **options)
        step = autopar.parallelize(residual(tanh), method=method, devices=jax.devices()[:2], donate_argnums=0)
        peaks.append(step.trace(layers, batch).plan().simulate().peak_bytes)
    assert peaks[0] > peaks[1] > peaks[2]


def with_recomputed(counts, step, *args, **options):
    """The stages of a step, as many layers of which are computed again as `counts` say."""
    trace = traced(step, *args)
    method = autopar.PipelineParallel(num_stages=len(counts), num_microbatches=2, layers=4, remat=True, **options)
    plan = passes.make_plan(trace, method, cluster=Cluster(num_devices=len(counts), kind="cpu"))
    stages = tuple(replace(each, recomputed=count) for each, count in zip(plan.stages, counts, strict=True))
    return passes.cut_step(trace, replace(plan, stages=stages))


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("counts", [(1,), (3,), (1, 0), (0, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_of_a_stage_any_number_of_layers_is_computed_again(name, counts, schedule):
    step, *args = CASES[name]
    graph = with_recomputed(counts, step, *args, schedule=schedule)
    assert_same(
        jax.tree.unflatten(jax.tree.structure(step(*args)), evaluate(graph, jax.tree.leaves(args))), step(*args)
    )
    if name == "tanh":
        found = {task.stage: len(regions(task.jaxpr.jaxpr.eqns)) for task in graph.tasks if task.kind in "FB"}
        assert found == dict(enumerate(counts))


def test_a_layer_that_is_kept_is_handed_on_as_without_others_that_are_computed_again():
    def handed(counts):
        graph = with_recomputed(counts, residual(tanh), LAYERS, mlp_batch())
        made = {name for task in graph.tasks if task.name == "F0" for name in task.outputs}
        read = {name for task in graph.tasks if task.name == "B0" for name in task.inputs}
        return sorted(graph.values[name].shape[-1] for name in made & read if graph.values[name].shape)

    none, one, both = (handed((count, 0)).count(WIDE) for count in range(3))
    assert none == 2 * one > both == 0
