"""Seconds that one device works on its part of an equation: the roofline of its FLOPs and of the bytes it moves.

products          max((FLOPs + half) / matmul rate, bytes / memory bandwidth), and what a kernel takes to start
untuned products  the same by the bytes read, and then the bytes written: of batches, where `batched_share` is below 1
ragged products   where the compiler has every group meet all rows, as often the FLOPs, and a copy of the rows for each
attention         the same in one kernel, exponentials besides, and the passes of its gradients (`costs.attention`)
kernels of users  the same, by the products inside (Pallas, or functions with a rule) and the bytes at their borders
copies to the host and back, the bytes over the link to it
random bits       100 operations for every 4 bytes, at the vector rate
all others        the bytes that go through memory once XLA has fused what it can, and the kernels that start

The bytes of a fused kernel are those at its border: each of its equations pays for the operands that it is the first to
read, and for the results that leave the kernel (`jaxprs.fusion`). Kernels with reductions reach a share of the memory
bandwidth, `reducing_share` of the machine. Transposed copies written in short pieces take as long as by
`piece_bytes`. Where a kernel does more operations for a byte than the vector units can, its bytes take as much longer.
Where a host launches each kernel, none takes less than that, `launch_s`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from autopar.compiler.costs.attention import kernel_flops, pass_bytes
from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.costs.own_collectives import own_collectives
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.flops import aval_bytes, equation_flops, product_flops_inside
from autopar.compiler.jaxprs.fusion import Traffic
from autopar.compiler.jaxprs.primitives import ATTENTION, DRAWS, MATRIX_PRODUCTS, PRODUCTS, SCATTERS
from autopar.compiler.sharding.layout import Layout, LogicalMesh, num_shards
from autopar.compiler.sharding.strategies import Strategy, masked_dims
from autopar.hardware.machine import Machine

# Threefry takes about 100 integer operations for 4 bytes.
_FLOPS_PER_RANDOM_WORD = 100


def equation_s(eqn: jc.JaxprEqn, strategy: Strategy, mesh_costs: MeshCosts, traffic: Traffic) -> float:
    """Seconds of one equation on one device under a strategy, its own collectives included."""
    mesh = mesh_costs.mesh
    operands = [_part(v.aval, layout, mesh) for v, layout in zip(eqn.invars, strategy.operands, strict=True)]
    results = [_part(v.aval, layout, mesh) for v, layout in zip(eqn.outvars, strategy.results, strict=True)]
    if (flops := _product_flops(eqn, mesh_costs.machine)) is not None:
        read, written = _once(operands, traffic.reads), _once(results, traffic.writes)
        compute_s = _product_s(eqn, flops, strategy, read, written, mesh_costs)
        compute_s += _copy_s(operands, results, mesh_costs.machine, traffic)
    else:
        compute_s = _compute_s(eqn, operands, results, mesh_costs.machine, traffic)
    return float(compute_s + _combine_s(eqn, strategy, mesh_costs))


def equation_bytes(eqn: jc.JaxprEqn, strategy: Strategy, mesh: LogicalMesh, traffic: Traffic) -> float:
    """Bytes of one equation that one device reads from its memory and writes there under a strategy."""
    operands = [_part(v.aval, layout, mesh) for v, layout in zip(eqn.invars, strategy.operands, strict=True)]
    results = [_part(v.aval, layout, mesh) for v, layout in zip(eqn.outvars, strategy.results, strict=True)]
    if eqn.primitive.name in PRODUCTS | ATTENTION or eqn.primitive.name == "declared_rule":
        apart = 2 * sum(_masked_parts(eqn, strategy, mesh)) + _pass_bytes(eqn, strategy, mesh)
        read, written = _once(operands, traffic.reads), _once(results, traffic.writes)
        return float(read + written + apart + _copied(operands, results, traffic))
    return float(_moved(eqn, operands, results, traffic))


def seconds_by_strategy(
    eqn: jc.JaxprEqn, strategies: Sequence[Strategy], mesh_costs: MeshCosts, traffic: Traffic
) -> npt.NDArray[np.float64]:
    """Return the `equation_s` of every strategy of an equation, computed together."""
    mesh = mesh_costs.mesh
    operands = [_parts(v.aval, [s.operands[place] for s in strategies], mesh) for place, v in enumerate(eqn.invars)]
    results = [_parts(v.aval, [s.results[place] for s in strategies], mesh) for place, v in enumerate(eqn.outvars)]
    if (flops := _product_flops(eqn, mesh_costs.machine)) is not None:
        read: npt.NDArray[np.float64] = np.zeros(len(strategies)) + _once(operands, traffic.reads)
        written: npt.NDArray[np.float64] = np.zeros(len(strategies)) + _once(results, traffic.writes)
        moved = zip(strategies, read.tolist(), written.tolist(), strict=True)
        total_s = np.array([_product_s(eqn, flops, strategy, of, to, mesh_costs) for strategy, of, to in moved])
        total_s += _copy_s(operands, results, mesh_costs.machine, traffic)
    else:
        total_s = np.zeros(len(strategies)) + _compute_s(eqn, operands, results, mesh_costs.machine, traffic)
    for number, strategy in enumerate(strategies):
        if strategy.combined:
            total_s[number] += _combine_s(eqn, strategy, mesh_costs)
    return total_s


def _product_flops(eqn: jc.JaxprEqn, machine: Machine) -> float | None:
    """Return the FLOPs of products, as many more as they reach less than the rate; None for other equations."""
    name = eqn.primitive.name
    if name in PRODUCTS:
        return (
            _times_computed(eqn, machine) * equation_flops(eqn) / (machine.in_step_share * _share_of_rate(eqn, machine))
        )
    if name in ATTENTION:
        return kernel_flops(eqn, machine)
    if name == "declared_rule":
        return product_flops_inside(eqn) / machine.in_step_share
    if name == "pallas_call":
        return product_flops_inside(eqn) / machine.in_step_share or None
    return None


def _times_computed(eqn: jc.JaxprEqn, machine: Machine) -> int:
    """Return how often the FLOPs of a product are computed: for every group where each meets the rows of all."""
    if not (machine.masks_ragged_products and jp.ragged_dimensions(eqn).ragged):
        return 1
    return cast(Any, eqn.invars[2].aval).shape[-1]


def _share_of_rate(eqn: jc.JaxprEqn, machine: Machine) -> float:
    """Return the share that a product reaches of what single matrix products do."""
    if eqn.primitive.name not in MATRIX_PRODUCTS:
        return machine.convolution_share
    return machine.batched_share if _is_batched(eqn) else 1.0


def _is_batched(eqn: jc.JaxprEqn) -> bool:
    return eqn.primitive.name == "dot_general" and any(jp.dot_dimensions(eqn)[1])


def _product_s(
    eqn: jc.JaxprEqn, flops: float, strategy: Strategy, read: float, written: float, mesh_costs: MeshCosts
) -> float:
    machine, dtype = mesh_costs.machine, _dtype_of_products(eqn)
    if machine.batched_share < 1 and _is_batched(eqn):
        product_s = machine.untuned_matmul_s(flops / strategy.devices, read, written, dtype)
    else:
        product_s = machine.matmul_s(flops / strategy.devices, read + written, dtype)
    if passes := _pass_bytes(eqn, strategy, mesh_costs.mesh):
        product_s += 2 * machine.kernel_s + passes / machine.memory_bandwidth
    return max(product_s, machine.launch_s) + _mask_s(eqn, strategy, mesh_costs)


def _pass_bytes(eqn: jc.JaxprEqn, strategy: Strategy, mesh: LogicalMesh) -> float:
    """Return the bytes of the passes before and after the gradients of attention."""
    if eqn.primitive.name not in ATTENTION:
        return 0.0
    return pass_bytes(eqn) * _part(eqn.invars[0].aval, strategy.operands[0], mesh)


def _dtype_of_products(eqn: jc.JaxprEqn) -> str:
    """Return the type of the first operand; of a kernel, whose first may be anything, that of its first product."""
    product = eqn
    if eqn.primitive.name == "pallas_call":
        kernel = next(jc.subjaxprs(eqn))
        product = next(inner for inner in jc.all_equations(kernel) if inner.primitive.name in PRODUCTS)
    return cast(Any, product.invars[0].aval).dtype.name


def _compute_s(eqn: jc.JaxprEqn, operands: list[Any], results: list[Any], machine: Machine, traffic: Traffic) -> Any:
    """Seconds of what is no product, by bytes of operands and results on one device: of one strategy, or of each."""
    if jc.moves_memory(eqn):
        return machine.host_copy_s(sum(results))
    if eqn.primitive.name in DRAWS:
        return machine.vector_s(sum(results) / 4 * _FLOPS_PER_RANDOM_WORD)
    nbytes = _moved(eqn, operands, results, traffic)
    taken = nbytes + traffic.wasted * sum(results)
    bandwidth = machine.memory_bandwidth * (machine.reducing_share if traffic.reduces else 1.0)
    work_s = np.maximum(taken / bandwidth, machine.vector_s(nbytes * traffic.flops_per_byte))
    return np.maximum(traffic.kernels * machine.kernel_s + work_s, traffic.kernels * machine.launch_s)


def _moved(eqn: jc.JaxprEqn, operands: list[Any], results: list[Any], traffic: Traffic) -> Any:
    """Bytes through memory: of what picks or replaces rows those alone, and not the whole table."""
    name = eqn.primitive.name
    if name in SCATTERS:
        # The rows that are replaced, or read and added to; the updates and their places.
        return (2 if name == "scatter" else 3) * operands[2] + operands[1]
    if name == "dynamic_update_slice":
        return 2 * operands[1]
    written = sum(times * part for times, part in zip(traffic.writes, results, strict=True))
    read = [times * part for times, part in zip(traffic.reads, operands, strict=True)]
    if name in ("gather", "dynamic_slice", "slice"):
        read[0] = np.minimum(read[0], traffic.reads[0] * sum(results))
    return sum(read) + written


def _once(arrays: Sequence[Any], times: Sequence[float]) -> Any:
    """Bytes of the arrays of a product that it reads or writes itself."""
    return sum(min(count, 1.0) * part for count, part in zip(times, arrays, strict=True))


def _copied(operands: list[Any], results: list[Any], traffic: Traffic) -> Any:
    """Bytes that are moved to copy operands of a product out of stacks, and its results into them."""
    times = [*traffic.reads, *traffic.writes]
    return sum(max(count - 1, 0) * part for count, part in zip(times, [*operands, *results], strict=True))


def _copy_s(operands: list[Any], results: list[Any], machine: Machine, traffic: Traffic) -> Any:
    """Seconds of these copies, each a kernel."""
    started_s = max(traffic.kernels - 1, 0.0) * machine.kernel_s
    return started_s + _copied(operands, results, traffic) / machine.memory_bandwidth


def _mask_s(eqn: jc.JaxprEqn, strategy: Strategy, mesh_costs: MeshCosts) -> float:
    """Seconds to write operands of a product with zeros for padding or rows of others, and to read them again."""
    machine, mesh = mesh_costs.machine, mesh_costs.mesh
    masked = _masked_parts(eqn, strategy, mesh)
    if (groups := _times_computed(eqn, machine)) > 1:
        # Where the result has the groups, both operands have the rows, and a copy for each group.
        count = 1 if jp.ragged_dimensions(eqn).groups else 2
        parts = zip(eqn.invars[:count], strategy.operands[:count], strict=True)
        masked = [*masked, *(groups * _part(v.aval, layout, mesh) for v, layout in parts)]
    return sum(machine.memory_s(2 * part) for part in masked)


def _masked_parts(eqn: jc.JaxprEqn, strategy: Strategy, mesh: LogicalMesh) -> list[float]:
    """Return the bytes of the operands of a product whose padding must be zero."""
    if eqn.primitive.name not in PRODUCTS:
        return []
    masked = zip(eqn.invars, strategy.operands, masked_dims(eqn, strategy, mesh), strict=True)
    return [_part(v.aval, layout, mesh) for v, layout, dims in masked if dims]


def _combine_s(eqn: jc.JaxprEqn, strategy: Strategy, mesh_costs: MeshCosts) -> float:
    made = own_collectives(eqn, strategy, mesh_costs.mesh)
    return sum(mesh_costs.collective_s(each.kind, each.axes, each.nbytes, each.reach) for each, _ in made)


def _parts(aval: Any, layouts: Sequence[Layout], mesh: LogicalMesh) -> npt.NDArray[np.float64]:
    """Return the bytes of one device's part of an array under each of some layouts."""
    nbytes, shape = aval_bytes(aval), getattr(aval, "shape", ())
    parts = {layout: nbytes / num_shards(shape, layout, mesh) for layout in dict.fromkeys(layouts)}
    return np.array([parts[layout] for layout in layouts])


def _part(aval: Any, layout: Layout, mesh: LogicalMesh) -> float:
    return aval_bytes(aval) / num_shards(getattr(aval, "shape", ()), layout, mesh)
