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
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autopar.compiler import jax_compat as jc
from autopar.compiler.inter_op.fixed_stages import search_fixed_stages
from autopar.compiler.inter_op.schedule_times import Timing, step_time_s
from autopar.compiler.inter_op.stage_search import StageSearch, search_stages
from autopar.compiler.inter_op.submeshes import Submesh, cluster_shape, place, submesh_choices
from autopar.compiler.intra_op.search import FOLD_FROM
from autopar.compiler.layer_classes import Layers, count_step_layers, find_layers
from autopar.compiler.layer_costs import LayerCosts
from autopar.compiler.microbatch_counts import descend, first_likely, microbatch_counts, usual_place, usual_size
from autopar.compiler.prepare import stage_graph
from autopar.compiler.search_wishes import pins_of_inputs
from autopar.compiler.stage_layouts import stage_shardings
from autopar.compiler.stage_ranges import RangeCosts, StageProblem, cut_transfer_s, submesh_mesh
from autopar.compiler.stages_found import StagesFound, certificate_of, lower_bound_s
from autopar.compiler.trace import Trace
from autopar.errors import InvalidArgument, MemoryTooSmall, NotSplittable, Unsupported
from autopar.plan import MeshPlan, Plan, StagePlan
from autopar.progress import tell, tell_best
from autopar.search_methods import Auto
from autopar.sharding_plan import Certificate

_ATTEMPTS = 4
"""Searches for less and less memory, until stages as a whole fit."""
_LIKELY = 0.9
"""Of the memory, what stages judged by the layers of another number of microbatches are to need at most."""
_BELOW = 0.97
"""Of a limit, what the next search gets at most."""
_SHARE_FOR_STAGES = 0.2
"""Of the time limit, after which no further number of microbatches is tried."""


def search_all(problem: StageProblem) -> list[StagesFound]:
    """The best stages for every number of microbatches that was tried, the fastest first.

    Raises `MemoryTooSmall` where nothing fits, and `InvalidArgument` for pins that no plan can keep.
    """
    began = time.monotonic()
    pins_of_inputs(problem.trace, problem.method.pins)
    options = {"batch_statistics": problem.method.batch_statistics, "random": problem.method.random}
    num_layers, loop_pieces = count_step_layers(problem.trace, **options)
    counts = microbatch_counts(problem)
    found: dict[int, StagesFound] = {}
    shortages: dict[int, MemoryTooSmall] = {}
    whole: set[int] = set()

    def time_s(place: int) -> float | None:
        """With the microbatches of a place; infinite where nothing fits, None where the batch cannot be split."""
        count = counts[place]
        if count not in found and count not in shortages and count not in whole:
            tell(f"{count} microbatches")
            try:
                found[count] = _search(problem, count, num_layers, loop_pieces, options)
            except MemoryTooSmall as error:
                shortages[count] = error
            except (NotSplittable, Unsupported):
                if problem.method.num_microbatches is not None:
                    raise
                whole.add(count)
        if count in found:
            return found[count].search.step_time_s
        return None if count in whole else math.inf

    def is_likely(place: int) -> bool:
        return _fits_by_hosts(problem, counts[place], counts[usual:], num_layers, loop_pieces, options)

    usual = usual_place(problem, counts, num_layers)
    start = first_likely(is_likely, len(counts), usual)
    deadline = began + _SHARE_FOR_STAGES * problem.method.time_limit_s
    descend(time_s, len(counts), start, deadline, usual_size(problem, counts))
    if found:
        return sorted(found.values(), key=lambda each: each.search.step_time_s)
    if shortages:
        raise shortages[max(shortages)]
    raise Unsupported(
        f"The search over stages tried {sorted(whole)} microbatches, and the step can be split into none of them. Use "
        "num_stages=1."
    )


def _search(
    problem: StageProblem, num_microbatches: int, num_layers: int, loop_pieces: int, options: dict[str, str]
) -> StagesFound:
    """The best schedule, without recomputation if that fits."""
    shortage: MemoryTooSmall | None = None
    for remat in _remats(problem):
        try:
            known = _known(problem, num_microbatches, remat, num_layers, loop_pieces, options)
            return _search_layers(problem, *known, remat)
        except MemoryTooSmall as error:
            shortage = error
    assert shortage is not None
    raise shortage


def _fits_by_hosts(
    problem: StageProblem,
    num_microbatches: int,
    counts: Sequence[int],
    num_layers: int,
    loop_pieces: int,
    options: dict[str, str],
) -> bool:
    """Whether a stage for every host is likely to do, judged by the layers of the first number that splits the batch:
    much less to find out than what the best stages are.
    """
    cluster = problem.cluster
    if problem.num_stages is not None or problem.method.num_microbatches is not None or cluster.num_hosts == 1:
        return True
    for remat in _remats(problem):
        known = _first_known(problem, counts, remat, num_layers, loop_pieces, options)
        if known is None:
            return True
        layers, costs = known
        if len(layers.class_of) < cluster.num_hosts:
            return True
        ranges, rows = RangeCosts(problem, layers, costs), layers.num_microbatches / num_microbatches
        share = 1.0 if rows == 1 else _LIKELY
        try:
            search_fixed_stages(
                len(layers.class_of),
                cluster.num_hosts,
                Submesh(num_hosts=1, devices_per_host=cluster.devices_per_host),
                lambda start, stop, submesh: [cost.with_rows(rows) for cost in ranges(start, stop, submesh)],  # noqa: B023
                lambda cut, source, target: rows * ranges.transfer_s(cut, source, target),  # noqa: B023
                timing=Timing(schedule=problem.method.schedule or "1f1b", num_microbatches=num_microbatches),
                memory_bytes=share * problem.expected_bytes,
            )
        except MemoryTooSmall:
            continue
        return True
    return False


