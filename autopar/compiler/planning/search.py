"""Search a plan in full: stages, their submeshes, microbatches, schedule and recomputation, chosen together.

    Trace, Auto, devices
      │ find_layers     Layers, for a number of microbatches
      │ LayerCosts      the intra-operator optimum of every class of layers on every submesh, by the price of memory
      │ search_stages   the best ranges of layers on the best submeshes, by the schedule's formula
      │ stage_shardings the intra-operator optimum of every stage as a whole
      ▼ Plan

Numbers of microbatches are tried from a usual one on, in the direction that helps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.compiler.frontend.trace import Trace
from autopar.compiler.inter_op.submeshes import place
from autopar.compiler.intra_op.plan_program import FOLD_FROM
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.pipeline.cut_stages import StageCut, cut_stages
from autopar.compiler.planning.candidates import StagesFound, certificate_of, lower_bound_s, search_all
from autopar.compiler.planning.stage_costs import StageProblem, submesh_mesh
from autopar.compiler.planning.stage_layouts import stage_shardings
from autopar.errors import MemoryTooSmall
from autopar.ir.plan import MeshPlan, Plan, StagePlan
from autopar.ir.plan_sharding import Certificate
from autopar.methods import Auto

_ATTEMPTS = 4
"""Searches for less and less memory, until stages as a whole fit."""
_BELOW = 0.97
"""Of a limit, what the next search gets at most."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LaidOut:
    """The plan of an outcome, the seconds of its step, and the most bytes that a device holds."""

    plan: Plan
    step_time_s: float
    peak_bytes: float


def plan_of_stages(problem: StageProblem, found: StagesFound) -> LaidOut:
    """The plan of an outcome: every stage's layouts are found anew, for the stage as a whole."""
    stages = found.search.best.stages
    devices = place([stage.submesh for stage in stages], problem.cluster)
    assert devices is not None
    layers, trace, method = found.layers, problem.trace, problem.method
    meshes: list[MeshPlan] = []
    for stage, mine in zip(stages, devices, strict=True):
        mesh = submesh_mesh(method, stage.submesh)
        meshes.append(MeshPlan(devices=mine, shape=mesh.shape, axis_names=mesh.axis_names))
    bare = Plan(
        fingerprint=trace.fingerprint,
        method="Auto",
        meshes=tuple(meshes),
        stages=tuple(
            StagePlan(layers=part.layers, mesh=part.mesh, remat=found.remat or layers.prepared.recomputes)
            for part in found.parts
        ),
        cuts=layers.cuts,
        loop_pieces=layers.loop_pieces,
        num_microbatches=layers.num_microbatches,
        schedule=found.schedule,
        input_specs={},
        cut_specs={},
        batch_statistics=method.batch_statistics,
        random=method.random,
    )
    graph = cut_stages(layers.prepared, StageCut.of(bare))
    laid_out = stage_shardings(problem, layers, graph, bare, stages, found.timing)
    planned = (replace(mesh, sharding=each.sharding) for mesh, each in zip(meshes, laid_out, strict=True))
    return LaidOut(
        plan=replace(bare, meshes=tuple(planned)),
        step_time_s=found.played_s([each.cost for each in laid_out]),
        peak_bytes=max(each.peak_bytes for each in laid_out),
    )


def plan_by_stages(problem: StageProblem) -> tuple[Plan | Auto, Certificate]:
    """The best plan, or the search of one program on one mesh that it comes down to, and how good that is.

    Raises `MemoryTooSmall` where nothing fits.
    """
    certificate: Certificate | None = None
    peak_bytes = 0.0
    for _ in range(_ATTEMPTS):
        try:
            ranked = search_all(problem)
        except MemoryTooSmall:
            if certificate is None:
                raise
            break
        # What holds for all that fits holds for what fits more easily.
        bound_s = lower_bound_s(ranked) if certificate is None else certificate.lower_bound_s
        best, certificate = ranked[0], certificate_of(ranked, bound_s)
        if len(best.search.best.stages) == 1 and best.layers.num_microbatches == 1:
            return replace(problem.method, num_stages=1, num_microbatches=1), certificate
        laid_out = plan_of_stages(problem, best)
        peak_bytes = laid_out.peak_bytes
        if peak_bytes <= problem.memory_bytes:
            # Stages as a whole may take less time than their layers, whose borders have one layout.
            certificate = certificate.at_most(laid_out.step_time_s)
            return replace(laid_out.plan, certificate=certificate), certificate
        # Stages as a whole may need more than their layers let expect: then all are expected to need as much more.
        problem = replace(problem, share=problem.share * min(_BELOW, problem.memory_bytes / peak_bytes))
    raise MemoryTooSmall(
        f"The stages found need {peak_bytes / 2**30:.3g} GiB of a device when they are laid out, and may use "
        f"{problem.memory_bytes / 2**30:.3g} GiB; none that need less were found. Use more devices, more and smaller "
        "microbatches, or a larger budget."
    )


def searches_stages(trace: Trace, method: Auto, num_devices: int) -> bool:
    """Whether there is anything to search beyond one program on one mesh."""
    if num_devices == 1 or not trace.differentiates:
        return False
    if method.num_stages == 1 and (method.num_microbatches is not None or not _large(trace)):
        return False
    if method.mesh_shape is not None:
        each = math.prod(method.mesh_shape)
        if num_devices % each or (each == num_devices and method.num_stages is None):
            return False  # one mesh, or an error that says why not
    return not any(jc.keeps_order(eqn) for eqn in jc.all_equations(trace.jaxpr))


def _large(trace: Trace) -> bool:
    """Whether the whole step in one program is too much to be planned under a memory budget in seconds."""
    return len(jc.open_jaxpr(trace.jaxpr)[0].eqns) >= FOLD_FROM
