"""Shardings that a user wrote into a step are obeyed or refused with a reason, and the result is the plain step's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import InvalidArgument, Unsupported
from tests.small_steps import two_stages

METHODS = {
    "data parallel": autopar.DataParallel(),
    "two stages": two_stages(),
    "searched": autopar.Auto(num_stages=1, num_microbatches=1, mesh_shape=(8,)),
}


def draw(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32)


def equals_plain(step, *args, method):
    wanted, got = jax.jit(step)(*args), autopar.parallelize(step, method=method)(*args)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(jax.device_get(got)), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_constraint_beside_a_gather(method):
    mesh = Mesh(np.array(jax.devices()), ("data",))

    def loss(weights, tokens):
        h = jax.lax.with_sharding_constraint(weights[0][tokens], NamedSharding(mesh, P("data")))
        return jnp.mean(jnp.tanh(h @ weights[1]) ** 2)

    def step(weights, tokens):
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, tokens))

    equals_plain(step, [draw(32, 8), draw(8, 8)], np.arange(16) % 7, method=method)


def constrained_step(shape, names, spec):
    mesh = Mesh(np.array(jax.devices()).reshape(shape), names)

    def loss(weights, x):
        h = jax.lax.with_sharding_constraint(x @ weights[0], NamedSharding(mesh, spec))
        return jnp.mean(jnp.tanh(h @ weights[1]) ** 2)

    return lambda weights, x: jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))


ARGUMENTS = ([draw(8, 16), draw(16, 8)], draw(32, 8))
GRID = autopar.ShardParallel(mesh_shape=(2, 4))
MATCHED = {
    "place by place": ((2, 4), ("dp", "tp"), P("dp", "tp"), GRID),
    "where the search may choose the mesh": (
        (2, 4),
        ("dp", "tp"),
        P("dp", "tp"),
        autopar.Auto(num_stages=1, num_microbatches=1),
    ),
    "one axis for all": ((8,), ("rows",), P("rows"), GRID),
    "beside an axis of size one": ((8, 1), ("rows", "columns"), P("rows", "columns"), autopar.DataParallel()),
}


@pytest.mark.parametrize(("shape", "names", "spec", "method"), MATCHED.values(), ids=MATCHED)
def test_axes_of_another_mesh_are_matched_by_size_and_place(shape, names, spec, method):
    equals_plain(constrained_step(shape, names, spec), *ARGUMENTS, method=method)


def test_axes_that_are_not_matched_are_refused_with_the_line_unless_ignored():
    step = constrained_step((4, 2), ("dp", "tp"), P("dp", "tp"))
    with pytest.raises(InvalidArgument, match=r"test_user_shardings.*'dp': 4, 'tp': 2.* planned mesh is {'data': 8}"):
        autopar.parallelize(step, method=autopar.DataParallel())(*ARGUMENTS)
    equals_plain(step, *ARGUMENTS, method=autopar.DataParallel(ignore_user_shardings=True))


def test_arrays_that_are_laid_out_by_hand_are_refused_with_the_recipe():
    mesh = Mesh(np.array(jax.devices()), ("data",))

    def local(x):
        return x - jax.lax.pmean(x, "data")

    centered = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    for step in (lambda w, x: w - centered(x).mean(), lambda w, x: w - jax.pmap(jnp.sin)(x).mean()):
        with pytest.raises(Unsupported, match=r"by hand, by `(shard_map|xla_pmap)`.*jax.vmap"):
            autopar.parallelize(step, method=autopar.DataParallel())(draw(4), draw(8, 4))


LINE, SQUARE = ((8,), ("data",)), ((4, 2), ("data", "model"))
NAMED = {
    "Zero": (autopar.Zero(stage=1, mesh_shape=(8,)), LINE, P("data"), P(None, "data")),
    "TensorParallel": (autopar.TensorParallel(mesh_shape=(8,)), LINE, P(None, "data"), P("data")),
    "ExpertParallel": (autopar.ExpertParallel(mesh_shape=(8,)), LINE, P("data"), None),
    "Megatron": (autopar.Megatron(data=4, tensor=2), SQUARE, P("data", "model"), P("model")),
}


@pytest.mark.parametrize("name", NAMED)
def test_named_methods_obey_constraints_within_their_form_and_refuse_others(name):
    method, mesh, kept, refused = NAMED[name]
    equals_plain(constrained_step(*mesh, kept), *ARGUMENTS, method=method)
    if refused is not None:
        step = constrained_step(*mesh, refused)
        with pytest.raises(InvalidArgument, match=rf"test_user_shardings.* {name} does not allow.*ignore_user"):
            autopar.parallelize(step, method=method)(*ARGUMENTS)
        equals_plain(step, *ARGUMENTS, method=dataclasses.replace(method, ignore_user_shardings=True))


def test_named_methods_obey_the_shardings_of_jitted_arguments():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    plain = lambda weights, x: jax.tree.map(lambda w: w - 0.1 * jnp.mean(x), weights)  # noqa: E731

    def planned(spec, method):
        step = jax.jit(plain, in_shardings=([NamedSharding(mesh, spec), None], None))
        return autopar.parallelize(step, method=method, batch_argnums=1).trace(*ARGUMENTS).plan().plan

    zero = autopar.Zero(stage=3, mesh_shape=(8,))
    assert planned(P(None, "data"), zero).input_specs["weights.0"] == P(None, "data")
    assert planned(P("data"), zero).input_specs["weights.0"] == P("data")
    with pytest.raises(InvalidArgument, match=r"in_shardings for x asks for a layout that TensorParallel does not"):
        step = jax.jit(plain, in_shardings=(None, NamedSharding(mesh, P("data"))))
        autopar.parallelize(step, method=autopar.TensorParallel(mesh_shape=(8,)), batch_argnums=1).trace(
            *ARGUMENTS
        ).plan()
