"""Normalising a step inlines its calls at every depth, drops dead equations, and changes nothing else."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.normalize import normalize

pytestmark = pytest.mark.usefixtures("float64")

CALLS = {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "eval_jaxpr",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_linear_solve",
    "custom_partitioning",
}


@jax.custom_jvp
def cubed(x):
    return x**3


@cubed.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return cubed(x), 2.5 * x**2 * t  # not the true derivative, so that a lost rule shows


@jax.custom_vjp
def halved(x):
    return x / 2


halved.defvjp(lambda x: (x / 2, x), lambda x, g: (g * jnp.cos(x),))


@jax.jit
def wave(x):
    return jnp.sin(x) * jnp.float64(1.25)


@custom_partitioning
def partitioned(x):
    return jnp.tanh(wave(x))


partitioned.def_partition(
    lambda mesh, operands, result: (mesh, jnp.tanh, result.sharding, (operands[0].sharding,)),
    sharding_rule="i j -> i j",
)


def over_rows(body: Callable[..., Any], x: jax.Array) -> jax.Array:
    h, ys = lax.scan(lambda h, row: (body(h) + row, h * 2), x[0], x)
    return jnp.sum(h) + jnp.sum(ys)


def branch(x: jax.Array) -> jax.Array:
    return lax.cond(jnp.sum(x) > 0, lambda v: over_rows(wave, v), lambda v: jnp.sum(cubed(v)), x)


def loop(x: jax.Array) -> jax.Array:
    return jnp.sum(lax.while_loop(lambda v: jnp.sum(wave(v)) > 9, lambda v: wave(v) - 1, x))


def constant(x: jax.Array) -> jax.Array:
    table = jnp.arange(12.0).reshape(3, 4)
    return jnp.sum(jax.jit(lambda v: v * table)(x))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "jit": lambda x: jnp.sum(wave(wave(x))),
    "jit in a scan": lambda x: over_rows(wave, x),
    "jit in a scan in a branch": branch,
    "jit in a while": loop,
    "captured constant": constant,
    "custom_jvp": lambda x: jnp.sum(cubed(x)),
    "custom_jvp, differentiated": jax.grad(lambda x: jnp.sum(jnp.sin(cubed(x)))),
    "custom_vjp": lambda x: jnp.sum(halved(x)),
    "custom_vjp in a jit, differentiated": jax.grad(lambda x: jnp.sum(jax.jit(halved)(jnp.sin(x)))),
    "custom_jvp in a scan, differentiated": jax.grad(lambda x: over_rows(jax.jit(cubed), x)),
    "jit in a branch, differentiated": jax.grad(branch),
    "custom_partitioning": lambda x: jnp.sum(partitioned(jnp.cos(x))),
    "checkpoint": jax.grad(jax.checkpoint(lambda x: jnp.sum(wave(x)))),
    "checkpoint around a scan": jax.grad(jax.checkpoint(lambda x: over_rows(wave, x))),
    "checkpoint in a scan": jax.grad(lambda x: over_rows(jax.checkpoint(wave), x)),
}


def traced(function: Callable[..., Any]) -> jc.ClosedJaxpr:
    return jax.make_jaxpr(function)(X())


def X() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)))


def all_equations(jaxpr: Any) -> Iterator[jc.JaxprEqn]:
    for eqn in jc.open_jaxpr(jaxpr)[0].eqns:
        yield eqn
        for inner in jc.subjaxprs(eqn):
            yield from all_equations(inner)


def primitives(closed: Any) -> list[str]:
    return [eqn.primitive.name for eqn in all_equations(closed)]


over_functions = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


@over_functions
def test_no_call_is_left_at_any_depth(function: Callable[..., Any]) -> None:
    closed = traced(function)
    assert CALLS.intersection(primitives(closed)), "the example calls nothing"
    assert not CALLS.intersection(primitives(normalize(closed)))


@over_functions
def test_the_normalised_function_returns_the_same_values(function: Callable[..., Any]) -> None:
    (result,) = jc.jaxpr_as_fun(normalize(traced(function)))(X())
    np.testing.assert_allclose(result, function(X()), rtol=1e-14)


@over_functions
def test_inputs_and_results_keep_their_types(function: Callable[..., Any]) -> None:
    before = traced(function)
    after = normalize(before)
    assert [str(a) for a in after.in_avals] == [str(a) for a in before.in_avals]
    assert [(a.shape, a.dtype) for a in after.out_avals] == [(a.shape, a.dtype) for a in before.out_avals]


@over_functions
def test_normalising_again_changes_nothing(function: Callable[..., Any]) -> None:
    once = normalize(traced(function))
    assert primitives(normalize(once)) == primitives(once)


def test_collectives_over_a_mapped_axis_become_reductions() -> None:
    def one(row):
        return lax.pmean(row, "rows"), lax.psum((row, 2.0 * row), "rows"), lax.pmax(row, "rows"), lax.pmin(row, "rows")

    def function(x):
        return jax.vmap(one, axis_name="rows")(x)

    closed = normalize(traced(function))
    assert not {"psum", "pmax", "pmin"}.intersection(primitives(closed))
    results = jc.jaxpr_as_fun(closed)(X())
    for result, expected in zip(results, jax.tree.leaves(function(X())), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-14)


def test_a_mean_over_a_mapped_axis_has_a_gradient_without_collectives() -> None:
    def loss(x):
        return jnp.sum(jax.vmap(lambda row: (row - lax.pmean(row, "rows")) ** 3, axis_name="rows")(x))

    closed = traced(jax.grad(loss))
    assert "psum" in primitives(closed)
    assert "psum" not in primitives(normalize(closed))


def test_branches_for_kernels_alone_are_no_choice() -> None:
    def diagonals(x: jax.Array) -> jax.Array:
        return jnp.diag(x) + jax.grad(lambda x: jnp.sum(jnp.diagonal(x) ** 2))(x)[0]

    x = jnp.arange(16.0).reshape(4, 4)
    normal = normalize(jax.make_jaxpr(diagonals)(x))
    assert not {"cond", "platform_index"} & {eqn.primitive.name for eqn in jc.all_equations(normal)}
    np.testing.assert_allclose(jc.jaxpr_as_fun(normal)(x)[0], diagonals(x))
    chosen = jax.make_jaxpr(lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos))(x)
    assert "cond" in {eqn.primitive.name for eqn in jc.all_equations(normalize(chosen))}


def test_a_reshape_in_another_order_becomes_a_transpose_and_a_reshape() -> None:
    def function(x):
        return lax.reshape(x, (2, 6), dimensions=(1, 0))

    x, once = X(), normalize(traced(function))
    assert primitives(traced(function)) == ["reshape"] and primitives(once) == ["transpose", "reshape"]
    np.testing.assert_array_equal(jc.jaxpr_as_fun(once)(x)[0], x.T.reshape(2, 6))


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ((2, 1, 1), ["concatenate"]),
        ((2, 1, 3), ["concatenate", "concatenate"]),
        ((1, 4, 2), ["concatenate", "tile"]),
        ((1, 4, 1), ["tile"]),
        ((3, 1, 3), ["tile"]),
    ],
)
def test_rows_repeated_a_few_times_become_a_concatenation(times: tuple[int, ...], expected: list[str]) -> None:
    def function(x: jax.Array) -> jax.Array:
        return lax.tile(x[:, None], times)

    x, once = X(), normalize(traced(function))
    assert [name for name in primitives(once) if name in ("tile", "concatenate")] == expected
    np.testing.assert_array_equal(jc.jaxpr_as_fun(once)(x)[0], np.tile(np.asarray(x)[:, None], times))


def test_a_linear_solve_becomes_its_solver() -> None:
    def loss(matrix: jax.Array, x: jax.Array) -> jax.Array:
        solved = lax.custom_linear_solve(lambda y: matrix @ y, x, lambda _, y: y / 3.0, lambda _, y: y / 3.0)
        return jnp.sum(jnp.linalg.solve(matrix + jnp.eye(3), solved))

    args = (3.0 * jnp.eye(3), jnp.arange(3.0))
    closed = normalize(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*args))
    assert not CALLS & {eqn.primitive.name for eqn in jc.all_equations(closed)}
    for got, want in zip(jc.jaxpr_as_fun(closed)(*args), jax.grad(loss, argnums=(0, 1))(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12)


def test_a_mapped_loop_ends_when_all_its_examples_have() -> None:
    def halved(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda c: jnp.sum(c) > 1.0, lambda c: 0.5 * c, x)

    x = jnp.arange(24.0).reshape(6, 4)
    closed = normalize(jax.make_jaxpr(jax.vmap(halved))(x))
    (loop,) = (eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "while")
    assert loop.params["cond_jaxpr"].out_avals[0].shape == ()
    np.testing.assert_array_equal(jc.jaxpr_as_fun(closed)(x)[0], jax.vmap(halved)(x))


def test_dead_equations_are_dropped_at_every_depth() -> None:
    def function(x):
        def body(h, row):
            _ = jnp.arctan(h) + jnp.tan(row)
            return h + row, None

        _ = jnp.cosh(x)
        return lax.scan(body, x[0], x)[0]

    assert {"cosh", "atan", "tan"} <= set(primitives(traced(function)))
    assert not {"cosh", "atan", "tan"} & set(primitives(normalize(traced(function))))


def test_what_has_an_effect_is_not_dead(capfd: pytest.CaptureFixture[str]) -> None:
    def function(x):
        jax.jit(lambda v: jax.debug.print("sum {}", v.sum()))(x)
        return lax.scan(lambda h, row: (h + row, jax.debug.print("row")), x[0], x)[0]

    normalised = normalize(traced(function))
    assert normalised.effects == traced(function).effects
    jc.jaxpr_as_fun(normalised)(X())
    jax.effects_barrier()
    printed = capfd.readouterr().out
    assert printed.count("row") == 3 and printed.count("sum") == 1


def test_inlined_equations_keep_scope_phase_and_source_line() -> None:
    @jax.jit
    def inner(x):
        with jax.named_scope("inside"):
            return jnp.sin(x)

    def loss(x):
        with jax.named_scope("model"):
            return jnp.sum(inner(x))

    eqns = {eqn.primitive.name: eqn for eqn in normalize(traced(jax.grad(loss))).jaxpr.eqns}
    assert jc.scope_of(eqns["cos"]) == "jvp(model)/inside"
    assert jc.ad_phase(eqns["cos"]) == "forward" and jc.ad_phase(eqns["mul"]) == "backward"
    assert "test_normalize.py" in jc.source_line(eqns["cos"])


def test_the_forward_of_a_rematerialised_scan_stays_forward() -> None:
    closed = normalize(traced(FUNCTIONS["checkpoint around a scan"]))
    phases = [(eqn.primitive.name, jc.ad_phase(eqn)) for eqn in closed.jaxpr.eqns]
    assert ("remat2", "backward") in phases
    assert not any(name == "scan" and phase != "forward" for name, phase in phases)
