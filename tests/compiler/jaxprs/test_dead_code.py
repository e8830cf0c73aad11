"""Equations that nothing needs are dropped; results and effects stay."""

import jax
import jax.numpy as jnp

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.dead_code import eliminate_dead


def primitives(function):
    closed = eliminate_dead(jax.make_jaxpr(function)(jnp.ones(3)))
    return [eqn.primitive.name for eqn in jc.open_jaxpr(closed)[0].eqns]


def test_a_chain_of_equations_that_ends_nowhere_is_dropped():
    def function(x):
        jnp.cos(jnp.sin(x))
        return jnp.tanh(x)

    assert primitives(function) == ["tanh"]


def test_what_a_needed_equation_reads_stays_in_order():
    def function(x):
        y = jnp.sin(x)
        jnp.exp(y)
        return jnp.cos(y)

    assert primitives(function) == ["sin", "cos"]


def test_side_effects_stay_with_what_they_read():
    def function(x):
        jax.debug.callback(lambda _: None, jnp.sin(x))
        return x

    assert primitives(function) == ["sin", "debug_callback"]


def test_an_equation_of_several_results_stays_for_one_of_them():
    def function(x):
        return jax.lax.top_k(x, 2)[1]

    assert primitives(function) == ["top_k"]
