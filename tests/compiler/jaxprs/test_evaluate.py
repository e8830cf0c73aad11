"""A program that is evaluated under a trace, equation by equation, is written down again as it was."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.xla_metadata import set_xla_metadata

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.content import content_digest
from autopar.compiler.jaxprs.evaluate import bind_bodies, evaluate_jaxpr, rewrite
from autopar.compiler.jaxprs.primitives import NESTED

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)


def layers(x):
    with jax.named_scope("outer"):
        y = jnp.tanh(x @ jnp.ones((8, 8), x.dtype)) * 2.0
        with jax.named_scope("inner"):
            y = y.reshape(2, 16)[:, 3:7].astype(jnp.bfloat16) + jnp.arange(4)
    return y.sum(), y + np.arange(8, dtype=np.float32).reshape(2, 4)


def steps(x):
    def body(carry, row):
        return jnp.where(row > 0, carry * row, carry), row.sum()

    return jax.lax.scan(jax.checkpoint(body), jnp.ones(8), x)


def draws(x):
    return x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)


def rewritten(closed):
    return rewrite(closed, lambda _, eqn, values: jc.bind_equation(eqn, values))


@pytest.mark.parametrize("function", [layers, jax.grad(lambda x: layers(x)[0]), steps, jax.vmap(jnp.sort), draws])
def test_programs_are_the_same_after_they_were_evaluated(function):
    closed = rewritten(jax.make_jaxpr(function)(X))
    assert str(rewritten(closed)) == str(closed)
    assert content_digest(rewritten(closed)) == content_digest(closed)


@pytest.mark.parametrize("around", [contextlib.nullcontext(), jax.threefry_partitionable(False)])
def test_equations_keep_the_context_that_they_were_traced_in(around):
    def step(x):
        with set_xla_metadata(kept="here"):
            y = jnp.sin(x)
        return jnp.cos(y)

    closed = jax.make_jaxpr(step)(X)
    with around:
        sine, cosine = rewritten(closed).jaxpr.eqns
    assert [eqn.ctx for eqn in (sine, cosine)] == [eqn.ctx for eqn in closed.jaxpr.eqns]
    assert dict(sine.ctx.xla_metadata) == {"kept": "here"}
    assert not cosine.ctx.xla_metadata


def test_equations_stand_within_the_scopes_around_them():
    closed = jax.make_jaxpr(layers)(X)

    def again(x):
        with jax.named_scope("around"):
            return evaluate_jaxpr(closed.jaxpr, closed.consts, [x])

    before, after = closed.jaxpr.eqns, jc.trace(again, [X]).jaxpr.eqns
    assert [jc.scope_of(eqn) for eqn in after] == [f"around/{jc.scope_of(eqn)}".rstrip("/") for eqn in before]
    assert [jc.source_line(eqn) for eqn in after] == [jc.source_line(eqn) for eqn in before]


def test_what_is_evaluated_without_a_trace_has_values():
    closed = jax.make_jaxpr(layers)(X)
    x = jnp.linspace(-1, 1, 32).reshape(X.shape)
    for got, expected in zip(evaluate_jaxpr(closed.jaxpr, closed.consts, [x]), layers(x), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


def loop(x):
    return jax.lax.scan(lambda c, row: (c + row, c * row), jnp.zeros(8), x)


def until(x):
    return jax.lax.while_loop(lambda c: c[1].sum() < 20.0, lambda c: (c[0] + 1, c[1] + x), (0, x))


def either(x):
    return jax.lax.cond(x.sum() > 0, jnp.sin, lambda v: v * 2.0, x)


@pytest.mark.parametrize("function", [loop, until, either, jax.grad(lambda x: jax.checkpoint(jnp.sin)(x).sum())])
def test_bodies_may_read_what_stands_around_their_equation(function):
    """Every body adds nothing: a value from outside, that is zero, so that the results stay as they were."""
    closed = jax.make_jaxpr(function)(jnp.ones((4, 8)))
    jaxpr, consts = jc.open_jaxpr(closed)

    def rerun(x, zero):
        def equation(_, eqn, values):
            if eqn.primitive.name not in NESTED:
                return jc.bind_equation(eqn, values)
            bodies = [jc.open_jaxpr(body) for body in jp.bodies_of(eqn)]

            def run(number, inputs):
                found = evaluate_jaxpr(*bodies[number], inputs)
                return [v if v.dtype == bool else v + zero.astype(v.dtype) for v in found]

            return bind_bodies(eqn, values, run)

        return evaluate_jaxpr(jaxpr, consts, [x], equation)

    x = jnp.linspace(0.1, 1.0, 32).reshape(4, 8)
    for mine, theirs in zip(rerun(x, jnp.float32(0)), jax.tree.leaves(function(x)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    other = rerun(x, jnp.float32(1))
    assert any(not np.allclose(mine, theirs) for mine, theirs in zip(other, jax.tree.leaves(function(x)), strict=True))


@pytest.mark.parametrize(("sign", "expected"), [(1.0, lambda x: jnp.sin(x) + 3.0), (-1.0, lambda x: x * 2.0 + 5.0)])
def test_each_branch_reads_its_own_values_from_around(sign, expected):
    jaxpr, consts = jc.open_jaxpr(jax.make_jaxpr(either)(jnp.ones((4, 8))))

    def rerun(x, *added):
        def equation(_, eqn, values):
            if eqn.primitive.name != "cond":
                return jc.bind_equation(eqn, values)
            bodies = [jc.open_jaxpr(body) for body in jp.bodies_of(eqn)]
            return bind_bodies(eqn, values, lambda n, inputs: [evaluate_jaxpr(*bodies[n], inputs)[0] + added[n]])

        return evaluate_jaxpr(jaxpr, consts, [x], equation)[0]

    x = sign * jnp.linspace(0.1, 1.0, 32).reshape(4, 8)
    np.testing.assert_allclose(rerun(x, jnp.float32(5), jnp.float32(3)), expected(x), rtol=1e-6)
