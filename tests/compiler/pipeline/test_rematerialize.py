"""Layers computed again in the backward pass: equal numbers, less memory, and no more of them than memory asks for."""

import contextlib
import dataclasses
import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.lowering.microbatch_loop import microbatch_loop
from autopar.compiler.memory.estimate import bytes_with_headroom
from autopar.compiler.pipeline.layers import count_layers, layer_cuts, layer_names
from autopar.compiler.pipeline.rematerialize import LayeredStep, offered_layers, rematerialize
from autopar.compiler.planning import one_mesh
from autopar.errors import InvalidArgument, MemoryTooSmall
from tests.compiler.microbatch.microbatched import assert_equal
from tests.small_steps import traced
from tests.zoo import ZOO

WIDTH, ROWS = 8, 16
RNG = np.random.default_rng(0)


def weights(*shape):
    return jnp.asarray(RNG.normal(size=shape) / shape[0] ** 0.5, jnp.float32)


def sgd(loss):
    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def block(layer, h):
    return h + jax.nn.gelu(h @ layer["up"]) @ layer["down"]


def blocks(params, h, wrap=lambda number, fun: fun):
    for number, layer in enumerate(params):
        with jax.named_scope(f"h_{number}"):
            h = wrap(number, block)(layer, h)
    return h


def deep_loss(params, batch):
    return jnp.mean((blocks(params["blocks"], batch["x"]) @ params["head"] - batch["y"]) ** 2)


def deep_arguments(num_blocks=6, width=WIDTH, rows=ROWS):
    layers = [{"up": weights(width, 4 * width), "down": weights(4 * width, width)} for _ in range(num_blocks)]
    params = {"blocks": layers, "head": weights(width, width)}
    return params, {"x": weights(rows, width), "y": weights(rows, width)}


def run(closed, args):
    return jax.jit(jc.jaxpr_as_fun(closed))(*[jnp.asarray(leaf) for leaf in jax.tree.leaves(args)])


def regions(closed):
    return [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "remat2"]


def everything(trace):
    """The step with every layer recomputed that can be, the last one too."""
    num_layers = offered_layers(trace).num_layers
    return rematerialize(trace, range(num_layers), num_layers)


def assert_equals_plain(step, *args, microbatches=(1,), tolerance=1e-5, batch=(1,), **options):
    trace = traced(step, *args, batch=batch)
    again = everything(trace)
    assert again.fingerprint == trace.fingerprint
    assert (again.inputs, again.outputs, again.state_outputs) == (trace.inputs, trace.outputs, trace.state_outputs)
    assert regions(again.jaxpr)
    options = {"batch_statistics": "exact", "random": "full_batch", **options}
    for count in microbatches:
        want = run(microbatch_loop(trace, count, **options), args)
        assert_equal(run(microbatch_loop(again, count, **options), args), want, tolerance=tolerance)


# --- equal numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "microbatches"),
    [
        *(("mlp", 1), ("mlp", 2), ("moe", 1), ("dropout", 2), ("gpt_linen", 2)),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in ("vit", "masked_lm", "encoder_decoder")),
    ],
)
def test_models_of_the_zoo_that_recompute_every_layer_equal_the_plain_step(name, microbatches, float64):
    case = ZOO[name]
    step, *args = case.make()
    step = functools.partial(step, **case.kwargs)
    trace = traced(step, *args, batch=case.batch_argnums)
    looped = microbatch_loop(everything(trace), microbatches, case.batch_statistics, "full_batch")
    assert regions(everything(trace).jaxpr)
    assert_equal(run(looped, args), run(trace.jaxpr, args), tolerance=case.tolerance)


def skipping(params, batch):
    """The last layer reads what the first two made: residuals that live long."""
    h, kept = batch["x"], []
    for number, layer in enumerate(params["blocks"]):
        with jax.named_scope(f"h_{number}"):
            h = jnp.sin(block(layer, h))
            h = h * kept.pop() if number == 2 else h
            kept.append(h)
    return jnp.mean((h @ params["head"] - batch["y"]) ** 2)


def masked(params, batch):
    keep = batch["y"][:, 0] > 0
    h = jnp.where(keep[:, None], batch["x"], 0.0) / jnp.sum(keep)
    return jnp.sum((blocks(params["blocks"], h) @ params["head"]) ** 2 * keep[:, None]) / jnp.sum(keep)


def penalised(params, batch):
    return deep_loss(params, batch) + 0.1 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))


