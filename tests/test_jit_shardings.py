"""Plans in the words of plain `jax.jit`: the same numbers, the planned layouts, and errors for what it cannot say."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autopar
from tests.small_steps import (
    SEPARATE,
    ArrayLayer,
    adam,
    adam_state,
    assert_same,
    draw,
    mlp_batch,
    mlp_loss,
    mlp_params,
    mlp_step,
)

WIDE = [{"w": draw(i, 64, 64), "b": draw(9 + i, 64)} for i in range(2)]
BATCH = (draw(20, 16, 64), draw(21, 16, 64))
SPLIT = autopar.ShardParallel(
    mesh_shape=(2, 4), specs={"0.w": PartitionSpec(None, "model"), "1.w": PartitionSpec("model", None)}
)


def planned(method, params=WIDE, batch=BATCH, step=mlp_step, **where):
    return autopar.parallelize(step, method=method, **where).trace(params, batch).plan()


@pytest.mark.parametrize("method", [SPLIT, autopar.Auto(num_stages=1, mesh_shape=(8,)), autopar.Zero(stage=3)])
def test_plain_jit_with_the_shardings_and_constraints_of_a_plan_gives_the_results_of_the_step(method):
    found = planned(method).shardings()
    jitted = jax.jit(found.constrain(mlp_step), in_shardings=found.inputs, out_shardings=found.outputs)
    params, loss = jitted(WIDE, BATCH)
    assert_same((params, loss), mlp_step(WIDE, BATCH))
    assert [leaf.sharding.spec for leaf in jax.tree.leaves(params)] == [
        each.spec for each in jax.tree.leaves(found.outputs[0])
    ]


def test_values_inside_are_constrained_as_planned():
    found = planned(SPLIT, cluster=autopar.Cluster(num_devices=8, machine=SEPARATE)).shardings(devices=jax.devices())
    closed = jax.make_jaxpr(found.constrain(mlp_step))(WIDE, BATCH)
    specs = {eqn.params["sharding"].spec for eqn in closed.eqns if eqn.primitive.name == "sharding_constraint"}
    assert PartitionSpec("data", "model") in specs
    assert found.input_specs["params.0.w"] == PartitionSpec(None, "model")


def test_a_plan_with_a_loop_over_microbatches_keeps_it_in_jit():
    found = planned(autopar.Zero(stage=1, num_microbatches=2)).shardings()
    jitted = jax.jit(found.constrain(mlp_step), in_shardings=found.inputs, out_shardings=found.outputs)
    assert_same(jitted(WIDE, BATCH), mlp_step(WIDE, BATCH))
    assert "scan" in str(jax.make_jaxpr(found.constrain(mlp_step))(WIDE, BATCH))


def test_logical_axis_rules_give_flax_the_planned_layouts():
    found = planned(SPLIT).shardings()
    names = {"0.w": ("embed", "mlp"), "1.w": ("mlp", "out"), "0.b": (None,)}
    rules = found.logical_axis_rules(names)
    assert rules == (("embed", None), ("mlp", "model"), ("out", None))
    for pattern, dims in names.items():
        spec = nn.logical_to_mesh_axes(dims, rules)
        planned_spec = found.input_specs[f"params.{pattern}"]
        assert tuple(spec) == tuple(planned_spec) + (None,) * (len(spec) - len(planned_spec))


LAYERS = [ArrayLayer(**layer) for layer in WIDE]


@pytest.mark.parametrize("method", [autopar.DataParallel(), autopar.ShardParallel(mesh_shape=(4, 2))])
def test_a_node_that_takes_only_arrays_is_one_sharding(method):
    found = planned(method, LAYERS).shardings()
    jitted = jax.jit(found.constrain(mlp_step), in_shardings=found.inputs, out_shardings=found.outputs)
    assert_same(jitted(LAYERS, BATCH), mlp_step(LAYERS, BATCH))


def test_a_node_that_takes_only_arrays_and_has_several_shardings_is_refused():
    plan = planned(autopar.ShardParallel(mesh_shape=(2, 4), specs={r"\.0$": PartitionSpec(None, "model")}), LAYERS)
    with pytest.raises(autopar.Unsupported, match=r"ArrayLayer takes no shardings .*\(TypeError: no arrays"):
        plan.shardings()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"0.w": ("mlp", "mlp")}, "split over nothing in params.0.w, and over .*model"),
        ({"0.w": ("mlp",)}, "has 2 dimensions, and 1 names are given"),
        ({"kernel": ("embed", "mlp")}, "finds no input of train_step"),
    ],
)
def test_names_that_no_rules_fit_are_refused(names, message):
    with pytest.raises(autopar.InvalidArgument, match=message):
        planned(SPLIT).shardings().logical_axis_rules(names)


def test_stages_have_no_shardings_for_one_jit():
    params, batch = mlp_params(), mlp_batch()
    with pytest.raises(autopar.Unsupported, match="stages on 2 meshes"):
        planned(autopar.PipelineParallel(num_stages=2), params, batch).shardings()


def test_state_on_the_host_has_no_shardings_for_one_jit():
    state = adam_state(WIDE)
    plan = planned(autopar.Megatron(offload="optimizer"), state, BATCH, adam(mlp_loss))
    with pytest.raises(autopar.Unsupported, match="on the host and brings it in part by part"):
        plan.shardings()


def test_microbatches_in_executables_of_their_own_have_no_constraints():
    found = planned(autopar.DataParallel(num_microbatches=2)).shardings()
    with pytest.raises(autopar.Unsupported, match="executables of their own"):
        found.constrain(mlp_step)


def test_arguments_by_name_are_refused():
    def step(params, *, batch):
        return mlp_step(params, batch)

    plan = autopar.parallelize(step, method=autopar.DataParallel()).trace(WIDE, batch=BATCH).plan()
    with pytest.raises(autopar.Unsupported, match="positional arguments"):
        plan.shardings()


def test_devices_that_are_not_here_are_asked_for():
    cluster = autopar.Cluster.parse("1x dgx-h100")
    step = autopar.parallelize(mlp_step, method=autopar.DataParallel(), cluster=cluster)
    plan = step.trace(WIDE, BATCH).plan()
    with pytest.raises(autopar.InvalidArgument, match="shardings need devices"):
        plan.shardings()
    assert plan.shardings(jax.devices()).mesh.size == 8


def test_arguments_of_other_shapes_are_refused():
    constrained = planned(SPLIT).shardings().constrain(mlp_step)
    with pytest.raises(autopar.InvalidArgument, match="planned for"):
        constrained(WIDE, jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[:8]), BATCH))
