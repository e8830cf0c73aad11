"""Stages by hand: the layers, the devices and the mesh of each, unequal ones too, with layouts given or searched."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import Auto, Cluster, InvalidArgument, PipelineParallel, Plan
from autopar.compiler import passes
from autopar.compiler.frontend.trace import Trace
from autopar.hardware.machine import Machine
from tests.small_steps import (
    assert_same,
    draw,
    gpt_batch,
    gpt_loss,
    gpt_params,
    mlp_batch,
    mlp_params,
    mlp_step,
    sgd,
    traced,
)

UNEQUAL = {"submeshes": [(1, 4), (1, 2)], "mesh_shapes": [(2, 2), (2, 1)], "num_microbatches": 2}


def marked_loss(params: Any, batch: Any) -> jax.Array:
    h, y = batch
    for n, layer in enumerate(params):
        h = jnp.tanh(h @ layer["w"] + layer["b"])
        h = autopar.layer_boundary(h) if n + 1 < len(params) else h
    return jnp.mean((h - y) ** 2)


def scoped_loss(params: Any, batch: Any) -> jax.Array:
    h, y = batch
    h = h * 2.0 @ params["first"]
    for n, layer in enumerate(params["blocks"]):
        with jax.named_scope(f"h_{n}"):
            h = jnp.tanh(h @ layer["w"] @ layer["w"] + layer["b"])
    return jnp.mean((h @ params["last"] - y) ** 2)


MARKED = traced(sgd(marked_loss), mlp_params(5), mlp_batch())
SCOPED = traced(sgd(scoped_loss), {"first": draw(1, 4, 4), "blocks": mlp_params(4), "last": draw(2, 4, 4)}, mlp_batch())


def plan(trace: Trace = MARKED, *, cluster: Cluster | None = None, **options: Any) -> Plan:
    where = Cluster(num_devices=8, kind="cpu") if cluster is None else cluster
    return passes.make_plan(trace, PipelineParallel(**options), cluster=where)


def test_every_stage_has_the_layers_the_devices_and_the_mesh_that_are_given():
    found = plan(layers=[[0, 1], [1, 5]], **UNEQUAL)
    assert [stage.layers for stage in found.stages] == [(0, 1), (1, 5)]
    assert [(m.devices, m.shape) for m in found.meshes] == [((0, 1, 2, 3), (2, 2)), ((4, 5), (2, 1))]
    assert found.num_devices == 6 and found.num_layers == 5  # two devices are idle
    assert Plan.from_json(found.to_json()) == found


def test_meshes_without_submeshes_take_the_devices_in_order():
    found = plan(layers=[[0, 4], [4, 5]], mesh_shapes=[(1, 2), (2, 3)])
    assert [m.devices for m in found.meshes] == [(0, 1), (2, 3, 4, 5, 6, 7)]
    assert found.meshes[1].axis_names == ("data", "model")


def test_whole_hosts_and_parts_of_one_are_submeshes():
    found = plan(layers=[[0, 1], [1, 3], [3, 5]], submeshes=[(1, 4), (2, 8), (1, 4)], cluster=hosts(3))
    assert [m.devices for m in found.meshes] == [(16, 17, 18, 19), tuple(range(16)), (20, 21, 22, 23)]


def hosts(count: int) -> Cluster:
    return Cluster.of_hosts(Machine.named("p3.16xlarge"), count)


def test_layers_are_those_of_the_model_and_what_is_around_goes_with_the_first_and_the_last():
    numbered, every = (plan(SCOPED, layers=layers) for layers in ([[0, 1], [1, 4]], [[0, 2], [2, 6]]))
    assert [stage.layers for stage in numbered.stages] == [(0, 2), (2, 6)]
    assert numbered.stages == every.stages and numbered.cuts == every.cuts


def test_virtual_stages_have_an_entry_each():
    layers = [[0, 1], [1, 2], [2, 4], [4, 5]]
    found = plan(layers=layers, submeshes=[(1, 4), (1, 2)], schedule="interleaved", num_microbatches=2)
    assert [(stage.mesh, list(stage.layers)) for stage in found.stages] == list(zip([0, 1, 0, 1], layers))


def test_one_program_may_leave_devices_idle():
    found = plan(layers=[[0, 5]], submeshes=[(1, 4)], mesh_shapes=[(2, 2)])
    assert found.is_single_program and found.meshes[0].devices == (0, 1, 2, 3)
    searched = plan(layers=[[0, 5]], submeshes=[(1, 4)], mesh_shapes=[(2, 2)], layouts="search")
    assert searched.is_single_program and searched.method == "PipelineParallel"


def test_inputs_are_laid_out_by_the_solver_where_that_is_asked_for():
    wide = traced(sgd(marked_loss), [{"w": draw(i, 512, 512), "b": draw(9, 512)} for i in range(3)], wide_batch())
    options: dict[str, Any] = {"layers": [[0, 2], [2, 3]], "submeshes": [(1, 4), (1, 4)], "mesh_shapes": [(2, 2)] * 2}
    given, searched = (plan(wide, layouts=layouts, **options) for layouts in ("given", "search"))
    pinned = plan(wide, layouts="search", specs={r"a\.0\.w": P("model", "data")}, **options)
    assert not [name for name in given.input_specs if name.endswith("w")]
    assert [name for name in searched.input_specs if name.endswith("w")]
    assert pinned.input_specs["a.0.w"] == P("model", "data")
    times = [sum(m.sharding.objective_s for m in each.meshes if m.sharding) for each in (given, searched)]
    assert times[1] < times[0]


def wide_batch() -> tuple[jax.Array, jax.Array]:
    return draw(20, 16, 512), draw(21, 16, 512)


@pytest.mark.parametrize("layouts", ["given", "search"])
@pytest.mark.parametrize(
    ("schedule", "layers"),
    [("1f1b", [[0, 1], [1, 4]]), ("interleaved", [[0, 1], [1, 2], [2, 3], [3, 4]])],
    ids=["1f1b", "interleaved"],
)
def test_unequal_stages_with_a_tied_embedding_compute_what_jit_does(schedule, layers, layouts):
    step, params, tokens = sgd(gpt_loss), gpt_params(3), gpt_batch()
    method = PipelineParallel(layers=layers, schedule=schedule, layouts=layouts, **UNEQUAL)
    lowered = autopar.parallelize(step, method=method).trace(params, tokens).plan().lower()
    assert_same(lowered.compile()(params, tokens), jax.jit(step)(params, tokens))
    assert lowered.verify(params, tokens)


def test_stages_by_hand_are_simulated_and_explained():
    planned = (
        autopar.parallelize(mlp_step, method=PipelineParallel(layers=[[0, 1], [1, 4]], layouts="search", **UNEQUAL))
        .trace(mlp_params(4), mlp_batch())
        .plan()
    )
    assert planned.simulate().step_time_s > 0
    assert "[1, 4)" in str(planned)
    assert planned.explain("stages") and planned.explain("num_microbatches")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"layers": [[0, 2], [3, 5]]},
            r"leave out the layers 2 to 2\. Begin every stage.*\[2, 5\] instead of \[3, 5\]",
        ),
        ({"layers": [[1, 2], [2, 5]]}, r"leave out the layers 0 to 0.*the first at 0"),
        ({"layers": [[0, 3], [2, 5]]}, r"have the layer 2 twice.*\[3, 5\] instead of \[2, 5\]"),
        ({"layers": [[0, 3], [3, 3]]}, r"layers is .*first layer and the one behind its last: \[\[0, 5\], \[5, 12\]\]"),
        ({"layers": [[0, 3], [3]]}, r"layers is .*Give the number of layers, or for every stage"),
        (
            {"layers": [[0, 3], [3, 5]], "submeshes": [(1, 4)]},
            "layers has 2 entries, submeshes has 1 entries. Give one",
        ),
        ({"layers": [[0, 3], [3, 5]], "num_stages": 3}, "layers has 2 entries, num_stages is 3. Give one entry"),
        ({"mesh_shapes": [(2, 2)], "submeshes": [(1, 4)] * 2}, "submeshes has 2 entries, mesh_shapes has 1 entries"),
        ({"layers": [[0, 3], [3, 4], [4, 5]], "schedule": "interleaved"}, "and 2 in layers, for its virtual stages"),
        (
            {"submeshes": [(1, 4)] * 2, "mesh_shapes": [(2, 2), (3, 1)]},
            r"\(3, 1\) has 3 devices, and its submesh .* = 4",
        ),
        ({"submeshes": [(1, 4), 4]}, r"submeshes is .*Give for every mesh its hosts and the devices of each"),
        ({"mesh_shapes": [(2, 2), 4]}, "mesh_shapes is .*Give a tuple of integers for every mesh"),
        ({"mesh_shapes": [(2, 2), (4,)]}, "different numbers of axes.*of size 1"),
        ({"mesh_shapes": [(2, 2), (0, 1)]}, r"The size of mesh axis 0 in \(0, 1\) is 0"),
        ({"mesh_shapes": [(2, 2)] * 2, "mesh_shape": (2, 2)}, "mesh_shape is .*Give one of them"),
        ({"layouts": "searched"}, "layouts is 'searched'. Choose one of 'given', 'search'"),
    ],
)
def test_stages_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(InvalidArgument, match=message):
        PipelineParallel(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [[0, 3], [3, 7]]}, "end at 7, and train_step has 5 layers. Let the last stage end at 5"),
        ({"layers": [[0, 3], [3, 4]]}, "end at 4, and train_step has 5 layers"),
        ({"submeshes": [(1, 6), (1, 4)]}, r"\(1, 6\), \(1, 4\) have 10 devices and do not fit: there are 1 host of 8"),
        (
            {"submeshes": [(2, 4), (1, 4)]},
            r"\(2, 4\) is neither whole hosts nor a part of one.*\(1, n\) with n up to 8",
        ),
        ({"mesh_shapes": [(2, 2), (5, 1)]}, r"have 4 \+ 5 = 9 devices, there are 8. Give shapes of at most 8"),
        ({"submeshes": [(1, 4), (1, 2)], "mesh_shape": (2, 2)}, "has 4 devices, and a submesh has 2. Give mesh_shapes"),
    ],
)
def test_stages_that_the_model_or_the_cluster_has_no_place_for_are_refused(options, message):
    with pytest.raises(InvalidArgument, match=message):
        plan(**options)


def test_layers_that_a_model_without_layers_cannot_be_cut_into_are_refused():
    with pytest.raises(InvalidArgument, match=r"99 layers were asked for.*Ask for at most"):
        plan(traced(mlp_step, mlp_params(), mlp_batch()), layers=[[0, 3], [3, 99]])
    with pytest.raises(InvalidArgument, match=r"end at 8, and .* has 4 layers, or 6 with what stands before"):
        plan(SCOPED, layers=[[0, 3], [3, 8]])


def test_submeshes_of_several_machines_are_refused():
    mixed = Cluster.parse("1x p4d.24xlarge + 1x p3.16xlarge")
    with pytest.raises(InvalidArgument, match=r"hosts of one kind, and the cluster has .*Give mesh_shapes without"):
        plan(submeshes=[(1, 8), (1, 8)], layers=[[0, 1], [1, 5]], cluster=mixed)


def test_a_search_says_how_to_ask_for_given_stages():
    with pytest.raises(InvalidArgument, match=r'Use PipelineParallel\(layers=..., layouts="search"\)'):
        Auto(layers=[[0, 2], [2, 4]])  # pyright: ignore[reportArgumentType]
