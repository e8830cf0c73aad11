"""Every step of the zoo runs under plain `jax.jit` and learns: the reference that plans are compared with."""

from typing import Any

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
def test_step_keeps_the_state_in_form_and_every_batch_leaf_begins_with_the_batch(case: Case) -> None:
    step, *arguments = case.make()
    after, _ = jax.eval_shape(step, *arguments, **case.kwargs)
    assert _types(after) == _types(jax.eval_shape(lambda state: state, arguments[0]))
    batch = jax.tree.leaves([arguments[i] for i in case.batch_argnums])
    assert batch and all(leaf.shape[0] == BATCH for leaf in batch)
    # The state is donated, and a buffer can be given away only once.
    buffers = [id(leaf) for leaf in jax.tree.leaves(arguments[0])]
    assert len(buffers) == len(set(buffers))


def _types(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
