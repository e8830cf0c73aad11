"""Search a plan in full: stages, their submeshes, microbatches, schedule and recomputation, chosen together.

    Trace, Auto, devices
      │ find_layers     Layers, for a number of microbatches
      │ LayerCosts      the intra-operator optimum of every class of layers on every submesh, by memory multiplier
      │ search_stages   the best ranges of layers on the best submeshes, by the closed form of the schedule
      │ stage_shardings the intra-operator optimum of every stage as a whole
      ▼ Plan

Numbers of microbatches are tried from a usual one on, in the direction that helps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.compiler.frontend.trace import Trace
from autopar.compiler.inter_op.submeshes import place_submeshes
from autopar.compiler.intra_op.plan_program import FOLD_FROM
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.pipeline.cut_stages import StageCut, cut_stages
from autopar.compiler.planning.candidates import PipelineCandidate, certificate_of, lower_bound_s, search_pipelines
from autopar.compiler.planning.stage_costs import StageProblem, submesh_mesh
from autopar.compiler.planning.stage_layouts import stage_shardings, with_input_specs
from autopar.errors import MemoryTooSmall
from autopar.ir.plan import MeshPlan, Plan, StagePlan
from autopar.ir.plan_sharding import Certificate
from autopar.methods import Auto

_ATTEMPTS = 4
"""Searches for less and less memory, until stages as a whole fit."""
_NEXT_SHARE = 0.97
"""Of the memory that one search had, the most that the next one gets."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedPlan:
    """The plan of a candidate with its layouts, the seconds of its step, and the peak bytes of a device."""

    plan: Plan
    step_time_s: float
    peak_bytes: float


def shard_candidate(problem: StageProblem, candidate: PipelineCandidate) -> ShardedPlan:
    """Return the plan of a candidate, whose layouts are chosen anew for every stage as a whole."""
    stages = candidate.search.best.stages
    devices = place_submeshes([stage.submesh for stage in stages], problem.cluster)
    assert devices is not None
    layers, trace, method = candidate.layers, problem.trace, problem.method
    meshes: list[MeshPlan] = []
    for stage, mine in zip(stages, devices, strict=True):
        mesh = submesh_mesh(method, stage.submesh)
        meshes.append(MeshPlan(devices=mine, shape=mesh.shape, axis_names=mesh.axis_names))
    bare = Plan(
        fingerprint=trace.fingerprint,
        method="Auto",
        meshes=tuple(meshes),
        stages=tuple(
            StagePlan(layers=stage.layers, mesh=stage.mesh, remat=candidate.remat or layers.prepared.recomputes)
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
    shardings = stage_shardings(problem, layers, graph, bare, stages, candidate.timing)
    planned = (replace(mesh, sharding=each.sharding) for mesh, each in zip(meshes, shardings, strict=True))
    return ShardedPlan(
        plan=with_input_specs(replace(bare, meshes=tuple(planned)), graph),
        step_time_s=candidate.simulate_s([each.cost for each in shardings]),
        peak_bytes=max(each.peak_bytes for each in shardings),
    )


def plan_by_stages(problem: StageProblem) -> tuple[Plan | Auto, Certificate]:
    """Return the best plan, or the search of one program on one mesh if that is best, with its certificate.

    Raises `MemoryTooSmall` where nothing fits.
    """
    certificate: Certificate | None = None
    peak_bytes = 0.0
    for _ in range(_ATTEMPTS):
        try:
            ranked = search_pipelines(problem)
        except MemoryTooSmall:
            if certificate is None:
                raise
            break
        # What holds for all that fits holds for what fits more easily.
        bound_s = lower_bound_s(ranked) if certificate is None else certificate.lower_bound_s
        best, certificate = ranked[0], certificate_of(ranked, bound_s)
        if len(best.search.best.stages) == 1 and best.layers.num_microbatches == 1:
            return replace(problem.method, num_stages=1, num_microbatches=1), certificate
        sharded = shard_candidate(problem, best)
        peak_bytes = sharded.peak_bytes
        if peak_bytes <= problem.memory_bytes:
            # Stages as a whole may take less time than their layers, whose borders have one layout.
            certificate = certificate.at_most(sharded.step_time_s)
            return replace(sharded.plan, certificate=certificate), certificate
        # Stages as a whole may need more than the sum over their layers: then all are expected to need as much more.
        problem = replace(problem, share=problem.share * min(_NEXT_SHARE, problem.memory_bytes / peak_bytes))
    raise MemoryTooSmall(
        f"The best stages need {peak_bytes / 2**30:.3g} GiB of a device with their layouts, and may use "
        f"{problem.memory_bytes / 2**30:.3g} GiB; there are none that need less. Use more devices, more and smaller "
        "microbatches, or a larger budget."
    )


def searches_stages(trace: Trace, method: Auto, num_devices: int) -> bool:
    """Return whether there is anything to search beyond one program on one mesh."""
    if num_devices == 1 or not trace.differentiates or (method.num_stages is None and not trace.batch_inputs):
        return False
    if method.num_stages == 1 and (method.num_microbatches is not None or not _large(trace)):
        return False
    if method.mesh_shape is not None:
        each = math.prod(method.mesh_shape)
        if num_devices % each or (each == num_devices and method.num_stages is None):
            return False  # one mesh, or an error that says why not
    return not any(jc.keeps_order(eqn) for eqn in jc.all_equations(trace.jaxpr))


def _large(trace: Trace) -> bool:
    """Return whether the whole step in one program is too much to be planned under a memory budget in seconds."""
    return len(jc.open_jaxpr(trace.jaxpr)[0].eqns) >= FOLD_FROM
