"""Numbers agree up to rounding, and up to what rounding does to a step that divides by what is zero but for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.verification import compare_numbers, rounded_arguments

NAMES = ("loss", "params")


def results(loss=1.0, params=(1.0, -2.0)):
    return [np.float32(loss), np.asarray(params, np.float32)]


def test_equal_results_agree():
    check = compare_numbers(NAMES, results(), results(), rounded=lambda: pytest.fail("not needed"))
    assert check
    assert check.difference == 0


def test_the_leaf_that_differs_most_is_named():
    check = compare_numbers(NAMES, results(), results(params=(1.0, -2.1)))
    assert not check
    assert check.leaf == "params"
    assert check.difference == pytest.approx(0.05, rel=1e-3)


def test_a_difference_is_allowed_that_rounding_the_arguments_makes_too():
    rounded = lambda: results(params=(1.06, -2.0))  # noqa: E731
    check = compare_numbers(NAMES, results(), results(params=(1.0, -2.1)), rounded=rounded)
    assert check
    assert (check.leaf, check.difference) == ("params", pytest.approx(0.1 / 5**0.5, rel=1e-3))
    assert check.tolerance == pytest.approx(2 * 0.06 / 5**0.5, rel=1e-3)


def test_a_difference_beyond_what_rounding_makes_is_none_of_it():
    rounded = lambda: results(params=(1.06, -2.0))  # noqa: E731
    assert not compare_numbers(NAMES, results(), results(params=(1.0, -2.2)), rounded=rounded)
    assert not compare_numbers(NAMES, results(), results(loss=1.1), rounded=rounded)
    assert not compare_numbers(NAMES, results(), results(params=(1.0, np.nan)), rounded=rounded)


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
