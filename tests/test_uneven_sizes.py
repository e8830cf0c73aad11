"""Steps of sizes that the devices do not divide: the numbers of `jax.jit`, no array whole where it can be split."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import ReplicatedWarning
from tests.small_steps import draw

WORDS = 5003


def drawn(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape) / 4, jnp.float32)


def words_step(table, tokens):
    """One step of a model whose words are looked up and scored in one table."""

    def loss(table):
        scores = jax.nn.log_softmax(table[tokens[:, 0]] @ table.T)
        return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:], 1))

    return table - jax.grad(loss)(table)


def regression_step(params, batch):
    """One step of two layers on examples with a weight each."""
    x, y = batch

    def loss(params):
        w, v = params
        return jnp.mean((jnp.tanh(x @ w) @ v - y) ** 2) + jnp.max(jnp.abs(x @ w)) / 100

    value, gradients = jax.value_and_grad(loss)(params)
    return [p - 0.1 * g for p, g in zip(params, gradients, strict=True)], value


def regression(rows):
    return [drawn(13, 30), drawn(30, 7)], (drawn(rows, 13), drawn(rows, 7))


def check_equal(found, expected):
    for one, whole in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, whole, rtol=1e-5, atol=1e-6)


def test_a_vocabulary_that_the_devices_do_not_divide_is_split_within_a_budget():
    table, tokens = drawn(WORDS, 8), np.random.default_rng(0).integers(0, WORDS, (12, 2))
    # The scores alone take one and a half times as much as the table, the step thrice that where nothing is split.
    method = autopar.Auto(num_stages=1, mesh_shape=(8,), memory=2 * table.nbytes)
    found = autopar.parallelize(words_step, method=method)(table, tokens)
    check_equal(found, jax.jit(words_step)(table, tokens))
    assert found.shape == table.shape
    assert max(shard.data.nbytes for shard in found.addressable_shards) == table.nbytes / 8


@pytest.mark.parametrize("count", [5, 7])
@pytest.mark.parametrize("method", [autopar.DataParallel(), autopar.Auto(num_stages=1)], ids=["by hand", "searched"])
def test_any_number_of_devices_and_batches_of_any_size_compute_what_one_device_does(method, count):
    step = autopar.parallelize(regression_step, method=method, devices=jax.devices()[:count])
    for rows, warned in (
        (12, pytest.warns(ReplicatedWarning, match=f"their 12 rows do not divide among {count}")),
        (3, nullcontext()),
    ):
        params, batch = regression(rows)
        with warned:
            found = step(params, batch)
        check_equal(found, jax.jit(regression_step)(params, batch))


@pytest.mark.filterwarnings("ignore::autopar.ReplicatedWarning")  # the smaller batch, if the mesh does not divide it
def test_a_state_that_was_split_is_taken_with_a_smaller_last_batch():
    step = autopar.parallelize(regression_step, method=autopar.Auto(num_stages=1))
    plain, (params, batch) = jax.jit(regression_step), regression(16)
    expected, _ = plain(*[plain(params, batch)[0], regression(12)[1]])
    found, _ = step(step(params, batch)[0], regression(12)[1])
    check_equal(found, expected)


def test_what_has_no_elements_is_no_part_of_a_collective():
    def train_step(params, batch):
        def loss_fn(params):
            return jnp.mean((jax.lax.cummax(batch["x"] @ params["first"], axis=1) @ params["second"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = {"first": draw(0, 8, 32), "second": draw(1, 32, 4)}
    batch = {"x": draw(2, 16, 8), "y": draw(3, 16, 4)}
    step = autopar.parallelize(train_step, method=autopar.Auto(num_stages=2))
    check_equal(step(params, batch), jax.jit(train_step)(params, batch))
