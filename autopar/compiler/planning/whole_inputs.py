"""Find the inputs that a plan leaves whole on every device because no axis of its meshes divides them.

JAX wants equal parts of every array outside of a program, so that such an input lies whole between steps, whatever
its parts are inside of one. Where the batch itself divides, the work on it may not: see `shared_work`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import get_args

from autopar.compiler.frontend.trace import Leaf, Trace
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.planning.demands.constraints import DATA
from autopar.compiler.planning.shared_work import note_shared_work
from autopar.compiler.sharding.layout import LogicalMesh
from autopar.compiler.sharding.replicated_values import below_split_size
from autopar.compiler.sharding.replication import note_replicated
from autopar.ir.instructions import listed
from autopar.ir.plan import MeshPlan, Plan
from autopar.methods import Auto, Method, SearchMethod

_WORTH_A_WORD_BYTES = 2**16
"""Least bytes of an array of the state to note: smaller ones cost next to nothing on every device."""

_METHODS = {method.__name__: method for method in get_args(Method)}


def note_whole(trace: Trace, plan: Plan, cut: Callable[[], StageGraph]) -> None:
    """Note the batch, the work on it and large arrays of the state, that the plan's method would divide and could not.

    `cut` makes the stages of the plan.
    """
    meshes = [mesh for mesh in plan.meshes if len(mesh.devices) > 1]
    method = _METHODS.get(plan.method)
    if not meshes or method is None:  # a plan that follows another one takes the state as it lies
        return
    divides, kinds = method.divides, () if plan.certificate is None else plan.certificate.kinds
    if trace.batch_inputs and "batch" in divides and (not kinds or "data" in kinds):
        any_axis = issubclass(method, get_args(SearchMethod))
        divides_other = method is Auto and (not kinds or "tensor" in kinds)  # dimensions, where that takes less time
        if not _note_batch(trace, plan, meshes, any_axis=any_axis) and not divides_other:
            note_shared_work(trace, plan, cut, lambda mesh: _parts_of_rows(trace, plan, mesh, any_axis=any_axis))
    if "state" in divides and (not kinds or {"zero", "tensor", "expert"} & set(kinds)):
        sizes = {size for mesh in meshes for size in mesh.shape if size > 1}
        whole = [leaf for leaf in _state(trace, plan) if not any(_divides(size, leaf.aval.shape) for size in sizes)]
        if whole:
            largest, names = max(whole, key=_nbytes), listed(tuple(leaf.name for leaf in whole))
            note_replicated(
                f"{names} lie whole on every device between steps, as no dimension "
                f"divides among {_counts(sizes)} devices ({largest.name} is {list(largest.aval.shape)}). Pad one "
                "to a multiple, or use another number of devices."
            )


def _note_batch(trace: Trace, plan: Plan, meshes: Sequence[MeshPlan], *, any_axis: bool) -> bool:
    """Note the batch if it enters whole as its rows do not divide, and is not tiny; returns whether it enters so."""
    sizes = {
        size
        for mesh in meshes
        for name, size in zip(mesh.axis_names, mesh.shape, strict=True)
        if size > 1 and (name == DATA or any_axis)
    }
    if not sizes or (any_axis and trace.num_rows == 1):  # one example is divided inside
        return False
    rows = trace.num_rows // plan.num_microbatches
    leaves = [trace.inputs[i] for i in trace.batch_inputs if trace.inputs[i].name not in plan.input_specs]
    if not leaves or any(rows % size == 0 for size in sizes):
        return False
    if not all(below_split_size(leaf.aval) for leaf in leaves):
        parts = "" if plan.num_microbatches == 1 else " of a microbatch"
        names = listed(tuple(leaf.name for leaf in leaves))
        enter, their = ("enters", "its") if len(leaves) == 1 else ("enter", "their")
        note_replicated(
            f"{names} {enter} whole on every device, as {their} {rows} rows{parts} do not divide among "
            f"{_counts(sizes)} devices. Give a batch of a multiple of that, or use another number of devices."
        )
    return True


def _parts_of_rows(trace: Trace, plan: Plan, mesh: LogicalMesh, *, any_axis: bool) -> int:
    """Return among how many devices of a mesh the method divides rows: those along the axes that split the batch."""
    leaves = [(trace.inputs[i].name, axis) for i, axis in trace.batch_axes.items()]
    axes = set(mesh.axis_names) if any_axis else {DATA}
    for name, axis in leaves:
        entry = (*plan.input_specs.get(name, ()), *[None] * (axis + 1))[axis]
        axes |= {entry} if isinstance(entry, str) else set(entry or ())
    return math.prod(size for name, size in zip(mesh.axis_names, mesh.shape, strict=True) if name in axes)


def _state(trace: Trace, plan: Plan) -> list[Leaf]:
    every = (trace.inputs[i] for i in sorted(set(trace.state_outputs.values())))
    return [leaf for leaf in every if _nbytes(leaf) >= _WORTH_A_WORD_BYTES and leaf.name not in plan.input_specs]


def _nbytes(leaf: Leaf) -> int:
    return math.prod(leaf.aval.shape) * leaf.aval.dtype.itemsize


def _divides(size: int, shape: Sequence[int]) -> bool:
    return any(dim % size == 0 for dim in shape)


def _counts(sizes: set[int]) -> str:
    return " or ".join(map(str, sorted(sizes)))
