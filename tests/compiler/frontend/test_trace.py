"""A trace names the inputs, tells state from batch, and identifies the program wherever it is made."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.compiler.jaxprs import compat as jc
from tests.small_steps import (
    Adam,
    adam,
    adam_state,
    gpt_batch,
    gpt_loss,
    gpt_params,
    mlp_batch,
    mlp_loss,
    mlp_params,
    mlp_step,
    sgd,
    traced,
)


def state_pairs(trace):
    return {trace.outputs[o].name: trace.inputs[i].name for o, i in trace.state_outputs.items()}


def test_phases_are_those_of_differentiation():
    trace = traced(mlp_step, mlp_params(), mlp_batch())
    phases = [jc.ad_phase(eqn) for eqn in trace.jaxpr.jaxpr.eqns]
    assert phases == sorted(phases, key=["forward", "backward", None].index)
    assert trace.differentiates and not traced(mlp_loss, mlp_params(), mlp_batch()).differentiates


def test_calls_are_inlined():
    trace = traced(jax.jit(sgd(jax.jit(gpt_loss))), gpt_params(), gpt_batch())
    assert not {"jit", "pjit", "custom_jvp_call"} & {eqn.primitive.name for eqn in jc.all_equations(trace.jaxpr)}


def test_printed_trace_counts_what_it_holds():
    text = str(traced(mlp_step, mlp_params(), mlp_batch(), donated=(0,)))
    assert text.startswith("Trace of train_step (")
    assert text.endswith("6 inputs (2 batch, 4 donated), 5 outputs")


# --- the trace at another batch -----------------------------------------------------------------------------------


def first_rows(params, batch):
    return mlp_step(params, (batch[0][:8], batch[1]))


def more_than_four(params, batch):
    assert batch[0].shape[0] > 4, "too few"
    return mlp_step(params, batch)


@pytest.mark.parametrize(("step", "rows"), [(mlp_step, 4), (first_rows, 4), (more_than_four, 16)])
def test_step_is_traced_with_half_of_the_batch_or_twice_the_batch(step, rows):
    trace = traced(step, mlp_params(), mlp_batch())
    assert trace.at_other_batch is not None
    assert [v.aval.shape for v in trace.at_other_batch.jaxpr.invars][-2:] == [(rows, 4), (rows, 4)]


@pytest.mark.parametrize(
    ("step", "batch", "reason"),
    [
        (lambda p, b: p, (), "no argument is a batch"),
        (lambda p, b: b[0].reshape(8, 4), (1,), "with a batch of 16 raised TypeError: .*reshape"),
    ],
    ids=["no batch", "a fixed size"],
)
def test_reason_is_kept_where_there_is_no_trace_at_another_batch(step, batch, reason):
    trace = traced(step, mlp_params(), mlp_batch(), batch=batch)
    assert trace.at_other_batch is None
    assert re.search(reason, trace.no_other_batch_because)


def test_inputs_that_kept_the_rows_of_the_batch_are_named_with_the_reason():
    def step(params, noise, images, labels):
        grads = jax.grad(lambda p: jnp.mean((images @ p + noise - labels) ** 2))(params)
        return params - grads

    step = autopar.parallelize(step, batch_argnums=(2, 3), method=autopar.DataParallel(num_microbatches=2))
    rows = jnp.ones((8, 4))
    with pytest.raises(autopar.NotSplittable, match=r"raised TypeError.* noise kept 8 rows there: .*batch_argnums"):
        step.trace(jnp.eye(4), rows, rows, rows).plan()


def test_step_that_is_not_split_is_traced_once():
    calls = []

    def step(params, batch):
        calls.append(len(batch[0]))
        return mlp_step(params, batch)

    parallel = autopar.parallelize(step, method=autopar.DataParallel())
    parallel.trace(mlp_params(), mlp_batch()).plan().lower()
    assert calls == [8]
    parallel.trace(mlp_params(), mlp_batch()).plan(autopar.DataParallel(num_microbatches=4)).lower()
    assert calls == [8, 8, 2]


# --- state --------------------------------------------------------------------------------------------------------


def test_results_are_paired_with_the_state_that_they_replace():
    trace = traced(adam(mlp_loss), adam_state(mlp_params(1)), mlp_batch())
    assert state_pairs(trace) == {
        f"0.{path}": f"a.{path}"
        for path in [f"{tree}.0.{name}" for tree in ("params", "mu", "nu") for name in ("b", "w")] + ["count"]
    }


class Result(NamedTuple):
    loss: jax.Array
    state: Adam


def deep(state, batch):
    new, loss = adam(mlp_loss)(state, batch)
    return {"history": [loss], "result": Result(loss, new)}


def two_trees(params, batch, average):
    new, loss = mlp_step(params, batch)
    return new, jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, new), loss


def one_array(w, batch):
    return mlp_loss([{"w": w, "b": jnp.zeros(4)}], batch), w * 0.9


def other_dtype(params, batch):
    return jax.tree.map(lambda p: p.astype(jnp.bfloat16), mlp_step(params, batch)[0])


def a_leaf_less(state, batch):
    return {"params": mlp_step(state["params"], batch)[0]}


def in_another_order(params, batch, rest):
    new, _ = mlp_step(params, batch)
    return {"m": new, "key": jax.random.split(rest["key"])[0]}, new


def batch_back(params, batch):
    return mlp_step(params, batch)[0], batch


PARAMS = mlp_params(1)
STATE = {
    "deep in the result": (deep, (adam_state(PARAMS), mlp_batch()), {"result.state": "a"}, 7),
    "two trees alike": (two_trees, (PARAMS, mlp_batch(), PARAMS), {"0": "a", "1": "c"}, 4),
    "one array": (one_array, (PARAMS[0]["w"], mlp_batch()), {"1": "a"}, 1),
    "another dtype": (other_dtype, (PARAMS, mlp_batch()), {}, 0),
    "a leaf less": (
        a_leaf_less,
        ({"params": PARAMS, "count": jnp.int32(0)}, mlp_batch()),
        {"params": "a.params"},
        2,
    ),
    "in another order": (
        in_another_order,
        (PARAMS, mlp_batch(), {"m": PARAMS, "key": jax.random.key(0)}),
        {"0": "c", "1": "a"},
        5,
    ),
    "gradients": (jax.grad(mlp_loss), (PARAMS, mlp_batch()), {"": "a."}, 2),
    "the batch": (batch_back, (PARAMS, mlp_batch()), {"0": "a"}, 2),
}


@pytest.mark.parametrize(("step", "args", "prefixes", "count"), STATE.values(), ids=STATE)
def test_state_is_found_where_every_leaf_stands_under_the_same_path(step, args, prefixes, count):
    pairs = state_pairs(traced(step, *args))
    assert len(pairs) == count
    for result, argument in pairs.items():
        prefix = next(p for p in prefixes if result.startswith(p))
        assert argument == prefixes[prefix] + result.removeprefix(prefix)


# --- fingerprints -------------------------------------------------------------------------------------------------


def with_callback(params, batch):
    new, loss = mlp_step(params, batch)
    jax.debug.callback(lambda value: None, loss)
    return new, loss


@pytest.mark.parametrize("step", [mlp_step, with_callback])
def test_equal_programs_have_equal_fingerprints(step):
    one, two = (traced(lambda p, b: step(p, b), mlp_params(), mlp_batch(), donated=d) for d in ((), (0,)))
    assert one.fingerprint == two.fingerprint and len(one.fingerprint) == 16


OTHERS = {
    "another rate": (sgd(mlp_loss, 0.2), mlp_params(), mlp_batch()),
    "another batch size": (mlp_step, mlp_params(), mlp_batch(4)),
    "another layer": (mlp_step, mlp_params(3), mlp_batch()),
    "other names of inputs": (lambda p, b: mlp_step(list(p.values()), b), dict(zip("xy", mlp_params())), mlp_batch()),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_other_programs_have_other_fingerprints(other):
    assert traced(*other).fingerprint != traced(mlp_step, mlp_params(), mlp_batch()).fingerprint
