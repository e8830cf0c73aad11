"""Gathers of parameters and sums of gradients share their latency, before a conversion and after it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.compiler.intra_op.plan_program import Constraints
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.resharding.costs import copied_bytes, reshard_steps
from autopar.compiler.resharding.steps import AllToAll
from autopar.compiler.sharding.layout import Layout
from autopar.compiler.spmd.block_times import block_bytes, block_times
from autopar.compiler.spmd.combining import combined_in_body, combined_values
from autopar.compiler.spmd.local_program import local_block
from tests.compiler.equations import real
from tests.compiler.planned_steps import LINE, collectives, mesh_costs, plan_step, traced

ROWS = Layout(((0,), ()))
W, X = real(64, 64), real(512, 64)
SPLIT = Constraints(inputs={0: (ROWS,), 1: (ROWS,)})
SLOW_TO_START = mesh_costs(LINE, latency_s=1e-4)


def loss(w, x, dtype):
    return jnp.sum(jnp.tanh(x.astype(dtype) @ w.astype(dtype)).astype(jnp.float32))


def step(w, x, dtype=jnp.bfloat16):
    return w - 0.1 * jax.grad(loss)(w, x, dtype)


def shares(jaxpr, combined, name, phase, dtype):
    """Return, as a set, whether collectives of values that equations of this name read in a dtype are combined."""
    read = {v for eqn in jaxpr.eqns if eqn.primitive.name == name for v in jc.operands(eqn) if v.aval.dtype == dtype}
    return {combined.share(v, phase) for v in read}


def test_a_parameter_and_its_gradient_are_combined_in_either_precision():
    jaxpr = jc.open_jaxpr(traced(step, W, X))[0]
    combined = combined_values(jaxpr)
    assert combined.share(jaxpr.invars[0], "forward")
    converted = {v.aval.dtype.name: v for eqn in jaxpr.eqns for v in jc.operands(eqn) if v.aval.shape == W.shape}
    assert {name: combined.share(v, "backward") for name, v in converted.items()} == {"bfloat16": True, "float32": True}


def test_activations_are_not_combined():
    jaxpr = jc.open_jaxpr(traced(step, W, X))[0]
    assert shares(jaxpr, combined_values(jaxpr), "tanh", "forward", jnp.bfloat16) == {False}


def test_only_the_inputs_and_results_that_are_named_are_those_of_parameters_and_gradients():
    jaxpr = jc.open_jaxpr(traced(lambda w, x: (2 * w, 2 * x), W, X))[0]
    combined = combined_values(jaxpr, "forward", inputs=[0], results=[1])
    w, x = jaxpr.invars
    assert [combined.share(v, "forward") for v in (w, x)] == [True, False]
    assert [combined.share(v, "forward") for v in jaxpr.outvars] == [True, True]
    assert not combined_values(jaxpr, "forward", inputs=[0], results=[0]).share(jaxpr.outvars[1], "forward")


def test_in_a_loop_what_every_round_reads_is_combined_and_the_carry_is_not():
    jaxpr = jc.open_jaxpr(traced(lambda w, x: lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, 3)[0], W, X))[0]
    (eqn,) = jaxpr.eqns
    body = jc.open_jaxpr(next(jc.subjaxprs(eqn)))[0]
    combined = combined_in_body(body, eqn, combined_values(jaxpr))
    assert [combined.share(v, "body") for v in body.invars] == [True, False]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
def test_a_parameter_is_converted_before_it_is_gathered_and_a_gradient_after_it_is_reduced(dtype):
    closed = traced(lambda w, x: step(w, x, dtype), W, X)
    found = plan_step(closed, LINE, num_state=1, chosen=SLOW_TO_START, constraints=SPLIT)
    moved = [each for each in collectives(closed, found, LINE) if each.collective.nbytes >= 64 * 64 * 2]
    assert {(each.collective.kind, each.dtype) for each in moved} == {
        ("all-gather", jnp.dtype(dtype).name),
        ("reduce-scatter", jnp.dtype(dtype).name),
    }
    assert all(each.combined for each in moved)


def test_a_program_costs_what_the_search_says():
    closed = traced(step, W, X)
    found = plan_step(closed, LINE, num_state=1, chosen=SLOW_TO_START)
    block = local_block(jc.open_jaxpr(closed)[0], found.plan, LINE)
    assert block_times(block, SLOW_TO_START).total_s == pytest.approx(found.optimum.value)


def test_a_device_moves_its_part_of_what_products_read_and_write():
    closed = traced(lambda w, x: x @ w, W, X)
    found = plan_step(closed, LINE, num_state=0, chosen=SLOW_TO_START, constraints=Constraints(inputs={1: (ROWS,)}))
    block = local_block(jc.open_jaxpr(closed)[0], found.plan, LINE)
    assert block_bytes(block, SLOW_TO_START) == 4 * (64 * 64 + 2 * 512 * 64 / LINE.num_devices)


def test_a_resharding_moves_what_it_copies():
    columns = Layout(((), (0,)), ())
    steps = reshard_steps(columns, ROWS, X.shape, LINE)
    nbytes = 512 * 64 * 4 / LINE.num_devices
    assert [type(step) for step in steps] == [AllToAll]
    assert (
        copied_bytes(steps, columns, X.shape, 4, LINE) == 2 * nbytes
    )  # columns are laid together before they are sent
