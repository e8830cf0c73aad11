"""Common subexpressions: computed once, unless they must be computed again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.cse import merge_common_subexpressions
from autopar.compiler.jaxprs.normalize import normalize
from tests.compiler.equations import real


def noisy(x):
    jax.debug.callback(lambda y: None, x)
    jax.debug.callback(lambda y: None, x)
    return x


@pytest.mark.parametrize(
    ("function", "before", "after"),
    [
        pytest.param(lambda x: jnp.sin(x) * jnp.sin(x), ["sin", "sin", "mul"], ["sin", "mul"], id="the same twice"),
        pytest.param(
            lambda x: jnp.sin(x + 1) * jnp.sin(x + 1),
            ["add", "sin", "add", "sin", "mul"],
            ["add", "sin", "mul"],
            id="what follows from the same",
        ),
        pytest.param(lambda x: jnp.sin(x + 1) * jnp.sin(x + 2), *[["add", "sin", "add", "sin", "mul"]] * 2, id="apart"),
        pytest.param(lambda x: x.sum(0) + x.sum(1), *[["reduce_sum", "reduce_sum", "add"]] * 2, id="other parameters"),
        pytest.param(lambda x: (x + 1) * (x.T + 1), *[["add", "transpose", "add", "mul"]] * 2, id="other operands"),
        pytest.param(noisy, *[["debug_callback", "debug_callback"]] * 2, id="side effects"),
        pytest.param(
            lambda x: jax.checkpoint(jnp.sin)(x) + jax.checkpoint(jnp.sin)(x),
            *[["remat2", "remat2", "add"]] * 2,
            id="remat regions",
        ),
        pytest.param(
            lambda x: sum(lax.top_k(x, 2)[0] for _ in range(2)),
            ["top_k", "add", "top_k", "add"],
            ["top_k", "add", "add"],
            id="several results",
        ),
    ],
)
def test_what_is_computed_twice_is_computed_once(function, before, after):
    x = real(8, 8)
    closed = normalize(jax.make_jaxpr(function)(x))
    merged = merge_common_subexpressions(closed)
    for program, names in ((closed, before), (merged, after)):
        found = [eqn.primitive.name for eqn in jc.open_jaxpr(program)[0].eqns]
        assert [name.replace("checkpoint", "remat2") for name in found] == names
    np.testing.assert_array_equal(jaxpr_as_fun(merged)(x)[0], function(x))


def test_constants_of_the_program_stay():
    table = np.arange(16, dtype=np.float32).reshape(4, 4)
    closed = normalize(jax.make_jaxpr(lambda x: (jnp.sin(x) @ table) + (jnp.sin(x) @ table))(real(4, 4)))
    merged = merge_common_subexpressions(closed)
    assert [eqn.primitive.name for eqn in jc.open_jaxpr(merged)[0].eqns] == ["sin", "dot_general", "add"]
    np.testing.assert_allclose(*(jaxpr_as_fun(program)(real(4, 4))[0] for program in (merged, closed)), rtol=1e-6)


def test_a_program_without_repetition_is_returned_as_it_is():
    closed = normalize(jax.make_jaxpr(lambda x: jnp.sin(x) + 1)(1.0))
    assert merge_common_subexpressions(closed) is closed


def test_values_that_are_kept_for_merging_are_no_leak_of_the_users() -> None:
    with jax.checking_leaks():
        closed = jax.make_jaxpr(lambda x: jnp.sin(x) * jnp.sin(x))(1.0)
        merged = merge_common_subexpressions(closed)
    assert [eqn.primitive.name for eqn in jc.open_jaxpr(merged)[0].eqns] == ["sin", "mul"]