def shared_mask(params, batch):
    mask = batch["y"] > jnp.arange(WIDTH) - 4
    h = blocks(params["blocks"], batch["x"], lambda _, fun: lambda layer, h: fun(layer, jnp.where(mask, h, 0.0)))
    return jnp.mean(h**2)


def noisy(params, batch):
    h, key = batch["x"], jax.random.key(3)
    for number, layer in enumerate(params["blocks"]):
        with jax.named_scope(f"h_{number}"):
            keep = jax.random.bernoulli(jax.random.fold_in(key, number), 0.8, h.shape)
            h = block(layer, jnp.where(keep, h, 0.0))
    return jnp.mean(h**2)


def half_precision(params, batch):
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    return deep_loss(params, {"x": batch["x"].astype(jnp.bfloat16), "y": batch["y"]}).astype(jnp.float32)


LOSSES = {
    "blocks": deep_loss,
    "values that skip layers": skipping,
    "a mean over some of the rows": masked,
    "a penalty on the parameters": penalised,
    "a mask that all layers share": shared_mask,
    "masks that are drawn": noisy,
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_recomputed_layers_equal_the_plain_step_with_one_microbatch_and_two(loss):
    assert_equals_plain(sgd(loss), *deep_arguments(3), microbatches=(1, 2))


def test_casts_of_parameters_are_made_again_and_not_kept():
    trace = traced(sgd(half_precision), *deep_arguments(3))
    again = rematerialize(trace, [0], offered_layers(trace).num_layers)
    (region,) = regions(again.jaxpr)
    read = [v for v in region.invars if v in again.jaxpr.jaxpr.invars]
    assert {v.aval.shape for v in read} >= {(WIDTH, 4 * WIDTH)}
    assert all(v.aval.dtype == jnp.float32 for v in read)


def test_statistics_of_a_microbatch_are_those_of_that_microbatch_again():
    def normalised(params, batch):
        h = batch["x"]
        for number, layer in enumerate(params["blocks"]):
            with jax.named_scope(f"h_{number}"):
                h = block(layer, (h - h.mean(0)) / (1 + h.std(0)))
        return jnp.mean(h**2)

    assert_equals_plain(sgd(normalised), *deep_arguments(3), microbatches=(1, 2), batch_statistics="per_microbatch")


def test_two_gradients_in_one_step_recompute_the_layers_of_the_first():
    def step(params, batch):
        value, grads = jax.value_and_grad(deep_loss)(params, batch)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return sgd(deep_loss)(params, batch)[0], value

    assert_equals_plain(step, *deep_arguments(3), microbatches=(1, 2))


# --- which layers -------------------------------------------------------------------------------------------------


def test_layers_are_the_numbered_scopes_and_the_last_part_is_not_offered():
    offer = offered_layers(traced(sgd(deep_loss), *deep_arguments(3)))
    assert offer.names == ("h_0", "h_1", "h_2", "end")
    assert (offer.num_layers, offer.layers) == (4, (0, 1, 2))


def test_small_scopes_are_one_layer_together():
    def loss(params, batch):
        h = jnp.tanh(batch["x"] @ params["head"])
        for number, layer in enumerate(params["blocks"]):
            with jax.named_scope(f"Dense_{2 * number}"):
                h = jnp.tanh(h @ layer["up"])
            with jax.named_scope(f"Dense_{2 * number + 1}"):
                h = jnp.tanh(h @ layer["down"])
        return jnp.mean(h**2)

    offer = offered_layers(traced(sgd(loss), *deep_arguments(3)))
    assert offer.names == ("start", "Dense_0", "Dense_2", "Dense_4", "end")


def test_models_without_scopes_are_cut_by_flops():
    def loss(params, batch):
        h = batch["x"]
        for layer in params["blocks"]:
            h = block(layer, h)
        return jnp.mean(h**2)

    step = LayeredStep(traced(sgd(loss), *deep_arguments(8)))
    assert count_layers(step.phases) == 4
    cuts = layer_cuts(step.phases, 4)
    assert len(cuts) == 3
    assert list(cuts) == sorted(cuts)
    assert step.names(4)[1] == "a.blocks.2.down ... a.blocks.3.up"
    assert all("test_rematerialize" in name for name in layer_names(step.phases, 4, {}))


def test_layers_that_the_user_rematerialises_stay_as_they_are():
    def loss(params, batch):
        h = blocks(params["blocks"], batch["x"], lambda number, fun: fun if number else jax.checkpoint(fun))
        return jnp.mean((h @ params["head"]) ** 2)

    trace = traced(sgd(loss), *deep_arguments(3))
    assert offered_layers(trace).layers == (1, 2)
    before, after = (
        len(jc.open_jaxpr(regions(t.jaxpr)[-1].params["jaxpr"])[0].eqns) for t in (trace, everything(trace))
    )
    assert before == after


def test_scans_over_layers_are_not_offered():
    def loss(params, batch):
        h, _ = jax.lax.scan(lambda h, layer: (block(layer, h), None), batch["x"], params["stacked"])
        return jnp.mean((h @ params["head"]) ** 2)

    params, batch = deep_arguments(4)
    params = {"stacked": jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["blocks"]), "head": params["head"]}
    assert not offered_layers(traced(sgd(loss), params, batch)).layers


