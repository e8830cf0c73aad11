"""The type of every value of a stage graph: shape, dtype, and the spec that follows from the plan.

A plan gives the specs of inputs and of values that cross stages. What stays inside of a stage follows: a value of a
microbatch is split along the batch like the activations, and what an update joins elementwise with a piece of state
(its gradient, its moments, its successor) is laid out like that state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.elementwise import Classes, joined_values
from autopar.compiler.pipeline.stage_graph import GraphValue, StageGraph, StageTask
from autopar.ir.plan import MeshPlan, Plan
from autopar.ir.program import ArrayType

DATA = "data"
"""The mesh axis along which batches are split."""


def batch_spec(shape: Sequence[int], axis: int | None, mesh: MeshPlan) -> PartitionSpec:
    """Split `axis` over the mesh's data axis, where there is one and it divides; replicated otherwise."""
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    if axis is None or DATA not in sizes or not shape or shape[axis] % sizes[DATA]:
        return PartitionSpec()
    return PartitionSpec(*[None] * axis, DATA)


def rows_axis(value: GraphValue, rows: int) -> int | None:
    """The axis of a microbatch's value that holds its examples: the first one as long as the microbatch.

    A guess by size decides only where the value is laid out, never what it is.
    """
    if not value.per_microbatch or not rows:
        return None
    return next((axis for axis, size in enumerate(value.shape) if size == rows), None)


def infer_value_types(graph: StageGraph, plan: Plan) -> dict[str, ArrayType]:
    """The type of every value, by its name without the microbatch."""
    mesh = plan.meshes[plan.stages[0].mesh]
    specs = dict(_state_specs(graph, plan))
    rows = microbatch_rows(graph)
    types: dict[str, ArrayType] = {}
    for name, value in graph.values.items():
        spec = plan.cut_specs.get(name, specs.get(name))
        if spec is None:
            spec = batch_spec(value.shape, rows_axis(value, rows), mesh)
        types[name] = ArrayType(shape=value.shape, dtype=str(value.dtype), spec=spec)
    return types


def microbatch_rows(graph: StageGraph) -> int:
    """Examples of one microbatch; 0 if the step has no batch."""
    batch = [graph.values[i.value].shape[i.axis] for i in graph.inputs if i.kind == "microbatch"]
    return batch[0] if batch else 0


def _state_specs(graph: StageGraph, plan: Plan) -> Mapping[str, PartitionSpec]:
    """Specs of inputs, and of what updates join with them."""
    joined = Classes()
    for task in graph.tasks:
        if task.kind == "U":
            _join_elementwise(task, joined)
        for a in task.accumulations:
            if a.kind != "concatenate":
                joined.join(a.operand, a.result)
    for out in graph.outputs:
        if out.value is not None and out.replaces is not None:
            joined.join(out.value, out.replaces)
    specs: dict[Any, PartitionSpec] = {}
    direct: dict[str, PartitionSpec] = {}
    for spec in graph.inputs:
        given = plan.input_specs.get(spec.name)
        if given is not None:
            direct[spec.value] = given
            if spec.kind == "whole" and any(entry is not None for entry in given):
                specs.setdefault(joined.find(spec.value), given)
    joined_specs = {n: specs[joined.find(n)] for n in graph.values if joined.find(n) in specs}
    return {**joined_specs, **direct}


def _join_elementwise(task: StageTask, joined: Classes) -> None:
    """Join the operands and results of equal shape of every update equation."""
    jaxpr = task.jaxpr.jaxpr
    names: dict[Any, Any] = dict(zip(jaxpr.invars, task.inputs, strict=True))

    def node(v: Any) -> Any:
        return names.get(v, (task.name, v))

    for eqn in jaxpr.eqns:
        for operand, result in joined_values(eqn):
            joined.join(node(operand), node(result))
    for v, name in zip(jaxpr.outvars, task.outputs, strict=True):
        if isinstance(v, jc.Var):
            joined.join(node(v), name)
