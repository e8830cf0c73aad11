"""Indices that are said to count rows do, for what JAX writes of the usual ways to index."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.identity_indices import are_identity_indices
from autopar.compiler.jaxprs.normalize import normalize

ROWS, CLASSES = 4, 6
LOGITS, LABELS = jnp.zeros((ROWS, CLASSES)), jnp.arange(ROWS) % 3
TABLE = np.stack([np.arange(ROWS), np.arange(ROWS)[::-1]], axis=1)


def counted_columns(function, *args):
    """The columns of a gather's indices that count its rows."""
    jaxpr, consts = jc.open_jaxpr(normalize(jax.make_jaxpr(function)(*args)))
    (gather,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "gather")
    producers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    constants = dict(zip(jaxpr.constvars, consts, strict=True))
    indices = gather.invars[1]
    columns = range(len(jp.gather_of(gather).numbers.start_index_map))
    return [c for c in columns if are_identity_indices(indices, 0, c, producers, constants)]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, y: x[jnp.arange(ROWS), y], [0]),
        (lambda x, y: x[jnp.arange(ROWS, dtype=jnp.int16), y], [0]),
        (lambda x, y: x[y, jnp.arange(ROWS)], [1]),
        (lambda x, y: x[jnp.arange(ROWS), jnp.arange(ROWS)], [0, 1]),
        (lambda x, y: x.at[TABLE[:, 0], TABLE[:, 1]].get(wrap_negative_indices=False), [0]),
        (lambda x, y: x[jnp.arange(ROWS)[::-1], y], []),
        (lambda x, y: x[jnp.arange(ROWS) + 1, y], []),
        (lambda x, y: x[y, y], []),
    ],
)
def test_columns_that_count_rows_are_told_apart(function, expected):
    assert counted_columns(function, LOGITS, LABELS) == expected


def test_numbers_along_another_axis_do_not_count_rows():
    def function(x):
        return x[jax.lax.broadcasted_iota(jnp.int32, (ROWS, ROWS), 1), 0]

    assert counted_columns(function, LOGITS) == []


def test_columns_of_a_constant_are_read():
    numbers = jax.lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0, 1), start_index_map=(0, 1))
    for table, expected in ((TABLE, [0]), (TABLE[:, ::-1], [1])):
        assert (
            counted_columns(lambda x, y, at=table: jax.lax.gather(x, at, numbers, (1, 1)), LOGITS, LABELS) == expected
        )
