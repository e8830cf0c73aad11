"""Layouts: how they are listed, how large parts are, and how JAX and readers write them."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.compiler.sharding.layout import (
    Layout,
    LogicalMesh,
    all_layouts,
    describe_layout,
    even_layouts,
    fits,
    from_spec,
    local_shape,
    may_have,
    num_shards,
    replicated,
    split_like,
    to_spec,
    used_axes,
)
from autopar.errors import InvalidArgument
from tests.compiler.planned_steps import GRID, LINE

CUBE = LogicalMesh(shape=(2, 2, 2), axis_names=("x", "y", "z"))


@pytest.mark.parametrize(
    ("shape", "mesh", "count"),
    [
        ((), GRID, 1),
        ((16,), LINE, 2),
        ((12,), LINE, 2),  # the second with padding
        ((4,), GRID, 3),  # over both axes parts are no smaller than over one
        ((16, 16), LINE, 3),
        ((16, 16), GRID, 9),
        ((8, 4), GRID, 8),  # not both axes on the second dimension
        ((8, 3), GRID, 8),
        ((2, 2, 2), CUBE, 34),
    ],
    ids=str,
)
def test_layouts_are_as_many_as_ways_to_give_axes_to_dimensions_whose_parts_they_make_smaller(shape, mesh, count):
    layouts = all_layouts(shape, mesh)
    assert len(layouts) == len(set(layouts)) == count
    assert list(layouts) == sorted(layouts)
    assert replicated(len(shape)) in layouts
    assert all(may_have(shape, layout, mesh) and not layout.partial for layout in layouts)
    assert even_layouts(shape, mesh) == tuple(layout for layout in layouts if fits(shape, layout, mesh))


def test_parts_are_as_large_as_the_first_and_count_with_their_padding():
    shape, rows = (12, 50257), Layout(((0, 1), ()))
    assert local_shape(shape, rows, GRID) == (2, 50257) and num_shards(shape, rows, GRID) == 6
    assert local_shape(shape, Layout(((0,), (1,))), GRID) == (6, 12565)
    assert num_shards(shape, Layout(((0,), (1,))), GRID) == pytest.approx(8 * 50257 / 50260)
    assert not fits(shape, rows, GRID) and fits(shape, Layout(((1,), ())), GRID)


@pytest.mark.parametrize("layout", all_layouts((8, 16, 4), GRID), ids=lambda layout: describe_layout(layout, GRID))
def test_specs_mean_to_jax_what_layouts_mean(layout):
    spec, shape = to_spec(layout, GRID), (8, 16, 4)
    assert from_spec(spec, 3, GRID) == layout
    sharding = NamedSharding(Mesh(np.array(jax.devices()).reshape(2, 4), GRID.axis_names), spec)
    assert sharding.shard_shape(shape) == local_shape(shape, layout, GRID)
    assert len({str(index) for index in sharding.devices_indices_map(shape).values()}) == num_shards(
        shape, layout, GRID
    )


@pytest.mark.parametrize(
    ("layout", "spec", "text"),
    [
        (Layout(()), PartitionSpec(), "[]"),
        (Layout(((), ())), PartitionSpec(), "[-, -]"),
        (Layout(((0,), ())), PartitionSpec("x"), "[x, -]"),
        (Layout(((), (0, 1))), PartitionSpec(None, ("x", "y")), "[-, x*y]"),
        (Layout(((1,), (0,))), PartitionSpec("y", "x"), "[y, x]"),
    ],
    ids=str,
)
def test_layouts_are_written(layout, spec, text):
    assert to_spec(layout, GRID) == spec
    assert describe_layout(layout, GRID) == text


def test_an_axis_of_one_device_in_a_spec_splits_nothing():
    mesh = LogicalMesh(shape=(1, 4), axis_names=("x", "y"))
    assert from_spec(PartitionSpec(("x", "y"), "x"), 2, mesh) == Layout(((1,), ()))


def test_partial_sums_are_described_and_have_no_spec():
    layout = Layout(((0,), ()), (1,))
    assert describe_layout(layout, GRID) == "[x, -] + y"
    assert used_axes(layout) == {0}
    with pytest.raises(AssertionError):
        to_spec(layout, GRID)


@pytest.mark.parametrize(
    ("shape", "names"), [((2, 4), ("x",)), ((0,), ("x",)), ((2, 4), ("x", "x"))], ids=["count", "size", "repeated"]
)
def test_a_mesh_needs_a_size_and_a_name_of_its_own_for_every_axis(shape, names):
    with pytest.raises(InvalidArgument):
        LogicalMesh(shape=shape, axis_names=names)


def test_axes_of_a_mesh_go_by_number():
    assert (GRID.num_devices, GRID.size((0, 1)), GRID.size(()), GRID.names((1, 0))) == (8, 8, 1, ("y", "x"))


@pytest.mark.parametrize("mesh_shape", [(2, 4), (2, 2, 2), (8, 1), (3, 2), (6,)])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7, 8, 9, 12, 13, 24, 100])
def test_a_dimension_is_split_like_its_least_equal(size, mesh_shape):
    """Parts of both are the same share of the dimension, along all axes that may split the one or the other."""
    mesh = LogicalMesh(shape=mesh_shape, axis_names=tuple("abc"[: len(mesh_shape)]))

    def shares(size):
        return {layout: num_shards((size,), layout, mesh) for layout in all_layouts((size,), mesh)}

    least = split_like(size, mesh_shape)
    assert shares(least) == shares(size) and split_like(least, mesh_shape) == least
    if all(fits((size,), layout, mesh) for layout in shares(size)):
        assert least == next(n for n in range(1, size + 1) if shares(n) == shares(size))
