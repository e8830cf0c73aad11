"""Seconds that one device works on its part of an equation: the roofline of its FLOPs and of the bytes it moves.

products          max((FLOPs + half) / matmul rate, bytes / memory bandwidth), and what a kernel takes to start
renaming, moving  a little: XLA fuses them into what reads the result
all others        the share of their bytes that fusion leaves, or their FLOPs at a vector rate
"""

from __future__ import annotations

from typing import Any, cast

from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.flops import aval_bytes, equation_flops
from autopar.compiler.jaxprs.primitives import COPIES, DRAWS, LABELS, PRODUCTS, RESHAPES
from autopar.compiler.sharding.layout import Layout, LogicalMesh, num_shards
from autopar.compiler.sharding.strategies import Strategy, masked_dims
from autopar.hardware.machine import Machine

# XLA fuses them into what reads the result. Other moves are computed where they stand more often than not.
_FUSED = LABELS | COPIES | RESHAPES | {"broadcast_in_dim", "convert_element_type", "iota", "slice", "transpose"}
_SHARE_OF_FUSED = 0.05
# Of the bytes of all other equations those that reach memory: XLA fuses the rest away.
_SHARE_NOT_FUSED = 0.35
# Threefry takes about 100 integer operations for 4 bytes.
_FLOPS_PER_RANDOM_WORD = 100


def equation_s(eqn: jc.JaxprEqn, strategy: Strategy, mesh_costs: MeshCosts) -> float:
    """Seconds of one equation on one device under a strategy, the collectives of a split maximum included."""
    mesh = mesh_costs.mesh
    read = sum(_part(v.aval, layout, mesh) for v, layout in zip(eqn.invars, strategy.operands, strict=True))
    written = sum(_part(v.aval, layout, mesh) for v, layout in zip(eqn.outvars, strategy.results, strict=True))
    compute_s = _compute_s(eqn, strategy, read, written, mesh_costs.machine) + _mask_s(eqn, strategy, mesh_costs)
    return compute_s + _combine_s(strategy, written, mesh_costs)


def _compute_s(eqn: jc.JaxprEqn, strategy: Strategy, read: float, written: float, machine: Machine) -> float:
    name = eqn.primitive.name
    if name in PRODUCTS:
        dtype = cast(Any, eqn.invars[0].aval).dtype
        flops = equation_flops(eqn) / strategy.devices
        return machine.matmul_s(flops, read + written, dtype.name)
    if name in _FUSED:
        return _SHARE_OF_FUSED * written / machine.memory_bandwidth
    if name in DRAWS:
        return machine.vector_s(written / 4 * _FLOPS_PER_RANDOM_WORD)
    if name.startswith(("gather", "scatter", "dynamic")):
        # They touch the rows that they move, not the whole table.
        read = min(read, 3 * min(written, read))
    flops = equation_flops(eqn) / strategy.devices
    memory_s = _SHARE_NOT_FUSED * machine.memory_s(read + written)
    return max(memory_s, machine.vector_s(flops))


def _mask_s(eqn: jc.JaxprEqn, strategy: Strategy, mesh_costs: MeshCosts) -> float:
    """Seconds to read operands of a product and write them with zeros for padding; other equations fuse with that."""
    if eqn.primitive.name not in PRODUCTS:
        return 0.0
    mesh = mesh_costs.mesh
    masked = zip(eqn.invars, strategy.operands, masked_dims(eqn, strategy, mesh), strict=True)
    return sum(mesh_costs.machine.memory_s(2 * _part(v.aval, layout, mesh)) for v, layout, dims in masked if dims)


def _combine_s(strategy: Strategy, written: float, mesh_costs: MeshCosts) -> float:
    return mesh_costs.collective_s("all-reduce", strategy.combined, written) if strategy.combined else 0.0


def _part(aval: Any, layout: Layout, mesh: LogicalMesh) -> float:
    return aval_bytes(aval) / num_shards(getattr(aval, "shape", ()), layout, mesh)
