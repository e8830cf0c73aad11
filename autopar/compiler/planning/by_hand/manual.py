"""Plan what a method by hand asks for: it gives the layouts of inputs, those of all other values are the best then.

    Trace, DataParallel | ShardParallel | PipelineParallel, a cluster  ->  Plan

    inputs       by the user's specs; else the examples along the axis "data", and everything else on every device
    state        comes back as it came
    results      where the user gives no specs: on every device, or along "data" with a row for each example

Where layouts are searched, only inputs with specs are fixed, and each stage keeps to the memory of a device if it can.
One stage without microbatches is one program on one mesh, all other plans are tasks of stages. A mesh of one device has
nothing to lay out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.compiler.frontend.trace import Trace
from autopar.compiler.frontend.training_loops import refuse_whole_training, unroll_training_loops, without_gradient
from autopar.compiler.inter_op.stage_costs import Timing
from autopar.compiler.intra_op.plan_tasks import GroupConstraints
from autopar.compiler.lowering.sharded_step import logical_mesh
from autopar.compiler.lowering.stage_programs import tasks_of_stages
from autopar.compiler.pipeline.cut_stages import StageCut, cut_stages
from autopar.compiler.pipeline.host_state import check_waiting, with_offload
from autopar.compiler.pipeline.prepare import loop_pieces_for, prepare
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.planning.demands.constraints import (
    batch_layout,
    equation_constraints,
    layout_from_user,
    specified_inputs,
    usual_result,
)
from autopar.compiler.planning.demands.given_stages import count_given_layers, stage_layers, stage_meshes
from autopar.compiler.planning.one_mesh import memory_limit, plan_by_search
from autopar.compiler.planning.stages.layer_classes import count_step_layers, layer_class
from autopar.compiler.planning.stages.stage_layouts import (
    ConstrainedStage,
    most_in_flight,
    received_seconds,
    shard_stages,
)
from autopar.compiler.sharding.layout import Layout, LogicalMesh, replicated
from autopar.compiler.sharding.replicated_values import below_split_size
from autopar.compiler.sharding.replication import note_replicated
from autopar.errors import InvalidArgument
from autopar.hardware.cluster import Cluster
from autopar.ir.plan import MeshPlan, Plan, StagePlan
from autopar.ir.schedules import get_schedule
from autopar.methods import Auto, DataParallel, HandMethod, PipelineParallel, ShardParallel, offloaded

_TIME_LIMIT_S = 60.0
"""Seconds for the layouts of one stage."""
_MEMORY = "adaptive"
"""The part of a device's memory that layouts which are searched may use, in the words of `MEMORY_LEVELS`."""


def plan_by_hand(trace: Trace, method: HandMethod, *, cluster: Cluster, cache_directory: Path | None = None) -> Plan:
    """Return the plan that a method describes; solved problems are kept on disk.

    Raises `InvalidArgument` where it does not fit the program or the devices.
    """
    unrolled = unroll_training_loops(trace)
    stages = _as_stages(unrolled, method, cluster.num_devices)
    meshes = stage_meshes(stages, cluster)
    divided = any(len(mesh.devices) > 1 for mesh in meshes)
    offloads = bool(offloaded(stages) or trace.host_state)
    several = stages.num_virtual_stages > 1
    alone = not several and stages.num_microbatches == 1 and not offloads and (divided or not stages.remat)
    if not several and stages.runs is not None and unrolled.differentiates:
        count_given_layers(unrolled, stages)  # raises for more than the model has
    if alone and divided:
        plan = _on_one_mesh(trace, stages, meshes[0], cluster, cache_directory)
        return replace(plan, method=type(method).__name__)
    specified_inputs(trace, stages.specs)  # also on one device every pattern must find an input
    if alone:
        return _bare_plan(trace, stages, meshes, type(method).__name__, cuts=(), layers=[(0, 1)])
    trace = unrolled
    num_layers = _count_layers(trace, stages)
    pieces = loop_pieces_for(trace, num_layers) if num_layers > 1 else 1
    prepared = prepare(
        trace,
        num_layers=num_layers,
        num_microbatches=stages.num_microbatches,
        loop_pieces=pieces,
        batch_statistics=stages.batch_statistics,
        random=stages.random,
    )
    cuts, layers = stage_layers(prepared.phases, stages, num_layers)
    bare = _bare_plan(trace, stages, meshes, type(method).__name__, cuts=cuts, layers=layers, loop_pieces=pieces)
    if prepared.recomputes:
        bare = replace(bare, stages=tuple(replace(stage, recomputed=stage.num_layers) for stage in bare.stages))
    graph = cut_stages(prepared, StageCut.of(bare)) if offloads or divided else None
    if graph is not None and offloads:
        bare = with_offload(bare, graph, offloaded(stages), trace.host_state)
        check_waiting(graph, bare)
        graph = cut_stages(prepared, StageCut.of(bare))
    if graph is None or not divided:
        return bare
    return shard_stages(
        bare,
        graph,
        [_constrained_stage(trace, graph, bare, number, stages, cluster) for number in range(len(bare.meshes))],
        cluster=cluster,
        time_limit_s=_TIME_LIMIT_S,
        cache_directory=cache_directory,
    )


