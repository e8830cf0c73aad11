"""Primitives of other packages are replaced by what they are made of, where that is code that can be traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse
from jax.interpreters import mlir

import autopar
from autopar.compiler.frontend.implementations import normalize_step
from autopar.compiler.jaxprs import compat as jc


def own_primitive(
    name: str, implementation: Callable[..., Any], *, platform: str | None = None, several: bool = False
) -> jc.Primitive:
    """A primitive as other packages make them: an implementation, a type, and the implementation as its lowering."""
    primitive = jc.Primitive(name)
    primitive.multiple_results = several
    primitive.def_impl(implementation)
    primitive.def_abstract_eval(
        lambda *operands, **_: (
            [jax.core.ShapedArray(operands[0].shape, operands[0].dtype)] * 2
            if several
            else jax.core.ShapedArray(operands[0].shape, operands[0].dtype)
        )
    )
    mlir.register_lowering(primitive, mlir.lower_fun(implementation, multiple_results=several), platform=platform)
    return primitive


def normalized(fun: Callable[..., Any], *args: Any) -> jc.ClosedJaxpr:
    return normalize_step(jax.make_jaxpr(fun)(*args))


def primitives_of(closed: jc.ClosedJaxpr) -> list[str]:
    return [eqn.primitive.name for eqn in jc.all_equations(closed)]


X = jnp.linspace(-1.0, 1.0, 64, dtype=jnp.float32).reshape(16, 4)


def test_an_implementation_stands_for_its_primitive_at_every_depth() -> None:
    twice = own_primitive("implemented_twice", lambda x, *, factor: x * factor)
    squared = own_primitive("implemented_square", lambda x: jnp.square(twice.bind(x, factor=3.0)))

    def fun(x: jax.Array) -> jax.Array:
        with jax.named_scope("outer"):
            return jax.lax.scan(lambda c, _: (jnp.tanh(squared.bind(c)), None), squared.bind(x), None, length=2)[0]

    closed = normalized(fun, X)
    assert not {"implemented_twice", "implemented_square"} & {*primitives_of(closed)}
    assert jc.scope_of(closed.jaxpr.eqns[0]) == "outer"
    np.testing.assert_allclose(jc.jaxpr_as_fun(closed)(X)[0], fun(X), rtol=1e-6)


def test_what_cannot_be_traced_or_has_a_lowering_of_its_own_stays() -> None:
    of_numpy = own_primitive("implemented_in_numpy", lambda x: np.asarray(x) + 1)
    of_platform = own_primitive("implemented_with_a_kernel", lambda x: x + 1, platform="cuda")
    of_other_type = own_primitive("implemented_otherwise", lambda x: x.astype(jnp.float16))
    named = own_primitive("implemented_with_a_rule", lambda x: x + 1)
    autopar.register_sharding_rule("implemented_with_a_rule", "i j -> i j")
    for primitive in (of_numpy, of_platform, of_other_type, named):
        assert primitives_of(normalized(primitive.bind, X)) == [primitive.name]


@pytest.mark.parametrize(
    "method", [autopar.DataParallel(), autopar.PipelineParallel(num_stages=2, num_microbatches=2), autopar.Auto()]
)
def test_a_step_with_a_primitive_that_looks_at_types_equals_the_plain_step(method: autopar.Method) -> None:
    plain = jax.ShapeDtypeStruct((16, 4), jnp.float32)

    def solved(x: jax.Array, *, like: Any) -> tuple[jax.Array, jax.Array]:
        # In a program for several devices a type says more.
        if x.shape == like.shape and jax.eval_shape(lambda: x) != like:
            raise ValueError("the structure does not match")
        return jnp.sin(x), jnp.cos(x)

    primitive = own_primitive("implemented_with_types", solved, several=True)

    @jax.custom_vjp
    def wave(x: jax.Array) -> jax.Array:
        return primitive.bind(x, like=plain)[0]

    wave.defvjp(lambda x: primitive.bind(x, like=plain), lambda slope, g: (slope * g,))

    def step(weights: list[jax.Array], batch: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        def loss(weights: list[jax.Array]) -> jax.Array:
            return jnp.mean((wave(batch @ weights[0]) @ weights[1] - batch) ** 2)

        value, grads = jax.value_and_grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value

    weights = [jnp.eye(4, dtype=jnp.float32), jnp.full((4, 4), 0.1, jnp.float32)]
    want = jax.jit(step)(weights, X)
    got = autopar.parallelize(step, method=method)(weights, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), want, got)


def sparse_step(weights: dict[str, jax.Array], features: sparse.BCOO, target: jax.Array) -> Any:
    """A layer on rows of sparse features, and one whose weights are sparse."""

    def loss(w: dict[str, jax.Array]) -> jax.Array:
        kept = sparse.BCOO((w["kept"], KEPT.indices), shape=KEPT.shape)
        hidden = jax.vmap(lambda row: row @ w["dense"])(features)
        return jnp.mean((jnp.tanh(hidden) @ kept - target) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


FEATURES = sparse.BCOO.fromdense(np.where(np.arange(16 * 6).reshape(16, 6) % 3, 0.0, 1.0).astype(np.float32), n_batch=1)
KEPT = sparse.BCOO.fromdense(np.where(np.arange(32).reshape(8, 4) % 2, 0.0, 0.5).astype(np.float32))


@pytest.mark.filterwarnings("error::autopar.ReplicatedWarning")
@pytest.mark.parametrize(
    "method", [autopar.DataParallel(), autopar.Zero(), autopar.DataParallel(num_microbatches=2)], ids=str
)
def test_sparse_arrays_are_divided_by_the_examples_of_their_batch(method: autopar.DataParallel | autopar.Zero) -> None:
    args = {"dense": jnp.linspace(-1.0, 1.0, 48).reshape(6, 8), "kept": KEPT.data}, FEATURES, jnp.ones((16, 4))
    step = autopar.parallelize(sparse_step, method=method, devices=jax.devices()[:2])
    trace = step.trace(*args).trace
    assert not [name for name in primitives_of(trace.jaxpr) if name.startswith("bcoo")]
    assert {trace.inputs[i].argument for i in trace.batch_inputs} == {1, 2}
    got, want = step(*args), jax.jit(sparse_step)(*args)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
