"""Evaluate one equation on one device's parts of its operands, inside a `shard_map` over the whole mesh.

Most primitives do on parts what they do on whole arrays, once their shape parameters are those of the parts. What
looks at positions (iota, gather, scatter, random bits) is shifted to where the part is. Partial sums stay partial;
a maximum over a split dimension is combined at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.compiler.intra_op.local_indexing import gather_locally, position, scatter_locally
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.sharding.layout import Layout, LogicalMesh, local_shape
from autopar.compiler.sharding.strategies import RUN_ONCE, Strategy

_lax: Any = lax
_jnp: Any = jnp


def evaluate_locally(eqn: jc.JaxprEqn, args: Sequence[Any], strategy: Strategy, mesh: LogicalMesh) -> list[Any]:
    """The parts of the results; `args` are parts laid out as `strategy.operands` says."""
    with jc.under_scope_of(eqn):
        match eqn.primitive.name:
            case "sharding_constraint" | "layout_constraint" | "reshard":
                return [args[0]]
            case "iota":
                return [_iota(eqn, strategy, mesh)]
            case "random_bits":
                return [_random_bits(eqn, args, strategy, mesh)]
            case "gather":
                return [gather_locally(eqn, args, strategy, mesh)]
            case name if name.startswith("scatter"):
                return [scatter_locally(eqn, args, strategy, mesh)]
            case name if name in RUN_ONCE:
                return _on_one_device(eqn, args, mesh)
            case _:
                results = jc.bind_equation(eqn, args, _local_params(eqn, strategy, mesh))
    if strategy.combined:
        combine = {"reduce_max": lax.pmax, "reduce_min": lax.pmin}[eqn.primitive.name]
        results = [combine(results[0], mesh.names(strategy.combined))]
    return results


def _local_params(eqn: jc.JaxprEqn, strategy: Strategy, mesh: LogicalMesh) -> dict[str, Any]:
    """The equation's parameters for the parts: their shapes, and no sharding, which only whole arrays have."""
    params = dict(eqn.params)
    params |= {key: None for key in ("sharding", "out_sharding") if key in params}
    match eqn.primitive.name:
        case "broadcast_in_dim":
            params["shape"] = _result_shape(eqn, strategy, mesh)
        case "reshape":
            params["new_sizes"] = _result_shape(eqn, strategy, mesh)
        case "dynamic_slice":
            params["slice_sizes"] = _result_shape(eqn, strategy, mesh)
        case "slice":
            (dims, _), shape = strategy.results[0], _result_shape(eqn, strategy, mesh)
            limits = params["limit_indices"]
            # A split dimension is taken whole: only such slices can be split.
            params["limit_indices"] = tuple(
                size if axes else limit for axes, size, limit in zip(dims, shape, limits, strict=True)
            )
        case "conv_general_dilated":
            numbers: Any = params["dimension_numbers"]
            rows, features = (strategy.operands[0].dims[d] for d in numbers.lhs_spec[:2])
            if params["feature_group_count"] > 1:
                params["feature_group_count"] //= mesh.size(features)
            if params["batch_group_count"] > 1:
                params["batch_group_count"] //= mesh.size(rows)
        case _:
            pass
    return params


def _result_shape(eqn: jc.JaxprEqn, strategy: Strategy, mesh: LogicalMesh) -> tuple[int, ...]:
    aval: Any = eqn.outvars[0].aval
    return local_shape(aval.shape, strategy.results[0], mesh)


def _iota(eqn: jc.JaxprEqn, strategy: Strategy, mesh: LogicalMesh) -> Any:
    shape, dimension = _result_shape(eqn, strategy, mesh), eqn.params["dimension"]
    axes = strategy.results[0].dims[dimension]
    if not axes:
        return _lax.broadcasted_iota(eqn.params["dtype"], shape, dimension)
    # Counted as integers: a number of few bits would be rounded before it is shifted.
    counted = _lax.broadcasted_iota(_jnp.int32, shape, dimension) + position(axes, mesh) * shape[dimension]
    return _lax.convert_element_type(counted, eqn.params["dtype"])


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
        start = position(layout.dims[dimension], mesh) * shape[dimension]
        index = _lax.broadcasted_iota(_jnp.uint32, shape, dimension) + _jnp.asarray(start).astype(_jnp.uint32)
        counter = counter + index * _jnp.uint32(stride)
        stride *= aval.shape[dimension]
    return jc.threefry_bits(key, counter, eqn.params["bit_width"])


def take_part(whole: Any, layout: Layout, mesh: LogicalMesh) -> Any:
    """This device's part of an array that every device holds."""
    shape = local_shape(whole.shape, layout, mesh)
    starts = [position(axes, mesh) * size for axes, size in zip(layout.dims, shape, strict=True)]
    return _lax.dynamic_slice(whole, starts, shape)


def _on_one_device(eqn: jc.JaxprEqn, args: Sequence[Any], mesh: LogicalMesh) -> list[Any]:
    """What a user sees once must happen once; what it returns is then a sum, to which the others add nothing."""
    everything = tuple(range(len(mesh.shape)))

    def call(*values: Any) -> list[Any]:
        return jc.bind_equation(eqn, values)

    def nothing(*_: Any) -> list[Any]:
        avals: list[Any] = [v.aval for v in eqn.outvars]
        return [_jnp.zeros(aval.shape, aval.dtype) for aval in avals]

    return list(lax.cond(position(everything, mesh) == 0, call, nothing, *args))
