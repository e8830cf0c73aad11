"""The kinds of dimensions: what numbers examples, features, experts, lengths, in the whole step and in its parts."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.compiler.frontend.dimension_kinds import part_kinds, step_kinds
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.lowering.stage_programs import tasks_of_stages
from autopar.compiler.planning.demands.kinds import graph_kinds

ROWS, LENGTH, WIDTH, HEADS, EXPERTS, CLASSES = 8, 12, 16, 4, 6, 10
DATA, TENSOR, EXPERT, LENGTHS = "data", "tensor", "expert", "sequence"


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def step_of(loss):
    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def transformer(params, tokens):
    """A layer of attention over embedded tokens, with a table of positions."""
    h = params["embedding"][tokens[:, :-1]] + params["positions"]
    query, key, value = jnp.split(h @ params["qkv"], 3, axis=-1)
    query, key, value = (v.reshape(ROWS, LENGTH, HEADS, WIDTH // HEADS) for v in (query, key, value))
    shares = jax.nn.softmax(jnp.einsum("bihd,bjhd->bhij", query, key))
    h += jnp.einsum("bhij,bjhd->bihd", shares, value).reshape(h.shape) @ params["out"]
    return -jnp.take_along_axis(jax.nn.log_softmax(h @ params["head"]), tokens[:, 1:, None], -1).mean()


def experts(params, x):
    shares = jax.nn.softmax(x @ params["router"])
    sent = jnp.einsum("be,bd->ebd", shares, x)
    made = jnp.tanh(jnp.einsum("ebd,edf->ebf", sent, params["up"]))
    return (jnp.einsum("ebf,efd->bd", made, params["down"]) + x).sum()


def depthwise(params, images):
    numbers = ("NHWC", "HWIO", "NHWC")
    h = jax.lax.conv_general_dilated(images, params["own"], (1, 1), "SAME", dimension_numbers=numbers,
                                     feature_group_count=WIDTH)  # fmt: skip
    return (jnp.tanh(h).mean((1, 2)) @ params["head"]).sum()


def scanned(params, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)[0].sum()


MODELS = {
    "transformer": (
        transformer,
        {
            "embedding": array(CLASSES, WIDTH),
            "positions": array(LENGTH, WIDTH),
            "qkv": array(WIDTH, 3 * WIDTH),
            "out": array(WIDTH, WIDTH),
            "head": array(WIDTH, CLASSES),
        },
        array(ROWS, LENGTH + 1, dtype=jnp.int32),
        {
            "params.embedding": (TENSOR, TENSOR),
            "params.positions": (LENGTHS, TENSOR),
            "params.qkv": (TENSOR, TENSOR),
            "params.head": (TENSOR, TENSOR),
            "batch": (DATA, LENGTHS),
        },
    ),
    "experts": (
        experts,
        {
            "router": array(WIDTH, EXPERTS),
            "up": array(EXPERTS, WIDTH, 2 * WIDTH),
            "down": array(EXPERTS, 2 * WIDTH, WIDTH),
        },
        array(ROWS, WIDTH),
        {
            "params.router": (TENSOR, EXPERT),
            "params.up": (EXPERT, TENSOR, TENSOR),
            "params.down": (EXPERT, TENSOR, TENSOR),
            "batch": (DATA, TENSOR),
        },
    ),
    "depthwise": (
        depthwise,
        {"own": array(3, 3, 1, WIDTH), "head": array(WIDTH, CLASSES)},
        array(ROWS, LENGTH, LENGTH + 2, WIDTH),
        {"params.own": (TENSOR, TENSOR, None, TENSOR), "batch": (DATA, LENGTHS, LENGTHS, TENSOR)},
    ),
    "scanned": (
        scanned,
        array(5, WIDTH, WIDTH),
        array(ROWS, WIDTH),
        {"params": (TENSOR, TENSOR, TENSOR), "batch": (DATA, TENSOR)},
    ),
}


def words(value):
    """The kind of every dimension, in order; None for one of size 1."""
    return tuple(next(iter({kind for _, kind in factors}), None) for factors in value)


@pytest.mark.parametrize("model", MODELS)
def test_dimensions_are_of_the_kinds_of_what_they_meet(model):
    loss, params, batch, wanted = MODELS[model]
    trace = autopar.parallelize(step_of(loss)).trace(params, batch).trace
    found = step_kinds(trace.jaxpr, trace.batch_axes)
    kinds = {leaf.name: words(value) for leaf, value in zip(trace.inputs, found.inputs, strict=True)}
    assert {name: kinds[name] for name in wanted} == wanted


def test_what_is_made_inside_has_kinds_as_well():
    loss, params, batch, _ = MODELS["transformer"]
    trace = autopar.parallelize(step_of(loss)).trace(params, batch).trace
    found = step_kinds(trace.jaxpr, trace.batch_axes)
    made = [v for eqn in jc.all_equations(trace.jaxpr) for v in eqn.outvars if v.aval.ndim == 4]
    assert (DATA, TENSOR, LENGTHS, LENGTHS) in {words(value) for v in made for value in found.of(v)}
    assert all(found.of(v) for eqn in trace.jaxpr.jaxpr.eqns for v in eqn.outvars)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_stages_have_the_kinds_of_the_whole_step(num_microbatches):
    def loss(params, x):
        for w in params:
            x = autopar.layer_boundary(jnp.tanh(x @ w))
        return (x**2).sum()

    method = autopar.PipelineParallel(num_stages=2, num_microbatches=num_microbatches)
    params = [array(WIDTH, WIDTH), array(WIDTH, WIDTH)]
    planned = autopar.parallelize(step_of(loss), method=method).trace(params, array(ROWS, WIDTH)).plan()
    graph = autopar.compiler.passes.cut_step(planned.trace, planned.plan)
    named = graph_kinds(graph, planned.trace.batch_axes)
    crossing = {words(named[name]) for name in graph.crossing if len(graph.values[name].shape) == 2}
    assert crossing == {(DATA, TENSOR)}
    for stage in range(2):
        tasks = tasks_of_stages(graph, [stage])
        found = part_kinds([(task.jaxpr, task.inputs, task.outputs) for task in tasks], named)
        for task in tasks:
            read = zip(task.inputs, task.jaxpr.jaxpr.invars, strict=True)
            assert all(found.of(v) == (named[name],) for name, v in read if name in named)
            products = [eqn for eqn in jc.all_equations(task.jaxpr) if eqn.primitive.name == "dot_general"]
            made = {words(value) for eqn in products for value in found.of(eqn.outvars[0])}
            assert made <= {(DATA, TENSOR), (TENSOR, TENSOR)}
