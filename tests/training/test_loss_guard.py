"""A loss is bad if it is not finite or far above those before it; noise and a loss that falls are not."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import LossSpike, NonFiniteLoss
from autopar.training.loss_guard import LossGuard


def judged(losses, deviations=10.0):
    guard = LossGuard(deviations)
    return [type(guard.judge(n, {"loss": jnp.float32(loss), "step": jnp.int32(n)})) for n, loss in enumerate(losses)]


def test_noise_and_falling_losses_are_good():
    rng = np.random.default_rng(0)
    falling = 10.0 * np.exp(-np.arange(300) / 60) + 2.0 + 0.1 * rng.normal(size=300)
    assert set(judged(falling)) == {type(None)}
    assert set(judged([3.0] * 40 + [3.1])) == {type(None)}


def test_spike_is_named_and_does_not_shift_the_median():
    verdicts = judged([2.0, 2.1] * 15 + [9.0, 9.0, 2.0])
    assert verdicts[-3:] == [LossSpike, LossSpike, type(None)]
    assert set(judged([2.0, 2.1] * 15 + [9.0], deviations=math.inf)) == {type(None)}
    assert set(judged([2.0, 2.1] * 5 + [9.0])) == {type(None)}, "too few to tell"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_bad_from_the_first_step(value):
    assert judged([value, 1.0]) == [NonFiniteLoss, type(None)]


def test_spike_says_by_how_much():
    guard = LossGuard(10.0)
    for number in range(30):
        guard.judge(number, jnp.float32(2.0 + number % 2 / 10))
    assert "loss of step 30 is 9, 93.8 deviations above the median of the last 30, 2.05; 10 are allowed" in str(
        guard.judge(30, jnp.float32(9.0))
    )
