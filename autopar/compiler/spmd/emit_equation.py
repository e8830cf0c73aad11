"""Evaluate one equation on one device's parts of its operands, inside a `shard_map` over the whole mesh.

    equation, Strategy, parts of the operands  ->  parts of the results

Most primitives do on parts what they do on whole arrays, once their shape parameters are those of the parts. Those that
depend on positions (iota, gather, scatter, random bits) are shifted to where the part is. Partial sums stay partial; a
maximum over a split dimension is combined at once. Padding may hold anything: it is masked before it is summed, or
before its maximum is taken.

Of an array that is split along the indexed dimension, every device holds some of the rows. It shifts the indices to its
own numbering and leaves out what is not its own:

    gather    rows of other devices count as zero, so that the parts are summands of the result
    scatter   updates of other devices' rows are dropped; where the updates are split, the results are summands, and the
              operand is counted on the first of these devices only
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.primitives import COMPRESSED_SUM, CONSTRAINTS, VISIBLE
from autopar.compiler.resharding.emit import padded
from autopar.compiler.sharding.layout import Axes, Layout, LogicalMesh, local_shape, part_size
from autopar.compiler.sharding.strategies import Strategy, masked_dims
from autopar.compiler.spmd.compressed_sums import compressed_sum

_lax: Any = lax
_jnp: Any = jnp


def evaluate_locally(eqn: jc.JaxprEqn, args: Sequence[Any], strategy: Strategy, mesh: LogicalMesh) -> list[Any]:
    """The parts of the results; `args` are parts laid out as `strategy.operands` says."""
    with jc.under_scope_of(eqn):
        args = _masked(eqn, args, strategy, mesh)
        match eqn.primitive.name:
            case name if name in CONSTRAINTS:
                return [args[0]]
            case "iota":
                return [_iota(eqn, strategy, mesh)]
            case "random_bits":
                return [_random_bits(eqn, args, strategy, mesh)]
            case "gather":
                return [gather_locally(eqn, args, strategy, mesh)]
            case name if name.startswith("scatter"):
                return [scatter_locally(eqn, args, strategy, mesh)]
            case "ragged_dot_general":
                return jc.bind_equation(eqn, [*args[:2], _own_rows(eqn, args[2], strategy, mesh)])
            case "fft":  # XLA transforms rows, and on CPUs lets a collective beside it choose another order
                return [jc.in_row_major_order(x) for x in jc.bind_equation(eqn, [jc.in_row_major_order(args[0])])]
            case name if name == COMPRESSED_SUM and strategy.combined:
                return [compressed_sum(args[0], strategy, mesh)]
            case name if name in VISIBLE:
                return _on_one_device(eqn, args, mesh)
            case _:
                results = jc.bind_equation(eqn, args, _local_params(eqn, strategy, mesh))
    if strategy.combined:
        combine = {"reduce_max": lax.pmax, "reduce_min": lax.pmin}[eqn.primitive.name]
        results = [combine(results[0], mesh.names(strategy.combined))]
    return results


def _masked(eqn: jc.JaxprEqn, args: Sequence[Any], strategy: Strategy, mesh: LogicalMesh) -> list[Any]:
    """The operands of an equation, the padding of what it reduces replaced by what changes no result."""
    masked = list(args)
    for place, dims in enumerate(masked_dims(eqn, strategy, mesh)):
        aval: Any = eqn.invars[place].aval
        for dim in dims:
            x = masked[place]
            _, held = part_held(aval.shape[dim], strategy.operands[place].dims[dim], mesh)
            inside = _lax.broadcasted_iota(_jnp.int32, x.shape, dim) < held
            masked[place] = _jnp.where(inside, x, _neutral(eqn.primitive.name, x.dtype))
    return masked


def _neutral(name: str, dtype: Any) -> Any:
    """Return the value that changes no sum, or no maximum or minimum."""
    if name not in ("reduce_max", "reduce_min"):
        return _jnp.zeros((), dtype)
    sign = -1 if name == "reduce_max" else 1
    if _jnp.issubdtype(dtype, _jnp.floating):
        return _jnp.asarray(sign * _jnp.inf, dtype)
    limits = _jnp.iinfo(dtype)
    return _jnp.asarray(limits.min if sign < 0 else limits.max, dtype)


def _local_params(eqn: jc.JaxprEqn, strategy: Strategy, mesh: LogicalMesh) -> dict[str, Any]:
    """The parameters that are others for the parts: their shapes, and no sharding."""
    params: dict[str, Any] = dict(jp.without_shardings(eqn))
    match eqn.primitive.name:
        case "broadcast_in_dim":
            params["shape"] = _result_shape(eqn, strategy, mesh)
        case "tile":
            aval: Any = eqn.invars[0].aval
            whole, parts = local_shape(aval.shape, strategy.operands[0], mesh), _result_shape(eqn, strategy, mesh)
            params["reps"] = tuple(part // size if size else 1 for part, size in zip(parts, whole, strict=True))
        case "reshape":
            params["new_sizes"] = _result_shape(eqn, strategy, mesh)
        case "dynamic_slice":
            params["slice_sizes"] = _result_shape(eqn, strategy, mesh)
        case "slice":
            (dims, _), shape = strategy.results[0], _result_shape(eqn, strategy, mesh)
            # A split dimension is taken whole: only such slices can be split.
            params["limit_indices"] = tuple(
                size if axes else limit for axes, size, limit in zip(dims, shape, jp.slice_of(eqn).limits, strict=True)
            )
        case "conv_general_dilated":
            conv = jp.convolution_of(eqn)
            rows, features = (strategy.operands[0].dims[d] for d in conv.lhs_spec[:2])
            if conv.feature_groups > 1:
                params["feature_group_count"] = part_size(conv.feature_groups, mesh.size(features))
            if conv.batch_groups > 1:
                params["batch_group_count"] = part_size(conv.batch_groups, mesh.size(rows))
        case _:
            pass
    return params


def _result_shape(eqn: jc.JaxprEqn, strategy: Strategy, mesh: LogicalMesh) -> tuple[int, ...]:
    aval: Any = eqn.outvars[0].aval
    return local_shape(aval.shape, strategy.results[0], mesh)


def _iota(eqn: jc.JaxprEqn, strategy: Strategy, mesh: LogicalMesh) -> Any:
    shape, (dimension,) = _result_shape(eqn, strategy, mesh), jp.dimensions_of(eqn)
    aval: Any = eqn.outvars[0].aval
    axes = strategy.results[0].dims[dimension]
    if not axes:
        return _lax.broadcasted_iota(aval.dtype, shape, dimension)
    # Counted as integers: a number of few bits would be rounded before it is shifted.
    start, _ = part_held(aval.shape[dimension], axes, mesh)
    counted = _lax.broadcasted_iota(_jnp.int32, shape, dimension) + start
    return _lax.convert_element_type(counted, aval.dtype)


def _own_rows(eqn: jc.JaxprEqn, sizes: Any, strategy: Strategy, mesh: LogicalMesh) -> Any:
    """The number of rows of each group that are this device's: groups follow one another along the ragged dimension."""
    aval: Any = eqn.invars[0].aval
    split = [d for d in jp.ragged_dimensions(eqn).ragged if strategy.operands[0].dims[d]]
    for dimension in split:
        start, held = part_held(aval.shape[dimension], strategy.operands[0].dims[dimension], mesh)
        ends = _jnp.cumsum(sizes)
        sizes = _jnp.clip(_jnp.minimum(ends, start + held) - _jnp.maximum(ends - sizes, start), 0).astype(sizes.dtype)
    return sizes


