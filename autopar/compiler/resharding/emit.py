"""Carry out resharding steps on one device's part of an array, inside a `shard_map` over all axes of the mesh.

What a collective over several axes joins or divides, it joins and divides in the order in which the axes are named. A
dimension that they do not divide is padded before it is divided, and cut after it was joined, axis by axis:

    10 rows over (2, 2)    0..9  ->  0..4 | 5..9  ->  0 1 2, 3 4 . | 5 6 7, 8 9 .    and back
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, assert_never

import jax
import jax.numpy as jnp
from jax import lax

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.resharding.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    PadToPartial,
    Permute,
    ReduceScatter,
    ReshardStep,
    Slice,
    ToPartial,
    after,
    exchanges,
)
from autopar.compiler.sharding.layout import Axes, Layout, LogicalMesh, Reach, local_shape, part_size, without_ones


def apply_steps(x: Any, steps: Sequence[ReshardStep], mesh: LogicalMesh, shape: tuple[int, ...], source: Layout) -> Any:
    """The part of `x` after `steps`, to be traced inside of a `shard_map` over `mesh.axis_names`.

    `x` is the part of an array of this shape, in the layout `source`. An array of PRNG keys moves as the words of the
    keys, and has no summands.
    """
    if not steps:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        # The words of a key are dimensions behind those of the array, so no step touches them.
        words = apply_steps(jax.random.key_data(x), steps, mesh, shape, source)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    if x.dtype == jnp.bool_ and any(isinstance(step, AllReduce | ReduceScatter) for step in steps):
        # There is no sum of booleans. As a byte each takes as much memory as before.
        return apply_steps(x.astype(jnp.uint8), steps, mesh, shape, source).astype(jnp.bool_)
    layout = without_ones(source, mesh)
    if 0 in shape:  # XLA has no collectives of nothing
        part = local_shape(shape, functools.reduce(after, steps, layout), mesh)
        return jnp.zeros((*part, *x.shape[len(shape) :]), x.dtype)
    for step in steps:
        layout = after(layout, step)
        x = _apply(x, step, mesh, local_shape(shape, layout, mesh))
    return x


def padded(x: Any, dim: int, counts: Sequence[int]) -> Any:
    """`x` with a dimension padded with zeros so that axes of these sizes split it evenly."""
    size = x.shape[dim]
    if size % math.prod(counts) == 0:
        return x
    before, behind, parts = x.shape[:dim], x.shape[dim + 1 :], []
    for count in counts:
        size = part_size(size, count)
        x = _with_size(x, dim + len(parts), size * count)
        parts.append(count)
        x = x.reshape(*before, *parts, size, *behind)
    return x.reshape(*before, math.prod(parts) * size, *behind)


def cut(x: Any, dim: int, size: int, counts: Sequence[int]) -> Any:
    """`x` of which a dimension was `padded`, with its own size again."""
    if x.shape[dim] == size:
        return x
    before, behind = x.shape[:dim], x.shape[dim + 1 :]
    sizes = list(itertools.accumulate(counts, part_size, initial=size))
    x = x.reshape(*before, *counts, sizes[-1], *behind)
    for level in reversed(range(len(counts))):
        joined = counts[level] * sizes[level + 1]
        x = x.reshape(*before, *counts[:level], joined, *behind)
        x = lax.slice_in_dim(x, 0, sizes[level], axis=dim + level)
    return x


def _with_size(x: Any, dim: int, size: int) -> Any:
    """`x` with zeros behind the end of a dimension."""
    widths = [(0, size - x.shape[d] if d == dim else 0, 0) for d in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), widths)


def _apply(x: Any, step: ReshardStep, mesh: LogicalMesh, later: tuple[int, ...]) -> Any:
    """`x` after a step, which makes the part of an array one of the shape `later`."""
    names, counts = mesh.names(step.axes), [mesh.shape[axis] for axis in step.axes]
    match step:
        case Slice(_, dim):
            size = later[dim]
            return lax.dynamic_slice_in_dim(padded(x, dim, counts), lax.axis_index(names) * size, size, dim)
        case AllGather(_, dim):
            return cut(lax.all_gather(x, names, axis=dim, tiled=True), dim, later[dim], counts)
        case AllToAll(_, source, target):
            x = lax.all_to_all(padded(x, target, counts), names, split_axis=target, concat_axis=source, tiled=True)
            # The copy that is priced. Else XLA has all readers go through memory in the order of the parts.
            x = jc.in_row_major_order(x) if source else x
            return cut(x, source, later[source], counts)
        case Permute():
            return lax.ppermute(x, names, permutation(step, mesh.shape))
        case ReduceScatter(_, dim):
            return lax.psum_scatter(padded(x, dim, counts), names, scatter_dimension=dim, tiled=True)
        case AllReduce():
            in_levels = len(exchanges(step, mesh)) > 1
            return _sum_in_levels(x, step.axes, mesh) if in_levels else lax.psum(x, names)
        case ToPartial():
            return jnp.where(lax.axis_index(names) == 0, x, jnp.zeros_like(x))
        case PadToPartial(axes, dim):
            whole = jnp.zeros((*x.shape[:dim], x.shape[dim] * mesh.size(axes), *x.shape[dim + 1 :]), x.dtype)
            whole = lax.dynamic_update_slice_in_dim(whole, x, lax.axis_index(names) * x.shape[dim], dim)
            return cut(whole, dim, later[dim], counts)
        case _:
            assert_never(step)


def _sum_in_levels(x: Any, axes: Axes, mesh: LogicalMesh) -> Any:
    """The sum along axes: of a part of the elements on each device of a domain, then across, then joined inside."""
    names, count = mesh.names(axes), mesh.reach(axes, "inside")
    inside, across = (groups_of(axes, reach, mesh) for reach in ("inside", "across"))
    flat = padded(x.reshape(-1), 0, [count])
    part = lax.psum_scatter(flat, names, scatter_dimension=0, axis_index_groups=inside, tiled=True)
    part = lax.psum(part, names, axis_index_groups=across)
    whole = lax.all_gather(part, names, axis_index_groups=inside, tiled=True)
    return lax.slice_in_dim(whole, 0, x.size).reshape(x.shape)


@functools.cache
def groups_of(axes: Axes, reach: Reach, mesh: LogicalMesh) -> tuple[tuple[int, ...], ...]:
    """Return which devices along axes exchange with each other, numbered with the last axis fastest."""
    assert mesh.links is not None
    groups = defaultdict[tuple[int, ...], list[int]](list)
    for device, place in enumerate(itertools.product(*(range(mesh.shape[axis]) for axis in axes))):
        split = [divmod(at, mesh.links.inside[axis]) for axis, at in zip(axes, place, strict=True)]
        groups[tuple(domain if reach == "inside" else within for domain, within in split)].append(device)
    return tuple(tuple(group) for group in groups.values())


@functools.cache
def permutation(step: Permute, mesh_shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Pairs (from, to) of the devices along `step.axes`, numbered with the last axis fastest.

    As many devices hold a part as need it. Those that hold what they need keep it.
    """
    axes = step.axes
    holders = defaultdict[tuple[int, ...], list[int]](list)
    needers = defaultdict[tuple[int, ...], list[int]](list)
    for device, place in enumerate(itertools.product(*(range(mesh_shape[axis]) for axis in axes))):
        coordinates = dict(zip(axes, place, strict=True))
        holders[_part(step.source, coordinates, mesh_shape)].append(device)
        needers[_part(step.target, coordinates, mesh_shape)].append(device)
    pairs: list[tuple[int, int]] = []
    for part, have in holders.items():
        need = needers[part]
        stay = set(have) & set(need)
        pairs += [(device, device) for device in stay]
        pairs += zip([d for d in have if d not in stay], [d for d in need if d not in stay], strict=True)
    return tuple(sorted(pairs))


def _part(dims: tuple[Axes, ...], coordinates: dict[int, int], mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return which part of each dimension a device has along `coordinates` only: the other axes do not change."""
    numbers: list[int] = []
    for axes in dims:
        number = 0
        for axis in axes:
            number = number * mesh_shape[axis] + coordinates.get(axis, 0)
        numbers.append(number)
    return tuple(numbers)
