"""Gather and scatter on split arrays: each device looks at its own rows, and sends nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from autopar.compiler.analysis.compiled_collectives import compiled_collectives
from autopar.compiler.sharding.layout import Layout, replicated
from autopar.compiler.sharding.strategies import Strategy
from autopar.compiler.spmd.emit_equation import gather_locally, position, scatter_locally
from tests.compiler.equations import equation, put, real, take
from tests.compiler.planned_steps import GRID

TABLE, ROWS, UPDATES = real(16, 4), jnp.asarray([0, 1, 2, 15, 16, -1, 3, 3]), real(8, 4)
SPLIT, WHOLE = Layout(((0, 1), ())), replicated(2)


def on_devices(run, specs, *args):
    """Return the devices' results of their parts, in the order of the mesh, and the collectives of the program."""
    mesh = Mesh(np.array(jax.devices()).reshape(GRID.shape), GRID.axis_names, (AxisType.Auto,) * 2)
    every = PartitionSpec(GRID.axis_names)

    def on_one(*parts):
        return run(*parts)[None]

    mapped = jax.shard_map(on_one, mesh=mesh, in_specs=specs, out_specs=every, check_vma=False)
    compiled = jax.jit(mapped).lower(*args).compile()
    return np.asarray(jax.jit(mapped)(*args)), compiled_collectives(compiled.as_text())


@pytest.mark.parametrize(
    ("axes", "expected"),
    [((), [0] * 8), ((0,), [0] * 4 + [1] * 4), ((0, 1), list(range(8))), ((1, 0), [0, 2, 4, 6, 1, 3, 5, 7])],
    ids=str,
)
def test_positions_count_with_the_first_axis_as_the_major_one(axes, expected):
    found, _ = on_devices(lambda: jnp.asarray(position(axes, GRID)), (), *())
    assert list(found) == expected


@pytest.mark.parametrize("mode", ["clip", "fill", "promise_in_bounds"])
def test_every_row_comes_from_the_one_device_that_has_it(mode):
    eqn, operands = equation("gather", take(mode), (TABLE, ROWS))
    strategy = Strategy((SPLIT, WHOLE), (Layout(((), ()), (0, 1)),))
    specs = (PartitionSpec(GRID.axis_names), PartitionSpec())
    found, sent = on_devices(lambda *parts: gather_locally(eqn, parts, strategy, GRID), specs, *operands)
    expected = np.asarray(take(mode)(TABLE, ROWS))
    np.testing.assert_array_equal(found.sum(0), expected)
    # Rows of others count as zero, so that summands are exact.
    assert (((found != 0).any(2)).sum(0) == 1).all()
    assert sent == ()


def test_updates_of_rows_that_others_have_are_dropped():
    eqn, operands = equation("scatter-add", put("add", "drop"), (TABLE, ROWS, UPDATES))
    strategy = Strategy((SPLIT, WHOLE, WHOLE), (SPLIT,))
    specs = (PartitionSpec(GRID.axis_names), PartitionSpec(), PartitionSpec())
    found, sent = on_devices(lambda *parts: scatter_locally(eqn, parts, strategy, GRID), specs, *operands)
    expected = put("add", "drop")(TABLE, ROWS, UPDATES)
    np.testing.assert_allclose(found.reshape(16, 4), expected, rtol=1e-6)
    assert sent == ()


def test_where_updates_are_split_one_device_counts_the_array():
    eqn, operands = equation("scatter-add", put("add", "drop"), (TABLE, ROWS, UPDATES))
    rows = Layout(((0, 1), ()))
    strategy = Strategy((WHOLE, rows, rows), (Layout(((), ()), (0, 1)),))
    split = PartitionSpec(GRID.axis_names)
    found, sent = on_devices(
        lambda *parts: scatter_locally(eqn, parts, strategy, GRID), (PartitionSpec(), split, split), *operands
    )
    np.testing.assert_allclose(found.sum(0), put("add", "drop")(TABLE, ROWS, UPDATES), rtol=1e-5)
    assert (found[1:] == 0).mean() > 0.8
    assert sent == ()
