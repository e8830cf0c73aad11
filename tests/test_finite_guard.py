"""A step that is told to check for finite values names the line, stage and microbatch of the first that is not."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import InvalidArgument, NonFiniteValue
from tests.small_steps import Adam, assert_same, devices, mlp_batch, mlp_loss, mlp_params, sgd, two_stages

METHODS = {
    "one device": (autopar.DataParallel(), 1),
    "one mesh": (autopar.DataParallel(), 2),
    "pipeline": (two_stages(), 4),
}


def logarithms(params, batch):
    h, y = batch
    h = jnp.tanh(h @ params[0]["w"] + params[0]["b"])
    h = jnp.log(h @ params[1]["w"] + params[1]["b"])  # of negative numbers
    return jnp.mean((h - y) ** 2)


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.strip().endswith(text))


def guarded(loss, method):
    how, count = METHODS[method]
    return autopar.parallelize(sgd(loss), method=how, devices=devices(count), check_finite=True)


@pytest.mark.parametrize("method", METHODS)
def test_first_nan_is_named_with_its_line(method):
    step, params, batch = guarded(logarithms, method), mlp_params(), mlp_batch()
    with pytest.raises(NonFiniteValue) as raised:
        step(params, batch)
    assert "`log` -> float32[" in str(raised.value)
    assert f"test_finite_guard.py:{line_of('# of negative numbers')}" in str(raised.value)
    if method == "pipeline":
        assert "(stage 1, forward of microbatch 0)" in str(raised.value)
    assert np.isfinite(params[0]["w"]).all(), "the arguments are still there"


@pytest.mark.parametrize("method", METHODS)
def test_nan_that_jax_is_told_to_look_for_is_raised_as_by_jit(method):
    how, count = METHODS[method]
    step, params, batch = (
        autopar.parallelize(sgd(logarithms), method=how, devices=devices(count)),
        mlp_params(),
        mlp_batch(),
    )
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        jax.jit(sgd(logarithms))(params, batch)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"\(nan\) encountered in .*check_finite=True"):
        step(params, batch)


def test_only_the_microbatch_with_the_nan_is_named():
    def loss(params, batch):
        h, y = batch
        h = jnp.tanh(h @ params[0]["w"])
        return jnp.mean((jnp.sqrt(jnp.abs(h) + y) @ params[1]["w"]) ** 2)

    batch = mlp_batch()
    step = guarded(loss, "pipeline")
    bad = (batch[0], jnp.abs(batch[1]).at[6].set(-9.0))  # in the second microbatch of four rows
    with pytest.raises(NonFiniteValue, match=r"`sqrt` .*test_finite_guard.*of microbatch 1\)"):
        step(mlp_params(), bad)


@pytest.mark.parametrize("method", METHODS)
def test_finite_steps_are_those_of_jit(method):
    result = guarded(mlp_loss, method)(mlp_params(), mlp_batch())
    assert_same(result, jax.jit(sgd(mlp_loss))(mlp_params(), mlp_batch()))


def test_infinity_that_a_mask_hides_is_no_fault():
    def loss(params, batch):
        h, y = batch
        scores = jnp.where(h > 0, h @ params[0]["w"], -jnp.inf).at[:, 0].set(0.0)
        return jnp.mean((jax.nn.softmax(scores) @ params[1]["w"] - y) ** 2)

    result = guarded(loss, "one mesh")(mlp_params(), mlp_batch())
    assert_same(result, jax.jit(sgd(loss))(mlp_params(), mlp_batch()))


def test_infinite_state_may_stay_so_and_nan_arguments_are_named():
    def step(state, x):
        return Adam(
            params=state.params - x.mean(), mu=jnp.minimum(state.mu, x.min()), nu=state.nu, count=state.count + 1
        )

    run = autopar.parallelize(step, devices=devices(2), check_finite=True)
    state = Adam(params=jnp.ones(4), mu=jnp.inf, nu=jnp.inf, count=jnp.int32(0))
    run(state, jnp.ones((8, 4)))
    with pytest.raises(NonFiniteValue, match=r"argument x was so before"):
        run(state, jnp.ones((8, 4)).at[3, 2].set(jnp.nan))


def loops(params, x):
    """Infinite in the third iteration of a scan, within a branch, in a loop of unknown length."""

    def double(h, _):
        return (jax.lax.cond(h.max() > 1e15, lambda h: h * 1e30, lambda h: h * 1e10, h), h.sum())

    h, sums = jax.lax.scan(double, x * params, None, length=4)
    return jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] - h, c[1] + 1), (h, 0))[0].mean() + sums.mean()


def test_loops_and_branches_are_looked_into():
    step = autopar.parallelize(lambda p, x: loops(p, x), devices=devices(2), check_finite=True)
    with pytest.raises(
        NonFiniteValue, match=r"`sub` -> .* is not a number .*Infinite before that: `mul` -> "
    ) as raised:
        step(jnp.ones(4), jnp.ones((8, 4)))
    assert str(raised.value).count("(loops") == 2


def test_option_is_a_truth_value():
    with pytest.raises(InvalidArgument, match="check_finite is 1"):
        autopar.parallelize(sgd(mlp_loss), check_finite=1)  # type: ignore[arg-type]
