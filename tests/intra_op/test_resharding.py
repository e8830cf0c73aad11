"""Resharding steps: exact on eight devices for every pair of layouts, and moving what they are said to move."""

import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from autopar.compiler.intra_op.hlo_collectives import compiled_collectives
from autopar.compiler.intra_op.layout import Layout, LogicalMesh, all_layouts, local_shape, used_axes
from autopar.compiler.intra_op.resharding import (
    apply_steps,
    reshard_steps,
    step_collectives,
)


def mesh_of(*shape):
    return LogicalMesh(shape=shape, axis_names=("x", "y", "z")[: len(shape)])


def with_partial_sums(shape, mesh):
    """Every layout, and every layout with sums over some of the axes that do not split it."""
    for layout in all_layouts(shape, mesh):
        free = [axis for axis in range(len(mesh.shape)) if axis not in used_axes(layout)]
        for length in range(len(free) + 1):
            for partial in itertools.combinations(free, length):
                yield Layout(layout.dims, partial)


# --- the oracle: what each device holds, by NumPy -----------------------------------------------------------


def parts_of(array, layout, mesh):
    """What each device holds of an array without partial sums: [*mesh, *part]."""
    part = local_shape(array.shape, layout, mesh)
    held = np.empty((*mesh.shape, *part), array.dtype)
    for device in np.ndindex(*mesh.shape):
        where = []
        for axes, size in zip(layout.dims, part, strict=True):
            number = np.ravel_multi_index([device[a] for a in axes], [mesh.shape[a] for a in axes]) if axes else 0
            where.append(slice(number * size, (number + 1) * size))
        held[device] = array[tuple(where)]
    return held


def summands_of(array, layout, mesh, rng):
    """What each device holds of an array that is a sum over `layout.partial`: [*mesh, *part]."""
    counts = [mesh.shape[axis] for axis in layout.partial]
    summands = rng.integers(-50, 50, (*counts, *array.shape)).astype(array.dtype)
    summands[(-1,) * len(counts)] += array - summands.sum(tuple(range(len(counts))))
    held = np.empty((*mesh.shape, *local_shape(array.shape, layout, mesh)), array.dtype)
    for index in np.ndindex(*counts):
        here = [slice(None)] * len(mesh.shape)
        for axis, position in zip(layout.partial, index, strict=True):
            here[axis] = slice(position, position + 1)
        parts = parts_of(summands[index], layout, mesh)
        held[tuple(here)] = parts[tuple(here)]
    return held


def run_on_devices(run, arrays, mesh):
    """The compiled `run` of every device's part of each array ([*mesh, *part]), and its results, stacked the same."""
    devices = np.array(jax.devices()[: mesh.num_devices]).reshape(mesh.shape)
    device_mesh = Mesh(devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.shape))
    spec, axes = PartitionSpec(*mesh.axis_names), tuple(range(len(mesh.shape)))

    def on_one_device(*parts):
        return [jnp.expand_dims(result, axes) for result in run(*[jnp.squeeze(part, axes) for part in parts])]

    mapped = jax.shard_map(on_one_device, mesh=device_mesh, in_specs=spec, out_specs=spec, check_vma=False)
    compiled = jax.jit(mapped).lower(*arrays).compile()
    arrays = [jax.device_put(array, jax.sharding.NamedSharding(device_mesh, spec)) for array in arrays]
    return compiled, [np.asarray(result) for result in compiled(*arrays)]


def check_exact(array, pairs, mesh):
    """Reshard `array` between all pairs of layouts in one program; the program."""
    rng = np.random.default_rng(0)
    arrays = [summands_of(array, source, mesh, rng) for source, _ in pairs]

    def run(*parts):
        programs = [reshard_steps(source, target, array.shape, mesh) for source, target in pairs]
        return [apply_steps(part, steps, mesh) for part, steps in zip(parts, programs, strict=True)]

    compiled, results = run_on_devices(run, arrays, mesh)
    for (source, target), result in zip(pairs, results, strict=True):
        expected = parts_of(array, Layout(target.dims), mesh)
        total = np.broadcast_to(result.sum(target.partial, keepdims=True), expected.shape)
        np.testing.assert_array_equal(total, expected, err_msg=f"{source} -> {target}")
    return compiled


def check_moves_as_planned(compiled, pairs, shape, mesh):
    """Bytes by kind and number of devices: those of the compiled program are those of the steps."""
    planned, found = Counter(), Counter()
    for source, target in pairs:
        steps = reshard_steps(source, target, shape, mesh)
        for c in step_collectives(steps, source, shape, 4, mesh):
            # A permutation is compiled to cycles of any length, not to groups.
            size = 0 if c.kind == "collective-permute" else mesh.size(c.axes)
            planned[c.kind, size] += c.nbytes
    for c in compiled_collectives(compiled.as_text()):
        found[c.kind, 0 if c.kind == "collective-permute" else c.group_size] += c.nbytes
    assert found == planned


def numbered(shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize(
    ("shape", "mesh"),
    [
        pytest.param((16, 8), mesh_of(8), id="8"),
        pytest.param((8, 3, 1, 16), mesh_of(8), id="8, with dimensions that do not divide"),
        pytest.param((), mesh_of(2, 4), id="2x4, a scalar"),
        pytest.param((8,), mesh_of(2, 4), id="2x4, a vector"),
        pytest.param((8, 16), mesh_of(2, 4), id="2x4, a matrix"),
        pytest.param((8, 4), mesh_of(2, 4), id="2x4, where not every dimension divides by 8"),
        pytest.param((6, 12), mesh_of(2, 3), id="2x3"),
        pytest.param((8,), mesh_of(2, 1, 4), id="2x1x4, a vector"),
        pytest.param((8,), mesh_of(2, 2, 2), id="2x2x2, a vector"),
    ],
)
def test_every_pair_of_layouts_is_exact_and_moves_what_is_planned(shape, mesh):
    layouts = list(with_partial_sums(shape, mesh))
    pairs = list(itertools.product(layouts, layouts))
    compiled = check_exact(numbered(shape), pairs, mesh)
    check_moves_as_planned(compiled, pairs, shape, mesh)
