"""No plan takes less than the bounds by work, whichever of unequal machines runs which equation."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.compiler.planning.step_bounds import (
    GroupWork,
    StepBounds,
    Work,
    step_bounds,
    total_work,
    work_of_program,
)
from autopar.hardware.machine import Machine


def bounds_of(devices, fixed_s, divisible_s, repeats):
    groups = tuple(
        GroupWork(num_devices=count, fixed_s=k, divisible_s=w, repeats=repeats)
        for count, k, w in zip(devices, fixed_s, divisible_s, strict=True)
    )
    return StepBounds(
        per_batch=Work(),
        per_chain=Work(),
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
    three, _ = work_of_program(jax.make_jaxpr(layers)(x, x).jaxpr, machine, (), ())
    product, _ = work_of_program(jax.make_jaxpr(jnp.matmul)(x, x).jaxpr, machine, (), ())
    assert three.divisible_s > 6 * product.divisible_s and three.fixed_s > 6 * product.fixed_s
    assert total_work([product] * 6).divisible_s == pytest.approx(6 * product.divisible_s)


def test_casts_of_parameters_and_sums_of_gradients_begin_anew_for_each_microbatch():
    def gradient(rows):
        def task(x, cotangent, w, total):
            w = w.astype(jnp.bfloat16)
            return total + jnp.einsum("ri,rj->ij", x, cotangent), jnp.einsum("rj,ij->ri", cotangent, w) + w[0, 0]

        x, w = jnp.zeros((rows, 256), jnp.bfloat16), jnp.zeros((256, 256))
        jaxpr = jax.make_jaxpr(task)(x, x, w, w).jaxpr
        return work_of_program(jaxpr, Machine.of_kind("h100"), (2,), (3,))

    (few, anew), (many, as_much) = gradient(512), gradient(4096)
    assert anew.divisible_s == as_much.divisible_s and 0 < anew.divisible_s < few.divisible_s
    assert anew.fixed_s == few.fixed_s
    by_rows = [each.divisible_s - anew.divisible_s for each in (few, many)]
    assert by_rows[1] == pytest.approx(8 * by_rows[0], rel=0.3)
    assert many.divisible_s < 8 * few.divisible_s


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


def drawn_step(seed):
    """Return a step of small layers, some of which have no parameters or share them, its arguments and their number."""
    draw = random.Random(seed)
    kinds = [draw.choice(("own", "own", "none", "shared")) for _ in range(draw.choice((4, 5, 6)))]
    names = {i: {"own": f"w{i}", "shared": "w"}.get(kind) for i, kind in enumerate(kinds)}

    def train_step(params, batch):
        def loss_of(params):
            h = batch["x"]
            for i, name in names.items():
                with jax.named_scope(f"h_{i}"):
                    h = jnp.sin(h) if name is None else jnp.tanh(h @ params[name])
            return jnp.mean((h - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = {name: jax.ShapeDtypeStruct((8, 8), jnp.float32) for name in names.values() if name is not None}
    return train_step, (params, dict.fromkeys("xy", jax.ShapeDtypeStruct((16, 8), jnp.float32))), len(kinds)


@pytest.mark.parametrize("seed", [1, 2, 4, 5])
def test_no_stages_of_small_layers_start_less_than_the_bound(seed):
    step, arguments, layers = drawn_step(seed)
    cluster = autopar.Cluster.parse("1x dgx-h100").with_devices(4)
    traced = autopar.parallelize(step, cluster=cluster).trace(*arguments)
    bounds = step_bounds(traced.trace, cluster, batch_statistics="exact", random="full_batch")
    for stages, microbatches in ((2, 1), (4, 1), (4, 2)):
        method = autopar.PipelineParallel(num_stages=stages, num_microbatches=microbatches, layers=layers)
        simulated_s = traced.plan(method).simulate(cluster).step_time_s
        assert 0.4 * simulated_s < bounds.stages_s(microbatches, stages, stages, [1, 2]) <= simulated_s


def step_of_layers(num_layers, *, scanned):
    """Return a step of products whose layers may be one loop: gradients of weights are in that of its backward pass."""

    def train_step(params, batch):
        def loss_of(params):
            h = batch["x"] @ params["first"]
            if scanned:
                h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["rest"])
            else:
                for layer in range(num_layers):
                    h = jnp.tanh(h @ params["rest"][layer])
            return jnp.mean((h - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = {"first": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    params["rest"] = jax.ShapeDtypeStruct((num_layers, 64, 64), jnp.float32)
    return train_step, (params, dict.fromkeys("xy", jax.ShapeDtypeStruct((16, 64), jnp.float32)))


@pytest.mark.parametrize("scanned", [False, True])
def test_stages_do_not_wait_for_gradients_of_weights(scanned):
    step, arguments = step_of_layers(3, scanned=scanned)
    slow = dict.fromkeys(Machine.named("dgx-h100").peak_flops, 1e6)
    machine = dataclasses.replace(
        Machine.named("dgx-h100"), name="slow", peak_flops=slow, matmul_half_flops=0.0, dispatch_s=0.0, sources={}
    )
    cluster = autopar.Cluster(num_devices=2, machine=machine)
    traced = autopar.parallelize(step, cluster=cluster).trace(*arguments)
    options = {"batch_statistics": "exact", "random": "full_batch"}
    whole, split = (
        step_bounds(traced.trace, cluster, splits_weight_gradients=splits, **options) for splits in (False, True)
    )
    assert split.per_chain.divisible_s < 0.85 * whole.per_chain.divisible_s
    assert whole.per_chain == whole.per_batch == split.per_batch
    for microbatches in (1, 2):
        of = {"num_stages": 2, "num_microbatches": microbatches}
        for bounds, schedule in ((whole, "1f1b"), (split, "zero-bubble")):
            method = autopar.PipelineParallel(schedule=schedule, **of)
            simulated_s = traced.plan(method).simulate(cluster).step_time_s
            assert 0.4 * simulated_s < bounds.stages_s(microbatches, 2, 2, [1]) <= simulated_s
