"""No plan takes less than the bounds by work, whichever of unequal machines runs which equation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.compiler.planning.step_bounds import GroupWork, StepBounds, Work, total_work, work_of_program
from autopar.hardware.machine import Machine


def bounds_of(devices, fixed_s, divisible_s, repeats):
    groups = tuple(
        GroupWork(num_devices=count, fixed_s=k, divisible_s=w, repeats=repeats)
        for count, k, w in zip(devices, fixed_s, divisible_s, strict=True)
    )
    return StepBounds(
        per_batch=Work(),
        per_step=Work(),
        of_groups=groups,
        state_bytes=0,
        whole_bytes=0,
        recomputes=False,
        num_devices=sum(devices),
        num_hosts=1,
        dispatch_s=0,
    )


@pytest.mark.parametrize("seed", range(20))
def test_no_division_of_equations_among_machines_takes_less(seed):
    draw = np.random.default_rng(seed)
    devices, equations, microbatches = draw.integers(1, 9, size=3), 12, int(draw.integers(1, 9))
    fixed_s, divisible_s = draw.uniform(0, 0.1, (3, equations)), draw.uniform(0.1, 4, (3, equations))
    repeats = draw.random(equations) < 0.7
    bound_s = bounds_of(devices, fixed_s, divisible_s, repeats).divided_s(microbatches)
    each_s = np.where(repeats, microbatches, 1) * fixed_s + divisible_s
    for _ in range(500):
        parts = draw.dirichlet(np.full(3, 0.3), size=equations).T
        assert bound_s <= ((parts * each_s).sum(axis=1) / devices).max() * (1 + 1e-12)


def test_equal_equations_are_as_much_work_wherever_they_stand():
    def layers(x, w):
        for _ in range(3):
            x = jax.checkpoint(lambda x: jnp.tanh(x @ w) @ w)(x)
        return x

    x = jnp.zeros((64, 64))
    machine = Machine.of_kind("h100")
    three = work_of_program(jax.make_jaxpr(layers)(x, x).jaxpr, machine)
    product = work_of_program(jax.make_jaxpr(jnp.matmul)(x, x).jaxpr, machine)
    assert three.divisible_s > 6 * product.divisible_s and three.fixed_s > 6 * product.fixed_s
    assert total_work([product] * 6).divisible_s == pytest.approx(6 * product.divisible_s)


def test_machines_that_differ_by_a_factor_end_together():
    work = np.array([3.0, 1.0, 2.0])
    none, repeats = np.zeros(3), np.ones(3, bool)
    bounds = bounds_of((8, 24), (none, none), (work, 2.5 * work), repeats)
    assert bounds.divided_s(4) == pytest.approx(work.sum() / (8 + 24 / 2.5))
    assert bounds.lanes_s(4) == pytest.approx(bounds.divided_s(4))


@pytest.mark.parametrize("seed", range(20))
def test_no_pipelines_side_by_side_take_less_wherever_the_state_is_updated(seed):
    draw = np.random.default_rng(seed)
    devices, equations, microbatches = draw.integers(1, 9, size=3), 12, int(draw.integers(1, 17))
    fixed_s, divisible_s = draw.uniform(0, 0.1, (3, equations)), draw.uniform(0.1, 4, (3, equations))
    repeats = draw.random(equations) < 0.7
    repeats[0] = True
    bound_s = bounds_of(devices, fixed_s, divisible_s, repeats).lanes_s(microbatches)
    each_s = (fixed_s + divisible_s / microbatches)[:, repeats].sum(axis=1)
    update_s = (fixed_s + divisible_s)[:, ~repeats].sum(axis=1)
    for _ in range(500):
        shares, first = draw.multinomial(microbatches, draw.dirichlet(np.ones(3))), draw.integers(3)
        busy_s = shares * each_s + np.where(np.arange(3) == first, update_s, 0)  # no device of a machine ever waits
        assert bound_s <= (busy_s / devices).max() * (1 + 1e-12)
