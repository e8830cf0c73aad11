"""Numbers agree up to rounding, and up to what rounding does to a step that divides by what is zero but for it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.verification import (
    Point,
    arguments_away_from_zero,
    compare_numbers,
    move_of_types,
    rounded_arguments,
    verify_numbers,
)
from tests.compile_counts import compiled_by_xla

NAMES = ("loss", "params")


def results(loss=1.0, params=(1.0, -2.0)):
    return [np.float32(loss), np.asarray(params, np.float32)]


def compared(found, *, expected=None, before=(None, None), rounded=results, points=1):
    """The worst leaf of a step whose results are `found`."""
    point = Point(
        before=before, expected=expected or results(), results=found, rounded=rounded, moved_before=before
    )  # fmt: skip
    return compare_numbers(NAMES, [point] * points, rounding=1e-7)


def test_equal_results_agree():
    check = compared(results())
    assert check
    assert check.difference == 0


def test_the_leaf_that_differs_most_is_named():
    check = compared(results(params=(1.0, -2.1)))
    assert not check
    assert check.leaf == "params"
    assert check.difference == pytest.approx(0.05, rel=1e-3)


def test_a_difference_is_allowed_that_rounding_the_arguments_makes_too():
    check = compared(results(params=(1.0, -2.1)), rounded=lambda: results(params=(1.12, -2.0)))
    assert check
    assert (check.leaf, check.difference) == ("params", pytest.approx(0.1 / 5**0.5, rel=1e-3))
    assert check.tolerance == pytest.approx(2 * 0.12 / 5**0.5, rel=1e-3)


def test_a_difference_beyond_what_rounding_makes_is_none_of_it():
    rounded = lambda: results(params=(1.06, -2.0))  # noqa: E731
    assert not compared(results(params=(1.0, -2.2)), rounded=rounded)
    assert not compared(results(loss=1.1), rounded=rounded)
    assert not compared(results(params=(1.0, np.nan)), rounded=rounded)


def test_what_replaces_an_argument_is_held_to_its_change():
    before = (None, np.asarray((1.001, -2.001), np.float32))
    assert compared(results(), before=before)
    assert not compared(results(params=before[1]), before=before), "the update was dropped"
    assert not compared(results(params=(0.999, -1.999)), before=before), "it was doubled"


def test_a_result_that_lost_digits_is_imprecise():
    check = compared(results(params=(1.0 + 2**-10, -2.0)))
    assert not check
    assert check.difference > 100 * check.tolerance


def test_what_is_imprecise_at_one_point_is_the_kink_of_a_function_and_at_two_another_function():
    good, bad = (
        Point(before=(None, None), expected=results(), results=found, rounded=results, moved_before=(None, None))
        for found in (results(), results(params=(1.0 + 2**-10, -2.0)))
    )
    assert compare_numbers(NAMES, [good, bad, good, good], rounding=1e-7)
    assert not compare_numbers(NAMES, [good, bad, good, bad], rounding=1e-7)
    assert not compare_numbers(NAMES, [bad], rounding=1e-7)


def test_arguments_away_from_zero_keep_signs_and_masks():
    count, zeros, mask, weights = np.arange(3), np.zeros(4, np.float32), np.float32([0, 1, 1]), np.float32([-1, 2])
    same, small, masked, moved = arguments_away_from_zero([count, zeros, mask, weights], times=4.0, seed=1)
    assert same is count
    assert (small > 0).all()
    assert (masked != 0).tolist() == [False, True, True]
    assert np.sign(moved).tolist() == [-1, 1]
    assert (np.abs(moved) > 4 * np.abs(weights)).all()
    assert {leaf.dtype for leaf in (small, masked, moved)} == {np.dtype("float32")}


def test_moments_in_each_others_place_are_seen_though_both_begin_as_zeros():
    def step(state, x):
        params, mu, nu = state
        grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(params)
        mu, nu = 0.9 * mu + 0.1 * grads, 0.99 * nu + 0.01 * grads**2
        return params - 0.01 * mu / (jnp.sqrt(nu) + 1e-3), mu, nu

    state, x = (jnp.ones(8), jnp.zeros(8), jnp.zeros(8)), jax.random.normal(jax.random.key(0), (16, 8))
    lowered = autopar.parallelize(step, method=autopar.DataParallel()).trace(state, x).plan().lower()
    assert lowered.verify(state, x)
    first, mu, nu, *rest = lowered.program.inputs
    swapped = (first, replace(mu, leaf=nu.leaf), replace(nu, leaf=mu.leaf), *rest)
    assert not replace(lowered, program=replace(lowered.program, inputs=swapped)).verify(state, x)


def test_program_that_is_verified_is_compiled_once():
    def step(params, x):
        loss, grads = jax.value_and_grad(lambda ws: jnp.mean(jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]) ** 2))(params)
        return [w - 0.1 * g for w, g in zip(params, grads)], loss

    arguments = [jnp.eye(8)] * 2, jnp.ones((8, 8))
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
    lowered = autopar.parallelize(step, method=method).trace(*arguments).plan().lower()
    programs = len(lowered.program.executables)
    first, second = (compiled_by_xla(lambda: lowered.verify(*arguments)) for _ in range(2))
    assert programs > 4
    assert second == programs + 1, "those of the plan and the plain step"
    assert first < 2 * programs + 1


def test_factor_before_a_tanh_is_seen_though_the_weights_are_small():
    def step(weights, x, scale=1.0):
        # The gate's own argument is below 1e-4, where tanh is a line and 1 + tanh is almost 1.
        return jnp.mean((x * (1 + jnp.tanh(scale * 3e-4 * jnp.tanh(x * weights) ** 3))) ** 2)

    def check(scale):
        names, replaced = ["loss"], {}
        return verify_numbers(
            names,
            lambda leaves: [jax.jit(step)(*leaves)],
            lambda leaves: [jax.jit(step, static_argnums=2)(*leaves, scale)],
            [np.full(8, 0.05, np.float32), np.linspace(0.5, 1.5, 8, dtype=np.float32)],
            replaced=replaced,
            rounding=1e-7,
        )

    assert check(1.0)
    assert not check(2.0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_arguments_move_by_their_rounding_error(dtype):
    whole, numbers = np.arange(6), np.asarray(jnp.linspace(1, 3, 1000, dtype=dtype))
    same, moved = rounded_arguments([whole, numbers])
    assert same is whole
    assert moved.dtype == dtype
    eps = float(jnp.finfo(dtype).eps)
    share = np.asarray(moved, np.float64) / np.asarray(numbers, np.float64) - 1
    assert (np.abs(share) <= 17 * eps).all()
    assert (share > 0).any()
    assert (share < 0).any()


def mixed_step(share=1.0):
    """Adam's first step for parameters in float32, which two layers read in bfloat16; of a `share` of the batch."""
    optimizer = optax.adam(1e-3)

    def loss(params, batch):
        h = batch.astype(jnp.bfloat16)
        for layer in params:
            h = jnp.tanh(h @ layer["w"].astype(jnp.bfloat16) + layer["b"].astype(jnp.bfloat16))
        return jnp.mean(h.astype(jnp.float32) ** 2)

    def step(state, batch):
        gradients = jax.grad(loss)(state[0], batch[: int(share * len(batch))])
        updates, moments = optimizer.update(gradients, state[1])
        return optax.apply_updates(state[0], updates), moments

    params = [{"w": jax.random.normal(jax.random.key(n), (64, 64)) / 8, "b": jnp.zeros(64)} for n in range(2)]
    return step, ((params, optimizer.init(params)), jax.random.normal(jax.random.key(9), (64, 64)))


