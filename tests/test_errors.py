"""Every mistake a user can make is met before anything runs: what was found, what is required, what to do."""

import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import (
    DataParallel,
    InvalidArgument,
    MemoryTooSmall,
    NotSplittable,
    PlanMismatch,
    ShardParallel,
    Unsupported,
)
from tests.small_steps import (
    ROWS,
    assert_same,
    devices,
    gpt_batch,
    gpt_loss,
    gpt_params,
    mlp_batch,
    mlp_loss,
    mlp_params,
    mlp_step,
    sgd,
    two_stages,
)

Step = Callable[..., Any]


def planned(step: Step = mlp_step, *args: Any, num_devices: int = 2, **options: Any) -> autopar.Planned:
    options = {"method": two_stages()} | options
    parallel = autopar.parallelize(step, devices=devices(num_devices), **options)
    return parallel.trace(*(args or (mlp_params(), mlp_batch()))).plan()


def lowered(step: Step = mlp_step, *args: Any, **options: Any) -> autopar.Lowered:
    return planned(step, *args, **options).lower()


def message(error: Any) -> str:
    return re.sub(r"\s+", " ", str(error.value))


# --- devices, stages and microbatches -----------------------------------------------------------------------------

DOES_NOT_FIT = {
    "three microbatches of eight rows": (
        {"method": two_stages(num_microbatches=3)},
        r"`batch\.0` has 8 rows, .* 3 microbatches .* divides 8 \(the nearest is 2\)",
    ),
    "more layers than equations": (
        {"method": two_stages(layers=100)},
        r"100 layers were asked for, .* only \d+ equations to cut between. Ask for at most \d+",
    ),
    "three devices for two stages": (
        {"num_devices": 3},
        r"3 devices do not divide into 2 stages .* a number of stages that divides 3, .* `devices=`",
    ),
    "a mesh shape larger than a stage": (
        {"num_devices": 4, "method": two_stages(mesh_shape=(4,))},
        r"mesh_shape \(4,\) needs 4 devices per stage, each of the 2 stages has 2. Give a shape",
    ),
    "a mesh shape larger than the machine": (
        {"num_devices": 4, "method": ShardParallel(mesh_shape=(2, 4))},
        r"mesh_shape \(2, 4\) needs 8 devices, there are 4. Give a shape .* `devices=` with 8",
    ),
    "a spec that does not divide": (
        {"num_devices": 3, "method": ShardParallel(mesh_shape=(3,), specs={r"\.w$": P(None, "data")})},
        r"params\.0\.w splits shape \(4, 4\) by .* over \{'data': 3\}, which does not divide. Choose another",
    ),
}


@pytest.mark.parametrize(("options", "expected"), DOES_NOT_FIT.values(), ids=DOES_NOT_FIT)
def test_method_that_does_not_fit_says_both_numbers(options, expected):
    with pytest.raises(InvalidArgument) as error:
        lowered(**options)
    assert re.search(expected, message(error))


def test_one_stage_with_microbatches_that_do_not_divide_the_batch_says_both_numbers():
    with pytest.raises(InvalidArgument, match=r"8 rows, .* 3 microbatches"):
        lowered(method=DataParallel(num_microbatches=3))


def test_stages_of_a_step_without_a_gradient_are_refused():
    def evaluation_step(params, batch):
        return mlp_loss(params, batch)

    for method in (two_stages(), autopar.Auto(num_stages=2)):
        step = autopar.parallelize(evaluation_step, method=method, devices=devices())
        with pytest.raises(InvalidArgument, match=r"evaluation_step takes no gradient, .* 2 stages. Use DataParallel"):
            step(mlp_params(), mlp_batch())


def test_plan_for_more_devices_than_there_are_can_be_made_but_not_compiled():
    there = len(jax.devices())
    cluster = autopar.Cluster(num_devices=2 * there, kind="cpu")
    step = autopar.parallelize(mlp_step, method=two_stages(), cluster=cluster)
    low = step.trace(mlp_params(), mlp_batch()).plan().lower()
    with pytest.raises(InvalidArgument, match=rf"needs {2 * there} devices, this process has {there}. Plan for these"):
        low.compile()


