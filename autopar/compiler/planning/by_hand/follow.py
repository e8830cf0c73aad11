"""Plan a step that takes the state of another step where that left it, as an evaluation does.

    Trace, Followed  ->  Plan

    on one mesh     every input that both have keeps its layout; those of all other values are the best under these
    in stages       the equations run where the state lies that they read, in the order of the step: a stage begins
                    where the next equation reads state of another mesh. Activations travel, state never does

Inputs are recognized by their names, or the ends of these, and by shape and dtype: `params.h_0.kernel` is what the
other step calls `state.params.h_0.kernel`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

from autopar.compiler.frontend.trace import Leaf, Trace, common_ending
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.lowering.sharded_step import logical_mesh
from autopar.compiler.lowering.stage_programs import tasks_of_stages
from autopar.compiler.pipeline.cut_stages import StageCut, cut_stages
from autopar.compiler.pipeline.phases import Phase
from autopar.compiler.pipeline.placement import layer_order
from autopar.compiler.pipeline.prepare import PreparedStep, prepare
from autopar.compiler.pipeline.stage_graph import GraphInput, StageGraph
from autopar.compiler.planning.demands.constraints import equation_constraints
from autopar.compiler.planning.one_mesh import plan_by_search
from autopar.compiler.planning.stages.layer_classes import layer_class
from autopar.compiler.planning.stages.stage_layouts import ConstrainedStage, received_seconds, shard_stages
from autopar.compiler.sharding.layout import Layout, LogicalMesh, fits, from_spec
from autopar.errors import InvalidArgument, NotSplittable, Unsupported
from autopar.hardware.cluster import Cluster
from autopar.ir.plan import Plan, StagePlan
from autopar.ir.program import Program, Window
from autopar.ir.schedules import GPipe
from autopar.methods import ShardParallel

_TIME_LIMIT_S = 60.0
"""Seconds for the layouts of one stage."""

Rows = tuple[int, int] | None
"""The rows `[start, stop)` of an input; None: all of it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Followed:
    """The step that is followed: its trace, plan and program, which says where every input lies.

    `num_microbatches` is the user's word for the step that follows; None: as many as divide its batch and the other's.
    """

    trace: Trace
    plan: Plan
    program: Program
    num_microbatches: int | None = None
    ignore_user_shardings: bool = False


@dataclass(frozen=True, kw_only=True)
class _Place:
    """The mesh that rows of an input lie on, and their layout over it."""

    mesh: int
    spec: PartitionSpec


_Places = Mapping[Rows, tuple[_Place, ...]]


def plan_following(trace: Trace, followed: Followed, *, cluster: Cluster, cache_directory: Path | None) -> Plan:
    """Return the plan of a step on the devices of another, without moving its state; solved problems are kept on disk.

    Raises `InvalidArgument` for names that may be two inputs of the other step, and `Unsupported` for a step that
    takes a gradient, or that would have to move state.
    """
    if trace.differentiates:
        raise Unsupported(
            f"{trace.name} follows {followed.trace.name}, and takes a gradient. Steps that follow only read the state: "
            "use a method instead of follow, with the specs or the pins that it is to keep."
        )
    if followed.plan.shares:
        raise Unsupported(
            f"{followed.trace.name} runs in lanes, of which one holds the state, and {trace.name} follows it. Give "
            "the step a method of its own, or plan the other one on one machine."
        )
    places = _places(followed)
    same = {i: places[number] for i, number in _recognized(trace, followed.trace, places).items()}
    if len(followed.plan.meshes) == 1:
        return _on_one_mesh(trace, followed, same, cluster, cache_directory)
    return _in_stages(trace, followed, same, cluster, cache_directory)


# --- what both steps have -------------------------------------------------------------------------------------------


def _places(followed: Followed) -> Sequence[_Places]:
    """Return for every input of the followed step where its rows lie; the batch without its microbatches."""
    batch = set(followed.trace.batch_inputs)
    places: list[dict[Rows, tuple[_Place, ...]]] = [{} for _ in followed.trace.inputs]
    for given in followed.program.inputs:
        if given.leaf is None:  # the number of a microbatch
            continue
        mesh = followed.program.meshes[given.mesh]
        rows = None if given.leaf in batch else _rows(given.window)
        place = _Place(mesh=given.mesh, spec=mesh.values[given.value].spec)
        known = places[given.leaf].get(rows, ())
        places[given.leaf][rows] = known if place in known else (*known, place)
    return places


def _rows(window: Window | None) -> Rows:
    return None if window is None else (window.start, window.stop)


