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
Where a host launches each kernel, none takes less than that, `launch_s`. What stays on the chip from one kernel to the
next takes a share of the time (`jaxprs.reuse`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from autopar.compiler.costs.attention import kernel_flops, pass_bytes
from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.costs.own_collectives import own_collectives
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.flops import aval_bytes, equation_flops, product_flops_inside
from autopar.compiler.jaxprs.fusion import Traffic
from autopar.compiler.jaxprs.primitives import ATTENTION, CUTS, DRAWS, MATRIX_PRODUCTS, PRODUCTS, SCATTERS
from autopar.compiler.jaxprs.reuse import NO_SPANS
from autopar.compiler.jaxprs.strides import channel_bytes
from autopar.compiler.sharding.layout import Layout, LogicalMesh, num_shards
from autopar.compiler.sharding.strategies import Strategy, masked_dims
from autopar.hardware.machine import Machine

# Threefry takes about 100 integer operations for 4 bytes.
_FLOPS_PER_RANDOM_WORD = 100
_LOADED_BYTES = 16
# Numbers of 16 bits in a load.
_LOADED = _LOADED_BYTES // 2
_ON_CHIP = 1 / 22
"""Time of bytes on the chip, in that of bytes in the device's memory: "VMEM bandwidth is around 22x higher than HBM
bandwidth" (jax-ml/scaling-book tpus.md)."""


class EquationWork(NamedTuple):
    """The work of one device on an equation: kernels that start, and seconds by what bounds them.

    The kernel of a product or of a pass takes the longest of its bounds, the others come behind it. Of several
    strategies the figures are arrays.
    """

    kernels: Any
    product_s: Any = 0.0
    """FLOPs over the rate of products."""
    half_s: Any = 0.0
    """The same of the FLOPs at which half of the rate is reached, in the same kernel."""
    memory_s: Any = 0.0
    """Bytes over the bandwidth, of the same kernel."""
    other_s: Any = 0.0
    """Operations of vector units, or bytes on the link to the host."""
    passes_s: Any = 0.0
    """Bytes over the bandwidth, of what stands before the kernel or behind it."""

    def seconds(self, machine: Machine) -> Any:
        """Seconds of the device, and no less than a host takes that launches each kernel."""
        several = any(isinstance(each, np.ndarray) for each in self)
        larger: Any = np.maximum if several else max  # which takes less time for two numbers
        bound_s = larger(larger(self.product_s + self.half_s, self.memory_s), self.other_s)
        return larger(self.kernels * machine.kernel_s + bound_s + self.passes_s, self.kernels * machine.launch_s)


def equation_s(eqn: jc.JaxprEqn, strategy: Strategy, mesh_costs: MeshCosts, traffic: Traffic) -> float:
    """Seconds of one equation on one device under a strategy, its own collectives included."""
    work = equation_work(eqn, strategy, mesh_costs, traffic)
    return float(work.seconds(mesh_costs.machine) + _combine_s(eqn, strategy, mesh_costs))


def equation_work(eqn: jc.JaxprEqn, strategy: Strategy, mesh_costs: MeshCosts, traffic: Traffic) -> EquationWork:
    """Return what one device works on an equation under a strategy, its own collectives left out."""
    mesh = mesh_costs.mesh
    operands = [_part(v.aval, layout, mesh) for v, layout in zip(eqn.invars, strategy.operands, strict=True)]
    results = [_part(v.aval, layout, mesh) for v, layout in zip(eqn.outvars, strategy.results, strict=True)]
    if (flops := _product_flops(eqn, mesh_costs.machine)) is not None:
        near = _beside_chip(eqn, operands, results, mesh_costs.machine, traffic, _ON_CHIP)
        read, written = _once(operands, near.reads), _once(results, near.writes)
        copies = max(traffic.kernels - 1, 0.0), _copied(operands, results, traffic)
        rate = mesh_costs.machine.matmul_flops(_dtype_of_products(eqn))
        return _product_work(eqn, (flops, rate), strategy, (read, written), copies, mesh_costs)
    return _pass_work(eqn, operands, results, mesh_costs.machine, traffic)


def equation_bytes(eqn: jc.JaxprEqn, strategy: Strategy, mesh_costs: MeshCosts, traffic: Traffic) -> float:
    """Bytes of one equation that one device reads from its memory and writes there under a strategy."""
    mesh = mesh_costs.mesh
    operands = [_part(v.aval, layout, mesh) for v, layout in zip(eqn.invars, strategy.operands, strict=True)]
    results = [_part(v.aval, layout, mesh) for v, layout in zip(eqn.outvars, strategy.results, strict=True)]
    near = _beside_chip(eqn, operands, results, mesh_costs.machine, traffic)
    if eqn.primitive.name in PRODUCTS | ATTENTION or eqn.primitive.name == "declared_rule":
        apart = 2 * sum(_masked_parts(eqn, strategy, mesh)) + _pass_bytes(eqn, strategy, mesh)
        read, written = _once(operands, near.reads), _once(results, near.writes)
        return float(read + written + apart + _copied(operands, results, traffic))
    return float(_moved(eqn, operands, results, near))


def seconds_by_strategy(
    eqn: jc.JaxprEqn, strategies: Sequence[Strategy], mesh_costs: MeshCosts, traffic: Traffic
) -> npt.NDArray[np.float64]:
    """Return the `equation_s` of every strategy of an equation, computed together."""
    mesh = mesh_costs.mesh
    operands = [_parts(v.aval, [s.operands[place] for s in strategies], mesh) for place, v in enumerate(eqn.invars)]
    results = [_parts(v.aval, [s.results[place] for s in strategies], mesh) for place, v in enumerate(eqn.outvars)]
    machine = mesh_costs.machine
    if (flops := _product_flops(eqn, machine)) is not None:
        near = _beside_chip(eqn, operands, results, machine, traffic, _ON_CHIP)
        moved = (_once(operands, near.reads), _once(results, near.writes), _copied(operands, results, traffic))
        read, written, copied = ((np.zeros(len(strategies)) + each).tolist() for each in moved)
        copies, rate = max(traffic.kernels - 1, 0.0), machine.matmul_flops(_dtype_of_products(eqn))
        works = [
            _product_work(eqn, (flops, rate), strategy, (of, to), (copies, again), mesh_costs)
            for strategy, of, to, again in zip(strategies, read, written, copied, strict=True)
        ]
        total_s = EquationWork(*np.array(works).T).seconds(machine)
    else:
        work = _pass_work(eqn, operands, results, machine, traffic)
        total_s = np.zeros(len(strategies)) + work.seconds(machine)
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
        share = machine.share_of_convolutions(_dtype_of_products(eqn))
        loaded = channel_bytes(eqn) / _LOADED_BYTES
        return share * machine.narrow_share * loaded if machine.narrow_share < 1 and loaded < 1 else share
    return machine.batched_share if _is_batched(eqn) else 1.0


def _is_batched(eqn: jc.JaxprEqn) -> bool:
    return eqn.primitive.name == "dot_general" and any(jp.dot_dimensions(eqn)[1])


def _product_work(
    eqn: jc.JaxprEqn,
    flops: tuple[float, float],
    strategy: Strategy,
    moved: tuple[float, float],
    copies: tuple[float, float],
    mesh_costs: MeshCosts,
) -> EquationWork:
    """The work of a product of some FLOPs at a rate, and bytes; `copies` are kernels beside it, and their bytes."""
    machine = mesh_costs.machine
    (total, rate), (read, written), (kernels, behind) = flops, moved, copies
    if machine.batched_share < 1 and _is_batched(eqn):  # it writes its result once it has computed it
        behind, written = behind + written, 0.0
    if passes := _pass_bytes(eqn, strategy, mesh_costs.mesh):
        kernels, behind = kernels + 2, behind + passes
    masked = _masked_operands(eqn, strategy, mesh_costs)
    if machine.unaligned_share < 1 and _is_unaligned(eqn, strategy):
        rate *= machine.unaligned_share
    return EquationWork(
        kernels=1 + kernels + len(masked),
        product_s=total / strategy.devices / rate,
        half_s=machine.matmul_half_flops / rate,
        memory_s=(read + written) / machine.memory_bandwidth,
        passes_s=(behind + 2 * sum(masked)) / machine.memory_bandwidth,
    )


def _is_unaligned(eqn: jc.JaxprEqn, strategy: Strategy) -> bool:
    """Return true for a matrix product with rows, not split, that do not begin at multiples of what a load holds."""
    if eqn.primitive.name not in MATRIX_PRODUCTS:
        return False
    avals = [cast(Any, v.aval) for v in (*eqn.invars, *eqn.outvars)]
    arrays = zip(avals, (*strategy.operands, *strategy.results), strict=True)
    return any(aval.ndim and aval.shape[-1] % _LOADED and not layout.dims[-1] for aval, layout in arrays)


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


def _pass_work(
    eqn: jc.JaxprEqn, operands: list[Any], results: list[Any], machine: Machine, traffic: Traffic
) -> EquationWork:
    """The work of what is no product, by bytes of operands and results on one device: of one strategy, or of each."""
    if jc.moves_memory(eqn):
        return EquationWork(0.0, other_s=machine.host_copy_s(sum(results)))
    if eqn.primitive.name in DRAWS:
        return EquationWork(0.0, other_s=machine.vector_s(sum(results) / 4 * _FLOPS_PER_RANDOM_WORD))
    nbytes = _moved(eqn, operands, results, traffic)
    near = _beside_chip(eqn, operands, results, machine, traffic, _ON_CHIP)
    moved = nbytes if near is traffic else _moved(eqn, operands, results, near)
    bandwidth = machine.memory_bandwidth * (machine.reducing_share if traffic.reduces else 1.0)
    return EquationWork(
        traffic.kernels,
        memory_s=(moved + traffic.wasted * sum(results)) / bandwidth,
        other_s=machine.vector_s(nbytes * traffic.flops_per_byte),
    )


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
    if name in CUTS:
        read[0] = np.minimum(read[0], traffic.reads[0] * sum(results))
    return sum(read) + written


def _beside_chip(
    eqn: jc.JaxprEqn, operands: list[Any], results: list[Any], machine: Machine, traffic: Traffic, share: float = 0.0
) -> Traffic:
    """Return the traffic with a share alone of what a device's chip has room for, by its parts of arrays.

    What lies between two readings of an array is taken to be split as the array is.
    """
    if traffic.spans == NO_SPANS or not machine.chip_bytes:
        return traffic

    def scaled(times: Sequence[float], atoms: Sequence[Any], parts: list[Any], spans: Sequence[Sequence[float]]) -> Any:
        for count, v, part, each in zip(times, atoms, parts, spans, strict=True):
            room = machine.chip_bytes * aval_bytes(v.aval) / np.maximum(part, 1.0)
            stays = sum((span <= room) * 1.0 for span in each) / max(len(each), 1)
            yield count * (1 - (1 - share) * stays)

    return traffic._replace(
        reads=tuple(scaled(traffic.reads, eqn.invars, operands, traffic.spans.reads)),
        writes=tuple(scaled(traffic.writes, eqn.outvars, results, traffic.spans.writes)),
    )


def _once(arrays: Sequence[Any], times: Sequence[Any]) -> Any:
    """Bytes of the arrays of a product that it reads or writes itself."""
    once = (np.minimum(count, 1.0) if isinstance(count, np.ndarray) else min(count, 1.0) for count in times)
    return sum(count * part for count, part in zip(once, arrays, strict=True))


def _copied(operands: list[Any], results: list[Any], traffic: Traffic) -> Any:
    """Bytes that are moved to copy operands of a product out of stacks, and its results into them."""
    times = [*traffic.reads, *traffic.writes]
    return sum(max(count - 1, 0) * part for count, part in zip(times, [*operands, *results], strict=True))


def _masked_operands(eqn: jc.JaxprEqn, strategy: Strategy, mesh_costs: MeshCosts) -> list[float]:
    """Return the bytes of operands of a product that are written with zeros for padding or rows of others before it."""
    machine, mesh = mesh_costs.machine, mesh_costs.mesh
    masked = _masked_parts(eqn, strategy, mesh)
    if (groups := _times_computed(eqn, machine)) > 1:
        # Where the result has the groups, both operands have the rows, and a copy for each group.
        count = 1 if jp.ragged_dimensions(eqn).groups else 2
        parts = zip(eqn.invars[:count], strategy.operands[:count], strict=True)
        masked = [*masked, *(groups * _part(v.aval, layout, mesh) for v, layout in parts)]
    return masked


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