def _random_bits(eqn: jc.JaxprEqn, args: Sequence[Any], strategy: Strategy, mesh: LogicalMesh) -> Any:
    """This device's part of the bits that one device would draw: counters are those of the whole array."""
    layout = strategy.results[0]
    aval: Any = eqn.outvars[0].aval
    key: Any = args[0]
    drawn_by_counter = jax.config.jax_threefry_partitionable and key.ndim == 0 and aval.size < 2**32  # type: ignore[reportAttributeAccessIssue]
    if not any(layout.dims):
        return jc.bind_equation(eqn, args)[0]
    if not drawn_by_counter or not jc.is_threefry_key(key):
        return take_part(jc.bind_equation(eqn, args)[0], layout, mesh)
    shape = local_shape(aval.shape, layout, mesh)
    counter: Any = _jnp.zeros(shape, _jnp.uint32)
    stride = 1
    for dimension in reversed(range(len(shape))):
        start, _ = part_held(aval.shape[dimension], layout.dims[dimension], mesh)
        index = _lax.broadcasted_iota(_jnp.uint32, shape, dimension) + _jnp.asarray(start).astype(_jnp.uint32)
        counter = counter + index * _jnp.uint32(stride)
        stride *= aval.shape[dimension]
    return jc.threefry_bits(key, counter, 8 * aval.dtype.itemsize)