NOTHING_TO_CUT = {
    "no batch": (sgd(lambda params, _: mlp_loss(params, mlp_batch())), None),
    "linear": (jax.grad(lambda params, batch: jnp.sum(batch[0] @ params[0]["w"])), mlp_batch()),
}


@pytest.mark.parametrize(("step", "batch"), NOTHING_TO_CUT.values(), ids=NOTHING_TO_CUT)
def test_forward_pass_without_a_batch_is_not_cut(step, batch):
    with pytest.raises(
        InvalidArgument, match=r"no operation of the forward depends on parameters and batch.*, or use Data"
    ):
        planned(step, mlp_params(), batch, method=two_stages(num_microbatches=1))


# --- plans --------------------------------------------------------------------------------------------------------


def test_plan_of_another_program_is_refused_with_both_fingerprints():
    other = planned(sgd(gpt_loss), gpt_params(), gpt_batch()).plan
    mine = autopar.parallelize(mlp_step, devices=devices(), method=other).trace(mlp_params(), mlp_batch())
    with pytest.raises(
        PlanMismatch, match=f"{other.fingerprint}, train_step .* {mine.trace.fingerprint}: another step"
    ):
        mine.plan()


def test_plan_of_the_same_step_on_another_batch_size_is_refused():
    plan = planned(mlp_step, mlp_params(), mlp_batch(16)).plan
    with pytest.raises(PlanMismatch, match="other shapes"):
        planned(method=plan)


SPEC = P("data")
MISMATCHES = {
    "more devices": ({}, 1, r"uses 2 devices numbered up to 1, there are 1. Run it where there are 2"),
    "a device that is not there": (
        {"meshes": tuple(autopar.MeshPlan(devices=(d,), shape=(1,), axis_names=("data",)) for d in (0, 5))},
        2,
        "numbered up to 5, there are 2",
    ),
    "a spec for an unknown input": (
        {"input_specs": {"parms.0": SPEC}},
        2,
        r"spec to 'parms\.0', which is no input of train_step. Its inputs are batch\.0, .* leave the spec out",
    ),
    "a spec with more entries than axes": (
        {"input_specs": {"params.0.b": P(None, "data")}},
        2,
        r"splits params\.0\.b, of shape \(4,\), by .* over a mesh of \{'data': 1\}",
    ),
    "a layer that begins behind the end": ({"cuts": (1000,)}, 2, r"forward equation 1000, train_step has \d+ of them"),
}


@pytest.mark.parametrize(("changes", "num_devices", "expected"), MISMATCHES.values(), ids=MISMATCHES)
def test_plan_that_does_not_fit_says_where(changes, num_devices, expected):
    plan = replace(planned().plan, **changes)
    with pytest.raises(PlanMismatch) as error:
        lowered(method=plan, num_devices=num_devices)
    assert re.search(expected, message(error))


def test_plan_with_a_spec_that_does_not_divide_says_which_input():
    plan = planned(method=ShardParallel(mesh_shape=(3,)), num_devices=3).plan
    with pytest.raises(PlanMismatch, match=r"params\.1\.w, of shape \(4, 4\), .* \{'data': 3\}.*whose size it divides"):
        planned(method=replace(plan, input_specs={"params.1.w": SPEC}), num_devices=3)


def test_microbatches_beside_a_plan_that_has_another_number_are_refused():
    with pytest.raises(InvalidArgument, match=r"num_microbatches is 4, the plan has 2. .* leave num_microbatches out"):
        autopar.parallelize(mlp_step, method=planned().plan, num_microbatches=4)


# --- arguments ----------------------------------------------------------------------------------------------------


def with_number(params, batch, number):
    return mlp_step(params, batch)


ROLES = {
    "batch out of range": (
        {"batch_argnums": 3},
        r"batch_argnums names argument 3, but with_number takes 3 positional arguments \(params, batch, number\)",
    ),
    "donated out of range": ({"donate_argnums": (0, -4)}, "donate_argnums names argument -4, .* Count them from 0"),
    "static out of range": ({"static_argnums": 7}, "static_argnums names argument 7"),
    "static name unknown": (
        {"static_argnames": "nmber"},
        "static_argnames names 'nmber', but with_number takes params, batch, number",
    ),
    "static and batch": (
        {"static_argnums": 1, "batch_argnums": 1},
        "Argument 1 of with_number is static, and cannot be a batch or donated as well",
    ),
    "static by name and donated": (
        {"static_argnames": "params", "donate_argnums": 0},
        "Argument 0 of with_number is static",
    ),
    "a method by name": ({"method": "pipeline"}, r"method is a str. Choose Auto\(\), DataParallel"),
    "no microbatch": ({"num_microbatches": 0}, "num_microbatches"),
}


