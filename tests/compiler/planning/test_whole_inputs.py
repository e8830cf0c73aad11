"""Inputs that are whole on every device for want of anything better are named once, in one warning for all."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import ReplicatedWarning

ODD = 50_257


def scores_step(state, batch):
    def loss(state):
        return jnp.mean((batch @ state["w"] + jnp.mean(state["bias"])) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, state, jax.grad(loss)(state))


def with_callback(state, batch):
    noted = jax.pure_callback(np.sin, jax.ShapeDtypeStruct((32,), jnp.float32), state["w"][:, 0])
    return scores_step(state, batch), noted


def warned(method, step, rows):
    state = {"w": jnp.ones((32, 16)), "bias": jnp.ones(ODD)}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        autopar.parallelize(step, method=method).trace(state, jnp.ones((rows, 32))).plan()
    return [str(each.message) for each in told if each.category is ReplicatedWarning]


def test_a_batch_that_does_not_divide_is_named_with_its_rows():
    (said,) = warned(autopar.DataParallel(), scores_step, 12)
    assert said.startswith("batch enters whole on every device, as its 12 rows do not divide among 8 devices. Give")
    (said,) = warned(autopar.PipelineParallel(num_stages=2, num_microbatches=2), scores_step, 12)
    assert "its 6 rows of a microbatch do not divide among 4 devices" in said


@pytest.mark.parametrize("method", [autopar.DataParallel(), autopar.Zero(stage=3, mesh_shape=(8,))])
def test_nothing_is_said_of_what_the_method_means_to_be_whole_and_of_what_is_divided(method):
    assert not any("batch" in said for said in warned(method, scores_step, 16))
    assert bool(warned(method, scores_step, 16)) is isinstance(method, autopar.Zero)


@pytest.mark.parametrize(("kinds", "named"), [("data", "batch"), ("tensor", "state.bias")])
def test_nothing_is_said_of_what_the_kinds_leave_whole(kinds, named):
    method = autopar.Auto(kinds=kinds, mesh_shape=(8,), num_microbatches=1)
    (said,) = warned(method, scores_step, 12)
    assert said.startswith(f"{named} ") and ("batch enter" in said) != ("state.bias lie" in said)


def test_large_state_of_odd_sizes_is_named():
    (said,) = warned(autopar.Zero(stage=3, mesh_shape=(8,)), scores_step, 16)
    assert said.startswith("state.bias lie whole") and f"state.bias is [{ODD}]" in said and "8 devices" in said


def test_all_that_is_whole_is_in_one_warning():
    (said,) = warned(autopar.DataParallel(), with_callback, 12)
    assert "In with_callback, 2 things are whole on every device:" in said
    assert "`pure_callback`" in said and "test_whole_inputs.py" in said and "its 12 rows do not divide" in said
