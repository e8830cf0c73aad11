"""What a step says itself of host memory: an offloading checkpoint is kept, a result there is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import autopar
from autopar.compiler.jaxprs import compat as jc
from autopar.errors import Unsupported

OFFLOADED = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["hidden"],
    offload_src="device",
    offload_dst="pinned_host",
)
PARAMS = [jnp.eye(16) / n for n in (2, 3)]
BATCH = jnp.linspace(-1, 1, 8 * 16).reshape(8, 16)


def loss(params, batch):
    for w in params:
        batch = checkpoint_name(jnp.tanh(batch @ w), "hidden")
    return jnp.mean(batch**2)


def train_step(params, batch):
    value, grads = jax.value_and_grad(jax.checkpoint(loss, policy=OFFLOADED))(params, batch)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value


def planned(step):
    return (
        autopar.parallelize(step, method=autopar.DataParallel(), devices=jax.devices()[:2]).trace(PARAMS, BATCH).plan()
    )


def test_a_checkpoint_that_offloads_is_kept_and_changes_no_number():
    lowered = planned(train_step).lower()
    (executable,) = lowered.program.executables.values()
    moved = [v for eqn in jc.all_equations(executable.jaxpr) if eqn.primitive.name == "device_put" for v in eqn.outvars]
    assert [jc.is_on_host(v) for v in moved].count(True) == len(PARAMS)
    found, expected = lowered.compile()(PARAMS, BATCH), jax.jit(train_step)(PARAMS, BATCH)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7), found, expected)


def test_a_result_that_the_step_puts_on_the_host_is_refused_with_its_line():
    def keeping(params, batch):
        params, value = train_step(params, batch)
        return [jax.device_put(p, jax.memory.Space.Host) for p in params], value

    with pytest.raises(Unsupported, match=r"keeping puts its result 0.0 into .*test_user_memory.py.*offload="):
        planned(keeping)