def test_a_step_without_a_gradient_offers_nothing():
    trace = traced(lambda p, b: p["head"] @ b["x"].T, *deep_arguments(1))
    assert offered_layers(trace).layers == ()
    assert rematerialize(trace, (), 1) is trace


def test_layers_that_there_are_not_are_refused():
    trace = traced(sgd(deep_loss), *deep_arguments(2))
    with pytest.raises(InvalidArgument, match=r"layers \[1, 7\].*cut into 3 layers.*from 0 to 2"):
        rematerialize(trace, [1, 7], 3)


# --- what is kept -------------------------------------------------------------------------------------------------


def residual_bytes(closed):
    """Return the forward pass's values that the backward pass reads."""
    eqns = closed.jaxpr.eqns
    made = {v for eqn in eqns if jc.ad_phase(eqn) == "forward" for v in eqn.outvars}
    read = {v for eqn in eqns if jc.ad_phase(eqn) == "backward" for v in jc.operands(eqn)}
    return sum(v.aval.size * v.aval.dtype.itemsize for v in made & read)


def test_backward_pass_reads_nothing_of_the_forward_but_the_borders_of_its_layers():
    trace = traced(sgd(deep_loss), *deep_arguments(6))
    again = rematerialize(trace, range(6), 7)
    border = ROWS * WIDTH * 4
    assert residual_bytes(trace.jaxpr) > 6 * 4 * border
    assert residual_bytes(again.jaxpr) <= 7 * border + 4


def products(eqn):
    return sum(inner.primitive.name == "dot_general" for inner in jc.all_equations(next(jc.subjaxprs(eqn))))


def test_regions_are_those_that_jax_would_have_written():
    def checkpointed(params, batch):
        h = blocks(params["blocks"], batch["x"], lambda _, fun: jax.checkpoint(fun))
        return jnp.mean((h @ params["head"] - batch["y"]) ** 2)

    args = deep_arguments(3)
    ours = regions(rematerialize(traced(sgd(deep_loss), *args), range(3), 4).jaxpr)
    theirs = regions(traced(sgd(checkpointed), *args).jaxpr)
    assert [jc.ad_phase(eqn) for eqn in ours] == ["backward"] * 3
    for mine, its in zip(ours, theirs, strict=True):
        assert {k: v for k, v in mine.params.items() if k != "jaxpr"} == {
            k: v for k, v in its.params.items() if k != "jaxpr"
        }
        # A product of the parameters' gradients may stand outside, next to the region.
        assert products(mine) <= products(its)


# --- the choice ---------------------------------------------------------------------------------------------------

SIZES = {"num_blocks": 6, "width": 32, "rows": 16384}
# H100s compute a hyperbolic tangent in 32 bits again by themselves.
GPUS = autopar.Cluster(num_devices=8, kind="a100")


def planned(args, method, cluster=GPUS):
    return autopar.parallelize(sgd(deep_loss), method=method, cluster=cluster).trace(*args).plan()


@functools.cache
def with_room():
    """Arguments, and the budget that the fastest plan needs."""
    args = deep_arguments(**SIZES)
    plan = planned(args, autopar.Auto(mesh_shape=(2, 4), memory="off")).plan
    return args, bytes_with_headroom(plan.sharding.peak_bytes)


def test_nothing_is_recomputed_where_there_is_room():
    args, peak_bytes = with_room()
    plan = planned(args, autopar.Auto(mesh_shape=(2, 4), memory=1.1 * peak_bytes)).plan
    assert (plan.sharding.recomputed, plan.sharding.recomputed_layers, plan.sharding.num_layers) == ((), (), 1)
    assert "needs no jax.checkpoint" in plan.remat_policy()