@pytest.mark.parametrize("reduce_dtype", [None, "float32"])
def test_a_step_in_bfloat16_with_parameters_in_float32_verifies(reduce_dtype):
    step, arguments = mixed_step()
    method = autopar.DataParallel(reduce_dtype=reduce_dtype)
    report = autopar.parallelize(step, method=method).trace(*arguments).plan().verify(*arguments)
    assert report, str(report)


def test_examples_that_a_step_in_bfloat16_leaves_out_are_noticed():
    (step, arguments), (wrong, _) = mixed_step(), mixed_step(share=7 / 8)
    leaves, tree = jax.tree.flatten(arguments)
    avals = [v.aval for eqn in jax.make_jaxpr(step)(*arguments).eqns for v in eqn.outvars]

    def flat(run):
        return lambda leaves: jax.tree.leaves(jax.jit(run)(*jax.tree.unflatten(tree, leaves)))

    names = [str(n) for n in range(len(leaves) - 1)]
    replaced = {n: n for n in range(len(names))}
    for found, same in ((step, True), (wrong, False)):
        check = verify_numbers(
            names, flat(step), flat(found), leaves, replaced=replaced, rounding=0.1, least_move=move_of_types(avals)
        )
        assert bool(check) is same


def test_a_step_by_the_sign_of_a_gradient_that_is_zero_but_for_rounding_verifies():
    def step(params, x):
        # Twice the same sum in another order.
        gradient = jnp.sum(x, 0) - jnp.sum(x.reshape(32, 32, -1).transpose(1, 0, 2).reshape(x.shape)[::-1], 0)
        return params - 0.1 * jnp.sign(gradient)

    x = jax.random.normal(jax.random.key(0), (1024, 256))
    planned = autopar.parallelize(step, method=autopar.Auto(mesh_shape=(8,))).trace(jnp.ones(256), x).plan()
    report = planned.verify(jnp.ones(256), x)
    assert report.numbers.difference > 3.5e-3, "sums are to differ, or this shows nothing"
    assert report
