"""Programs at other batches: what is written down is what a trace at that batch is."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from autopar.compiler.intra_op.fold_layers import program_key
from autopar.compiler.jaxprs.normalize import normalize
from autopar.compiler.jaxprs.sizes_between import NotBetween, program_between
from tests.compiler.equations import real

WEIGHTS = real(4, 4)


def scanned(x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum(1)), x, jnp.stack([WEIGHTS] * 3))


def loss(x):
    return jnp.mean(jax.checkpoint(lambda h: jnp.sin(h @ WEIGHTS).reshape(-1))(x))


def traced(function, rows):
    return normalize(jax.make_jaxpr(function)(jax.ShapeDtypeStruct((rows, 4), jnp.float32)))


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: jnp.concatenate([x, x[:, :2]], 1)[1:], id="a size and something that stays"),
        pytest.param(lambda x: x.reshape(-1, 2, 2).transpose(1, 0, 2).reshape(2, -1), id="reshapes"),
        pytest.param(lambda x: jnp.take_along_axis(x, jnp.argsort(x, 1), 1), id="gathers"),
        pytest.param(lambda x: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x, 0.0), id="draws"),
        pytest.param(lambda x: jax.vmap(jnp.outer)(x, x), id="batched"),
        pytest.param(scanned, id="loops"),
        pytest.param(lambda x: lax.cond(x[0, 0] > 0, lambda h: h @ WEIGHTS, lambda h: h, x), id="branches"),
        pytest.param(lambda x: jax.nn.relu(jax.nn.silu(x)), id="functions with rules of their own"),
    ],
)
@pytest.mark.parametrize("rows", [2, 4, 12, 16])
def test_a_program_between_two_is_that_of_its_batch(function, rows):
    one, other, there = (traced(function, count) for count in (16, 8, rows))
    between = program_between(one, other, Fraction(16 - rows, 8))
    assert program_key(between) == program_key(there)
    x = real(rows, 4)
    for mine, theirs in zip(jaxpr_as_fun(between)(x), jaxpr_as_fun(there)(x), strict=True):
        assert bool(jnp.array_equal(mine, theirs))


@pytest.mark.parametrize(
    ("function", "at"),
    [
        pytest.param(jax.grad(loss), Fraction(1, 2), id="a mean over the rows"),
        pytest.param(lambda x: x + x.shape[0], Fraction(1, 2), id="a number that tells the rows"),
        pytest.param(lambda x: x @ WEIGHTS if x.shape[0] > 8 else x * 2.0, Fraction(1, 2), id="another program"),
        pytest.param(lambda x: x * 2.0, Fraction(1, 3), id="no whole size"),
        pytest.param(lambda x: x * 2.0, Fraction(2), id="no size at all"),
    ],
)
def test_what_differs_in_more_than_sizes_is_to_be_traced(function, at):
    with pytest.raises(NotBetween):
        program_between(traced(function, 16), traced(function, 8), at)
