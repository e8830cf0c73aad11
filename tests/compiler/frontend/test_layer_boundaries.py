"""Marks of `autopar.layer_boundary`: the layers between them, through every way in which a model is written."""

import itertools
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import autopar
from autopar.compiler.passes import cut_step
from autopar.errors import InvalidArgument

WIDTHS = (4, 8, 16, 8, 2)
"""A wide middle: by FLOPs alone, stages would begin elsewhere."""
X = jnp.asarray(np.random.default_rng(0).normal(size=(8, WIDTHS[0])), jnp.float32)
WEIGHTS = [
    jnp.asarray(np.random.default_rng(i).normal(size=s), jnp.float32) for i, s in enumerate(itertools.pairwise(WIDTHS))
]


def block(w, h):
    return jnp.tanh(h @ w)


def plain(weights, x, around=lambda f: f):
    """Four products; the marks stand after the first and after the third."""
    for number, w in enumerate(weights):
        x = around(block)(w, x)
        if number in (0, 2):
            x = autopar.layer_boundary(x)
    return jnp.mean(x**2)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = autopar.layer_boundary(jnp.tanh(linen.Dense(8)(x)))
        x = autopar.layer_boundary(jnp.tanh(linen.Dense(8)(jnp.tanh(linen.Dense(16)(x)))))
        return linen.Dense(2)(x)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(*sizes, rngs=rngs) for sizes in itertools.pairwise(WIDTHS)])

    def __call__(self, x):
        for number, layer in enumerate(self.layers):
            x = jnp.tanh(layer(x))
            x = autopar.layer_boundary(x) if number in (0, 2) else x
        return x


class Equinox(eqx.Module):
    layers: list

    def __call__(self, x):
        for number, layer in enumerate(self.layers):
            x = jnp.tanh(layer(x))
            x = autopar.layer_boundary(x) if number in (0, 2) else x
        return x


def nnx_model():
    graph, params = nnx.split(Nnx(nnx.Rngs(0)))
    return nnx.to_pure_dict(params), lambda params, x: jnp.mean(nnx.merge(graph, nnx_state(params))(x) ** 2)


def nnx_state(params):
    state = nnx.state(nnx.eval_shape(lambda: Nnx(nnx.Rngs(0))))
    nnx.replace_by_pure_dict(state, params)
    return state


def equinox_model():
    keys = jax.random.split(jax.random.key(0), 4)
    model = Equinox([eqx.nn.Linear(*sizes, key=key) for sizes, key in zip(itertools.pairwise(WIDTHS), keys)])
    params, static = eqx.partition(model, eqx.is_array)
    return params, lambda params, x: jnp.mean(jax.vmap(eqx.combine(params, static))(x) ** 2)


def per_example(weights, x):
    return jnp.mean(jax.vmap(partial(plain, weights))(x))


MODELS = {
    "plain": lambda: (WEIGHTS, plain),
    "jit": lambda: (WEIGHTS, jax.jit(plain)),
    "vmap": lambda: (WEIGHTS, per_example),
    "remat of blocks": lambda: (WEIGHTS, partial(plain, around=jax.checkpoint)),
    "remat of all": lambda: (WEIGHTS, jax.checkpoint(plain)),
    "linen": lambda: (Linen().init(jax.random.key(0), X), lambda p, x: jnp.mean(Linen().apply(p, x) ** 2)),
    "nnx": nnx_model,
    "equinox": equinox_model,
}


def train_step_of(loss):
    def train_step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return train_step


@pytest.mark.parametrize("name", MODELS)
def test_stages_begin_at_marks(name):
    params, loss = MODELS[name]()
    method = autopar.PipelineParallel(num_stages=3, num_microbatches=2)
    traced = autopar.parallelize(train_step_of(loss), method=method, devices=jax.devices()[:3]).trace(params, X)
    graph = cut_step(traced.trace, traced.plan().plan)
    stages = {i.name: i.stages[0] for i in graph.inputs if i.name.startswith("params") and len(i.stages)}
    weights = [stages[n] for n in sorted(stages) if "bias" not in n]
    assert weights == [0, 1, 1, 2]


@pytest.mark.parametrize(
    "method",
    [
        autopar.PipelineParallel(num_stages=2, num_microbatches=2),
        autopar.Auto(num_stages=2, num_microbatches=2),
        autopar.Auto(num_stages=2, num_microbatches=2, layers=2),
    ],
)
def test_a_model_with_marks_trains_as_without(method):
    step = train_step_of(plain)
    plan = autopar.parallelize(step, method=method).trace(WEIGHTS, X).plan().plan
    assert plan.num_layers == (method.layers or 3)
    got = autopar.parallelize(step, method=method)(WEIGHTS, X)
    for a, b in zip(jax.tree.leaves(jax.jit(step)(WEIGHTS, X)), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", [autopar.PipelineParallel, autopar.Auto])
def test_more_stages_than_marked_layers_are_refused(method):
    traced = autopar.parallelize(train_step_of(plain)).trace(WEIGHTS, X)
    with pytest.raises(InvalidArgument, match=r"4 stages were asked for, and the model marks 3 layers.*at most 3"):
        traced.plan(method(num_stages=4, num_microbatches=2))
    assert traced.plan(method(num_stages=4, num_microbatches=2, layers=4)).plan.num_stages == 4


def test_a_mark_gives_back_any_tree():
    tree = {"a": jnp.ones(2), "b": [1, None, "text", np.ones(2)]}
    back = autopar.layer_boundary(tree)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert back["b"][2] == "text" and np.array_equal(back["a"], tree["a"])


def test_marks_in_front_and_at_the_end_make_no_layers():
    def loss(weights, x):
        h = block(weights[0], autopar.layer_boundary(x))
        return autopar.layer_boundary(jnp.mean(autopar.layer_boundary(autopar.layer_boundary(h)) @ weights[1]))

    traced = autopar.parallelize(train_step_of(loss)).trace(WEIGHTS[:2], X)
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
    assert traced.plan(method).plan.num_layers == 2


def test_a_scan_over_layers_has_its_iterations_for_layers():
    def loss(weights, x):
        h, _ = jax.lax.scan(lambda h, w: (autopar.layer_boundary(block(w, h)), None), x, weights)
        return jnp.mean(h**2)

    traced = autopar.parallelize(train_step_of(loss)).trace(jnp.ones((4, 4, 4)), X)
    for method in (autopar.PipelineParallel, autopar.Auto):
        plan = traced.plan(method(num_stages=2, num_microbatches=2)).plan
        assert plan.num_stages == 2 and plan.loop_pieces > 1
