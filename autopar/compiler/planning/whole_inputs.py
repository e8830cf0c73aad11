"""Find the inputs that a plan leaves whole on every device because no axis of its meshes divides them.

JAX wants equal parts of every array outside of a program, so that such an input lies whole between steps, whatever
its parts are inside of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

from autopar.compiler.frontend.trace import Leaf, Trace
from autopar.compiler.planning.constraints import DATA
from autopar.compiler.sharding.replicated_values import below_split_size
from autopar.compiler.sharding.replication import note_replicated
from autopar.ir.instructions import listed
from autopar.ir.plan import MeshPlan, Plan
from autopar.methods import Method

_WORTH_A_WORD_BYTES = 2**16
"""Least bytes of an array of the state to note: smaller ones cost next to nothing on every device."""

_METHODS = {method.__name__: method for method in get_args(Method)}


def note_whole_inputs(trace: Trace, plan: Plan) -> None:
    """Note the batch, and the large arrays of the state, that the plan's method would have divided and could not."""
    meshes = [mesh for mesh in plan.meshes if len(mesh.devices) > 1]
    method = _METHODS.get(plan.method)
    if not meshes or method is None:  # a plan that follows another one takes the state as it lies
        return
    divides, kinds = method.divides, () if plan.certificate is None else plan.certificate.kinds
    if "batch" in divides and (not kinds or "data" in kinds):
        _note_batch(trace, plan, meshes, any_axis="state" in divides)
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


def _note_batch(trace: Trace, plan: Plan, meshes: Sequence[MeshPlan], *, any_axis: bool) -> None:
    sizes = {
        size
        for mesh in meshes
        for name, size in zip(mesh.axis_names, mesh.shape, strict=True)
        if size > 1 and (name == DATA or any_axis)
    }
    if not trace.batch_inputs or not sizes or (any_axis and trace.num_rows == 1):  # one example is divided inside
        return
    rows = trace.num_rows // plan.num_microbatches
    leaves = [trace.inputs[i] for i in trace.batch_inputs if trace.inputs[i].name not in plan.input_specs]
    if any(rows % size == 0 for size in sizes) or all(below_split_size(leaf.aval) for leaf in leaves):
        return
    parts = "" if plan.num_microbatches == 1 else " of a microbatch"
    names = listed(tuple(leaf.name for leaf in leaves))
    note_replicated(
        f"{names} enter whole on every device, as their {rows} rows{parts} do not divide among {_counts(sizes)} "
        f"devices. Give a batch of a multiple of that, or use another number of devices."
    )


def _state(trace: Trace, plan: Plan) -> list[Leaf]:
    every = (trace.inputs[i] for i in sorted(set(trace.state_outputs.values())))
    return [leaf for leaf in every if _nbytes(leaf) >= _WORTH_A_WORD_BYTES and leaf.name not in plan.input_specs]


def _nbytes(leaf: Leaf) -> int:
    return math.prod(leaf.aval.shape) * leaf.aval.dtype.itemsize


def _divides(size: int, shape: Sequence[int]) -> bool:
    return any(dim % size == 0 for dim in shape)


def _counts(sizes: set[int]) -> str:
    return " or ".join(map(str, sorted(sizes)))
