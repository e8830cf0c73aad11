"""Carry out resharding steps on one device's part of an array, inside a `shard_map` over all axes of the mesh.

What a collective over several axes joins or divides, it joins and divides in the order in which the axes are named.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, assert_never

import jax
import jax.numpy as jnp
from jax import lax

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
)
from autopar.compiler.sharding.layout import Axes, LogicalMesh


def apply_steps(x: Any, steps: Sequence[ReshardStep], mesh: LogicalMesh) -> Any:
    """The part of `x` after `steps`, to be traced inside of a `shard_map` over `mesh.axis_names`.

    An array of PRNG keys moves as the words of the keys, and has no summands.
    """
    if not steps:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        # The words of a key are dimensions behind those of the array, so no step touches them.
        words = apply_steps(jax.random.key_data(x), steps, mesh)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    if x.dtype == jnp.bool_ and any(isinstance(step, AllReduce | ReduceScatter) for step in steps):
        # There is no sum of booleans. As a byte each takes as much memory as before.
        return apply_steps(x.astype(jnp.uint8), steps, mesh).astype(jnp.bool_)
    for step in steps:
        x = _apply(x, step, mesh)
    return x


def _apply(x: Any, step: ReshardStep, mesh: LogicalMesh) -> Any:
    names = mesh.names(step.axes)
    match step:
        case Slice(axes, dim):
            size = x.shape[dim] // mesh.size(axes)
            return lax.dynamic_slice_in_dim(x, lax.axis_index(names) * size, size, dim)
        case AllGather(_, dim):
            return lax.all_gather(x, names, axis=dim, tiled=True)
        case AllToAll(_, source, target):
            return lax.all_to_all(x, names, split_axis=target, concat_axis=source, tiled=True)
        case Permute():
            return lax.ppermute(x, names, permutation(step, mesh.shape))
        case ReduceScatter(_, dim):
            return lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True)
        case AllReduce():
            return lax.psum(x, names)
        case ToPartial():
            return jnp.where(lax.axis_index(names) == 0, x, jnp.zeros_like(x))
        case PadToPartial(axes, dim):
            whole = jnp.zeros((*x.shape[:dim], x.shape[dim] * mesh.size(axes), *x.shape[dim + 1 :]), x.dtype)
            return lax.dynamic_update_slice_in_dim(whole, x, lax.axis_index(names) * x.shape[dim], dim)
        case _:
            assert_never(step)


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
