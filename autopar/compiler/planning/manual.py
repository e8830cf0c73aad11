"""Write down as a plan what a method by hand asks for: every decision of it, for one program and a number of devices.

Trace, DataParallel | ShardParallel | PipelineParallel, number of devices  ->  Plan
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping

from jax.sharding import PartitionSpec

from autopar.compiler.frontend.layer_boundaries import is_layer_boundary
from autopar.compiler.frontend.trace import Trace
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.lowering.value_types import batch_spec, microbatch_rows, rows_axis
from autopar.compiler.pipeline.cut_stages import StageCut, cut_stages
from autopar.compiler.pipeline.layers import count_layers, count_marked_layers, cut_forward, group_layers, layer_cuts
from autopar.compiler.pipeline.prepare import loop_pieces_for, prepare
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.errors import InvalidArgument, ReplicatedWarning
from autopar.ir.instructions import spec_parts
from autopar.ir.plan import MeshPlan, Plan, StagePlan
from autopar.ir.schedules import get_schedule
from autopar.methods import DataParallel, HandMethod, PipelineParallel, ShardParallel


def plan_by_hand(trace: Trace, method: HandMethod, *, num_devices: int) -> Plan:
    """The plan that a method describes. Raises `InvalidArgument` where it does not fit the program or the devices."""
    match method:
        case DataParallel():
            _check_batch(trace, method, num_devices)
            return _one_stage(trace, method, (num_devices,), ("data",), {})
        case ShardParallel():
            _check_devices(method.mesh_shape, num_devices)
            return _one_stage(trace, method, method.mesh_shape, method.mesh_axes, method.specs)
        case PipelineParallel():
            if method.num_virtual_stages == 1:
                shape = method.mesh_shape or (num_devices,)
                _check_devices(shape, num_devices)
                return _one_stage(trace, method, shape, method.mesh_axes, method.specs)
            if not trace.differentiates:
                warnings.warn(
                    f"{trace.name} takes no gradient, so there is no backward pass to pipeline and it runs as one "
                    f"stage, sharded over all {num_devices} devices. Use ShardParallel or DataParallel to say so.",
                    stacklevel=2,
                )
                _check_batch(trace, method, num_devices)
                return _one_stage(trace, method, (num_devices,), ("data",), {})
            return _pipeline(trace, method, num_devices)


def _check_batch(trace: Trace, method: HandMethod, num_devices: int) -> None:
    """Raise where nobody can tell the batch that is to be split; warn where there is none."""
    if num_devices == 1 or not trace.batch.missing or not trace.jaxpr.jaxpr.eqns:
        return
    if trace.batch.ambiguous:
        raise InvalidArgument(
            f"The batch of {trace.name} is to be split among {num_devices} devices, but {trace.batch.missing}. Name "
            "the arguments that carry it in batch_argnums, or the inputs that do not in unbatched."
        )
    if method.num_microbatches > 1 and trace.differentiates:
        return  # these are refused where they are made
    warnings.warn(
        f"Every device computes the whole of {trace.name}, because {trace.batch.missing}. Name the arguments that "
        "carry the batch in batch_argnums (an empty tuple for none), or use Auto(), which can split other dimensions.",
        ReplicatedWarning,
        stacklevel=2,
    )


def _check_devices(mesh_shape: tuple[int, ...], num_devices: int) -> None:
    size = math.prod(mesh_shape)
    if size != num_devices:
        raise InvalidArgument(
            f"mesh_shape {mesh_shape} needs {size} devices, there are {num_devices}. Give a shape whose product is "
            f"{num_devices}, or pass `devices=` with {size} of them."
        )


def _one_stage(
    trace: Trace,
    method: HandMethod,
    mesh_shape: tuple[int, ...],
    axis_names: tuple[str, ...],
    specs: Mapping[str, PartitionSpec],
) -> Plan:
    count = math.prod(mesh_shape)
    mesh = MeshPlan(devices=tuple(range(count)), shape=mesh_shape, axis_names=axis_names)
    num_microbatches = method.num_microbatches if trace.differentiates else 1
    return Plan(
        fingerprint=trace.fingerprint,
        method=type(method).__name__,
        meshes=(mesh,),
        stages=(StagePlan(layers=(0, 1), mesh=0),),
        cuts=(),
        num_microbatches=num_microbatches,
        input_specs=_input_specs(trace, mesh, specs, num_microbatches),
        cut_specs={},
        batch_statistics=method.batch_statistics,
        random=method.random,
    )


def _pipeline(trace: Trace, method: PipelineParallel, num_devices: int) -> Plan:
    meshes = _stage_meshes(method, num_devices)
    num_layers = _count_layers(trace, method)
    pieces = loop_pieces_for(trace, num_layers)
    prepared = prepare(
        trace,
        num_layers=num_layers,
        num_microbatches=method.num_microbatches,
        loop_pieces=pieces,
        batch_statistics=method.batch_statistics,
        random=method.random,
    )
    anywhere = method.layers is None and not count_marked_layers(prepared.phases)
    cuts = (cut_forward if anywhere else layer_cuts)(prepared.phases, num_layers)
    stages = tuple(group_layers(prepared.phases, cuts, method.num_virtual_stages))
    remat = method.remat or prepared.recomputes
    cut = StageCut(
        cuts=cuts,
        stages=stages,
        remat_stages=frozenset(range(len(stages)) if remat else ()),
        split_weight_gradients=get_schedule(method.schedule).splits_weight_gradients,
    )
    return Plan(
        fingerprint=trace.fingerprint,
        method=type(method).__name__,
        meshes=meshes,
        stages=tuple(
            StagePlan(layers=layers, mesh=s % method.num_stages, remat=remat) for s, layers in enumerate(stages)
        ),
        cuts=cuts,
        loop_pieces=pieces,
        num_microbatches=method.num_microbatches,
        schedule=get_schedule(method.schedule).name,
        input_specs=_input_specs(trace, meshes[0], method.specs, method.num_microbatches),
        cut_specs=_cut_specs(cut_stages(prepared, cut), meshes[0]),
        batch_statistics=method.batch_statistics,
        random=method.random,
    )


def _count_layers(trace: Trace, method: PipelineParallel) -> int:
    """Return the number of layers that is given, or that the model marks, or else one for each stage.

    Raises `InvalidArgument` if the model marks fewer layers than there are stages.
    """
    if method.layers is None and any(is_layer_boundary(eqn) for eqn in jc.all_equations(trace.jaxpr)):
        options = {"batch_statistics": method.batch_statistics, "random": method.random}
        phases = prepare(trace, num_layers=1, num_microbatches=1, loop_pieces=1, **options).phases
        if count_marked_layers(phases):
            return count_layers(phases, method.num_virtual_stages)
    return method.num_layers


def _stage_meshes(method: PipelineParallel, num_devices: int) -> tuple[MeshPlan, ...]:
    if num_devices % method.num_stages:
        raise InvalidArgument(
            f"{num_devices} devices do not divide into {method.num_stages} stages of equal size. Use a number of "
            f"stages that divides {num_devices}, or pass `devices=` with a multiple of {method.num_stages}."
        )
    each = num_devices // method.num_stages
    shape = method.mesh_shape or (each,)
    _check_stage_shape(shape, each, method.num_stages)
    return tuple(
        MeshPlan(devices=tuple(range(s * each, (s + 1) * each)), shape=shape, axis_names=method.mesh_axes)
        for s in range(method.num_stages)
    )


def _check_stage_shape(shape: tuple[int, ...], each: int, num_stages: int) -> None:
    size = math.prod(shape)
    if size != each:
        raise InvalidArgument(
            f"mesh_shape {shape} needs {size} devices per stage, each of the {num_stages} stages has {each}. "
            f"Give a shape whose product is {each}, or another number of stages."
        )


def _input_specs(
    trace: Trace, mesh: MeshPlan, specs: Mapping[str, PartitionSpec], num_microbatches: int
) -> dict[str, PartitionSpec]:
    """The user's spec by pattern; the batch along the data axis; everything else replicated."""
    batch = set(trace.batch_inputs)
    input_specs: dict[str, PartitionSpec] = {}
    for i, leaf in enumerate(trace.inputs):
        pattern = next((p for p in specs if re.search(p, leaf.name)), None)
        if pattern is not None and leaf.aval.ndim >= len(specs[pattern]):
            input_specs[leaf.name] = specs[pattern]
            _check_divides(leaf.name, leaf.aval.shape, specs[pattern], mesh)
        elif i in batch and leaf.aval.shape[0] % num_microbatches == 0:
            rows = (leaf.aval.shape[0] // num_microbatches, *leaf.aval.shape[1:])
            input_specs[leaf.name] = batch_spec(rows, 0, mesh)
    return {name: spec for name, spec in input_specs.items() if any(entry is not None for entry in spec)}


def _check_divides(name: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: MeshPlan) -> None:
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    for axis, parts in enumerate(spec_parts(spec, sizes)):
        if shape[axis] % parts:
            raise InvalidArgument(
                f"{name} has shape {shape}; its axis {axis} of size {shape[axis]} does not divide into {parts} parts, "
                f"as {spec} asks for. Choose another axis for it, or a narrower pattern."
            )


def _cut_specs(graph: StageGraph, mesh: MeshPlan) -> dict[str, PartitionSpec]:
    """Split activations and cotangents that cross stages along the batch."""
    rows = microbatch_rows(graph)
    specs: dict[str, PartitionSpec] = {}
    for name in sorted(graph.crossing):
        value = graph.values[name]
        spec = batch_spec(value.shape, rows_axis(value, rows), mesh)
        if any(entry is not None for entry in spec):
            specs[name] = spec
    return specs