def take_part(whole: Any, layout: Layout, mesh: LogicalMesh) -> Any:
    """This device's part of an array that every device holds."""
    shape = local_shape(whole.shape, layout, mesh)
    for dim, axes in enumerate(layout.dims):
        whole = padded(whole, dim, [mesh.shape[axis] for axis in axes])
    starts = [_jnp.int32(position(axes, mesh) * size) for axes, size in zip(layout.dims, shape, strict=True)]
    return _lax.dynamic_slice(whole, starts, shape)


def _on_one_device(eqn: jc.JaxprEqn, args: Sequence[Any], mesh: LogicalMesh) -> list[Any]:
    """Evaluate a visible effect on one device only; its result is a sum to which the other devices add nothing."""
    everything = tuple(range(len(mesh.shape)))

    def call(*values: Any) -> list[Any]:
        return jc.bind_equation(eqn, values)

    def nothing(*_: Any) -> list[Any]:
        avals: list[Any] = [v.aval for v in eqn.outvars]
        return [_jnp.zeros(aval.shape, aval.dtype) for aval in avals]

    return list(lax.cond(position(everything, mesh) == 0, call, nothing, *args))


# --- gather and scatter -----------------------------------------------------------------------------------------


def position(axes: Axes, mesh: LogicalMesh) -> Any:
    """The number of this device's part along `axes`, the first of them major."""
    index: Any = 0
    for axis in axes:
        index = index * mesh.shape[axis] + lax.axis_index(mesh.axis_names[axis])
    return index


def part_held(size: int, axes: Axes, mesh: LogicalMesh) -> tuple[Any, Any]:
    """Return where this device's part of a dimension begins, and how many places of it are no padding."""
    counts = [mesh.shape[axis] for axis in axes]
    if size % math.prod(counts) == 0:
        part = size // math.prod(counts)
        return position(axes, mesh) * part, part
    start, held = 0, size
    for axis, count in zip(axes, counts, strict=True):
        size = part_size(size, count)
        before: Any = lax.axis_index(mesh.axis_names[axis]) * size
        start, held = start + before, jnp.clip(held - before, 0, size)
    return start, held


def gather_locally(eqn: jc.JaxprEqn, args: Sequence[Any], strategy: Strategy, mesh: LogicalMesh) -> Any:
    """This device's part, or summand, of the gathered slices."""
    operand, indices = args
    numbers, slice_sizes, mode, _ = jp.gather_of(eqn)
    dims = strategy.operands[0].dims
    aval: Any = eqn.invars[0].aval
    indexed = {d: p for p, d in enumerate(numbers.start_index_map) if dims[d] and slice_sizes[d] == 1}
    sizes = tuple(operand.shape[d] if dims[d] and size > 1 else size for d, size in enumerate(slice_sizes))
    if not indexed:
        return jc.bind_equation(eqn, args, {"slice_sizes": sizes})[0]
    indices = _wide(indices)
    last = [aval.shape[d] - slice_sizes[d] for d in numbers.start_index_map]
    outside = _is_outside(indices, last)
    fills = mode == _lax.GatherScatterMode.FILL_OR_DROP
    if not fills:
        # What is said to be inside is clipped all the same, as XLA does.
        indices = _clipped(indices, last)
    mine: Any = ~outside if fills else True
    for dimension, place in indexed.items():
        start, held = part_held(aval.shape[dimension], dims[dimension], mesh)
        own = indices[..., place].astype(_jnp.int32) - start
        mine = mine & (own >= 0) & (own < held)
        indices = indices.at[..., place].set(own.astype(indices.dtype))
    inside = {"slice_sizes": sizes, "mode": _lax.GatherScatterMode.CLIP}
    gathered = jc.bind_equation(eqn, (operand, indices), inside)[0]
    batch = [d for d in range(gathered.ndim) if d not in numbers.offset_dims]

    def along_rows(mask: Any) -> Any:
        return _lax.broadcast_in_dim(mask, gathered.shape, batch)

    result = _jnp.where(along_rows(mine), gathered, _jnp.zeros((), gathered.dtype))
    if fills:
        axes = tuple(axis for dimension in indexed for axis in dims[dimension])
        first = position(axes, mesh) == 0
        result = _jnp.where(along_rows(outside & first), _fill_value(eqn, gathered.dtype), result)
    return result