def _on_one_mesh(
    trace: Trace, stages: PipelineParallel, mesh: MeshPlan, cluster: Cluster, cache_directory: Path | None
) -> Plan:
    """Return the plan of one program on one mesh, some devices beside which may be idle."""
    same: dict[str, Any] = {
        "mesh_shape": mesh.shape,
        "axis_names": mesh.axis_names,
        "random": stages.random,
        "batch_statistics": stages.batch_statistics,
        "ignore_user_shardings": stages.ignore_user_shardings,
    }
    if stages.layouts == "search":
        method = Auto(num_stages=1, num_microbatches=1, remat=stages.remat, pins=stages.specs, **same)
    else:
        method = ShardParallel(specs=stages.specs, **same)
    plan = plan_by_search(
        trace,
        method,
        num_devices=len(mesh.devices),
        machine=cluster.machine_of(mesh.devices),
        cache_directory=cache_directory,
    )
    return replace(plan, meshes=(replace(plan.meshes[0], devices=mesh.devices),))


def _as_stages(trace: Trace, method: HandMethod, num_devices: int) -> PipelineParallel:
    """Return the method as stages. Raises `InvalidArgument` for what the step has not."""
    match method:
        case DataParallel() | ShardParallel():
            if isinstance(method, DataParallel):
                _check_batch(trace, method, num_devices)
            by_specs = isinstance(method, ShardParallel)
            stages = PipelineParallel(
                num_stages=1,
                num_microbatches=method.num_microbatches if trace.differentiates else 1,
                mesh_shape=method.mesh_shape if by_specs else (num_devices,),
                axis_names=method.mesh_axes if by_specs else ("data",),
                specs=method.specs if by_specs else {},
                random=method.random,
                batch_statistics=method.batch_statistics,
                ignore_user_shardings=method.ignore_user_shardings,
            )
        case PipelineParallel():
            stages = method
    asked = {"stages": stages.num_virtual_stages, "microbatches": method.num_microbatches}
    if not trace.differentiates and (several := [f"{count} {of}" for of, count in asked.items() if count > 1]):
        refuse_whole_training(trace, several[0])
    if stages.num_virtual_stages > 1 and not trace.differentiates:
        raise without_gradient(trace, stages.num_virtual_stages)
    return stages


def _check_batch(trace: Trace, method: DataParallel, num_devices: int) -> None:
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
    note_replicated(
        f"Every device computes the whole of {trace.name}, because {trace.batch.missing}. Name the arguments that "
        "carry the batch in batch_argnums (an empty tuple for none), or use Auto(), which can split other dimensions."
    )


