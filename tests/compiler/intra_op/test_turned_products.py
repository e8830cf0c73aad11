"""Products that are only read transposed: made the other way round, unless that copies more of their operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from autopar.compiler.intra_op.turned_products import turn_products
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.normalize import normalize
from tests.compiler.equations import real

ROWS = (((0, 1), (0, 1)), ((), ()))
DOT, TURN = "dot_general", "transpose"


def gradient(left, right, **params):
    """The gradient of a matrix as `jax.grad` makes it: a product over rows, transposed."""
    return lax.dot_general(left, right, ROWS, **params).T


def in_a_loop(left, right):
    total, _ = lax.scan(lambda total, _: (total + gradient(left, right), None), jnp.zeros((3, 5)), None, length=2)
    return total


def recomputed(left, right):
    return jax.checkpoint(lambda left, right: jnp.sin(gradient(left, right)))(left, right)


@pytest.mark.parametrize(
    ("function", "shapes", "after"),
    [
        pytest.param(gradient, ((4, 2, 5), (4, 2, 3)), [DOT], id="the right operand is smaller"),
        pytest.param(gradient, ((4, 2, 3), (4, 2, 3)), [DOT], id="both are alike"),
        pytest.param(gradient, ((4, 2, 3), (4, 2, 5)), [DOT, TURN], id="the left operand is smaller"),
        pytest.param(
            lambda x, y: lax.dot_general(x, y, ((1, 1), (0, 0))).swapaxes(1, 2),
            ((2, 4, 5), (2, 4, 3)),
            [DOT],
            id="of each of a batch",
        ),
        pytest.param(
            lambda x, y: lax.dot_general(x, y, ((1, 1), (0, 0))).transpose(1, 0, 2),
            ((2, 4, 5), (2, 4, 3)),
            [DOT, TURN],
            id="in an order that no product has",
        ),
        pytest.param(
            lambda x, y: lax.dot_general(x, y, ROWS).T @ lax.dot_general(x, y, ROWS),
            ((4, 2, 5), (4, 2, 3)),
            [DOT, DOT, DOT],
            id="each by itself",
        ),
        pytest.param(
            lambda x, y: (lambda product: (product, product.T))(lax.dot_general(x, y, ROWS)),
            ((4, 2, 5), (4, 2, 3)),
            [DOT, TURN],
            id="read as it is, too",
        ),
        pytest.param(
            lambda x, y: gradient(x, y, precision=(lax.Precision.HIGH, lax.Precision.DEFAULT)),
            ((4, 2, 5), (4, 2, 3)),
            [DOT],
            id="precisions change places",
        ),
        pytest.param(in_a_loop, ((4, 2, 5), (4, 2, 3)), ["broadcast_in_dim", "scan", DOT, "add"], id="in a loop"),
    ],
)
def test_what_is_read_transposed_is_made_that_way(function, shapes, after):
    args = [real(*shape) for shape in shapes]
    turned = turn_products(normalize(jax.make_jaxpr(function)(*args)))
    assert sorted(eqn.primitive.name for eqn in jc.all_equations(turned)) == sorted(after)
    for mine, theirs in zip(jaxpr_as_fun(turned)(*args), jax.tree.leaves(function(*args)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_regions_that_are_recomputed_are_entered():
    args = real(4, 2, 5), real(4, 2, 3)
    turned = turn_products(normalize(jax.make_jaxpr(recomputed)(*args)))
    assert TURN not in {eqn.primitive.name for eqn in jc.all_equations(turned)}
    np.testing.assert_allclose(jaxpr_as_fun(turned)(*args)[0], recomputed(*args), rtol=1e-5, atol=1e-6)


def test_precisions_stay_with_their_operands():
    args = real(4, 2, 5), real(4, 2, 3)
    precision = lax.Precision.HIGH, lax.Precision.DEFAULT
    turned = turn_products(normalize(jax.make_jaxpr(lambda x, y: gradient(x, y, precision=precision))(*args)))
    (product,) = jc.open_jaxpr(turned)[0].eqns
    assert product.params["precision"] == precision[::-1]
    assert [v.aval.shape for v in product.invars] == [(4, 2, 3), (4, 2, 5)]


def test_a_program_without_such_products_is_returned_as_it_is():
    closed = normalize(jax.make_jaxpr(lambda x, y: jnp.sin(x @ y))(real(3, 4), real(4, 5)))
    assert turn_products(closed) is closed
