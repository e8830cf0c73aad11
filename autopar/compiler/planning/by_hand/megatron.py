"""Plan a step for given degrees of data, tensor and pipeline parallelism: even stages, restricted layouts.

    Trace, Megatron, devices
      │ even_layers        as many layers of the model for every stage
      │ stage_values       where the examples are, by the kinds of dimensions
      │ value_layouts      what the degrees and the ZeRO stage leave open, for values and
      │ stage_constraints  for equations
      │ task_graph.best    the optimum of that, once for all equivalent stages
      ▼ Plan               with the times of every task, so that it can be simulated

Nothing is searched beyond the layouts inside of a stage: the plan is the one that was asked for, whether it fits into
memory or not. `Planned.simulate` tells.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from autopar.compiler.frontend.dimension_kinds import DimensionKinds
from autopar.compiler.frontend.trace import Trace
from autopar.compiler.frontend.training_loops import refuse_whole_training, unroll_training_loops
from autopar.compiler.intra_op.plan_tasks import GroupTask
from autopar.compiler.lowering.sharded_step import logical_mesh
from autopar.compiler.lowering.stage_programs import tasks_of_stages
from autopar.compiler.pipeline.cut_stages import StageCut, cut_stages
from autopar.compiler.pipeline.host_state import check_waiting, with_offload
from autopar.compiler.pipeline.layers import count_layers, cut_forward, has_own_layers, layer_cuts, numbered_layers
from autopar.compiler.pipeline.prepare import PreparedStep, loop_pieces_for, prepare
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.planning.demands.constraints import constraints_within
from autopar.compiler.planning.demands.kinds import task_kinds
from autopar.compiler.planning.demands.megatron_layouts import (
    StepValues,
    stage_constraints,
    stage_values,
    value_layouts,
)
from autopar.compiler.planning.one_mesh import plan_by_search
from autopar.compiler.planning.stages.layer_classes import (
    count_step_layers,
    layer_class,
)
from autopar.compiler.planning.stages.stage_layouts import ConstrainedStage, received_seconds, shard_stages
from autopar.errors import InvalidArgument, Unsupported
from autopar.hardware.cluster import Cluster
from autopar.ir.plan import MeshPlan, Plan, StagePlan
from autopar.ir.schedules import get_schedule
from autopar.methods import Megatron, offloaded


def plan_megatron(trace: Trace, method: Megatron, *, cluster: Cluster, cache_directory: Path | None) -> Plan:
    """Return the plan of the degrees on the devices of a cluster; solved problems are kept on disk.

    Raises `InvalidArgument` for degrees that the devices, the batch, the layers or the weights do not divide into, and
    `Unsupported` for a step without a gradient, one whose examples cannot be found, or one that has nothing to
    offload.
    """
    unrolled = unroll_training_loops(trace)
    data, tensor, pipeline = method.degrees(cluster.num_devices)
    _check_step(unrolled, method, data, tensor)
    devices = method.devices_of_stages(cluster.num_devices, _devices_per_host(cluster, method))
    keeps_on_host = bool(offloaded(method) or trace.host_state)
    if len(devices) * method.stages_per_mesh * method.num_microbatches == 1 and not keeps_on_host:
        return _on_one_mesh(trace, replace(method, data=data), devices[0], cluster, cache_directory)
    trace = unrolled
    pieces = _pieces(trace, method)
    prepared = prepare(
        trace,
        num_layers=pieces[0],
        num_microbatches=method.num_microbatches,
        loop_pieces=pieces[1],
        batch_statistics=method.batch_statistics,
        random=method.random,
    )
    bare = _bare_plan(trace, method, prepared, pieces, devices, (data, tensor, pipeline))
    graph = cut_stages(prepared, StageCut.of(bare))
    if keeps_on_host:
        bare = with_offload(bare, graph, offloaded(method), trace.host_state)
        check_waiting(graph, bare)
        graph = cut_stages(prepared, StageCut.of(bare))
    tasks = [tasks_of_stages(graph, bare.stages_on(number), trace.donated_inputs) for number in range(pipeline)]
    problem = _Problem(
        method=method,
        graph=graph,
        values=stage_values(graph, trace.batch_axes),
        kinds=task_kinds(graph, [task for own in tasks for task in own], trace.batch_axes),
        plan=bare,
        cluster=cluster,
    )
    return shard_stages(
        bare,
        graph,
        [_asked(problem, own, number) for number, own in enumerate(tasks)],
        cluster=cluster,
        time_limit_s=method.time_limit_s,
        cache_directory=cache_directory,
    )


def _on_one_mesh(
    trace: Trace, method: Megatron, devices: tuple[int, ...], cluster: Cluster, cache_directory: Path | None
) -> Plan:
    """Return the plan of one stage with the whole batch, which is one program."""
    plan = plan_by_search(
        trace,
        method,
        num_devices=len(devices),
        machine=cluster.machine_of(devices),
        order=None if devices == tuple(range(len(devices))) else devices,
        cache_directory=cache_directory,
    )
    return replace(plan, schedule=get_schedule(method.schedule).name)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Problem:
    """Everything that is the same for all stages."""

    method: Megatron
    graph: StageGraph
    values: StepValues
    kinds: DimensionKinds
    plan: Plan
    cluster: Cluster


# --- the step and its stages --------------------------------------------------------------------------------------


def _check_step(trace: Trace, method: Megatron, data: int, tensor: int) -> None:
    if not trace.differentiates:
        refuse_whole_training(trace, "degrees of parallelism")
        raise Unsupported(
            f"{trace.name} takes no gradient, and Megatron is for steps of training. Use DataParallel or Auto."
        )
    if data > 1 and not trace.batch_inputs:
        raise Unsupported(
            f"Megatron splits the examples over data={data} replicas, and {trace.name} has none: "
            f"{trace.no_other_batch_because}. Name the arguments that carry the batch in batch_argnums, give data=1, "
            "or use Auto()."
        )
    rows = trace.num_rows if trace.batch_inputs else 0
    if rows % method.num_microbatches == 0 and rows // method.num_microbatches % data:
        raise InvalidArgument(
            f"Each of {method.num_microbatches} microbatches has {rows // method.num_microbatches} of the {rows} "
            f"examples, which do not divide among data={data} replicas. Give a batch that is a multiple of "
            f"{data * method.num_microbatches}, or fewer microbatches."
        )
    state = [leaf for i, leaf in enumerate(trace.inputs) if i not in trace.batch_inputs and leaf.aval.ndim > 1]
    if tensor > 1 and not any(size % tensor == 0 for leaf in state for size in leaf.aval.shape):
        named = ", ".join(f"{leaf.name} {list(leaf.aval.shape)}" for leaf in state[:3]) or "none of several dimensions"
        raise InvalidArgument(
            f"tensor={tensor} divides no dimension of any weight of {trace.name} ({named}). Give a tensor degree that "
            "divides them, or tensor=1."
        )


def _pieces(trace: Trace, method: Megatron) -> tuple[int, int]:
    """Return the number of layers that the step is cut into, and of pieces of its scans over layers.

    One stage is one layer, unless its layers are to be computed again.
    """
    stages = method.pipeline * method.stages_per_mesh
    if stages == 1 and not method.remat:
        return 1, 1
    if loop_pieces_for(trace, stages) > 1:
        return stages, stages
    return count_step_layers(trace, num_stages=stages, batch_statistics=method.batch_statistics, random=method.random)


def even_layers(prepared: PreparedStep, num_layers: int, num_stages: int) -> tuple[tuple[int, ...], list[int]]:
    """Return where layers begin, and where stages do among them: numbered layers in even numbers, with what is around.

    Raises `InvalidArgument` for more stages than layers.
    """
    if has_own_layers(prepared.phases):
        num_layers = count_layers(prepared.phases)
    cuts = layer_cuts(prepared.phases, num_layers)
    begins = numbered_layers(prepared.phases, num_layers)
    count = len(begins)
    if count < num_stages:
        raise InvalidArgument(
            f"{prepared.trace.name} has {count} layers for {num_stages} stages, each needs one. Use at most {count} "
            "stages (pipeline x virtual_stages)."
        )
    return cuts, [begins[stage * count // num_stages] for stage in range(num_stages)]


def _devices_per_host(cluster: Cluster, method: Megatron) -> int:
    """Return the devices of a fast domain; `InvalidArgument` for a placement on several machines."""
    if cluster.is_mixed and method.placement is not None:
        raise InvalidArgument(
            f"placement={method.placement!r} orders the devices of hosts that are alike, and the cluster has "
            f"{cluster}. Leave the placement out, or give the devices of one group."
        )
    return cluster.groups[0].machine.domain


def _bare_plan(
    trace: Trace,
    method: Megatron,
    prepared: PreparedStep,
    pieces: tuple[int, int],
    devices: tuple[tuple[int, ...], ...],
    degrees: tuple[int, int, int],
) -> Plan:
    """Return the plan without layouts."""
    schedule = get_schedule(method.schedule)
    stage_mesh = schedule.meshes_of_stages(degrees[2], method.stages_per_mesh)
    num_stages = len(stage_mesh)
    if num_stages == 1:
        cuts, starts = layer_cuts(prepared.phases, pieces[0]), [0]
    elif pieces[1] > 1:
        cuts, starts = cut_forward(prepared.phases, num_stages), list(range(num_stages))
    else:
        cuts, starts = even_layers(prepared, pieces[0], num_stages)
    mesh = replace(method, data=degrees[0]).search()
    assert mesh.mesh_shape is not None
    return Plan(
        fingerprint=trace.fingerprint,
        method=type(method).__name__,
        meshes=tuple(MeshPlan(devices=own, shape=mesh.mesh_shape, axis_names=mesh.mesh_axes) for own in devices),
        stages=tuple(
            StagePlan(
                layers=(start, stop),
                mesh=number,
                recomputed=stop - start if method.remat or prepared.recomputes else 0,
            )
            for start, stop, number in zip(starts, [*starts[1:], len(cuts) + 1], stage_mesh, strict=True)
        ),
        cuts=cuts,
        loop_pieces=pieces[1],
        num_microbatches=method.num_microbatches,
        schedule=schedule.name,
        input_specs={},
        batch_statistics=method.batch_statistics,
        random=method.random,
    )


# --- the layouts of a stage ---------------------------------------------------------------------------------------


def _asked(problem: _Problem, tasks: list[GroupTask], number: int) -> ConstrainedStage:
    graph, plan, zero = problem.graph, problem.plan, problem.method.zero
    mesh = logical_mesh(plan.meshes[number])
    layer = layer_class(graph, tasks)
    constraints = layer.constraints
    if mesh.num_devices > 1:
        form = stage_constraints(tasks, problem.kinds, mesh, zero)
        constraints = replace(
            constraints,
            allowed=value_layouts(tasks, problem.values, graph.crossing, mesh, zero),
            equations=form if problem.method.ignore_user_shardings else constraints_within(form, mesh, "Megatron"),
        )
    return ConstrainedStage(
        tasks=tasks,
        layer=layer,
        constraints=constraints,
        received=received_seconds(graph, plan, number, problem.cluster),
    )
