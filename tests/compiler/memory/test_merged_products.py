"""Products of one array that are one, of which a part is wanted in two orders: queries, keys and values."""

import jax
import jax.numpy as jnp
import pytest

from autopar.compiler.memory.liveness import Op
from autopar.compiler.memory.merged_products import KeptProduct, kept_products

MIB = 2**20


def attention(x, a, b, c):
    """Queries, keys and values, the scores, what is read, and the gradient of queries for one of scores."""
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w) for w in (a, b, c))
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k)
    read = jnp.einsum("bhqs,bshk->bqhk", scores, v)
    return read, jax.lax.dot_general(scores, k, (((3,), (1,)), ((0, 1), (0, 2))))


def found(batch: int, part_bytes: float) -> list[KeptProduct]:
    args = [jnp.zeros((batch, 4, 8)), *[jnp.zeros((8, 2, 4))] * 3]
    eqns = [eqn for eqn in jax.make_jaxpr(attention)(*args).jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert len(eqns) == 6
    ops = [Op("apart", tuple(eqn.invars), tuple(eqn.outvars)) for eqn in eqns]
    nbytes = dict.fromkeys((key for op in ops for key in (*op.reads, *op.results)), part_bytes)
    return kept_products(ops, eqns, nbytes, lambda key: key.aval.shape)


def test_a_merged_product_is_kept_for_the_part_that_is_read_in_two_orders():
    (kept,) = found(batch=3, part_bytes=4 * MIB)
    assert kept.maker == 2
    assert kept.reader == 5
    assert len(kept.others) == 2


@pytest.mark.parametrize(
    ("batch", "part_bytes"),
    [
        pytest.param(3, 32 * MIB, id="large products are not merged"),
        pytest.param(1, 4 * MIB, id="heads of one example are batched as they lie: parts are sliced"),
    ],
)
def test_no_product_is_kept_that_is_not_merged_or_whose_parts_are_sliced(batch: int, part_bytes: float):
    assert found(batch, part_bytes) == []
