"""A user's own function with a sharding rule: one equation that computes what the function computes."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

import autopar
from autopar import InvalidArgument
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.normalize import normalize
from autopar.compiler.sharding.rule_lookup import equation_key, sharding_rules


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def product(x, w):
    return jnp.tanh(jnp.sin(x) @ w)


def traced(function, *args: Any) -> list[jc.JaxprEqn]:
    return list(jc.open_jaxpr(normalize(jax.make_jaxpr(function)(*args)))[0].eqns)


@pytest.mark.parametrize(
    ("text", "fn", "args", "expected"),
    [
        ("b s d, d f -> b s f", lambda x, w: x @ w, (f32(2, 4, 8), f32(8, 16)), "ijk,kl->ijl sum(k)"),
        ("b _ d, d f -> b _ f", lambda x, w: x @ w, (f32(2, 4, 8), f32(8, 16)), "ijk,kl->iml sum(k) blocked(jm)"),
        ("b->b f", lambda x: jnp.outer(x, jnp.ones(4)), (f32(2),), "i->ij blocked(j)"),
        ("b, -> b", lambda x, y: x * y, (f32(2), f32()), "i,->i"),
        ("b d -> b, d", lambda x: (x.sum(1), x.sum(0)), (f32(2, 4),), "ij->i,j blocked(ij)"),
        ("b d -> b", lambda x: x.sum(1) > 0, (f32(2, 4),), "ij->i blocked(j)"),
        ("b, b -> b, b", lambda p: {"a": p["a"] * 2, "b": p["b"]}, ({"a": f32(2), "b": f32(2)},), "i,i->i,i"),
        ("one d -> d", lambda x: x[0], (f32(1, 4),), "1i->i"),
    ],
    ids=["summed", "never", "right only", "number", "in some results", "booleans", "pytrees", "size one"],
)
def test_declared_rule_is(text, fn, args, expected):
    (eqn,) = traced(autopar.sharding_rule(fn, text), *args)
    (rule,) = sharding_rules([eqn])
    assert (str(rule), rule.source) == (expected, "user")


def test_function_with_a_rule_computes_what_it_did():
    x, w = jnp.arange(8.0).reshape(2, 4), jnp.ones((4, 3))
    declared = autopar.sharding_rule(product, "b d, d f -> b f")
    np.testing.assert_array_equal(declared(x, w), product(x, w))
    np.testing.assert_allclose(jax.jit(declared)(x, w), product(x, w), rtol=1e-6)


def test_results_keep_their_tree():
    declared = autopar.sharding_rule(lambda p: {"y": (p["x"] + 1, p["x"])}, "b -> b, b")
    result = declared({"x": jnp.ones(2)})
    assert jax.tree.structure(result) == jax.tree.structure({"y": (0, 0)})


@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_gradients_look_inside_of_a_function_with_a_rule(argnums):
    x, w = jnp.arange(8.0).reshape(2, 4), jnp.ones((4, 3))
    declared = autopar.sharding_rule(product, "b d, d f -> b f")
    expected = jax.grad(lambda *args: product(*args).sum(), argnums)(x, w)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
        jax.grad(lambda *args: declared(*args).sum(), argnums)(x, w),
        expected,
    )


def attention(q, kv, places):
    scores = jnp.einsum("bqh,bkh->bqk", q, kv["k"]) + places[:, None]
    return {"mixed": jnp.einsum("bqk,bkh->bqh", jax.nn.softmax(scores), kv["v"]), "places": places + 1}


def attention_loss(function):
    def loss(q, kv, places):
        found = function(q, kv, places)
        return (found["mixed"] ** 2).sum() + found["places"].sum()

    return loss


def test_gradients_of_a_kernel_have_a_rule_where_that_is_asked_for():
    declared = autopar.sharding_rule(attention, "b _ _, b _ _, b _ _, b _ -> b _ _, b _", gradients=True)
    drawn = np.random.default_rng(0).normal(size=(3, 4, 5, 8)).astype("float32")
    operands = (drawn[0], {"k": drawn[1], "v": drawn[2]}, np.arange(20).reshape(4, 5))
    gradients = [jax.grad(attention_loss(each), (0, 1)) for each in (declared, attention)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *(each(*operands) for each in gradients))
    forward, backward = (e for e in traced(gradients[0], *operands) if e.primitive.name == "declared_rule")
    assert [str(rule) for rule in sharding_rules([forward, backward])] == [
        "ijk,ilm,ino,ip->iqr,is blocked(jklmnopqrs)",
        "ijk,ilm,ino,ip,iqr->ist,iuv,iwx blocked(jklmnopqrstuvwx)",
    ]


def test_gradients_with_a_rule_are_equal_equations_in_every_layer():
    declared = autopar.sharding_rule(jnp.sin, "b -> b", gradients=True)
    equations = traced(jax.grad(lambda x: declared(declared(x)).sum()), f32(8))
    keys = {equation_key(eqn) for eqn in equations if eqn.primitive.name == "declared_rule"}
    assert len(keys) == 2


def test_gradients_pass_integers_by():
    declared = autopar.sharding_rule(lambda x, i: (x[i], i + 1), "n d, k -> k d, k")
    gradient = jax.grad(lambda x: declared(x, jnp.array([0, 0, 1]))[0].sum())(jnp.ones((2, 2)))
    np.testing.assert_array_equal(gradient, [[2, 2], [1, 1]])


def test_vmap_looks_inside_of_a_function_with_a_rule():
    x, w = jnp.arange(24.0).reshape(3, 2, 4), jnp.ones((4, 3))
    declared = autopar.sharding_rule(product, "b d, d f -> b f")
    batched = jax.vmap(declared, in_axes=(0, None))(x, w)
    np.testing.assert_allclose(batched, jnp.tanh(jnp.sin(x) @ w), rtol=1e-6)


def test_both_functions_of_a_custom_vjp_keep_their_rules():
    forward = autopar.sharding_rule(lambda x, w: x @ w, "b d, d f -> b f")
    backward = autopar.sharding_rule(lambda x, w, g: (g @ w.T, x.T @ g), "b d, d f, b f -> b d, d f")
    product = jax.custom_vjp(forward)
    product.defvjp(lambda x, w: (forward(x, w), (x, w)), lambda kept, g: backward(*kept, g))
    eqns = traced(jax.value_and_grad(lambda x, w: product(x, w).sum(), (0, 1)), f32(8, 4), f32(4, 2))
    rules = [str(sharding_rules([eqn])[0]) for eqn in eqns if eqn.primitive.name == "declared_rule"]
    # Along b one result of the backward function is split and the other one summed, which no rule can say.
    assert rules == ["ij,jk->ik sum(j)", "ij,jk,ik->ij,jk blocked(ik)"]


def test_equation_with_a_rule_runs_on_parts_of_its_operands():
    declared = autopar.sharding_rule(lambda x, w: x @ w, "b d, d f -> b f")
    (eqn,) = traced(declared, f32(8, 4), f32(4, 2))
    x, w = jnp.arange(32.0).reshape(8, 4), jnp.ones((4, 2))
    parts = [jc.bind_equation(eqn, [x[:, part], w[part]])[0] for part in (slice(0, 2), slice(2, 4))]
    np.testing.assert_allclose(sum(parts), x @ w)


def test_calls_alike_are_equal_equations():
    declared = autopar.sharding_rule(product, "b d, d d2 -> b d2")
    first, second = traced(lambda x, w: declared(declared(x, w), w), f32(8, 4), f32(4, 4))
    assert equation_key(first) == equation_key(second)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("b d", r"has 0 arrows; it must have one.*Write one such as"),
        ("b -> d -> b", r"has 2 arrows; it must have one.*Write one such as"),
        ("(b s) d -> b", r"names a dimension '\(b'; names are letters.*Write one such as"),
        ("b b -> b", r"has 'b' twice in one array; its dimensions must have names of their own\. Call one of them `_`"),
    ],
)
def test_rule_that_cannot_be_read_is_refused(text, message):
    with pytest.raises(InvalidArgument, match=message):
        autopar.sharding_rule(product, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("b d -> b d", r"'product' has 2 operands, its sharding rule 'b d -> b d' has 1; they must be as many\. Write"),
        ("b d, d f -> b f, b", r"'product' has 1 results, its sharding rule .* has 2; they must be as many\. Write"),
        (
            "b, d f -> b f",
            r"operand 0 of 'product' has the shape \(2, 4\), .* names 1 dimensions; there must be a name",
        ),
        ("b d, d b -> b b2", r"operand 1 of 'product' has 3 elements along 'b' .*, another array has 2; .* Give them"),
    ],
)
def test_rule_that_does_not_fit_the_arrays_is_refused(text, message):
    with pytest.raises(InvalidArgument, match=message):
        autopar.sharding_rule(product, text)(jnp.ones((2, 4)), jnp.ones((4, 3)))


def test_traced_value_that_is_no_argument_is_refused():
    def step(x, y):
        return autopar.sharding_rule(lambda x: x + y, "b -> b")(x)

    with pytest.raises(InvalidArgument, match=r"reads a traced value .* says nothing of it\. Make it an argument"):
        jax.jit(step)(jnp.ones(2), jnp.ones(2))


def test_side_effects_are_refused():
    def shout(x):
        jax.debug.print("{}", x)
        return x

    with pytest.raises(InvalidArgument, match=r"'shout' has .* side effects .* must have none\. Move them out"):
        autopar.sharding_rule(shout, "b -> b")(jnp.ones(2))


def of_rows(kernel, *operands):
    """Run a Pallas kernel on two rows at a time; `interpret` needs no GPU."""
    rows, width = operands[0].shape
    block = pallas.BlockSpec((2, width), lambda i: (i, 0))
    return pallas.pallas_call(
        kernel,
        grid=(rows // 2,),
        in_specs=[block] * len(operands),
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((rows, width), operands[0].dtype),
        interpret=True,
    )(*operands)


def sine(x, y):
    y[...] = jnp.sin(x[...])


def sine_backward(x, g, y):
    y[...] = jnp.cos(x[...]) * g[...]


forward = autopar.sharding_rule(lambda x: of_rows(sine, x), "rows width -> rows width")
backward = autopar.sharding_rule(lambda x, g: of_rows(sine_backward, x, g), "rows width, rows width -> rows width")
sine_of_rows = jax.custom_vjp(forward)
sine_of_rows.defvjp(lambda x: (forward(x), x), lambda x, g: (backward(x, g),))


# As a library has it, whose two functions have no rule.
of_library = jax.custom_vjp(lambda x: of_rows(sine, x))
of_library.defvjp(lambda x: (of_rows(sine, x), x), lambda x, g: (of_rows(sine_backward, x, g),))
declared_of_library = autopar.sharding_rule(of_library, "rows width -> rows width", gradients=True)


def kernel_step(params, x, kernel):
    def loss(params):
        return jnp.mean(kernel(kernel(x @ params[0]) @ params[1]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kernel", [sine_of_rows, declared_of_library], ids=["own", "of a library"])
@pytest.mark.parametrize(
    "method",
    [autopar.DataParallel(), autopar.PipelineParallel(num_stages=2, num_microbatches=2)],
    ids=["data", "stages"],
)
def test_pallas_kernel_with_a_rule_is_called_with_parts(method, kernel):
    random = np.random.default_rng(0)
    params = [jnp.asarray(random.normal(size=(8, 8)), jnp.float32) for _ in range(2)]
    x = jnp.asarray(random.normal(size=(32, 8)), jnp.float32)
    plain = partial(kernel_step, kernel=kernel)
    step = autopar.parallelize(plain, method=method, devices=jax.devices()[:4])
    for got, wanted in zip(jax.tree.leaves(step(params, x)), jax.tree.leaves(plain(params, x)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
