"""Every step of the zoo runs under plain `jax.jit` and learns: the reference that plans are compared with."""

import jax
import numpy as np
import pytest

from tests.zoo import BATCH, ZOO, Case, losses

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("case", ZOO.values(), ids=str)
def test_plain_step_is_finite_and_learns(case: Case) -> None:
    step, state, *batch = case.make()
    jitted, history = jax.jit(step), []
    for _ in range(6):
        state, metrics = jitted(state, *batch, **case.kwargs)
        history.append(losses(metrics))
    assert np.all(np.isfinite(history))
    assert history[0] and (not case.loss_falls or np.sum(history[-1]) < np.sum(history[0]))


@pytest.mark.parametrize("case", ZOO.values(), ids=str)
def test_state_keeps_its_types_and_nothing_reads_a_donated_buffer_twice(case: Case) -> None:
    step, state, *batch = case.make()
    after, _ = jax.eval_shape(step, state, *batch, **case.kwargs)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    leaves = jax.tree.leaves(state)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(after)] == [
        (jax.numpy.shape(x), jax.numpy.result_type(x)) for x in leaves
    ]
    arrays = [id(x) for x in leaves if isinstance(x, jax.Array)]
    assert len(arrays) == len(set(arrays))


@pytest.mark.parametrize("case", ZOO.values(), ids=str)
def test_every_batch_leaf_begins_with_the_batch(case: Case) -> None:
    _, *arguments = case.make()
    leaves = jax.tree.leaves([arguments[i] for i in case.batch_argnums])
    assert leaves and all(leaf.shape[0] == BATCH for leaf in leaves)
