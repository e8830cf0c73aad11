"""Lanes compute the step on every division of the microbatches, wherever each is cut, and whatever they sum."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import MeshPlan, Plan, StagePlan
from autopar.compiler import passes
from autopar.compiler.pipeline.lanes import with_lanes
from autopar.compiler.pipeline.stage_graph import evaluate
from tests.small_steps import (
    adam,
    adam_state,
    assert_same,
    cut,
    gan_params,
    gan_step,
    gpt_batch,
    gpt_loss,
    gpt_params,
    mlp_batch,
    mlp_loss,
    mlp_params,
    traced,
)

THREE_AND_ONE = [(6, [(0, 1), (1, 2), (2, 3)]), (2, [(0, 3)])]
ONE_AND_TWO = [(2, [(0, 3)]), (6, [(0, 1), (1, 3)])]
TWO_AND_THREE = [(6, [(0, 2), (2, 3)]), (2, [(0, 1), (1, 2), (2, 3)])]


def results_of_every_example(params, batch):
    """A step that returns what it has for each example, the largest of a batch, and whether any is negative."""

    def loss(params):
        h, y = batch
        for layer in params:
            h = jnp.tanh(h @ layer["w"] + layer["b"])
        return jnp.mean((h - y) ** 2), h

    (value, h), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value, h, jnp.max(h), jnp.any(h < 0)


def normalized(params, batch):
    """A step whose microbatches wait for statistics of the whole batch."""

    def loss(params):
        h = batch[0] @ params[0]["w"]
        h = (h - jnp.mean(h, 0)) / jnp.sqrt(jnp.var(h, 0) + 1e-3)
        return jnp.mean((jnp.tanh(h) @ params[1]["w"] - batch[1]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.mark.parametrize("shares", [(1, 3), (3, 1), (2, 1, 1)])
@pytest.mark.parametrize("step", [adam(mlp_loss, clip=0.5), results_of_every_example], ids=["clipped", "examples"])
def test_lanes_compute_the_step(step, shares):
    state = adam_state(mlp_params()) if step is not results_of_every_example else mlp_params()
    graph = cut(step, state, mlp_batch(), num_stages=1, num_microbatches=4, num_devices=1)
    lanes = with_lanes([graph] * len(shares), shares)
    lanes.verify()
    leaves = jax.tree.leaves((state, mlp_batch()))
    assert_same(evaluate(lanes, leaves), evaluate(graph, leaves))
    assert_same(evaluate(lanes, leaves), jax.tree.leaves(step(state, mlp_batch())))


@pytest.mark.parametrize(("step", "state"), [(gan_step, gan_params()), (normalized, mlp_params())], ids=["gan", "norm"])
def test_lanes_go_through_all_rounds(step, state):
    graph = cut(step, state, mlp_batch(), num_stages=1, num_microbatches=4, num_devices=1)
    assert graph.num_rounds > 1
    lanes = with_lanes([graph] * 2, (3, 1))
    lanes.verify()
    leaves = jax.tree.leaves((state, mlp_batch()))
    assert_same(evaluate(lanes, leaves), jax.tree.leaves(step(state, mlp_batch())))


def test_lanes_of_several_rounds_run_as_planned():
    state, batch = mlp_params(), mlp_batch()
    one = autopar.DataParallel(num_microbatches=4)
    bare = autopar.parallelize(normalized, method=one, devices=jax.devices()[:1]).trace(state, batch).plan().plan
    plan = replace(
        bare,
        meshes=tuple(autopar.MeshPlan(devices=(n,), shape=(1,), axis_names=("data",)) for n in range(2)),
        stages=tuple(replace(bare.stages[0], mesh=n, microbatches=share) for n, share in enumerate((3, 1))),
    )
    got = autopar.parallelize(normalized, method=plan, devices=jax.devices()[:2])(state, batch)
    assert_same(got, normalized(state, batch))


def test_only_state_goes_to_other_lanes_and_only_sums_come_back():
    graph = cut(adam(mlp_loss), adam_state(mlp_params()), mlp_batch(), num_stages=1, num_microbatches=4, num_devices=1)
    lanes = with_lanes([graph] * 2, (3, 1))
    there = {name for name, (source, _) in lanes.crossing.items() if source == 0}
    back = {name for name, (source, _) in lanes.crossing.items() if source == 1}
    assert {"params.0.w", "params.1.b"} <= {name.split(".", 1)[1] for name in there}
    assert all("mu" not in name for name in there)
    assert back and all(name.endswith(".lane1") for name in back)
    assert [list(lanes.microbatches_of(stage)) for stage in range(2)] == [[0, 1, 2], [3]]


def in_lanes(step, state, batch, lanes, remat=(), **options):
    """A plan of pipelines side by side, of which `lanes` has the microbatches and the layers of the stages."""
    count, num_layers = sum(share for share, _ in lanes), lanes[0][1][-1][1]
    method = autopar.PipelineParallel(num_stages=num_layers, num_microbatches=count, **options)
    bare = autopar.parallelize(step, method=method, devices=jax.devices()[:num_layers]).trace(state, batch).plan().plan
    stages = [(share, layers) for share, each in lanes for layers in each]
    return replace(
        bare,
        meshes=tuple(MeshPlan(devices=(n,), shape=(1,), axis_names=("data",)) for n in range(len(stages))),
        stages=tuple(
            StagePlan(layers=layers, mesh=n, microbatches=share, recomputed=(layers[1] - layers[0]) * (n in remat))
            for n, (share, layers) in enumerate(stages)
        ),
    )


@pytest.mark.parametrize("lanes", [THREE_AND_ONE, ONE_AND_TWO, TWO_AND_THREE], ids=["3+1", "1+2", "2+3"])
@pytest.mark.parametrize(
    ("step", "state", "batch"),
    [
        (adam(mlp_loss, clip=0.5), adam_state(mlp_params(4)), mlp_batch()),
        (results_of_every_example, mlp_params(4), mlp_batch()),
        (adam(gpt_loss, clip=0.5), adam_state(gpt_params(3)), gpt_batch()),
        (gan_step, gan_params(), mlp_batch()),
    ],
    ids=["clipped", "examples", "tied", "gan"],
)
def test_lanes_of_several_stages_compute_the_step(step, state, batch, lanes):
    trace = traced(step, state, batch)
    plan = replace(in_lanes(step, state, batch, lanes), fingerprint="")
    graph = passes.cut_step(trace, plan)
    graph.verify()
    leaves = jax.tree.leaves((state, batch))
    assert_same(evaluate(graph, leaves), jax.tree.leaves(step(state, batch)))


@pytest.mark.parametrize("lanes", [THREE_AND_ONE, ONE_AND_TWO, TWO_AND_THREE], ids=["3+1", "1+2", "2+3"])
@pytest.mark.parametrize(
    ("loss", "params", "batch"),
    [(mlp_loss, mlp_params(4), mlp_batch()), (gpt_loss, gpt_params(3), gpt_batch())],
    ids=["mlp", "tied"],
)
def test_ten_steps_of_adam_in_unequal_pipelines_are_those_of_one_device(loss, params, batch, lanes):
    step, state = adam(loss), adam_state(params)
    plan = in_lanes(step, state, batch, lanes)
    assert Plan.from_json(plan.to_json()) == plan and plan.shares == tuple(share for share, _ in lanes)
    run = autopar.parallelize(step, method=plan, devices=jax.devices()[: len(plan.meshes)])
    expected, plain = state, jax.jit(step)
    for _ in range(10):
        state, value = run(state, batch)
        expected, wanted = plain(expected, batch)
    assert_same((state, value), (expected, wanted))


@pytest.mark.parametrize("schedule", ["gpipe", "eager-1f1b", "zero-bubble"])
def test_unequal_pipelines_follow_every_schedule_and_recompute_stages_of_their_own(schedule):
    step, state, batch = adam(gpt_loss, clip=0.5), adam_state(gpt_params(3)), gpt_batch()
    plan = in_lanes(step, state, batch, TWO_AND_THREE, remat=(0, 3), schedule=schedule)
    run = autopar.parallelize(step, method=plan, devices=jax.devices()[:5])
    assert_same(run(state, batch), jax.jit(step)(state, batch))


def test_virtual_stages_of_a_lane_share_its_meshes():
    step, state, batch = adam(mlp_loss), adam_state(mlp_params(5)), mlp_batch()
    bare = in_lanes(step, state, batch, [(6, [(0, 1), (1, 2), (2, 3), (3, 4)]), (2, [(0, 3), (3, 4)])])
    meshes = (0, 1, 0, 1, 2, 3)
    stages = tuple(replace(stage, mesh=mesh) for stage, mesh in zip(bare.stages, meshes, strict=True))
    plan = replace(bare, meshes=bare.meshes[:4], stages=stages, schedule="interleaved")
    run = autopar.parallelize(step, method=plan, devices=jax.devices()[:4])
    assert_same(run(state, batch), jax.jit(step)(state, batch))


def test_every_lane_has_an_order_of_its_own_and_crossings_stay_inside_it():
    step, state, batch = adam(mlp_loss), adam_state(mlp_params(4)), mlp_batch()
    plan = replace(in_lanes(step, state, batch, THREE_AND_ONE), fingerprint="")
    trace = traced(step, state, batch)
    graph, program = passes.cut_step(trace, plan), passes.lower_step(trace, plan)
    assert [len(graph.microbatches_of(stage)) for stage in range(4)] == [6, 6, 6, 2]
    micro = {name: place for name, place in graph.crossing.items() if graph.values[name].per_microbatch}
    assert micro and all(3 not in (source, *readers) for source, readers in micro.values())
    back = {readers for name, (source, readers) in graph.crossing.items() if source == 3}
    assert back == {(0,), (1,), (2,)}, "each stage of the first lane gets the sums of what it owns"
    runs = [[str(run.task) for run in mesh.instructions if hasattr(run, "task")] for mesh in program.meshes]
    order = [task for task in runs[0] if task.startswith(("F0", "B0"))]
    assert order[:4] == ["F0.m0", "F0.m1", "F0.m2", "B0.m0"]
    assert [task for task in runs[3] if task.startswith(("F3", "B3"))] == ["F3.m6", "F3.m7"]


def test_unequal_pipelines_are_verified_traced_and_compared(tmp_path):
    step, state, batch = adam(gpt_loss), adam_state(gpt_params(3)), gpt_batch()
    plan = in_lanes(step, state, batch, TWO_AND_THREE)

    def planned(plan):
        devices = jax.devices()[: len(plan.meshes)]
        return autopar.parallelize(step, method=plan, devices=devices).trace(state, batch).plan()

    there = planned(plan)
    assert "numbers: agree" in str(there.verify(state, batch))
    there.chakra(tmp_path)
    assert {f"step.{device}.et" for device in range(5)} <= {path.name for path in tmp_path.iterdir()}
    (changed,) = [
        each
        for each in there.diff(planned(in_lanes(step, state, batch, ONE_AND_TWO))).changes
        if each.subject == "microbatches"
    ]
    assert (changed.before, changed.after) == ("6 + 2", "2 + 6")
    _, times = there.lower().compile().measure(state, batch)
    assert {each.name for each in times if each.name.startswith("B2")} == {"B2.m6", "B2.m7"}
