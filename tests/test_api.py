"""`parallelize` takes every function, argument and result that `jax.jit` takes, with the plain step's results."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import DataParallel
from tests.small_steps import (
    adam,
    adam_state,
    assert_same,
    devices,
    draw,
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

METHODS = {"one mesh": DataParallel(), "two stages": two_stages(), "whole batch": two_stages(num_microbatches=1)}
on_every_path = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def parallel(step: Callable[..., Any] = mlp_step, **options: Any) -> autopar.Step:
    return autopar.parallelize(step, **({"method": two_stages(), "devices": devices()} | options))


def num_compiled(step: autopar.Step) -> int:
    return len({id(compiled) for compiled in step._compiled.values()})


# --- the decorator and its ladder ---------------------------------------------------------------------------------


def test_one_line_uses_all_devices():
    @autopar.parallelize
    def train_step(params, batch):
        """Train."""
        return mlp_step(params, batch)

    params, _ = train_step(mlp_params(), mlp_batch())
    assert_same(params, mlp_step(mlp_params(), mlp_batch())[0])
    assert params[0]["w"].sharding.device_set == set(jax.devices())
    assert (train_step.__name__, train_step.__doc__) == ("train_step", "Train.")


def test_decorator_takes_options():
    @autopar.parallelize(method=two_stages(), devices=devices())
    def train_step(params, batch):
        return mlp_step(params, batch)

    assert_same(train_step(mlp_params(), mlp_batch()), mlp_step(mlp_params(), mlp_batch()))


def test_every_rung_of_the_ladder_prints_what_it_adds():
    traced = parallel().trace(mlp_params(), mlp_batch())
    planned = traced.plan()
    lowered = planned.lower()
    compiled = lowered.compile()
    assert str(traced).startswith(f"Trace of train_step ({traced.trace.fingerprint}):")
    assert "6 inputs (2 batch, 0 donated), 5 outputs" in str(traced)
    assert str(planned).startswith(planned.plan.summary()) and "2 microbatches, schedule 1f1b" in str(planned)
    assert str(lowered) == str(lowered.program) and "mesh 1: devices 1 as (data=1)" in str(lowered)
    assert str(compiled).startswith("Compiled train_step on 2 devices\nPipelineParallel: 2 microbatches")
    assert_same(compiled(mlp_params(), mlp_batch()), mlp_step(mlp_params(), mlp_batch()))


def test_step_is_planned_for_shapes_and_runs_on_arrays():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (mlp_params(), mlp_batch()))
    compiled = parallel().trace(*shapes).plan().lower().compile()
    assert_same(compiled(mlp_params(), mlp_batch()), mlp_step(mlp_params(), mlp_batch()))


def test_plan_for_a_cluster_needs_no_devices():
    step = parallel(
        method=two_stages(num_stages=4), devices=None, cluster=autopar.Cluster(num_devices=512, kind="H100")
    )
    with pytest.raises(autopar.InvalidArgument, match="forward pass has only"):
        parallel(method=two_stages(num_stages=64), cluster=autopar.Cluster(num_devices=512, kind="H100")).trace(
            mlp_params(), mlp_batch()
        ).plan()
    plan = step.trace(mlp_params(), mlp_batch()).plan().lower().plan
    assert plan.num_devices == 512 and len(plan.meshes) == 4


def test_plan_goes_to_json_and_back_and_means_the_same():
    planned = parallel().trace(mlp_params(), mlp_batch()).plan()
    plan = autopar.Plan.from_json(planned.plan.to_json())
    again = parallel(method=plan).trace(mlp_params(), mlp_batch()).plan()
    assert again.plan == planned.plan
    assert again.lower().program == planned.lower().program


def test_another_method_can_be_tried_on_the_same_trace():
    traced = parallel().trace(mlp_params(), mlp_batch())
    assert traced.plan(DataParallel()).plan.num_stages == 1
    assert traced.plan().plan.num_stages == 2


def test_num_microbatches_goes_before_that_of_the_method():
    plan = parallel(num_microbatches=4).trace(mlp_params(), mlp_batch()).plan().plan
    assert plan.num_microbatches == 4
    assert parallel(method=plan, num_microbatches=4).trace(mlp_params(), mlp_batch()).plan().plan == plan


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b", "interleaved", "zero-bubble", "zero-bubble-v"])
def test_tied_gpt_with_clipped_adam_is_the_plain_step_after_two_steps(schedule):
    plain = jax.jit(adam(gpt_loss, clip=0.1))
    step = parallel(adam(gpt_loss, clip=0.1), method=two_stages(schedule=schedule), donate_argnums=0)
    state, want = adam_state(gpt_params()), adam_state(gpt_params())
    for _ in range(2):
        (state, loss), (want, want_loss) = step(state, gpt_batch()), plain(want, gpt_batch())
        assert_same((state, loss), (want, want_loss), tolerance=1e-4)


# --- functions ----------------------------------------------------------------------------------------------------


class Trainer:
    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, params: Any, batch: Any) -> Any:
        return sgd(mlp_loss, self.rate)(params, batch)

    def train(self, params: Any, batch: Any) -> Any:
        return self(params, batch)


def rate_first(rate, params, batch):
    return sgd(mlp_loss, rate)(params, batch)


def rate_last(params, batch, rate):
    return sgd(mlp_loss, rate)(params, batch)


FUNCTIONS = {
    "partial": functools.partial(rate_first, 0.3),
    "partial by name": functools.partial(rate_last, rate=0.3),
    "callable object": Trainer(0.3),
    "method": Trainer(0.3).train,
    "jitted": jax.jit(functools.partial(rate_first, 0.3)),
    "jitted and donated": jax.jit(sgd(mlp_loss, 0.3), donate_argnums=0),
    "lambda": lambda *args: sgd(mlp_loss, 0.3)(*args),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_any_callable_is_a_step(function):
    assert_same(parallel(function)(mlp_params(), mlp_batch()), sgd(mlp_loss, 0.3)(mlp_params(), mlp_batch()))


# --- arguments ----------------------------------------------------------------------------------------------------


def in_three(params, x, y, *, scale=1.0):
    return sgd(lambda p, b: scale * mlp_loss(p, b))(params, (x, y))


X, Y = mlp_batch()
PASSED = {
    "by position": ((X, Y), {}),
    "by name": ((), {"y": Y, "x": X}),
    "by position and name": ((X,), {"y": Y}),
    "with a number by name": ((X, Y), {"scale": 2.0}),
}


@pytest.mark.parametrize(("args", "kwargs"), PASSED.values(), ids=PASSED)
def test_batch_in_several_arguments_is_passed_in_any_way(args, kwargs):
    step = parallel(in_three, batch_argnums=(1, 2))
    assert_same(step(mlp_params(), *args, **kwargs), in_three(mlp_params(), *args, **kwargs))
    trace = step.trace(mlp_params(), *args, **kwargs).trace
    assert {trace.inputs[i].name for i in trace.batch_inputs} >= {"x", "y"}


def test_state_by_name_and_batch_first():
    def train_step(batch, params):
        return mlp_step(params, batch)

    got = parallel(train_step, batch_argnums=0)(params=mlp_params(), batch=mlp_batch())
    assert_same(got, mlp_step(mlp_params(), mlp_batch()))


@pytest.mark.parametrize("option", [{"static_argnums": 2}, {"static_argnames": "rate"}], ids=str)
def test_step_is_compiled_once_for_each_static_value(option):
    step = parallel(rate_last, method=DataParallel(), **option)
    for rate in (0.5, 0.25, 0.5):
        assert_same(step(mlp_params(), mlp_batch(), rate), rate_last(mlp_params(), mlp_batch(), rate))
    assert num_compiled(step) == 2


def test_step_is_compiled_once_for_each_shape():
    step = parallel(method=DataParallel())
    for rows in (8, 4, 8):
        assert_same(step(mlp_params(), mlp_batch(rows)), mlp_step(mlp_params(), mlp_batch(rows)))
    assert num_compiled(step) == 2


class Pair(NamedTuple):
    params: Any
    rest: Any


def of_pairs(state, batch):
    params, loss = mlp_step(state.params, (batch["x"], batch["y"]))
    return Pair(params, state.rest), (None, loss, [], {"nothing": ()})


@on_every_path
def test_trees_keep_their_types_and_their_empty_places(method):
    args = Pair(mlp_params(), {"ema": None, "list": [jnp.ones(3)]}), {"x": X, "y": Y, "mask": None}
    assert_same(parallel(of_pairs, method=method)(*args), of_pairs(*args))


def of_many_types(state, batch):
    params, loss = mlp_step(state["params"], batch)
    key, draw_key = jax.random.split(state["key"])
    after = {
        "params": params,
        "count": state["count"] + 1,
        "flags": ~state["flags"],
        "key": key,
        "old key": jax.random.fold_in(state["old key"], 3),
        "table": state["table"] + 1,
        "half": state["half"] * 2,
    }
    metrics = {
        "loss": loss,
        "positive": jnp.sum(batch[0] > 0),
        "any": jnp.any(batch[0] > 1),
        "all": jnp.all(batch[0] > -9),
        "largest": jnp.max(batch[0]),
        "label": jnp.argmax(batch[0], axis=-1),
        "noise": jax.random.normal(draw_key, (3,)),
    }
    return after, metrics


@on_every_path
def test_integers_truth_values_and_keys_are_state_and_results(method):
    state = {
        "params": mlp_params(),
        "count": jnp.int32(0),
        "flags": jnp.array([True, False]),
        "key": jax.random.key(0),
        "old key": jax.random.PRNGKey(1),
        "table": jnp.arange(40),
        "half": draw(0, 5, 5).astype(jnp.bfloat16),
    }
    assert_same(parallel(of_many_types, method=method)(state, mlp_batch()), of_many_types(state, mlp_batch()))


def passing_on(state, batch):
    params, loss = mlp_step(state["params"], batch[:2])
    results = loss, batch[0], params[0]["w"], params[0]["w"], state["table"], jnp.zeros(3), 1, 2.5, True, np.arange(4)
    return {"params": params, "table": state["table"], "number": state["number"]}, results


@on_every_path
@pytest.mark.parametrize("donated", [(), (0,)], ids=["kept", "donated"])
def test_inputs_unused_and_returned_and_results_repeated_and_constant(method, donated):
    state = {"params": mlp_params(), "table": draw(0, 5, 40), "number": jnp.float32(1), "unused": jnp.ones(7)}
    batch = (*mlp_batch(), jnp.ones((8, 2)))
    want = jax.jit(passing_on)(state, batch)
    step = parallel(passing_on, method=method, donate_argnums=donated)
    got = step(jax.tree.map(jnp.copy, state), batch)
    assert_same(got, want)
    assert_same(
        step(got[0] | {"unused": state["unused"]}, batch),
        jax.jit(passing_on)(want[0] | {"unused": state["unused"]}, batch),
    )


@on_every_path
def test_caller_keeps_what_was_not_donated(method):
    state, batch = {"params": mlp_params(), "table": draw(0, 5, 40), "number": jnp.float32(1)}, mlp_batch()
    step = parallel(passing_on, method=method)
    after, results = step(state, batch)
    # Arguments in the layouts that the step wants: they are taken as they are.
    again = step(after, batch)
    for leaf in jax.tree.leaves((again, results)):
        if isinstance(leaf, jax.Array):
            leaf.delete()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((state, batch, after)))


LARGE = np.random.default_rng(0).normal(size=(1000, 4)).astype(np.float32)
LARGE_ON_DEVICE = jnp.asarray(LARGE)


def closing_over(params, batch):
    def loss(p, b):
        return mlp_loss(p, (b[0] + LARGE[:1], b[1])) + jnp.mean((LARGE_ON_DEVICE @ p[1]["w"]) ** 2)

    new, value = sgd(loss)(params, batch)
    return new, value + LARGE_ON_DEVICE.sum() + LARGE.sum()


@on_every_path
def test_arrays_of_the_closure_are_constants(method):
    assert_same(
        parallel(closing_over, method=method)(mlp_params(), mlp_batch()), closing_over(mlp_params(), mlp_batch())
    )


@pytest.mark.parametrize("state", [{}, (), None, {"a": None}], ids=repr)
def test_step_of_nothing_is_a_step(state):
    assert parallel(lambda state, batch: (state, batch), method=None)(state, ()) == (state, ())


def test_step_without_a_batch_runs_on_one_mesh():
    step = sgd(lambda params, _: mlp_loss(params, (LARGE_ON_DEVICE[:8], LARGE_ON_DEVICE[8:16])))
    assert_same(parallel(step, method=DataParallel(), batch_argnums=())(mlp_params(), None), step(mlp_params(), None))


def numbers(state, batch):
    params, loss = mlp_step(state["params"], batch)
    return {
        "params": params,
        "count": state["count"] + 1,
        "rate": state["rate"] * 0.5,
        "sum": state["sum"] + loss,
    }, loss


@on_every_path
def test_python_and_numpy_numbers_in_the_state_compile_once(method):
    state = {"params": jax.tree.map(np.float64, mlp_params()), "count": 0, "rate": 0.5, "sum": np.float64(0)}
    step, want = parallel(numbers, method=method), state
    for _ in range(3):
        state, _ = step(state, mlp_batch())
        want, _ = jax.jit(numbers)(want, mlp_batch())
    assert_same(state, want)
    assert num_compiled(step) == 1


# --- donation -----------------------------------------------------------------------------------------------------


@on_every_path
def test_all_state_that_is_replaced_is_donated(method):
    step = parallel(adam(mlp_loss), method=method, donate_argnums=0)
    state, _ = step(adam_state(mlp_params()), mlp_batch())
    step(state, mlp_batch())
    kept = [leaf.shape for leaf in jax.tree.leaves(state) if not leaf.is_deleted()]
    assert kept in ([], [()])  # the counter may be there on every stage, of which one has the caller's copy


@on_every_path
def test_nothing_is_deleted_that_was_not_donated(method):
    step = parallel(adam(mlp_loss), method=method)
    state, _ = step(adam_state(mlp_params()), mlp_batch())
    step(state, mlp_batch())
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((state, mlp_batch())))


def test_step_says_what_it_is() -> None:
    def double(x):
        return x * 2

    step = autopar.parallelize(double, method=autopar.DataParallel(), batch_argnums=())
    assert repr(step) == "<parallelized double by DataParallel, compiled 0 times>"
    step(jnp.ones(4))
    assert repr(step) == "<parallelized double by DataParallel, compiled 1 times>"
