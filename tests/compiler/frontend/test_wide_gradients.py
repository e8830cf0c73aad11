"""With `reduce_dtype` gradients that are made in few bits are summed in more, over devices and microbatches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.compiler.frontend.wide_gradients import with_wide_gradients
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.primitives import WIDENING
from autopar.errors import InvalidArgument
from autopar.hardware.machine import Link, Machine
from autopar.reports.plan_difference import plan_difference
from tests.small_steps import draw

WIDTH, TOKENS, LENGTH, ROWS = 32, 64, 16, 256
BF16 = jnp.bfloat16
LINK = Link(latency_s=1e-7, bandwidth=1e10, ramp_bytes=0.0)
# Slow enough that every device has its part of the work, small as that is.
MACHINE = dataclasses.replace(Machine.named("dgx-h100"), intra=LINK, memory_bandwidth=1e10)
EIGHT = autopar.Cluster(num_devices=8, machine=MACHINE)
METHODS = {
    "data parallel": functools.partial(autopar.DataParallel),
    "microbatches": functools.partial(autopar.DataParallel, num_microbatches=4),
    "zero": functools.partial(autopar.Megatron, data=8, zero=2),
    "tensor parallel": functools.partial(autopar.Megatron, data=4, tensor=2),
    "stages": functools.partial(autopar.PipelineParallel, num_stages=2, num_microbatches=2, layers=2),
    "stages with weight gradients apart": functools.partial(
        autopar.PipelineParallel, num_stages=2, num_microbatches=2, layers=2, schedule="zero-bubble"
    ),
}


def layer(x, p):
    return jnp.tanh(x @ p["w"] + p["b"]), None


def chain(x, layers):
    for number in range(2):
        x, _ = layer(x, jax.tree.map(lambda a, n=number: a[n], layers))
    return x


def scanned(x, layers):
    return jax.lax.scan(layer, x, layers)[0]


def computed_again(x, layers):
    return jax.lax.scan(jax.checkpoint(layer), x, layers)[0]


def experts(x, layers):
    """Every example goes through the layer that it belongs to."""
    mine = jax.nn.one_hot(jnp.arange(len(x)) % 2, 2, dtype=x.dtype)
    return jnp.einsum("bn,bnlk->blk", mine, jnp.tanh(jnp.einsum("bld,ndk->bnlk", x, layers["w"])))


BODIES = {"layers": chain, "scan": scanned, "scan of checkpoints": computed_again, "experts": experts}


def momentum_step(body=chain, dtype=BF16):
    """A language model with its table used twice, computed in `dtype`; SGD with momentum in float32."""

    def loss(params, tokens):
        params = jax.tree.map(lambda p: p.astype(dtype), params)
        x = body(params["table"][tokens], params["layers"])
        logits = (x @ params["table"].T).astype(jnp.float32)
        return -jnp.mean(jax.nn.log_softmax(logits)[..., 0])

    def step(state, tokens):
        value, grads = jax.value_and_grad(loss)(state[0], tokens)
        mu = jax.tree.map(lambda m, g: 0.9 * m + g.astype(jnp.float32), state[1], grads)
        return (jax.tree.map(lambda p, m: (p - 0.5 * m).astype(p.dtype), state[0], mu), mu), value

    return step


def arguments(dtype=jnp.float32):
    layers = {"w": draw(1, 2, WIDTH, WIDTH), "b": draw(2, 2, WIDTH)}
    params = jax.tree.map(lambda p: p.astype(dtype), {"table": draw(0, TOKENS, WIDTH), "layers": layers})
    tokens = jax.random.randint(jax.random.key(0), (ROWS, LENGTH), 0, TOKENS)
    return (params, jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)), tokens


def planned(step, method, dtype=jnp.float32, cluster=EIGHT):
    return autopar.parallelize(step, method=method, cluster=cluster).trace(*arguments(dtype)).plan()


def sums(found):
    """Types in which arrays are summed over devices; scalars, as the loss, are none."""
    every = found.plan.planned_collectives
    return [c for c in every if c.kind in ("all-reduce", "reduce-scatter") and c.nbytes > 16]


def of_activations(c):
    """Return whether a sum is one of activations, which have a batch: larger than all parameters here."""
    return c.nbytes >= 2 * ROWS * LENGTH * WIDTH / 16


def types_of_sums(found):
    return {c.dtype for c in sums(found) if not of_activations(c)}


@pytest.mark.parametrize("name", METHODS)
def test_gradients_are_summed_in_the_type_that_is_asked_for_and_the_step_equals_plain_jit(name):
    found = planned(momentum_step(), METHODS[name](reduce_dtype="float32"))
    assert types_of_sums(found) == {"float32"}
    report = found.verify(*arguments())
    assert report, str(report)


@pytest.mark.parametrize("name", ["data parallel", "zero", "tensor parallel"])
def test_gradients_are_summed_in_the_type_in_which_they_are_made_by_default(name):
    assert "bfloat16" in types_of_sums(planned(momentum_step(), METHODS[name]()))


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("dtype", [jnp.float32, BF16], ids=["parameters in float32", "parameters in bfloat16"])
def test_loops_over_layers_and_regions_computed_again_sum_what_they_make_so(name, dtype):
    found = planned(momentum_step(BODIES[name]), autopar.DataParallel(reduce_dtype="float32"), dtype)
    assert types_of_sums(found) == {"float32"}
    assert types_of_sums(planned(momentum_step(BODIES[name]), autopar.DataParallel(), dtype)) == {"bfloat16"}
    report = found.verify(*arguments(dtype))
    assert report, str(report)


def test_a_search_sums_as_it_is_asked_to():
    auto = functools.partial(autopar.Auto, num_stages=1, num_microbatches=1, mesh_shape=(8,), memory="off")
    assert types_of_sums(planned(momentum_step(), auto(reduce_dtype=jnp.float32))) == {"float32"}


def test_the_lowered_program_sums_in_the_type_that_is_asked_for():
    def summed(method):
        (executable,) = planned(momentum_step(), method).lower().program.executables.values()
        eqns = [eqn for eqn in jc.all_equations(executable.jaxpr) if eqn.primitive.name in ("psum", "reduce_scatter")]
        return {str(v.aval.dtype) for eqn in eqns for v in eqn.outvars if v.aval.size > 4}

    assert summed(autopar.DataParallel()) == {"bfloat16"}
    assert summed(autopar.DataParallel(reduce_dtype="float32")) == {"float32"}


@pytest.mark.parametrize("name", ["data parallel", "microbatches"])
def test_sums_in_float32_are_nearer_to_exact_numbers(name):
    def gradients(step, dtype):
        (_, mu), _ = step(*arguments(dtype))
        return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(mu)])

    def error(reduce_dtype):
        method = METHODS[name](reduce_dtype=reduce_dtype)
        return np.linalg.norm(gradients(autopar.parallelize(momentum_step(), method=method), BF16) - exact)

    exact = gradients(jax.jit(momentum_step(dtype=jnp.float32)), BF16)
    assert error("float32") < error(None)


def test_microbatches_of_parameters_in_few_bits_are_summed_in_more():
    found = planned(momentum_step(), METHODS["microbatches"](reduce_dtype="float32"), BF16)
    assert types_of_sums(found) == {"float32"}
    report = found.verify(*arguments(BF16))
    assert report, str(report)


def test_a_plan_keeps_the_type_and_is_a_method():
    step = momentum_step()
    found = planned(step, autopar.DataParallel(reduce_dtype="float32"))
    again = autopar.Plan.from_json(found.plan.to_json())
    assert again == found.plan
    assert "summed in float32" in str(again)
    assert types_of_sums(planned(step, again)) == {"float32"}
    plain = planned(step, autopar.DataParallel()).plan
    assert "reduce_dtype" not in plain.to_json()
    assert plain.fingerprint == again.fingerprint
    (change,) = [each for each in plan_difference(plain, again).changes if each.subject == "gradients summed in"]
    assert (change.before, change.after) == ("their own type", "float32")


def test_a_step_in_float32_stays_as_it_is():
    closed = jax.make_jaxpr(momentum_step(dtype=jnp.float32))(*arguments())
    assert with_wide_gradients(closed, "float32") is closed


def test_what_the_step_reads_in_few_bits_is_rounded_after_the_sum():
    def step(w, x):
        return jax.grad(lambda w: jnp.sum(x.astype(BF16) @ w))(w)

    closed = jax.make_jaxpr(step)(jnp.ones((8, 8), BF16), jnp.ones((16, 8)))
    wide = with_wide_gradients(closed, "float32")
    assert [eqn.primitive.name for eqn in jc.all_equations(wide)].count(WIDENING) == 1
    assert wide.out_avals == closed.out_avals
    assert wide.jaxpr.eqns[-1].primitive.name == "convert_element_type"


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        ("int32", "no type of floating numbers"),
        ("float", "float64"),
        ("speed", "no type of floating numbers"),
        (4, "no type of floating numbers"),
        ("bfloat16", "of 16 bits: a sum needs at least the 32"),
        (jnp.float16, "autopar.compress_gradients"),
    ],
)
def test_a_type_in_which_nothing_can_be_summed_is_refused(dtype, words):
    if words == "float64":
        assert autopar.DataParallel(reduce_dtype=dtype).reduce_dtype == words
        return
    with pytest.raises(InvalidArgument, match=words):
        autopar.DataParallel(reduce_dtype=dtype)
