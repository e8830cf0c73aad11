"""The program of one device: the numbers of the whole program, and the collectives that were planned, no others."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding

import autopar
from autopar.compiler.analysis.compiled_collectives import compiled_collectives
from autopar.compiler.intra_op.plan_program import Constraints
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.sharding.layout import Layout, LogicalMesh, to_spec
from autopar.compiler.spmd.collectives import planned_collectives
from autopar.compiler.spmd.emit import emit_spmd
from autopar.compiler.spmd.local_program import LocalBlock, local_block
from tests.compiler.planned_steps import GRID, LINE, plan_step, traced
from tests.small_steps import assert_same

# XLA forgets on CPUs, and only there, what keeps a recomputation apart, and merges it with what is computed already.
KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}


def drawn(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape) / 4, jnp.float32)


def mlp_step(w, v, m, x):
    """One step of momentum on two layers."""
    gradients = jax.grad(lambda w, v: (jnp.tanh(x @ w) @ v).var(), (0, 1))(w, v)
    m = 0.9 * m + gradients[0]
    return w - m, v - gradients[1], m


def layers(stack, x):
    """The gradient of a scan over stacked weights."""

    def loss(stack):
        x_last, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack)
        return (x_last**2).sum()

    return stack - jax.grad(loss)(stack)


def accumulated(w, batches):
    """Gradients of microbatches, added up in the carry of a scan."""

    def add(total, x):
        return total + jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w), x.sum(0)

    total, sums = lax.scan(add, jnp.zeros_like(w), batches)
    return w - total, sums


def counted_loop(w, x):
    """A loop with a known number of rounds, a counter beside its array."""
    return lax.fori_loop(0, 5, lambda i, h: jnp.tanh(h @ w) + i, x)


def ended_by_data(w, x):
    """A loop that ends when its array is large, and counts its rounds."""
    return lax.while_loop(lambda c: (c[0] ** 2).sum() < 200, lambda c: (jnp.tanh(c[0] @ w) * 2 + 1, c[1] + 1), (x, 0))


def branches(w, x):
    """A branch that the sign of a sum decides."""
    return lax.cond(x.sum() > 0, lambda h: jnp.tanh(h @ w), lambda h: h @ w.T, x)


def switched(w, x):
    """One of three ways, by a number that comes from data."""
    ways = [lambda h: h @ w, lambda h: h * 2, jnp.zeros_like]
    return lax.switch(jnp.int32(jnp.abs(x).sum()) % 3, ways, x)


def recomputed(w, v, x):
    """Two layers whose activations are computed again for the gradient."""

    @jax.checkpoint
    def block(w, x):
        return x + jnp.tanh(jnp.tanh(x @ w) @ w.T)

    return jax.grad(lambda w, v: (block(v, block(w, x)) ** 2).sum(), (0, 1))(w, v)


def embedded(table, head, tokens):
    """Words to vectors, and a loss over all words."""

    def loss(table, head):
        logits = table[tokens] @ head
        own = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - own).mean()

    gradients = jax.grad(loss, (0, 1))(table, head)
    return table - gradients[0], head - gradients[1]


def dropped(w, key, x):
    """Dropout, whose mask must not depend on who draws it."""
    mask = jax.random.bernoulli(key, 0.5, (x.shape[0], w.shape[1]))
    return jax.grad(lambda w: (jnp.where(mask, x @ w, 0) ** 2).sum())(w), jax.random.split(key)[0]


def normalised(x, scale):
    """Means, and the greatest of each column."""
    x = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3) * scale
    return x, x.max(0), jnp.argmax(x, -1)


def constants(x):
    """Results that are numbers, inputs, and the same twice."""
    y = x + np.arange(64, dtype=np.float32)
    return y, 3.0, x, y


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 512, (16, 8)))
PROGRAMS = {
    "mlp": (mlp_step, (drawn(64, 128), drawn(128, 64), drawn(64, 128), drawn(32, 64)), 3),
    "scan over layers": (layers, (drawn(3, 64, 64), drawn(32, 64)), 1),
    "scan that adds up": (accumulated, (drawn(64, 64), drawn(4, 32, 64)), 1),
    "loop": (counted_loop, (drawn(64, 64), drawn(32, 64)), 0),
    "loop that data ends": (ended_by_data, (drawn(64, 64), drawn(32, 64)), 0),
    "branch": (branches, (drawn(64, 64), drawn(32, 64)), 0),
    "switch": (switched, (drawn(64, 64), drawn(32, 64)), 0),
    "remat": (recomputed, (drawn(64, 128), drawn(64, 128), drawn(32, 64)), 2),
    "embedding": (embedded, (drawn(512, 32), drawn(32, 512), TOKENS), 2),
    "dropout": (dropped, (drawn(64, 128), jax.random.key(1), drawn(32, 64)), 0),
    "normalisation": (normalised, (drawn(64, 128), drawn(128)), 0),
    "constants": (constants, (drawn(32, 64),), 0),
}


@functools.cache
def local_program(name: str, mesh: LogicalMesh) -> tuple[jc.ClosedJaxpr, LocalBlock]:
    """Return a device's program under the best plan that splits the first input; nothing moves if nothing is split."""
    function, args, num_state = PROGRAMS[name]
    closed = traced(function, *args)
    first = args[0].ndim - 1
    split = Layout(tuple(tuple(range(len(mesh.shape))) if d == first else () for d in range(first + 1)))
    found = plan_step(closed, mesh, num_state=num_state, constraints=Constraints(inputs={0: (split,)}))
    return closed, local_block(jc.open_jaxpr(closed)[0], found.plan, mesh)


