"""Sums of gradients for which new state is copied."""

import jax
import jax.numpy as jnp

from autopar.compiler.intra_op.state_copies import transposed_gradients
from autopar.compiler.jaxprs import compat as jc
from tests.compiler.equations import real
from tests.compiler.planned_steps import traced


def program(fn, *arguments):
    return jc.open_jaxpr(traced(fn, *arguments))[0]


def test_gradients_that_an_update_transposes_are_found_with_the_state_and_the_arrays_that_they_are_views_of():
    def step(w, momentum, bias, h, d):
        gradient = (d.T @ h).reshape(256, 128).T
        momentum = 0.9 * momentum + gradient
        return w - momentum, momentum, bias - d.sum(0), gradient

    w, rows = real(128, 256), real(32, 256)
    jaxpr = program(step, w, w, real(256), real(32, 128), rows)
    found = transposed_gradients(jaxpr, {0: 0, 1: 1, 2: 2})
    (product,) = (eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general")
    assert found[product] == 2.0  # the weights and their momentum
    assert {v.aval.size for v in found} == {128 * 256}
    assert not transposed_gradients(jaxpr, {})


def test_what_is_transposed_of_small_arrays_or_read_by_no_state_is_not_found():
    jaxpr = program(lambda w, g: (w - g.T, g.T), real(4, 8), real(8, 4))
    assert not transposed_gradients(jaxpr, {0: 0})
    jaxpr = program(lambda w, g: jax.lax.transpose(g, (1, 0)) * jnp.float32(2), real(128, 256), real(256, 128))
    assert not transposed_gradients(jaxpr, {0: 0})