def _recognized(trace: Trace, theirs: Trace, places: Sequence[_Places]) -> dict[int, int]:
    """Return by number which inputs of the step that is followed the inputs of a step are."""
    kinds: dict[Any, list[int]] = {}
    for number, leaf in enumerate(theirs.inputs):
        kinds.setdefault(_kind(leaf, theirs.batch_axes.get(number)), []).append(number)
    recognized: dict[int, int] = {}
    for i, leaf in enumerate(trace.inputs):
        alike = kinds.get(_kind(leaf, trace.batch_axes.get(i)), [])
        meeting = {number: common_ending(leaf.name, theirs.inputs[number].name) for number in alike}
        most = max(meeting.values(), default=0)
        best = [number for number in alike if meeting[number] == most]
        exact = [number for number in best if theirs.inputs[number].name == leaf.name]
        best = exact or best
        if most and best:
            if any(places[number] != places[best[0]] for number in best):
                raise _ambiguous(trace, theirs, leaf, best)
            recognized[i] = best[0]
    return recognized


def _kind(leaf: Leaf, batch_axis: int | None) -> Any:
    sizes = tuple(size for axis, size in enumerate(leaf.aval.shape) if axis != batch_axis)
    return (batch_axis, sizes, leaf.aval.dtype)


def _ambiguous(trace: Trace, theirs: Trace, leaf: Leaf, best: Sequence[int]) -> InvalidArgument:
    names = " and ".join(theirs.inputs[number].name for number in best[:3])
    return InvalidArgument(
        f"{trace.name} follows {theirs.name}, whose inputs {names} may each be {leaf.name}, and lie in different "
        f"places. Name the arguments of {trace.name} as those of {theirs.name}, or pass the same tree."
    )


# --- one mesh -------------------------------------------------------------------------------------------------------


def _on_one_mesh(
    trace: Trace, followed: Followed, same: Mapping[int, _Places], cluster: Cluster, cache_directory: Path | None
) -> Plan:
    (mesh,) = followed.plan.meshes
    if len(mesh.devices) == 1:
        return Plan(
            fingerprint=trace.fingerprint,
            method="Follow",
            meshes=(replace(mesh, sharding=None),),
            stages=(StagePlan(layers=(0, 1), mesh=0),),
            cuts=(),
            input_specs={},
            batch_statistics=followed.plan.batch_statistics,
            random=followed.plan.random,
        )
    logical = logical_mesh(mesh)
    specs: dict[str, PartitionSpec] = {}
    for i, places in same.items():
        leaf, spec = trace.inputs[i], places[None][0].spec if None in places else None
        if spec is not None and fits(leaf.aval.shape, from_spec(spec, leaf.aval.ndim, logical), logical):
            specs[f"^{re.escape(leaf.name)}$"] = spec
    method = ShardParallel(
        mesh_shape=mesh.shape,
        axis_names=mesh.axis_names,
        specs=specs,
        random=followed.plan.random,
        batch_statistics=followed.plan.batch_statistics,
        ignore_user_shardings=followed.ignore_user_shardings,
    )
    plan = plan_by_search(
        trace,
        method,
        num_devices=len(mesh.devices),
        machine=cluster.machine_of(mesh.devices),
        order=logical.order,
        cache_directory=cache_directory,
    )
    return replace(plan, method="Follow", meshes=(replace(plan.meshes[0], devices=mesh.devices),))


# --- stages ---------------------------------------------------------------------------------------------------------


def _in_stages(
    trace: Trace, followed: Followed, same: Mapping[int, _Places], cluster: Cluster, cache_directory: Path | None
) -> Plan:
    prepared = _prepared(trace, followed)
    cuts, meshes = _cuts(prepared, same)
    used = sorted(set(meshes))
    bare = Plan(
        fingerprint=trace.fingerprint,
        method="Follow",
        meshes=tuple(replace(followed.plan.meshes[mesh], sharding=None) for mesh in used),
        stages=tuple(StagePlan(layers=(s, s + 1), mesh=used.index(mesh)) for s, mesh in enumerate(meshes)),
        cuts=cuts,
        loop_pieces=followed.plan.loop_pieces,
        num_microbatches=prepared.phases.step.num_microbatches,
        schedule=GPipe().name,
        input_specs={},
        batch_statistics=followed.plan.batch_statistics,
        random=followed.plan.random,
    )
    graph = cut_stages(prepared, StageCut.of(bare))
    _check_nothing_moves(trace, graph, followed, same, meshes)
    return shard_stages(
        bare,
        graph,
        [_constrained_stage(graph, followed, bare, number, used[number], same, cluster) for number in range(len(used))],
        cluster=cluster,
        time_limit_s=_TIME_LIMIT_S,
        cache_directory=cache_directory,
    )