@pytest.mark.parametrize(("options", "expected"), ROLES.values(), ids=ROLES)
def test_options_that_contradict_the_function_are_refused_at_the_decorator(options, expected):
    with pytest.raises(InvalidArgument, match=expected):
        autopar.parallelize(with_number, **options)


def test_only_functions_are_parallelized():
    with pytest.raises(InvalidArgument, match="given a int; it takes a function"):
        autopar.parallelize(3)  # type: ignore[call-overload]


def test_static_value_that_cannot_be_hashed_is_named_by_position_and_by_name():
    step = autopar.parallelize(with_number, static_argnums=2, devices=devices())
    with pytest.raises(
        InvalidArgument, match=r"Static argument 2 of with_number is a list, which cannot be hashed. .* tuple"
    ):
        step(mlp_params(), mlp_batch(), [1])
    with pytest.raises(InvalidArgument, match="Static argument 'number' of with_number is a dict"):
        step(mlp_params(), mlp_batch(), number={})


X, Y = mlp_batch()
BATCHES = {
    "an array of words": (
        (X, np.array(["text"])),
        r"batch\.1 is an array of <U4, a type that JAX does not have\. Convert it before the call: .* words and",
    ),
    "another byte order": (
        (X, np.asarray(Y).astype(">f4")),
        r"batch\.1 is an array of >f4, a type that JAX does not have\..* by x\.astype\(x\.dtype\.newbyteorder\('='\)\)",
    ),
    "records": ((X, np.zeros(8, [("y", "f4", 4)])), r"batch\.1 is an array of \[\('y', .* records field by field"),
    "different sizes": ((X, Y[:4]), r"different batch sizes \(batch\.0: 8, batch\.1: 4\); one size is required"),
    "a scalar": ((X, 1.0), r"Batch input batch\.1 is a scalar; every batch input needs the batch as its first axis"),
    "a scalar array": ((X, jnp.float32(1)), r"Batch input batch\.1 is a scalar"),
}


@pytest.mark.parametrize(("batch", "expected"), BATCHES.values(), ids=BATCHES)
def test_batch_that_is_none_names_the_leaf(batch, expected):
    with pytest.raises(InvalidArgument, match=expected):
        autopar.parallelize(mlp_step, batch_argnums=1, devices=devices())(mlp_params(), batch)


def test_of_lists_of_examples_one_of_each_size_is_named():
    def step(params, batch):
        x, y = map(jnp.stack, batch)
        return jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(params)

    expected = r"different batch sizes \(batch\.0\.0: 16, batch\.1\.0: 4\);.*; stack a list of examples \(jnp\.stack\)"
    with pytest.raises(InvalidArgument, match=expected):
        autopar.parallelize(step, batch_argnums=1, devices=devices())(
            jnp.ones((16, 4)), ([*jnp.ones((8, 16))], [*jnp.ones((8, 4))])
        )


def test_leaf_of_the_state_that_is_no_array_is_named_by_its_path():
    with pytest.raises(InvalidArgument, match=r"params\.0\.w is a set: no array or number"):
        autopar.parallelize(mlp_step, devices=devices())([{"w": {1}, "b": X[0]}], mlp_batch())


@pytest.mark.parametrize("method", [DataParallel(), two_stages()], ids=["one mesh", "two stages"])
def test_donated_argument_used_again_is_named_by_its_path(method):
    step = autopar.parallelize(mlp_step, donate_argnums=0, devices=devices(), method=method)
    # The results lie where the next step needs them: what would have to be copied there is not lost.
    params, _ = step(mlp_params(), mlp_batch())
    step(params, mlp_batch())
    with pytest.raises(autopar.DonatedBuffer, match=r"'params\.0\.[wb]' was donated to an earlier call and is gone"):
        step(params, mlp_batch())


