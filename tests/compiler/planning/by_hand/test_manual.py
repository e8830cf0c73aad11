"""A method by hand becomes a plan that holds every decision, and the same plan each time."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import DataParallel, InvalidArgument, Plan, ShardParallel
from autopar.compiler import passes
from autopar.compiler.frontend.trace import Trace
from autopar.hardware.cluster import Cluster
from tests.small_steps import (
    WIDTH,
    draw,
    gpt_batch,
    gpt_loss,
    gpt_params,
    mlp_batch,
    mlp_loss,
    mlp_params,
    mlp_step,
    sgd,
    traced,
    two_stages,
)


def plan(method: Any, trace: Trace | None = None, *, num_devices: int = 8) -> Plan:
    found = traced(mlp_step, mlp_params(4), mlp_batch()) if trace is None else trace
    return passes.make_plan(found, method, cluster=Cluster(num_devices=num_devices, kind="cpu"))


def test_data_parallel_is_one_mesh_of_all_devices_with_the_batch_along_it():
    found = plan(DataParallel())
    assert [(m.devices, m.shape, m.axis_names) for m in found.meshes] == [(tuple(range(8)), (8,), ("data",))]
    assert found.input_specs == {"b.0": P("data"), "b.1": P("data")}
    assert (found.num_stages, found.cuts, found.method) == (1, (), "DataParallel")


def test_plan_knows_its_program_and_is_the_same_each_time():
    trace = traced(mlp_step, mlp_params(4), mlp_batch())
    assert plan(two_stages(), trace).fingerprint == trace.fingerprint
    assert plan(two_stages(), trace) == plan(two_stages(), traced(mlp_step, mlp_params(4), mlp_batch()))


@pytest.mark.parametrize(
    ("rows", "microbatches", "spec"),
    [(16, 1, P("data")), (16, 2, P("data")), (16, 4, None), (12, 1, None)],
    ids=["all rows", "of a microbatch", "too few in a microbatch", "rows that do not divide"],
)
def test_batch_is_split_where_the_rows_of_a_microbatch_divide(rows, microbatches, spec):
    trace = traced(mlp_step, mlp_params(), mlp_batch(rows))
    assert plan(DataParallel(num_microbatches=microbatches), trace).input_specs.get("b.0") == spec


MEAN = traced(lambda params, batch: jnp.mean(batch[0]) + params[0]["w"], mlp_params(), mlp_batch())


@pytest.mark.parametrize(
    "method", [DataParallel(num_microbatches=4), ShardParallel(mesh_shape=(8,), num_microbatches=4)]
)
def test_step_without_a_gradient_is_not_split(method):
    assert plan(method, MEAN).num_microbatches == 1


# --- specs --------------------------------------------------------------------------------------------------------

SPECS = {
    "by name": ({r"\.w$": P(None, "model")}, {"a.0.w": P(None, "model"), "a.1.w": P(None, "model")}),
    "first pattern that fits": (
        {r"a\.0": P("model"), "w": P(None, "model")},
        {"a.0.w": P("model"), "a.0.b": P("model"), "a.1.w": P(None, "model")},
    ),
    "more entries than axes": ({"a": P(None, "model")}, {"a.0.w": P(None, "model"), "a.1.w": P(None, "model")}),
    "two mesh axes on one": (
        {"w": P(("data", "model"))},
        {"a.0.w": P(("data", "model")), "a.1.w": P(("data", "model"))},
    ),
    "nothing": ({"w": P()}, {}),
}


@pytest.mark.parametrize(("specs", "expected"), SPECS.values(), ids=SPECS)
def test_specs_go_to_the_inputs_whose_names_they_match(specs, expected):
    trace = traced(mlp_step, mlp_params(), mlp_batch())
    found = plan(ShardParallel(mesh_shape=(2, 2), specs=specs), trace, num_devices=4)
    assert found.input_specs == expected | {"b.0": P("data"), "b.1": P("data")}


def test_spec_of_the_user_goes_before_that_of_the_batch():
    found = plan(ShardParallel(mesh_shape=(2, 4), specs={r"^b\.1": P(None, "model")}))
    assert found.input_specs == {"b.0": P("data"), "b.1": P(None, "model")}


# --- pipelines ----------------------------------------------------------------------------------------------------


def test_stages_share_the_devices_in_order():
    found = plan(two_stages(num_stages=4))
    assert [m.devices for m in found.meshes] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert {(m.shape, m.axis_names) for m in found.meshes} == {((2,), ("data",))}
    assert [(s.layers, s.mesh) for s in found.stages] == [((i, i + 1), i) for i in range(4)]


def test_stage_meshes_have_the_shape_that_was_asked_for():
    found = plan(two_stages(mesh_shape=(2, 2), axis_names=("data", "tensor"), specs={"w": P(None, "tensor")}))
    assert {(m.shape, m.axis_names) for m in found.meshes} == {((2, 2), ("data", "tensor"))}
    assert found.input_specs["a.0.w"] == P(None, "tensor") and found.input_specs["b.0"] == P("data")


def test_virtual_stages_go_round_the_meshes():
    found = plan(two_stages(schedule="interleaved", num_microbatches=4))
    assert [s.mesh for s in found.stages] == [0, 1, 0, 1]
    assert len(found.meshes) == 2 and found.num_layers == 4


def test_more_layers_than_stages_are_grouped_evenly():
    found = plan(two_stages(layers=4))
    assert [s.layers for s in found.stages] == [(0, 2), (2, 4)]
    assert len(found.cuts) == 3


def test_equal_layers_are_cut_between_them():
    trace = traced(mlp_step, mlp_params(4), mlp_batch())
    graph = passes.cut_step(trace, plan(two_stages(num_stages=4), trace))
    forward = [[e.primitive.name for e in t.jaxpr.jaxpr.eqns] for t in graph.tasks if t.kind == "F"]
    assert [names.count("dot_general") for names in forward] == [1, 1, 1, 1]


def test_options_are_carried_over():
    method = two_stages(remat=True, schedule="gpipe", random="per_microbatch", batch_statistics="per_microbatch")
    found = plan(method)
    assert [s.recomputed == s.num_layers for s in found.stages] == [True, True]
    assert (found.schedule, found.random, found.batch_statistics) == ("gpipe", "per_microbatch", "per_microbatch")


def test_one_stage_is_one_mesh():
    found = plan(two_stages(num_stages=1, mesh_shape=(2, 4), specs={"w": P(None, "model")}))
    assert len(found.meshes) == found.num_stages == 1
    assert found.input_specs["a.0.w"] == P(None, "model")


def test_activations_between_stages_are_split_along_the_batch():
    trace = traced(sgd(gpt_loss), gpt_params(), gpt_batch(16))
    found = plan(two_stages(num_microbatches=2), trace, num_devices=4)
    graph = passes.cut_step(trace, found)
    crossing = [n for n in graph.crossing if graph.values[n].per_microbatch and graph.values[n].shape[0] == 8]
    assert {found.meshes[0].sharding.layouts["values"][name] for name in crossing} == {"data,-,-"}


def test_a_pattern_that_finds_nothing_is_refused_with_the_closest_names():
    for method in (ShardParallel(mesh_shape=(8,), specs={"parms": P()}), two_stages(specs={"parms": P()})):
        with pytest.raises(InvalidArgument, match=r"'parms' matches no input .* closest names are .*leave the"):
            plan(method)


HAND_METHODS = {
    "data parallel": DataParallel(),
    "microbatches": DataParallel(num_microbatches=2),
    "by specs": ShardParallel(mesh_shape=(2, 4), specs={"w": P(None, "model")}),
    "stages": two_stages(),
    "stages by specs": two_stages(mesh_shape=(2, 2), specs={"w": P(None, "model")}),
}


@pytest.mark.parametrize("method", HAND_METHODS.values(), ids=HAND_METHODS)
def test_plans_by_hand_are_verified_and_simulated(method):
    params, batch = mlp_params(4), mlp_batch(16)
    planned = autopar.parallelize(mlp_step, method=method).trace(params, batch).plan()
    assert planned.verify(params, batch)
    assert planned.simulate().step_time_s > 0
    assert planned.plan.planned_collectives


def test_state_stays_on_every_device_under_data_parallelism():
    for method in (DataParallel(), DataParallel(num_microbatches=2)):
        params, value = autopar.parallelize(mlp_step, method=method)(mlp_params(4), mlp_batch(16))
        assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves((params, value)))


def test_an_input_of_a_plan_by_hand_is_explained_with_the_others_as_they_are():
    params = [draw(i, 16, 16) for i in range(2)]
    step = autopar.parallelize(lambda p, x: [w - x.mean() * w for w in p], method=DataParallel())
    explained = step.trace(params, draw(3, 16, 16)).plan().explain("p.0")
    assert explained.chosen.choice == str(P()) and len(explained.alternatives) == 3


def test_loop_over_layers_is_split_into_a_piece_for_each_layer():
    def loss(params, batch):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch[0], params)
        return mlp_loss([], (h, batch[1]))

    trace = traced(sgd(loss), draw(0, 4, WIDTH, WIDTH), mlp_batch())
    assert plan(two_stages(layers=4), trace).loop_pieces == 4
    assert plan(two_stages(), traced(mlp_step, mlp_params(), mlp_batch())).loop_pieces == 1


def test_plan_goes_to_json_and_back():
    for method in (DataParallel(), two_stages(num_stages=4, layers=8, remat=True), ShardParallel(mesh_shape=(2, 4))):
        found = plan(method)
        assert Plan.from_json(found.to_json()) == found