def _first_known(
    problem: StageProblem,
    counts: Sequence[int],
    remat: bool,
    num_layers: int,
    loop_pieces: int,
    options: dict[str, str],
) -> tuple[Layers, LayerCosts] | None:
    for count in counts:
        try:
            return _known(problem, count, remat, num_layers, loop_pieces, options)
        except (NotSplittable, Unsupported):
            continue
    return None


def _remats(problem: StageProblem) -> tuple[bool, ...]:
    return (False, True) if problem.method.remat == "auto" else (bool(problem.method.remat),)


def _known(
    problem: StageProblem,
    num_microbatches: int,
    remat: bool,
    num_layers: int,
    loop_pieces: int,
    options: dict[str, str],
) -> tuple[Layers, LayerCosts]:
    """The layers for a number of microbatches and their costs, found when they are first asked for."""
    key = (num_microbatches, remat)
    if key not in problem.known:
        layers = find_layers(
            problem.trace,
            num_layers=num_layers,
            loop_pieces=loop_pieces,
            num_microbatches=num_microbatches,
            schedule=problem.method.schedule or "1f1b",
            remat=remat,
            pins=problem.method.pins,
            **options,
        )
        problem.known[key] = layers, _costs_of(problem, layers)
    return problem.known[key]


def _costs_of(problem: StageProblem, layers: Layers) -> LayerCosts:
    return LayerCosts(
        classes=layers.classes,
        most_common=Counter(layers.class_of).most_common(1)[0][0],
        method=problem.method,
        cache_directory=problem.cache_directory,
    )


def _search_layers(problem: StageProblem, layers: Layers, costs: LayerCosts, remat: bool) -> StagesFound:
    ranges = RangeCosts(problem, layers, costs)
    found: list[tuple[str, StageSearch]] = []
    shortage: MemoryTooSmall | None = None
    for schedule in (problem.method.schedule,) if problem.method.schedule else ("1f1b", "eager-1f1b", "gpipe"):
        try:
            found.append((schedule, _partitioned(problem, layers, ranges, schedule)))
        except MemoryTooSmall as error:
            shortage = error
    if not found:
        assert shortage is not None
        raise shortage
    schedule, search = min(found, key=lambda each: each[1].step_time_s)
    tell_best(search.step_time_s)
    return StagesFound(layers=layers, schedule=schedule, remat=remat, search=search, costs_gap=costs.gap)


def _partitioned(problem: StageProblem, layers: Layers, ranges: RangeCosts, schedule: str) -> StageSearch:
    """The best stages of any sizes, or of one size if their number or their mesh is given."""
    cluster, method = problem.cluster, problem.method
    num_layers, timing = len(layers.class_of), Timing(schedule=schedule, num_microbatches=layers.num_microbatches)
    count = problem.num_stages
    if count is not None:
        return search_fixed_stages(
            num_layers,
            count,
            _part(cluster, count),
            ranges,
            ranges.transfer_s,
            timing=timing,
            memory_bytes=problem.expected_bytes,
        )
    return search_stages(
        num_layers,
        cluster.num_devices,
        submesh_choices(cluster.num_devices, cluster.devices_per_host, any_host_count=False),
        ranges,
        ranges.transfer_s,
        num_microbatches=layers.num_microbatches,
        schedule=schedule,
        memory_bytes=problem.expected_bytes,
        time_limit_s=method.time_limit_s,
        can_place=lambda submeshes: place(submeshes, cluster) is not None,
    )


def _part(cluster: Submesh, count: int) -> Submesh:
    """One of `count` equal parts of the cluster."""
    size, rest = divmod(cluster.num_devices, count)
    if rest:
        raise InvalidArgument(
            f"{cluster.num_devices} devices do not divide into {count} equal stages. Use a number of stages that "
            "divides them, or leave it to the search."
        )
    return cluster_shape(size, cluster.devices_per_host)


@dataclass(frozen=True, kw_only=True, eq=False)
class LaidOut:
    """The plan of an outcome, its step time by the schedule's formula, and the most bytes that a device holds."""

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
            StagePlan(layers=(stage.start, stage.stop), mesh=s, remat=found.remat or layers.prepared.recomputes)
            for s, stage in enumerate(stages)
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
    laid_out = stage_shardings(problem, layers, stage_graph(layers.prepared, bare), bare, stages)
    planned = (replace(mesh, sharding=each.sharding) for mesh, each in zip(meshes, laid_out, strict=True))
    transfers_s = [
        cut_transfer_s(problem, layers, after.start, before.submesh, after.submesh)
        for before, after in pairwise(stages)
    ]
    timing = Timing(schedule=found.schedule, num_microbatches=layers.num_microbatches)
    return LaidOut(
        plan=replace(bare, meshes=tuple(planned)),
        step_time_s=step_time_s(timing, [each.cost for each in laid_out], transfers_s),
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
            bound_s = min(certificate.lower_bound_s, laid_out.step_time_s)
            certificate = replace(certificate, lower_bound_s=bound_s)
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
