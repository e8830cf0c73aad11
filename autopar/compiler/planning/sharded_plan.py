"""Make the plan of stages that were found: the layouts of each as a whole, and what the step takes with them.

PipelineCandidate  ->  ShardedPlan
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.compiler.inter_op.stage_costs import StageCost
from autopar.compiler.inter_op.submeshes import place_in_groups
from autopar.compiler.pipeline.cut_stages import StageCut, cut_stages
from autopar.compiler.pipeline.host_state import with_offload
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.planning.pipeline_candidate import PipelineCandidate
from autopar.compiler.planning.stage_layouts import StageLayouts, stage_shardings, with_input_specs
from autopar.compiler.planning.stage_problem import StageProblem, submesh_mesh
from autopar.compiler.solver.solve import MAX_GAP
from autopar.ir.plan import MeshPlan, Plan, StagePlan
from autopar.methods import offloaded


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedPlan:
    """The plan of a candidate with its layouts, the costs of its stages, its seconds, and the peak bytes of a device.

    That is one of the devices that use the largest share of the `memory_bytes` that they may use.
    """

    costs: tuple[StageCost, ...]
    step_time_s: float
    peak_bytes: float
    memory_bytes: float
    limits: tuple[float, ...]
    """Bytes that the devices of each mesh may use."""
    gap: float
    """The share of its time by which the best layouts of these stages may at most be faster."""
    graph: StageGraph
    """The stages as the plan cuts them."""
    make_plan: Callable[[], Plan]

    @cached_property
    def plan(self) -> Plan:
        """The plan, made when it is first asked for."""
        return self.make_plan()

    def needing(self, peaks: Sequence[float]) -> ShardedPlan:
        """Return the same plan of which each mesh needs so many bytes on its devices."""
        peak_bytes, memory_bytes = _fullest(peaks, self.limits)
        return replace(self, peak_bytes=peak_bytes, memory_bytes=memory_bytes)


def shard_candidate(
    problem: StageProblem,
    candidate: PipelineCandidate,
    max_gap: float = MAX_GAP,
    are_too_slow: Callable[[Mapping[int, StageLayouts]], bool] = lambda known: False,
) -> ShardedPlan:
    """Return the plan of a candidate, whose layouts are chosen anew for every stage as a whole, up to a gap.

    Raises `StagesTooSlow` as soon as some of its stages `are_too_slow`.
    """
    stages = candidate.stages
    devices = place_in_groups([stage.submesh for stage in stages], problem.clusters)
    assert devices is not None
    layers, trace, method = candidate.layers, problem.trace, problem.method
    meshes: list[MeshPlan] = []
    for stage, mine in zip(stages, devices, strict=True):
        mesh = submesh_mesh(problem, stage.submesh)
        meshes.append(MeshPlan(devices=mine, shape=mesh.shape, axis_names=mesh.axis_names, links=mesh.links))
    bare = Plan(
        fingerprint=trace.fingerprint,
        method="Auto",
        meshes=tuple(meshes),
        stages=tuple(
            StagePlan(
                layers=stage.layers,
                mesh=stage.mesh,
                remat=stages[stage.mesh].cost.choice.remat or layers.prepared.recomputes,
            )
            for stage in candidate.virtual_stages
        ),
        cuts=layers.cuts,
        loop_pieces=layers.loop_pieces,
        num_microbatches=layers.num_microbatches,
        schedule=candidate.timing.schedule.name,
        input_specs={},
        batch_statistics=method.batch_statistics,
        random=method.random,
    )
    graph = cut_stages(layers.prepared, StageCut.of(bare))
    if problem.offloads:
        bare = with_offload(bare, graph, offloaded(problem.method), problem.trace.host_state)
        graph = cut_stages(layers.prepared, StageCut.of(bare))
    shardings = stage_shardings(problem, layers, graph, bare, stages, candidate.timing, max_gap, are_too_slow)

    def make_plan() -> Plan:
        planned = (replace(mesh, sharding=each.sharding) for mesh, each in zip(meshes, shardings, strict=True))
        return with_input_specs(replace(bare, meshes=tuple(planned)), graph)

    limits = tuple(problem.memory_of(stage.submesh) for stage in stages)
    peak_bytes, memory_bytes = _fullest([each.peak_bytes for each in shardings], limits)
    costs = tuple(each.cost for each in shardings)
    return ShardedPlan(
        make_plan=make_plan,
        costs=costs,
        step_time_s=candidate.simulate_s(costs),
        peak_bytes=peak_bytes,
        memory_bytes=memory_bytes,
        limits=limits,
        gap=max(each.gap for each in shardings),
        graph=graph,
    )


def _fullest(peaks: Sequence[float], limits: Sequence[float]) -> tuple[float, float]:
    """Return the bytes that a device needs and may use, of those that use the largest share."""
    return max(zip(peaks, limits, strict=True), key=lambda each: each[0] / each[1])
