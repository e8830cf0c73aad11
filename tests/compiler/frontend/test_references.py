"""Mutable references: those that a step makes itself become values; those of the caller are refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import Unsupported
from tests.small_steps import draw, sgd, two_stages

PARAMS, BATCH = [draw(0, 8, 8), draw(1, 8, 8)], draw(2, 16, 8)
METHODS = {
    "data": autopar.DataParallel(num_microbatches=2),
    "stages": two_stages(num_microbatches=2),
    "search": autopar.Auto(),
}


def loss(params: Any, batch: Any) -> jax.Array:
    hidden = batch
    for weight in params:
        hidden = jnp.tanh(hidden @ weight)
    return jnp.mean(hidden**2)


def written_in_a_loop(params: Any, batch: Any) -> Any:
    norms = jax.new_ref(jnp.zeros(2))
    value, gradients = jax.value_and_grad(loss)(params, batch)
    jax.lax.fori_loop(0, 2, lambda i, _: norms.__setitem__(i, jnp.sum(jnp.stack(gradients)[i] ** 2)), None)
    norms[0] += value
    return [p - 0.1 * g for p, g in zip(params, gradients, strict=True)], norms[...]


def written_in_the_loss(params: Any, batch: Any) -> Any:
    seen = jax.new_ref(jnp.zeros(()))

    def noted(params: Any) -> jax.Array:
        value = loss(params, batch)
        seen[...] += jax.lax.stop_gradient(value)
        return value

    gradients = jax.grad(noted)(params)
    return [p - 0.1 * g for p, g in zip(params, gradients, strict=True)], seen[...]


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("step", [written_in_a_loop, written_in_the_loss])
def test_a_step_may_write_to_references_of_its_own(step, method):
    found = autopar.parallelize(step, method=method)(PARAMS, BATCH)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(jax.jit(step)(PARAMS, BATCH)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_a_reference_of_the_caller_is_refused_with_its_line_or_name():
    total = jax.new_ref(jnp.zeros(()))

    def adds(params: Any, batch: Any, ref: Any = total) -> Any:
        params, value = sgd(loss)(params, batch)
        ref[...] += value
        return params

    step = autopar.parallelize(adds, method=autopar.DataParallel())
    with pytest.raises(Unsupported, match=r"test_references\.py:\d+.*uses a jax\.Ref that was made outside.*new_ref"):
        step(PARAMS, BATCH)
    with pytest.raises(Unsupported, match=r"^ref is a jax\.Ref.*Pass its value, ref\[\.\.\.\], return the new one"):
        step(PARAMS, BATCH, total)
