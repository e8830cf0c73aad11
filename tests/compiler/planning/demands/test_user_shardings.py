"""Shardings that a user wrote into a step are obeyed or refused with a reason, and the result is the plain step's."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.compiler.jaxprs import compat as jc
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


def by_hand(shape, names, specs, **options):
    """Return a decorator: `shard_map` over a mesh of the user's own."""
    mesh = Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), names)
    return lambda local: jax.shard_map(local, mesh=mesh, in_specs=specs[:-1], out_specs=specs[-1], **options)


@by_hand((8,), ("data",), (P(), P("data"), P()))
def mean_loss(w, x):
    return jax.lax.pmean(jnp.mean(jnp.tanh(x @ w) ** 2), "data")


@by_hand((8,), ("data",), (P(), P("data"), P()), check_vma=False)
def mean_gradient(w, x):
    return jax.lax.pmean(jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w), "data")


@by_hand((2, 2), ("rows", "columns"), (P(None, "columns"), P(("rows", "columns")), P("rows", "columns")))
def gathered_product(w, x):
    both = jax.lax.all_gather(x, "columns", tiled=True)
    turned = jax.lax.ppermute(both @ w, "rows", [(0, 1), (1, 0)])
    first = jax.lax.scan(lambda c, r: (c + jnp.sin(r), None), jnp.zeros_like(turned[0]), turned)[0]
    return turned + first + jax.lax.axis_index("rows")


@by_hand((4,), ("data",), (P(), P("data"), P()), check_vma=False)
def of_the_first_device(w, x):
    return jax.lax.all_to_all(x @ w, "data", 1, 0, tiled=True).sum(1)


def nested(w, x):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"})
    def outer(w, x):
        inner = jax.shard_map(
            lambda w, x: jax.lax.psum(x @ w, ("model",)),
            in_specs=(P("model"), P(None, "model")),
            out_specs=P(),
            axis_names={"model"},
        )
        return jax.lax.pmean(jnp.mean(inner(w, x) ** 2), "data")

    return outer(w, x)


LAID_OUT = {
    "one in another": lambda w, x: w - 0.1 * jax.grad(nested)(w, x),
    "a loss": lambda w, x: w - 0.1 * jax.grad(mean_loss)(w, x),
    "a gradient": lambda w, x: w - 0.1 * mean_gradient(w, x),
    "over two axes": lambda w, x: w - 0.1 * jax.grad(lambda w: (gathered_product(w, x) ** 2).mean())(w),
    "a result that differs": lambda w, x: w - of_the_first_device(w, x).mean(),
    "pmap": lambda w, x: w - 0.1 * jax.grad(lambda w: (jax.pmap(jnp.sin)((x @ w).reshape(8, 2, 4)) ** 2).mean())(w),
}


@pytest.mark.parametrize("name", LAID_OUT)
def test_what_a_step_lays_out_by_hand_is_computed_on_the_planned_mesh(name):
    equals_plain(LAID_OUT[name], draw(4, 4), draw(16, 4), method=autopar.DataParallel())


def test_a_loss_of_parts_has_a_gradient_to_cut_by():
    trace = autopar.parallelize(LAID_OUT["a loss"]).trace(draw(4, 4), draw(16, 4)).trace
    assert trace.differentiates
    phases = [jc.ad_phase(eqn) for eqn in trace.jaxpr.jaxpr.eqns]
    assert phases.index("forward") < phases.index("backward")


def test_collectives_of_some_devices_of_a_mesh_are_refused_with_the_recipe():
    local = by_hand((8,), ("data",), (P("data"), P("data")), check_vma=False)(
        lambda x: jax.lax.psum(x, "data", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]])
    )
    with pytest.raises(Unsupported, match=r"by hand, by `shard_map`.*test_user_shardings.*jax.vmap"):
        autopar.parallelize(lambda w, x: w - local(x).mean(), method=autopar.DataParallel())(draw(4), draw(8, 4))


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


def test_error_for_the_shardings_of_a_jitted_step_names_the_argument():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    plain = lambda weights, x: jax.tree.map(lambda w: w - 0.1 * jnp.mean(x), weights)  # noqa: E731
    step = jax.jit(plain, in_shardings=([NamedSharding(mesh, P("model")), None], None))
    with pytest.raises(InvalidArgument, match=r"in_shardings for weights\.0 is over the axes {'model': 2} of a mesh"):
        autopar.parallelize(step, method=autopar.DataParallel(), batch_argnums=1).trace(*ARGUMENTS).plan()
