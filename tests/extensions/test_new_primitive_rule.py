"""A primitive of one's own: one file gives it a sharding rule and a FLOP count, and it is planned like any other.

    y[b, d] = sum over s of w[s] * x[b, s, d]

A device with some of the rows s makes a summand of y, so that a split of s is completed by one all-reduce.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

import autopar
from autopar.compiler.jaxprs.flops import equation_flops, register_flops
from autopar.compiler.sharding.rule_lookup import rules_without_warning, sharding_rules

weighted_sum_p = Primitive("weighted_sum_of_rows")


def weighted_sum(x: Any, w: Any) -> Any:
    return weighted_sum_p.bind(x, w)


def _in_jax(x: Any, w: Any) -> Any:
    return jnp.einsum("bsd,s->bd", x, w)


weighted_sum_p.def_impl(jax.jit(_in_jax))
weighted_sum_p.def_abstract_eval(lambda x, w: ShapedArray((x.shape[0], x.shape[2]), x.dtype))
mlir.register_lowering(weighted_sum_p, mlir.lower_fun(_in_jax, multiple_results=False))
ad.defbilinear(
    weighted_sum_p,
    lambda cotangent, x, w: jnp.einsum("bd,s->bsd", cotangent, w),
    lambda cotangent, x, w: jnp.einsum("bd,bsd->s", cotangent, x),
)


autopar.register_sharding_rule("weighted_sum_of_rows", "b s d, s -> b d")


@register_flops("weighted_sum_of_rows")
def weighted_sum_flops(eqn: Any) -> float:
    return 2.0 * eqn.invars[0].aval.size


def train_step(params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        hidden = jnp.tanh(x @ params["up"])
        return (weighted_sum(hidden, params["rows"]) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def arguments(rows: int) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    params = {
        "up": jnp.asarray(random.normal(size=(32, 64)), jnp.float32),
        "rows": jnp.asarray(random.normal(size=rows), jnp.float32),
    }
    return params, jnp.asarray(random.normal(size=(16, rows, 32)), jnp.float32)


def test_rule_and_count_are_found():
    closed = jax.make_jaxpr(weighted_sum)(jnp.ones((4, 8, 6)), jnp.ones(8))
    (eqn,) = closed.jaxpr.eqns
    assert str(sharding_rules([eqn])[0]) == "ijk,j->ik sum(j)"
    assert equation_flops(eqn) == 2 * 4 * 8 * 6


@pytest.mark.parametrize(
    "method",
    [
        autopar.Auto(mesh_shape=(8,)),
        autopar.Auto(mesh_shape=(2, 4)),
        autopar.Auto(mesh_shape=(2, 4), num_stages=1, num_microbatches=4),
    ],
    ids=["one axis", "two axes", "microbatches"],
)
def test_step_with_the_primitive_is_searched_simulated_and_run(method):
    params, x = arguments(rows=256)
    step = autopar.parallelize(train_step, method=method, batch_argnums=(1,))
    planned = step.trace(params, x).plan()
    assert planned.simulate().step_time_s > 0
    expected, loss = jax.jit(train_step)(params, x)
    result, value = step(params, x)
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), result, expected)


def test_rows_may_be_split_and_summed():
    params, x = arguments(rows=256)
    pinned = autopar.Auto(mesh_shape=(8,), pins={"rows": jax.sharding.PartitionSpec("data")})
    step = autopar.parallelize(train_step, method=pinned, batch_argnums=(1,))
    expected, loss = jax.jit(train_step)(params, x)
    result, value = step(params, x)
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    np.testing.assert_allclose(result["rows"], expected["rows"], rtol=1e-4, atol=1e-6)


def test_rule_may_be_made_of_the_equation_and_be_registered_late():
    late = Primitive("turned_rows")
    late.def_abstract_eval(lambda x, *, by_rows: ShapedArray(x.shape, x.dtype))
    equations = [jax.make_jaxpr(lambda x, n=n: late.bind(x, by_rows=n))(jnp.ones((4, 8))).jaxpr.eqns[0] for n in (0, 1)]
    assert [rule.source for rule in rules_without_warning(equations)] == ["none", "none"]
    autopar.register_sharding_rule("turned_rows", lambda eqn: "b _ -> b _" if eqn.params["by_rows"] else "_ d -> _ d")
    assert [str(rule) for rule in sharding_rules(equations)] == ["ij->kj blocked(ik)", "ij->ik blocked(jk)"]


WRONG = {
    "rule of another type": ("mine", 3, "A sharding rule is 3; it must be a text"),
    "no arrow": ("mine", "b d", "has 0 arrows"),
    "a primitive of JAX": ("gather", "b, i -> b", "'gather'; it must be the name of a primitive of your own"),
    "a kernel": ("pallas_call", "b -> b", "give the function that calls it to sharding_rule"),
    "no name": (weighted_sum_p, "b -> b", "must be the name of a primitive"),
}


@pytest.mark.parametrize(("primitive", "rule", "expected"), WRONG.values(), ids=WRONG)
def test_wrong_rule_is_refused(primitive, rule, expected):
    with pytest.raises(autopar.InvalidArgument, match=expected):
        autopar.register_sharding_rule(primitive, rule)


def test_rule_that_does_not_fit_an_equation_is_refused_when_it_is_planned():
    flat = Primitive("flat_rows")
    flat.def_abstract_eval(lambda x: ShapedArray(x.shape, x.dtype))
    autopar.register_sharding_rule("flat_rows", "b -> b")
    with pytest.raises(autopar.InvalidArgument, match=r"operand 0 of 'flat_rows' has the shape \(4, 8\)"):
        sharding_rules(jax.make_jaxpr(flat.bind)(jnp.ones((4, 8))).jaxpr.eqns)