OTHER_CALLS = {
    "another batch size": lambda: (mlp_params(), mlp_batch(4)),
    "another structure": lambda: (mlp_params(), list(mlp_batch())),
    "another dtype": lambda: (mlp_params(), (X.astype(jnp.int32), Y)),
    "another number of layers": lambda: (mlp_params(3), mlp_batch()),
}


@pytest.mark.parametrize("call", OTHER_CALLS.values(), ids=OTHER_CALLS)
def test_compiled_step_refuses_other_arguments(call, compiled_mlp):
    with pytest.raises(
        InvalidArgument, match="train_step was compiled for arguments of other shapes, dtypes, or static"
    ):
        compiled_mlp(*call())


@pytest.fixture(scope="module")
def compiled_mlp():
    return lowered().compile()


# --- what cannot be split -----------------------------------------------------------------------------------------


def fixed_size(params, batch):
    return mlp_loss(params, (batch[0].reshape(8, 4), batch[1]))


def batch_norm(params, batch):
    h = batch[0] @ params[0]["w"]
    h = (h - h.mean(0)) / (h.std(0) + 1e-3)
    return mlp_loss(params[1:], (h, batch[1]))


def pairs_in_a_condition(params, batch):
    h = batch[0] @ params[0]["w"]
    pairs = jax.lax.cond(params[0]["b"][0] > 0, lambda: h @ h.T, lambda: -h @ h.T)
    return jnp.mean(jax.nn.log_softmax(pairs)) + mlp_loss(params, batch)


def branches_as_wide_as_the_batch(params, batch):
    w, h = jnp.tile(params[0]["w"], (2, 2)), jnp.tile(batch[0] @ params[1]["w"], 2)
    assert w.shape == (ROWS, ROWS), "as many rows in the batch as the layer is wide"
    return jnp.mean(jax.lax.cond(w[0, 0] > 0, lambda: jnp.tanh(h @ w), lambda: jnp.sin(h))) + mlp_loss(params, batch)


def loops_over_rows(params, batch):
    return sum(mlp_loss(params, (batch[0][i : i + 1], batch[1][i : i + 1])) for i in range(len(batch[0])))


NOT_SPLITTABLE = {
    fixed_size: r"2 microbatches need a step that accepts other batch sizes, .* raised TypeError: .*reshape.*"
    r"Take sizes from the arguments' shapes",
    pairs_in_a_condition: r"`dot_general` .*test_errors.py:\d+.*pairs_in_a_condition.* combines pairs .*"
    r"num_microbatches=1",
    loops_over_rows: r"structure depends on the batch size: .*Replace Python loops",
}


