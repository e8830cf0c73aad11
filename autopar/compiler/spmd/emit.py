"""Trace the program of one device: a single `shard_map` over the whole mesh, in which every collective is explicit.

    closed jaxpr, LocalBlock, mesh  ->  closed jaxpr with the same inputs and outputs

XLA finds nothing to partition, so the compiled collectives are the planned ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.evaluate import bind_bodies
from autopar.compiler.resharding.emit import apply_steps
from autopar.compiler.sharding.layout import Layout, LogicalMesh, to_spec
from autopar.compiler.spmd.emit_equation import evaluate_locally
from autopar.compiler.spmd.evaluated import EvaluatedValues
from autopar.compiler.spmd.local_program import Evaluate, LocalBlock, Reshard, RunBody, Value


def emit_spmd(closed: jc.ClosedJaxpr, block: LocalBlock, mesh: LogicalMesh) -> jc.ClosedJaxpr:
    """The program as every device runs it, wrapped so that it takes and gives whole arrays."""
    computed = [number for number, v in enumerate(block.outputs) if isinstance(v, Value)]
    return _localized(closed, block, mesh, computed)


def emit_spmd_task(closed: jc.ClosedJaxpr, block: LocalBlock, mesh: LogicalMesh) -> jc.ClosedJaxpr:
    """The same for a program that gives constants back, too, and whose borders may be partial sums.

    The summands of such a value are an array of one more axis, the first, which the axes of the sum split.
    """
    return _localized(closed, block, mesh, range(len(block.outputs)))


def border_spec(layout: Layout, mesh: LogicalMesh) -> PartitionSpec:
    """The layout of a value between programs as JAX writes it; summands are stacked along a first axis."""
    if not layout.partial:
        return to_spec(layout, mesh)
    return PartitionSpec(mesh.names(layout.partial), *to_spec(Layout(layout.dims), mesh))


def border_shape(shape: tuple[int, ...], layout: Layout, mesh: LogicalMesh) -> tuple[int, ...]:
    """The shape of a value between programs: that of the stack of its summands, if it is a sum."""
    return (mesh.size(layout.partial), *shape) if layout.partial else shape


def _localized(
    closed: jc.ClosedJaxpr,
    block: LocalBlock,
    mesh: LogicalMesh,
    returned: Sequence[int],
) -> jc.ClosedJaxpr:
    _, consts = jc.open_jaxpr(closed)
    abstract = AbstractMesh(mesh.shape, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.shape))
    outputs = [block.outputs[number] for number in returned]

    def on_device(*args: Any) -> list[Any]:
        args = tuple(x[0] if v.layout.partial else x for x, v in zip(args, block.inputs, strict=True))
        results = _run(block, consts, args, mesh)
        return [
            results[number][None] if isinstance(v, Value) and v.layout.partial else results[number]
            for number, v in zip(returned, outputs, strict=True)
        ]

    run: Any = jax.shard_map(
        on_device,
        mesh=abstract,
        in_specs=tuple(border_spec(value.layout, mesh) for value in block.inputs),
        out_specs=[border_spec(v.layout, mesh) if isinstance(v, Value) else PartitionSpec() for v in outputs],
        check_vma=False,  # which results are equal on which devices is the plan's to know
    )
    avals = [_border_aval(value, mesh) for value in block.inputs]
    return jc.trace(run, avals)


def _border_aval(value: Value, mesh: LogicalMesh) -> Any:
    aval: Any = value.variable.aval
    if not value.layout.partial:
        return aval
    return jax.ShapeDtypeStruct(border_shape(tuple(aval.shape), value.layout, mesh), aval.dtype)


def _run(block: LocalBlock, consts: Sequence[Any], args: Sequence[Any], mesh: LogicalMesh) -> list[Any]:
    values = EvaluatedValues.of_inputs(block, consts, args)
    for action in block.actions:
        match action:
            case Reshard(operand=operand, result=result, steps=steps, after=after):
                (x,) = values.read_after([operand], after)
                values[result] = apply_steps(x, steps, mesh, tuple(action.aval.shape), action.source)
            case Evaluate(eqn=eqn, operands=operands, results=results, strategy=strategy):
                computed = evaluate_locally(eqn, list(map(values.read, operands)), strategy, mesh)
                values.update(zip(results, computed, strict=True))
            case RunBody(results=results):
                values.update(zip(results, _enter(action, values, mesh), strict=True))
    return list(map(values.read, block.outputs))


def _enter(action: RunBody, values: EvaluatedValues, mesh: LogicalMesh) -> list[Any]:
    consts = [jc.open_jaxpr(body)[1] for body in jp.bodies_of(action.eqn)]
    return bind_bodies(
        action.eqn,
        values.read_after(action.operands, action.after),
        lambda number, inputs: _run(action.bodies[number], consts[number], inputs, mesh),
    )
