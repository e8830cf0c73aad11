"""Regions that are computed again wait for the sums of gradients that began before the last few."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import Cluster, Zero
from autopar.compiler.lowering.sharded_step import sharded_step
from autopar.compiler.spmd import local_program
from autopar.compiler.spmd.local_program import RunBody, action_values
from autopar.hardware.machine import Machine

LAYERS, WIDTH = 6, 64


def step(parameters, batch):
    @jax.checkpoint
    def layer(x, w):
        return jnp.tanh(x @ w)

    def loss(parameters):
        x = batch
        for w in parameters:
            x = layer(x, w)
        return (x**2).mean()

    value, gradients = jax.value_and_grad(loss)(parameters)
    return [w - 0.1 * g for w, g in zip(parameters, gradients, strict=True)], value


def arguments():
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    return [jax.random.normal(key, (WIDTH, WIDTH)) / 8 for key in keys[1:]], jax.random.normal(keys[0], (32, WIDTH))


def planned(machine: Machine):
    parallel = autopar.parallelize(step, method=Zero(stage=3), cluster=Cluster(num_devices=8, machine=machine))
    traced = parallel.trace(*arguments())
    return traced, traced.plan()


def ending_late() -> Machine:
    return replace(Machine.named("cpu"), schedules_for_latency=False)


@pytest.fixture
def one_sum_at_once(monkeypatch):
    monkeypatch.setattr(local_program, "_SUMMED_AT_ONCE_BYTES", 4.0 * WIDTH * WIDTH)


def actions_of(traced, planned):
    return sharded_step(traced.trace, planned.plan).block.actions


def test_a_region_waits_for_all_sums_but_the_last_two(one_sum_at_once):
    actions = actions_of(*planned(ending_late()))
    made = {v: number for number, action in enumerate(actions) for v in action_values(action)[0]}
    regions = {number: action for number, action in enumerate(actions) if isinstance(action, RunBody)}
    gradients = [action.results[-1].variable for action in regions.values()]
    # Along one axis each gradient is summed in its region, along the other one behind it.
    awaited = [[v.variable for v in action.after] for action in regions.values()]
    assert awaited == [[], [], *([gradient] * 2 for gradient in gradients[:-2])]
    assert all(made[v] < number for number, action in regions.items() for v in action.after)


@pytest.mark.parametrize("machine", [Machine.named("cpu"), Machine.named("tpu-v5p"), ending_late()])
def test_nothing_waits_where_sums_end_early_or_are_small(machine: Machine):
    regions = [action for action in actions_of(*planned(machine)) if isinstance(action, RunBody)]
    assert len(regions) == LAYERS
    assert not any(action.after for action in regions)


@pytest.mark.parametrize("as_users_jit", [False, True])
def test_what_waits_computes_the_same(one_sum_at_once, as_users_jit: bool):
    _, waiting = planned(ending_late())
    assert waiting.plan.sharding is not None
    assert waiting.plan.sharding.layouts["waits_for_sums"]
    found = waiting.shardings(devices=jax.devices()[:8])
    run = (
        jax.jit(found.constrain(step), in_shardings=found.inputs, out_shardings=found.outputs)
        if as_users_jit
        else waiting.lower().compile()
    )
    new, loss = run(*arguments())
    expected, expected_loss = jax.jit(step)(*arguments())
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    for mine, theirs in zip(new, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