def test_as_few_layers_are_recomputed_as_make_the_plan_fit():
    args, peak_bytes = with_room()
    some, all_of_them = (
        planned(args, autopar.Auto(mesh_shape=(2, 4), memory=share * peak_bytes)) for share in (0.9, 0.8)
    )
    few, many = (len(each.plan.sharding.recomputed) for each in (some, all_of_them))
    assert 0 < few < many <= 6
    plan = some.plan
    assert plan.sharding.peak_bytes <= 0.9 * peak_bytes
    assert plan.sharding.recomputed == tuple(f"h_{number}" for number in range(few))
    assert f"{few} of 7 layers computed again: h_0" in str(plan)
    assert "h_0" in plan.remat_policy()
    assert some.verify(*args)


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_layers_are_recomputed_where_that_takes_less_than_layouts_that_save_memory(share):
    args, peak_bytes = with_room()
    auto = autopar.Auto(mesh_shape=(2, 4), memory=share * peak_bytes, num_stages=1, num_microbatches=1)
    found_s = planned(args, auto).plan.sharding.step_time_s
    for remat in (False, True):
        with contextlib.suppress(MemoryTooSmall):
            assert found_s <= 1.001 * planned(args, dataclasses.replace(auto, remat=remat)).plan.sharding.step_time_s


def test_layouts_that_save_memory_replace_no_faster_plan():
    plans = {
        (1, "off"): SimpleNamespace(step_time_s=2.0, peak_bytes=1.0),
        (0, None): SimpleNamespace(step_time_s=3.0, peak_bytes=1.0),
    }
    search = lambda count, below_s, memory=None: plans[count, memory]  # noqa: E731
    assert one_mesh._saving_memory(search, 1, 1.0, math.inf).step_time_s == 2.0


def test_a_plan_that_recomputes_means_the_same_from_json():
    args = deep_arguments(6, 32, 1024)
    plan = planned(args, autopar.Auto(mesh_shape=(2, 4), memory="off", remat=True), cluster=None).plan
    assert plan.sharding.recomputed_layers == (0, 1, 2, 3, 4, 5)
    again = autopar.Plan.from_json(plan.to_json())
    assert again == plan
    step = autopar.parallelize(sgd(deep_loss))
    assert again.verify(step, args)
    explained = again.explain("blocks.0.up", step, args)
    spec = next((s for name, s in plan.input_specs.items() if name.endswith("blocks.0.up")), P())
    assert explained.chosen.choice == str(spec)
    assert all(each.plan.sharding.recomputed == plan.sharding.recomputed for each in explained.others)


def test_microbatches_are_recomputed_one_by_one():
    args, _ = with_room()
    found = planned(args, autopar.Auto(mesh_shape=(8,), memory="off", remat=True, num_microbatches=2))
    assert len(found.plan.sharding.recomputed) == 6
    assert found.verify(*args)


def test_recomputing_costs_modelled_time_and_saves_modelled_memory():
    args, peak_bytes = with_room()
    kept, again = (
        planned(args, autopar.Auto(mesh_shape=(2, 4), memory="off", remat=remat)).plan.sharding
        for remat in (False, True)
    )
    assert bytes_with_headroom(again.peak_bytes) < 0.8 * peak_bytes
    assert kept.step_time_s < again.step_time_s < 1.5 * kept.step_time_s


# Tensor parallelism divides activations so well that less is enough before anything is computed again.
@pytest.mark.parametrize(
    "method, share", [(autopar.Zero(mesh_shape=(8,)), 0.85), (autopar.TensorParallel(mesh_shape=(8,)), 0.31)]
)
def test_kinds_of_parallelism_recompute_layers_too(method, share):
    args = deep_arguments(num_blocks=2, width=32, rows=16384)
    least = bytes_with_headroom(planned(args, dataclasses.replace(method, memory="off")).plan.sharding.peak_bytes)
    tight = planned(args, dataclasses.replace(method, memory=share * least))
    assert tight.plan.sharding.recomputed
    assert tight.verify(*args)


def test_memory_too_small_is_an_error_where_recomputing_is_not_allowed_or_not_enough():
    args, pair = deep_arguments(num_blocks=2, width=32, rows=1024), autopar.Cluster(num_devices=2, kind="h100")
    peak_bytes = planned(args, autopar.Auto(mesh_shape=(2,), memory="off"), pair).plan.sharding.peak_bytes
    for method in (
        autopar.Auto(mesh_shape=(2,), memory=0.05 * peak_bytes, remat=False),
        autopar.Auto(mesh_shape=(2,), memory=0.01 * peak_bytes),
    ):
        with pytest.raises(MemoryTooSmall, match="needs at least"):
            planned(args, method, pair)