def compiled_on(closed: jc.ClosedJaxpr, block: LocalBlock, mesh: LogicalMesh, args, **options):
    """The compiled program of eight devices, and its operands on them."""
    devices = Mesh(np.array(jax.devices()).reshape(mesh.shape), mesh.axis_names, (AxisType.Auto,) * len(mesh.shape))
    shardings = [NamedSharding(devices, to_spec(value.layout, mesh)) for value in block.inputs]
    local = jaxpr_as_fun(emit_spmd(closed, block, mesh))
    compiled = jax.jit(local, in_shardings=shardings, **options).lower(*args).compile(KEEP_BARRIERS)
    return compiled, [jax.device_put(x, sharding) for x, sharding in zip(args, shardings, strict=True)]


@pytest.mark.parametrize("mesh", [LINE, GRID], ids=["8", "2x4"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_devices_compute_the_numbers_of_one_and_move_what_is_planned(name, mesh):
    function, args, _ = PROGRAMS[name]
    closed, block = local_program(name, mesh)
    compiled, operands = compiled_on(closed, block, mesh, args)
    planned, found = Counter(), Counter()
    for each in planned_collectives(block, mesh):
        planned[each.collective.kind] += each.collective.nbytes * each.times
    for each in compiled_collectives(compiled.as_text()):
        found[each.kind] += each.nbytes * each.count
    assert found == planned
    results = zip(jax.tree.leaves(jax.jit(function)(*args)), jc.open_jaxpr(closed)[0].outvars, strict=True)
    expected = [x for x, v in results if not isinstance(v, jc.Literal)]
    for one, whole in zip(compiled(*operands), expected, strict=True):
        if jnp.issubdtype(whole.dtype, jax.dtypes.prng_key):
            one, whole = jax.random.key_data(one), jax.random.key_data(whole)
        # Sums are made in another order.
        np.testing.assert_allclose(one, whole, rtol=1e-4, atol=1e-5 * max(1, np.abs(whole).max()))


def test_programs_with_loops_count_what_their_bodies_move():
    closed, block = local_program("scan over layers", GRID)
    assert {each.times for each in planned_collectives(block, GRID)} >= {3}
    assert len(jc.open_jaxpr(emit_spmd(closed, block, GRID))[0].eqns) == 1


def test_state_that_is_given_away_is_written_in_place():
    _, args, num_state = PROGRAMS["mlp"]
    closed, block = local_program("mlp", GRID)
    compiled, operands = compiled_on(closed, block, GRID, args, donate_argnums=range(num_state))
    state = sum(operands[number].addressable_shards[0].data.nbytes for number in range(num_state))
    assert compiled.memory_analysis().alias_size_in_bytes == state


def reported(seen, x):
    jax.debug.callback(lambda loss: seen.append(float(loss)), (x**2).sum())
    return x + 1


def asked(seen, x):
    def answer(loss):
        seen.append(float(loss))
        return np.float32(2)

    return x * io_callback(answer, jax.ShapeDtypeStruct((), jnp.float32), (x**2).sum())


@pytest.mark.parametrize(("function", "expected"), [(reported, drawn(64, 64) + 1), (asked, drawn(64, 64) * 2)])
def test_what_a_user_sees_once_happens_once(function, expected):
    seen, x = [], drawn(64, 64)
    closed = traced(functools.partial(function, seen), x)
    rows = Layout(((0, 1), ()))
    plan = plan_step(closed, GRID, constraints=Constraints(inputs={0: (rows,)})).plan
    compiled, operands = compiled_on(closed, local_block(jc.open_jaxpr(closed)[0], plan, GRID), GRID, (x,))
    (found,) = compiled(*operands)
    jax.effects_barrier()
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert seen == [pytest.approx(float((x**2).sum()), rel=1e-5)]


def test_a_transform_of_features_that_are_gathered_after_it_runs_in_the_order_of_its_rows():
    def step(weights, x, y):
        def loss(weights):
            spectra = jnp.fft.rfft2((x.reshape(-1, 4, 4, 1) @ weights["lift"]), axes=(1, 2))
            mixed = jnp.einsum("bxyi,ioxy->bxyo", spectra, weights["real"] + 1j * weights["imaginary"])
            features = jax.nn.gelu(jnp.fft.irfft2(mixed, s=(4, 4), axes=(1, 2)))
            return jnp.mean((features.mean(-1).reshape(-1, 16) - y) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    keys = jax.random.split(jax.random.key(0), 4)
    weights = {
        "lift": jnp.ones((1, 4)),
        "real": jax.random.normal(keys[0], (4, 4, 4, 3)),
        "imaginary": jax.random.normal(keys[1], (4, 4, 4, 3)),
    }
    x, y = (jax.random.normal(key, (16, 16)) for key in keys[2:])
    parallel = autopar.parallelize(step, method=autopar.Megatron(data=2, tensor=4))
    assert_same(parallel(weights, x, y), jax.jit(step)(weights, x, y), 1e-4)