@pytest.mark.parametrize(("loss", "expected"), NOT_SPLITTABLE.items(), ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("method", [two_stages(), DataParallel(num_microbatches=2)], ids=["two stages", "one mesh"])
def test_model_that_mixes_examples_is_refused_with_its_source_line(loss, expected, method):
    with pytest.raises(NotSplittable) as error:
        lowered(sgd(loss), method=method)
    assert re.search(expected, message(error))


def test_branches_that_keep_two_values_in_one_place_are_refused_with_the_reason():
    with pytest.raises(NotSplittable) as error:
        lowered(sgd(branches_as_wide_as_the_batch), method=DataParallel(num_microbatches=2), batch_argnums=1)
    expected = (
        rf"`cond` .*\[{ROWS},{ROWS}\] .*has {ROWS} rows and another dimension is {ROWS} wide.*another number of rows"
    )
    assert re.search(expected, message(error))


@pytest.mark.parametrize("loss", NOT_SPLITTABLE, ids=lambda value: value.__name__)
def test_model_that_mixes_examples_is_pipelined_with_the_whole_batch(loss):
    step = autopar.parallelize(sgd(loss), method=two_stages(num_microbatches=1), devices=devices())
    assert_same(step(mlp_params(), mlp_batch()), jax.jit(sgd(loss))(mlp_params(), mlp_batch()))


def test_batch_statistics_are_those_of_the_batch_or_on_request_of_each_microbatch():
    exact = autopar.parallelize(sgd(batch_norm), method=two_stages(), devices=devices())
    assert_same(exact(mlp_params(), mlp_batch()), jax.jit(sgd(batch_norm))(mlp_params(), mlp_batch()))
    step = autopar.parallelize(sgd(batch_norm), method=two_stages(batch_statistics="per_microbatch"), devices=devices())
    halves = [jax.tree.map(lambda a, i=i: a[4 * i : 4 * i + 4], mlp_batch()) for i in range(2)]
    want = np.mean([batch_norm(mlp_params(), half) for half in halves])
    np.testing.assert_allclose(step(mlp_params(), mlp_batch())[1], want, rtol=1e-5)


@pytest.mark.parametrize("batch", [(), {}, None], ids=repr)
def test_microbatches_of_no_batch_are_refused(batch):
    step = sgd(lambda params, _: mlp_loss(params, (X, Y)))
    with pytest.raises(
        InvalidArgument, match=r"2 microbatches were asked for, but no input outside of the state .*batch_argnums"
    ):
        lowered(step, mlp_params(), batch)


# --- callbacks ----------------------------------------------------------------------------------------------------


def debugged(params, batch):
    new, loss = mlp_step(params, batch)
    jax.debug.callback(lambda _: None, loss, ordered=True)
    return new, loss


def logged(params, batch):
    new, loss = mlp_step(params, batch)
    jax.experimental.io_callback(lambda _: None, None, loss, ordered=True)
    return new, loss


NO_ORDER = {
    "two stages": (two_stages(), "2 stages and 2 microbatches, which have no common order"),
    "two microbatches": (DataParallel(num_microbatches=2), "1 stages and 2 microbatches, which have no common order"),
}


@pytest.mark.parametrize(("step", "primitive"), [(debugged, "debug_callback"), (logged, "io_callback")])
@pytest.mark.parametrize(("method", "found"), NO_ORDER.values(), ids=NO_ORDER)
def test_callback_that_must_keep_an_order_is_refused_where_there_is_none(step, primitive, method, found):
    with pytest.raises(Unsupported) as error:
        lowered(step, method=method)
    assert re.search(rf"in order, by `{primitive}` .*test_errors.py:\d+.*{found}.*Use ordered=False", message(error))


def test_ordered_debug_callback_is_refused_on_several_devices_and_runs_on_one():
    with pytest.raises(Unsupported, match=r"in order, by `debug_callback` .* on one device only; the plan has 2. Use"):
        lowered(debugged, method=DataParallel())
    assert_same(
        lowered(debugged, method=None, num_devices=1).compile()(mlp_params(), mlp_batch()),
        mlp_step(mlp_params(), mlp_batch()),
    )


def test_ordered_io_callback_runs_on_several_devices():
    assert_same(
        lowered(logged, method=DataParallel()).compile()(mlp_params(), mlp_batch()), mlp_step(mlp_params(), mlp_batch())
    )


def test_a_first_pass_that_is_recomputed_as_a_whole_says_what_cannot_be_cut():
    checkpointed = jax.checkpoint(mlp_loss)

    def attacked_step(params, batch):
        x = batch[0] + 0.1 * jnp.sign(jax.grad(lambda x: checkpointed(params, (x, batch[1])))(batch[0]))
        return sgd(checkpointed)(params, (x, batch[1]))

    step = autopar.parallelize(attacked_step, method=two_stages(), devices=devices())
    with pytest.raises(
        InvalidArgument, match=r"first pass through the model is `remat2`.*test_errors.*around the layers"
    ):
        step(mlp_params(), mlp_batch())


def test_a_message_that_takes_long_is_found_once_and_when_it_is_read() -> None:
    found: list[str] = []

    def find() -> str:
        found.append("0.5 GiB are missing.")
        return found[-1]

    error = MemoryTooSmall(find)
    assert not found
    assert str(error) == str(error) == str(pickle.loads(pickle.dumps(error))) == "0.5 GiB are missing."
    assert len(found) == 1
    error = MemoryTooSmall("0.5 GiB are missing.", least_share=1.5, changes=find)
    assert error.shortage == "0.5 GiB are missing." and error.least_share == 1.5 and len(found) == 1
    assert str(error) == "0.5 GiB are missing. 0.5 GiB are missing." and len(found) == 2
