"""Make the plan of stages that were found: the layouts of each as a whole, and what the step takes with them.

PipelineCandidate  ->  ShardedPlan
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.compiler.inter_op.stage_costs import StageCost
from autopar.compiler.inter_op.submeshes import place_in_groups
from autopar.compiler.pipeline.cut_stages import StageCut, cut_stages
from autopar.compiler.pipeline.host_state import with_offload
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.planning.stages.pipeline_candidate import PipelineCandidate
from autopar.compiler.planning.stages.stage_layouts import StageLayouts, stage_shardings, with_input_specs
from autopar.compiler.planning.stages.stage_problem import StageProblem, submesh_mesh
from autopar.compiler.solver.solve import MAX_GAP
from autopar.ir.plan import MeshPlan, Plan, StagePlan
from autopar.methods import offloaded


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedPlan:
    """The plan of a candidate with its layouts, the costs of its stages, its seconds, and the bytes of the devices."""

    costs: tuple[StageCost, ...]
    step_time_s: float
    peaks: tuple[float, ...]
    """Bytes that a device of each mesh needs."""
    limits: tuple[float, ...]
    """Bytes that it may use."""
    gap: float
    """The share of its time by which the best layouts of these stages may at most be faster."""
    graph: StageGraph
    """The stages as the plan cuts them."""
    make_plan: Callable[[], Plan]

    @cached_property
    def plan(self) -> Plan:
        """The plan, made when it is first asked for."""
        return self.make_plan()

    @cached_property
    def peak_shares(self) -> list[float]:
        """The share of what it may use that a device of each mesh needs."""
        return [peak / limit for peak, limit in zip(self.peaks, self.limits, strict=True)]

    @property
    def fullest(self) -> int:
        """The mesh whose devices need the largest share of what they may use."""
        return max(range(len(self.limits)), key=self.peak_shares.__getitem__)

    @property
    def fits(self) -> bool:
        """True if no device needs more than it may use."""
        return max(self.peak_shares) <= 1


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
                recomputed=layers.num_recomputed(*stage.layers, stages[stage.mesh].cost.choice.remat),
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
    costs = tuple(each.cost for each in shardings)
    return ShardedPlan(
        make_plan=make_plan,
        costs=costs,
        step_time_s=candidate.simulate_s(costs),
        peaks=tuple(each.peak_bytes for each in shardings),
        limits=limits,
        gap=max(each.gap for each in shardings),
        graph=graph,
    )
