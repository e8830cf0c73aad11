"""Add up summands that devices send to each other as codes of 8 bits, inside a `shard_map` over all axes of the mesh.

    x = parts 0 .. n-1   ->   device i gets part i of every x, and adds them up in float32   ->   all get all sums

Values are encoded once on each way, with the sender's own scales; codes are never added. The result is one part where
every device keeps its own, else the whole, equal on all devices to the bit. `costs.own_collectives` lists the
collectives that are made here.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.compiler.resharding.emit import groups_of, padded
from autopar.compiler.sharding.layout import Axes, LogicalMesh, used_axes
from autopar.compiler.sharding.scaled_blocks import decode, encode
from autopar.compiler.sharding.strategies import Strategy

Groups = tuple[tuple[int, ...], ...]
"""The devices that exchange with each other, in groups; None for all along the axes."""


def compressed_sum(x: Any, strategy: Strategy, mesh: LogicalMesh) -> Any:
    """Return this device's part of the sum of all `x` along `strategy.combined`, in the type of `x`."""
    axes = strategy.combined
    before, after = strategy.operands[0], strategy.results[0]
    if not used_axes(after).isdisjoint(axes):
        (dim,) = (d for d in range(x.ndim) if before.dims[d] != after.dims[d])
        return _own_part(x, axes, dim, mesh).astype(x.dtype)
    flat = x.astype(jnp.float32).reshape(-1)
    whole = _in_levels(flat, axes, mesh) if mesh.sums_in_levels(axes) else _in_one_level(flat, axes, mesh)
    return lax.slice_in_dim(whole, 0, x.size).reshape(x.shape).astype(x.dtype)


def _own_part(x: Any, axes: Axes, dim: int, mesh: LogicalMesh) -> Any:
    """The sum of this device's part of a dimension."""
    count, names = mesh.size(axes), mesh.names(axes)
    shape = (*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])
    parts = jnp.moveaxis(x.reshape(shape), dim, 0)
    return _exchanged(parts.reshape(count, -1), names, None).reshape(parts.shape[1:])


def _in_one_level(flat: Any, axes: Axes, mesh: LogicalMesh) -> Any:
    count, names = mesh.size(axes), mesh.names(axes)
    parts = padded(flat, 0, [count]).reshape(count, -1)
    part = _exchanged(parts, names, None)
    encoded = lax.all_gather(encode(part[None]), names, axis=0, tiled=True)
    return decode(encoded, part.size).reshape(-1)


def _in_levels(flat: Any, axes: Axes, mesh: LogicalMesh) -> Any:
    names, inside, across = mesh.names(axes), mesh.reach(axes, "inside"), mesh.reach(axes, "across")
    within, between = (groups_of(axes, reach, mesh) for reach in ("inside", "across"))
    share = lax.psum_scatter(
        padded(flat, 0, [inside]), names, scatter_dimension=0, axis_index_groups=within, tiled=True
    )
    part = _exchanged(padded(share, 0, [across]).reshape(across, -1), names, between)
    encoded = lax.all_gather(encode(part[None]), names, axis=0, tiled=True, axis_index_groups=between)
    encoded = lax.all_gather(encoded, names, axis=0, tiled=True, axis_index_groups=within)
    shares = decode(encoded, part.size).reshape(inside, -1)
    return shares[:, : math.prod(share.shape)].reshape(-1)


def _exchanged(parts: Any, names: tuple[str, ...], groups: Groups | None) -> Any:
    """The sum of all devices' parts with this device's number, in float32."""
    encoded = lax.all_to_all(encode(parts), names, split_axis=0, concat_axis=0, axis_index_groups=groups, tiled=True)
    return decode(encoded, parts.shape[1]).sum(axis=0)