def _bare_plan(
    trace: Trace,
    stages: PipelineParallel,
    meshes: tuple[MeshPlan, ...],
    method: str,
    *,
    cuts: tuple[int, ...],
    layers: Sequence[tuple[int, int]],
    loop_pieces: int = 1,
) -> Plan:
    """Return the plan without layouts."""
    schedule = get_schedule(stages.schedule)
    stage_mesh = schedule.meshes_of_stages(len(meshes), stages.stages_per_mesh)
    return Plan(
        fingerprint=trace.fingerprint,
        method=method,
        meshes=meshes,
        stages=tuple(
            StagePlan(layers=own, mesh=mesh, recomputed=own[1] - own[0] if stages.remat else 0)
            for own, mesh in zip(layers, stage_mesh, strict=True)
        ),
        cuts=cuts,
        loop_pieces=loop_pieces,
        num_microbatches=stages.num_microbatches,
        schedule=schedule.name,
        input_specs={},
        batch_statistics=stages.batch_statistics,
        random=stages.random,
    )


def _count_layers(trace: Trace, stages: PipelineParallel) -> int:
    """Return the number of layers to cut: a single stage has several only to compute them again."""
    if stages.num_virtual_stages > 1 or (stages.remat and stages.layers is not None):
        return count_given_layers(trace, stages)
    if not stages.remat:
        return 1
    return count_step_layers(trace, batch_statistics=stages.batch_statistics, random=stages.random)[0]


def _constrained_stage(
    trace: Trace, graph: StageGraph, plan: Plan, number: int, stages: PipelineParallel, cluster: Cluster
) -> ConstrainedStage:
    mesh = logical_mesh(plan.meshes[number])
    tasks = tasks_of_stages(graph, plan.stages_on(number), trace.donated_inputs)
    layer = layer_class(graph, tasks)
    constraints: GroupConstraints = replace(
        layer.constraints,
        allowed=_allowed(trace, graph, stages, mesh),
        equations=equation_constraints(mesh, ignore_user_shardings=stages.ignore_user_shardings),
    )
    stage = ConstrainedStage(
        tasks=tasks,
        layer=layer,
        constraints=constraints,
        received=received_seconds(graph, plan, number, cluster),
    )
    if stages.layouts == "given":
        return stage
    timing = Timing(
        schedule=get_schedule(stages.schedule),
        num_microbatches=stages.num_microbatches,
        virtual_stages=stages.stages_per_mesh,
    )
    count = len(plan.meshes)
    return replace(
        stage,
        memory_bytes=memory_limit(_MEMORY, cluster.machine_of(plan.meshes[number].devices)),
        num_in_flight=most_in_flight(plan, number, timing, count - 1 - number, count),
    )


def _allowed(
    trace: Trace, graph: StageGraph, stages: PipelineParallel, mesh: LogicalMesh
) -> dict[str, tuple[Layout, ...]]:
    """Return the layouts of the inputs by name, and where there are no specs those of results that are no state.

    Where layouts are searched, they are those of the inputs that have specs.
    """
    specs, searched = specified_inputs(trace, stages.specs), stages.layouts == "search"
    allowed: dict[str, tuple[Layout, ...]] = {}
    if not specs and not searched:
        rows = trace.num_rows if trace.batch_inputs else None
        for out in graph.outputs:
            if out.value is not None and out.replaces is None and not below_split_size(graph.values[out.value]):
                allowed[out.value] = usual_result(graph.values[out.value].shape, rows, mesh)
    for given in graph.inputs:
        value = graph.values.get(given.value)
        if value is None or given.leaf is None:
            continue
        if given.leaf in specs:
            layout = layout_from_user(given.name, specs[given.leaf], value.shape, mesh)
        elif searched:
            continue
        elif given.kind == "microbatch":
            layout = batch_layout(value.shape, given.axis, mesh)
        else:
            layout = replicated(len(value.shape))
        if any(layout.dims) or not below_split_size(value):
            allowed[given.value] = (layout,)
    return allowed