def scatter_locally(eqn: jc.JaxprEqn, args: Sequence[Any], strategy: Strategy, mesh: LogicalMesh) -> Any:
    """This device's part, or summand, of the operand with its updates."""
    operand, indices, updates = args
    numbers, mode, _ = jp.scatter_of(eqn)
    dims = strategy.operands[0].dims
    aval: Any = eqn.invars[0].aval
    windows = _window_dimensions(numbers, len(dims))
    indexed = {d: p for p, d in enumerate(numbers.scatter_dims_to_operand_dims) if dims[d] and d not in windows}
    changes: dict[str, Any] = {}
    indices = _wide(indices)
    if indexed and mode == _lax.GatherScatterMode.CLIP:
        sizes = _window_sizes(eqn, len(dims))
        indices = _clipped(indices, [aval.shape[d] - sizes[d] for d in numbers.scatter_dims_to_operand_dims])
    for dimension, place in indexed.items():
        start, held = part_held(aval.shape[dimension], dims[dimension], mesh)
        own = indices[..., place].astype(_jnp.int32) - start
        # Negative indices are out of range here, not counted from the end.
        own = _jnp.where((own >= 0) & (own < held), own, operand.shape[dimension])
        indices = indices.at[..., place].set(own.astype(indices.dtype))
    if indexed:
        changes = {"mode": _lax.GatherScatterMode.FILL_OR_DROP, "indices_are_sorted": False}
    summed = [axis for axis in strategy.results[0].partial if axis not in strategy.operands[0].partial]
    if summed:
        first = position(tuple(summed), mesh) == 0
        operand = _jnp.where(first, operand, _jnp.zeros((), operand.dtype))
    if masked_dims(eqn, strategy, mesh)[1]:
        # Behind the end of the updates stand others, for whatever places.
        changes |= {"unique_indices": False, "indices_are_sorted": False}
    return jc.bind_equation(eqn, (operand, indices, updates), changes)[0]


def _window_dimensions(numbers: Any, rank: int) -> list[int]:
    """The operand's dimensions that an update covers as a window."""
    inserted = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    return [d for d in range(rank) if d not in inserted]


def _window_sizes(eqn: jc.JaxprEqn, rank: int) -> list[int]:
    """Return how much of each dimension of the whole operand one update covers."""
    numbers = jp.scatter_of(eqn).numbers
    aval: Any = eqn.invars[2].aval
    named = dict(zip(_window_dimensions(numbers, rank), numbers.update_window_dims, strict=True))
    return [aval.shape[named[d]] if d in named else 1 for d in range(rank)]


def _wide(indices: Any) -> Any:
    """Indices in which any place of an array can be written, and the one behind its end."""
    return indices.astype(_jnp.int32) if indices.dtype.itemsize < 4 else indices


def _is_outside(indices: Any, last: Sequence[int]) -> Any:
    """Return whether an index starts before the array, or after the last place where its slice is inside."""
    outside: Any = False
    for place, greatest in enumerate(last):
        outside = outside | (indices[..., place] < 0) | (indices[..., place] > greatest)
    return outside


def _clipped(indices: Any, last: Sequence[int]) -> Any:
    return _jnp.stack([_jnp.clip(indices[..., place], 0, greatest) for place, greatest in enumerate(last)], -1)


def _fill_value(eqn: jc.JaxprEqn, dtype: Any) -> Any:
    """Return the value that a gather puts for an index out of range, as `jax.lax.gather` says."""
    value = jp.gather_of(eqn).fill_value
    if value is not None:
        return _jnp.asarray(value, dtype)
    if _jnp.issubdtype(dtype, _jnp.inexact):
        return _jnp.asarray(_jnp.nan, dtype)
    if _jnp.issubdtype(dtype, _jnp.signedinteger):
        return _jnp.asarray(_jnp.iinfo(dtype).min, dtype)
    return _jnp.asarray(_jnp.iinfo(dtype).max if dtype != _jnp.bool_ else True, dtype)
