"""A parallel step in bfloat16 is as near to exact numbers as the plain one.

The two differ from each other by as much as each differs from the step in float64, so that is what both are held
against: the gradients, all together, by their distance in shares of their length.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import autopar
from tests.zoo.gpt_linen import BFLOAT16, make_gpt, train_step

pytestmark = pytest.mark.usefixtures("float64")

MODEL = BFLOAT16.clone(num_layers=1)
METHODS = {
    "data parallel": autopar.DataParallel(),
    "searched": autopar.Auto(mesh_shape=(2, 4)),
    "tensor parallel": autopar.TensorParallel(mesh_shape=(2, 4)),
}
# Sums of other parts, each rounded: more than this beside the plain step's own error would be a loss.
MORE_ERROR = 1.15


def gradients(result) -> np.ndarray:
    """All momenta of a step's result, which after the first step are its gradients."""
    state, _ = result
    momenta = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.size > 1]
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in momenta])


@functools.cache
def made():
    return make_gpt(MODEL, optax.sgd(0.1, momentum=0.9))


@functools.cache
def exact() -> np.ndarray:
    """The gradients of the same parameters, everything in float64."""
    _, state, _ = made()
    wide = MODEL.clone(dtype=jnp.float64, param_dtype=jnp.float64)
    _, exact_state, exact_batch = make_gpt(wide, optax.sgd(0.1, momentum=0.9))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), state.params)
    exact_state = TrainState.create(apply_fn=exact_state.apply_fn, params=params, tx=exact_state.tx)
    return gradients(jax.jit(train_step)(exact_state, exact_batch))


def error(found: np.ndarray) -> float:
    return float(np.linalg.norm(found - exact()) / np.linalg.norm(exact()))


@functools.cache
def plain_error() -> float:
    _, state, batch = made()
    return error(gradients(jax.jit(train_step)(state, batch)))


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_step_in_bfloat16_is_as_near_to_exact_numbers_as_the_plain_step(method):
    _, state, batch = made()
    found = error(gradients(autopar.parallelize(train_step, method=method)(state, batch)))
    assert found <= MORE_ERROR * plain_error()


def test_the_plain_step_in_bfloat16_is_away_from_exact_numbers_by_rounding():
    assert 1e-3 < plain_error() < 5e-2
