"""Sizes that no mesh axis divides: whatever the plan, devices compute the numbers of one, and padding shows nowhere."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding

from autopar.compiler.intra_op.choice_graph import block_plan_of
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.sharding.layout import LogicalMesh, padded_dims, to_spec
from autopar.compiler.spmd.emit import emit_spmd
from autopar.compiler.spmd.local_program import Evaluate, RunBody, local_block
from tests.compiler.planned_steps import plan_step, traced

MESHES = [
    LogicalMesh(shape=(7,), axis_names=("x",)),
    LogicalMesh(shape=(3, 2), axis_names=("x", "y")),
]


def drawn(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape) / 2)


def tied_words(table, tokens):
    """A cross-entropy over all words, whose vectors are looked up and scored in one table."""

    def loss(table):
        scores = jax.nn.log_softmax(jnp.tanh(table[tokens[:, 0]]) @ table.T)
        return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:], 1))

    value, gradient = jax.value_and_grad(loss)(table)
    return table - gradient, value


def normalised(w, v, x):
    """Layers between which a batch is centered, scaled and clipped by its greatest and its least."""

    def loss(w, v):
        h = x @ w
        h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-3)
        # No gradient of the greatest: it asks which element is equal to it, and compilers round that in their own ways.
        greatest, least = lax.stop_gradient((jnp.abs(h).max(), h.min(1, keepdims=True)))
        h = h / greatest + jnp.where(h > least + 0.1, h, 0)
        return jnp.log(jnp.exp(h @ v).sum(1)).mean()

    gradients = jax.grad(loss, (0, 1))(w, v)
    return w - gradients[0], v - gradients[1]


def convolved(w, v, images):
    """Two convolutions and a mean over the image."""

    def loss(w, v):
        h = jax.nn.relu(lax.conv(images, w, (1, 1), "SAME"))
        return (lax.conv(h, v, (2, 2), "SAME").mean((2, 3)) ** 2).sum()

    gradients = jax.grad(loss, (0, 1))(w, v)
    return w - gradients[0], v - gradients[1]


def scanned(stack, x, key):
    """Recomputed layers in a loop, with dropout."""

    @jax.checkpoint
    def layer(h, w):
        return h + jnp.where(jax.random.bernoulli(key, 0.7, h.shape), jnp.tanh(h @ w), 0), None

    gradient = jax.grad(lambda stack: (lax.scan(layer, x, stack)[0] ** 2).mean())(stack)
    return stack - gradient, jnp.sort(x, 0)[0]


TOKENS = np.random.default_rng(0).integers(0, 37, (45, 2))
STEPS = {
    "tied words": (tied_words, lambda: (drawn(37, 10), TOKENS), 1),
    "normalised": (normalised, lambda: (drawn(11, 13), drawn(13, 9), drawn(19, 11)), 2),
    "convolved": (convolved, lambda: (drawn(5, 3, 3, 3), drawn(9, 5, 3, 3), drawn(11, 3, 4, 4)), 2),
    "scanned": (scanned, lambda: (drawn(3, 11, 11), drawn(10, 11), jax.random.key(3)), 1),
}


def runs_as_one(step, args, closed, block, mesh):
    devices = Mesh(
        np.array(jax.devices()[: mesh.num_devices]).reshape(mesh.shape),
        mesh.axis_names,
        (AxisType.Auto,) * len(mesh.shape),
    )
    shardings = [NamedSharding(devices, to_spec(value.layout, mesh)) for value in block.inputs]
    operands = [jax.device_put(x, sharding) for x, sharding in zip(args, shardings, strict=True)]
    found = jax.jit(jaxpr_as_fun(emit_spmd(closed, block, mesh)), in_shardings=shardings)(*operands)
    for one, whole in zip(found, jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(one, whole, rtol=1e-9, atol=1e-12)


def splits_unevenly(block, mesh):
    """The equations with a padded result."""
    for action in block.actions:
        if isinstance(action, RunBody):
            yield from itertools.chain.from_iterable(splits_unevenly(body, mesh) for body in action.bodies)
        elif isinstance(action, Evaluate):
            pairs = zip(action.eqn.outvars, action.strategy.results, strict=True)
            if any(padded_dims(v.aval.shape, layout, mesh) for v, layout in pairs):
                yield action.eqn


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh.shape)))
@pytest.mark.parametrize("name", STEPS)
def test_plans_drawn_at_random_compute_what_one_device_does(name, mesh):
    step, make, num_state = STEPS[name]
    args = make()
    closed = traced(step, *args)
    found = plan_step(closed, mesh, num_state=num_state)
    rng = np.random.default_rng(0)
    options = [int(rng.integers(len(costs))) for costs in found.table.costs]
    block = local_block(jc.open_jaxpr(closed)[0], block_plan_of(found.choices, options), mesh)
    assert any(splits_unevenly(block, mesh))
    runs_as_one(step, args, closed, block, mesh)
