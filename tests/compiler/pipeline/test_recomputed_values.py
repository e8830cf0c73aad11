"""Values that cheap equations make of other kept values are not kept for the backward task, but made there again."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.compiler.pipeline.stage_graph import StageGraph, evaluate
from tests.small_steps import WIDTH, assert_same, cut, draw, mlp_batch, sgd

LAYERS = [{"w": draw(n, WIDTH, 4 * WIDTH), "v": draw(10 + n, 4 * WIDTH, WIDTH)} for n in range(2)]


def normed(h):
    centred = h - jnp.mean(h, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5)


def gated(h):
    return h * jax.nn.sigmoid(h)


def masked(h):
    keep = jax.random.bernoulli(jax.random.key(0), 0.9, h.shape)
    return jnp.where(keep, h / 0.9, 0.0)


def long_chain(h):
    for _ in range(300):
        h = h - 1e-3 * h * h
    return h


def step_of(act, norm=lambda h: h):
    def loss(params, batch):
        h = batch[0]
        for layer in params:
            h = h + act(norm(h) @ layer["w"]) @ layer["v"]
        return jnp.mean((h - batch[1]) ** 2)

    return sgd(loss)


def handed_on(graph: StageGraph, stage: int = 0) -> list:
    """Values of a microbatch that the backward tasks of a stage read of its forward task."""
    made = {name for task in graph.tasks if (task.kind, task.stage) == ("F", stage) for name in task.outputs}
    read = {name for task in graph.tasks if task.kind in "BW" and task.stage == stage for name in task.inputs}
    return [graph.values[name] for name in sorted(made & read)]


def wide(values) -> list[str]:
    return [each.name.split("_")[0] for each in values if each.shape[-1:] == (4 * WIDTH,)]


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize(
    ("act", "kept"),
    [
        (jax.nn.gelu, ["dot", "mul", "tanh"]),  # what goes in, what the second product reads, and what takes long
        (gated, ["dot", "logistic", "mul"]),
        (lambda h: jax.nn.relu(h) ** 2, ["dot", "integer"]),
    ],
    ids=["gelu", "swish", "squared relu"],
)
def test_of_an_activation_only_what_is_dear_waits(act, kept, schedule):
    graph = cut(step_of(act), LAYERS, mlp_batch(), schedule=schedule, num_microbatches=4)
    assert sorted(wide(handed_on(graph))) == kept


def test_of_a_norm_only_what_goes_in_and_out_waits():
    graph = cut(step_of(jnp.tanh, normed), LAYERS, mlp_batch(), num_microbatches=2)
    narrow = [each for each in handed_on(graph) if each.shape[-1:] == (WIDTH,)]
    assert len(narrow) == 1  # the product's operand; what goes in is the batch, which was there before


def test_of_a_long_chain_some_values_wait_since_to_make_all_again_takes_time_too():
    graph = cut(step_of(long_chain), LAYERS, mlp_batch(), num_microbatches=2)
    assert 4 < len(wide(handed_on(graph))) < 40


@pytest.mark.parametrize(
    "step",
    [step_of(jax.nn.gelu, normed), step_of(gated, normed), step_of(masked), step_of(jnp.exp), step_of(long_chain)],
    ids=["gelu", "swish", "dropout", "exp", "long chain"],
)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
def test_a_step_of_which_values_are_made_again_is_the_step(step, schedule):
    graph = cut(step, LAYERS, mlp_batch(), num_microbatches=2, schedule=schedule)
    got = jax.jit(lambda *leaves: evaluate(graph, leaves))(*jax.tree.leaves((LAYERS, mlp_batch())))
    want = jax.jit(step)(LAYERS, mlp_batch())
    assert_same(jax.tree.unflatten(jax.tree.structure(want), got), want, tolerance=2e-5)


def test_what_is_random_is_drawn_once():
    graph = cut(step_of(masked), LAYERS, mlp_batch(), num_microbatches=2)
    drawing = {
        task.kind
        for task in graph.tasks
        for eqn in task.jaxpr.jaxpr.eqns
        if "random_bits" in eqn.primitive.name or "threefry" in eqn.primitive.name
    }
    assert drawing == {"F"}


def test_the_same_is_kept_for_any_number_of_examples():
    steps = step_of(jax.nn.gelu, normed)
    graphs = [cut(steps, LAYERS, mlp_batch(), num_microbatches=count) for count in (1, 2, 4, 8)]
    kept = [[(each.name, each.shape[1:]) for each in handed_on(graph)] for graph in graphs]
    assert all(each == kept[0] for each in kept)
    assert kept[0]


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_pipeline_that_makes_values_again_runs_as_the_plain_step(schedule):
    step = step_of(jax.nn.gelu, normed)
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=4, schedule=schedule)
    run = autopar.parallelize(step, method=method)
    assert_same(run(LAYERS, mlp_batch()), jax.jit(step)(LAYERS, mlp_batch()))
