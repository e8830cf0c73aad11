"""Orders in which products read arrays: parts of merged products, queries, keys and values, and results of kernels."""

import jax
import jax.numpy as jnp
import pytest

from autopar.compiler.memory.liveness import Op
from autopar.compiler.memory.merged_products import KeptProduct, kept_products, transposed_results

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


@pytest.mark.parametrize(
    ("product", "rows", "transposed"),
    [
        pytest.param("ebcf,ebcd->efd", 3, ["g"], id="two dimensions are contracted: the left operand's are outermost"),
        pytest.param("ebcf,ebcd->efd", 1, [], id="of one row one dimension is left, and either may be outermost"),
        pytest.param("ebcf,efd->ebcd", 3, [], id="a left operand goes on with what is not contracted"),
        pytest.param("ebcf,edf->ebcd", 3, [], id="and a right one's sides of one dimension are read either way"),
    ],
)
def test_kernels_transpose_what_products_in_batches_read_the_other_way_round(product: str, rows: int, transposed):
    sizes = {"e": 2, "b": rows, "c": 5, "f": 4, "d": 8}
    left, right = (jnp.zeros([sizes[name] for name in names]) for names in product.split("->")[0].split(","))
    (eqn,) = jax.make_jaxpr(lambda x, y: jnp.einsum(product, x, y))(left, right).jaxpr.eqns[:1]
    shapes = {"g": left.shape, "x": right.shape}
    ops = [Op("fused", ("a",), ("g",)), Op("apart", ("a",), ("x",)), Op("apart", ("g", "x"), ("dw",))]
    assert eqn.primitive.name == "dot_general"
    assert [*transposed_results(ops, [None, None, eqn], shapes.__getitem__)] == transposed