def _prepared(trace: Trace, followed: Followed) -> PreparedStep:
    def in_microbatches(count: int) -> PreparedStep:
        return prepare(
            trace,
            num_layers=followed.plan.num_layers,
            num_microbatches=count,
            loop_pieces=followed.plan.loop_pieces,
            batch_statistics=followed.plan.batch_statistics,
            random=followed.plan.random,
        )

    if followed.num_microbatches is not None or not trace.batch_inputs:
        return in_microbatches(followed.num_microbatches or 1)
    try:
        return in_microbatches(math.gcd(trace.num_rows, followed.plan.num_microbatches))
    except (NotSplittable, Unsupported):  # nobody asked for microbatches
        return in_microbatches(1)


def _cuts(prepared: PreparedStep, same: Mapping[int, _Places]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the forward equations at which stages begin, and the mesh of every stage."""
    phases = prepared.phases
    on = _meshes_of_state(prepared, same)
    cuts: list[int] = []
    meshes: list[int] = []
    order = {i: position for position, i in enumerate(layer_order(phases))}
    for i, eqn in enumerate(phases.equations):
        read = {on[v] for v in jc.operands(eqn) if v in on}
        if i in order and read:
            if len(read) > 1:
                raise Unsupported(
                    f"{prepared.trace.name} follows a step in stages, and {jc.describe(eqn)} reads state of the meshes "
                    f"{sorted(read)} at once, some of which would have to move. Read each array where the step that is "
                    "followed reads it, or use a method instead of follow."
                )
            (mesh,) = read
            if meshes and mesh != meshes[-1]:
                cuts.append(order[i])
            if not meshes or mesh != meshes[-1]:
                meshes.append(mesh)
        elif len(read) == 1 and phases.of[i] <= {Phase.UNPLACED, Phase.STEP}:  # a cast, a penalty
            on.update(dict.fromkeys(eqn.outvars, next(iter(read))))
    return tuple(cuts), tuple(meshes) or (0,)


def _meshes_of_state(prepared: PreparedStep, same: Mapping[int, _Places]) -> dict[jc.Var, int]:
    """Return the mesh of every input that lies on one."""
    step, on = prepared.phases.step, dict[jc.Var, int]()
    for v, given in zip(step.jaxpr.jaxpr.invars, step.inputs, strict=True):
        if given.kind == "whole" and given.leaf is not None and v not in prepared.phases.replicated_scalars:
            piece = prepared.inputs[given.leaf]
            places = _of_piece(same, piece.leaf, piece.start, piece.stop)
            if len(places) == 1:
                on[v] = places[0].mesh
    return on


def _of_piece(same: Mapping[int, _Places], leaf: int | None, start: int | None, stop: int | None) -> tuple[_Place, ...]:
    if leaf is None or leaf not in same:
        return ()
    return same[leaf].get(None if start is None or stop is None else (start, stop), ())


def _check_nothing_moves(
    trace: Trace, graph: StageGraph, followed: Followed, same: Mapping[int, _Places], meshes: Sequence[int]
) -> None:
    for given in (given for given in graph.inputs if given.kind == "whole" and given.stages):
        lies = {place.mesh for place in _of_piece(same, given.leaf, given.start, given.stop)}
        moved = {meshes[stage] for stage in (given.stages[:1] if given.owned else given.stages)} - lies
        if given.leaf in same and given.owned and moved:
            lying = f"on mesh {min(lies)}" if lies else "in other pieces"
            raise Unsupported(
                f"{trace.name} reads {given.name} on mesh {min(moved)}, and {followed.trace.name} leaves it {lying}: "
                "it would have to move at every call. Leave it out of the arguments if it is not needed, or use a "
                "method instead of follow."
            )


def _constrained_stage(
    graph: StageGraph,
    followed: Followed,
    plan: Plan,
    number: int,
    theirs: int,
    same: Mapping[int, _Places],
    cluster: Cluster,
) -> ConstrainedStage:
    mesh = logical_mesh(plan.meshes[number])
    tasks = tasks_of_stages(graph, plan.stages_on(number))
    layer = layer_class(graph, tasks)
    layouts = {given.value: _layout(graph, given, theirs, same, mesh) for given in graph.inputs}
    return ConstrainedStage(
        tasks=tasks,
        layer=layer,
        constraints=replace(
            layer.constraints,
            allowed={name: (layout,) for name, layout in layouts.items() if layout is not None},
            equations=equation_constraints(mesh, ignore_user_shardings=followed.ignore_user_shardings),
        ),
        received=received_seconds(graph, plan, number, cluster),
    )


def _layout(
    graph: StageGraph, given: GraphInput, theirs: int, same: Mapping[int, _Places], mesh: LogicalMesh
) -> Layout | None:
    """Return the layout that an input has on a mesh of the followed step; None if it has none there."""
    places = _of_piece(same, given.leaf, given.start, given.stop)
    spec = next((place.spec for place in places if place.mesh == theirs), None)
    if spec is None or given.value not in graph.values:
        return None
    shape = graph.values[given.value].shape
    layout = from_spec(spec, len(shape), mesh)
    return layout if fits(shape, layout, mesh) else None
