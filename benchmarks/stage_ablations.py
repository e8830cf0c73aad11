"""Searches with one decision of the search over stages taken away, as in Alpa's study of what each is worth.

    Traced, Cluster, Auto, name  ->  Plan

    equal-mesh        all stages have as many devices; their layers are searched
    equal-layer       all stages have as many layers (up to one); their devices are searched
    equal-operator    layers have as many equations, instead of those of the model; all else is searched

Source: Zheng et al. 2022, section 8.3 and Figure 9.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import autopar
from autopar.compiler.pipeline.phases import Phases
from autopar.compiler.pipeline.placement import layer_order
from autopar.compiler.pipeline.prepare import prepare
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.planning.search.best_first import Simulated, search_plan
from autopar.compiler.planning.stages.layer_classes import count_step_layers, model_cuts
from autopar.compiler.planning.stages.stage_problem import StageProblem
from autopar.errors import MemoryTooSmall
from autopar.ir.plan import Plan
from autopar.methods import Auto
from autopar.simulation import SimulationReport

_SCHEDULES = ("1f1b", "eager-1f1b")
"""Schedules of stages whose layers are given: an interleaved one has several of them on a mesh."""
ABLATIONS = ("equal-mesh", "equal-layer", "equal-operator")


def ablated_plan(traced: autopar.Traced, cluster: autopar.Cluster, method: Auto, name: str) -> autopar.Planned:
    """The best plan of what is left of the space. Raises `MemoryTooSmall` where nothing of it fits."""

    def report(plan: Plan) -> SimulationReport:
        return traced.plan(plan).simulate(cluster)

    def step_s(plan: Plan, graph: StageGraph | None = None) -> float:
        return report(plan).step_time_s

    def peak_bytes(plan: Plan) -> list[int]:
        return [mesh.peak_bytes for mesh in report(plan).meshes]

    simulated = Simulated(step_s=step_s, peak_bytes=peak_bytes)
    found: list[tuple[float, autopar.Planned]] = []
    shortage: MemoryTooSmall | None = None
    for problem in _problems(traced, cluster, method, name):
        try:
            planned = traced.plan(search_plan(problem, simulated))
        except MemoryTooSmall as error:
            shortage = error
            continue
        found.append((step_s(planned.plan), planned))
    if not found:
        assert shortage is not None
        raise shortage
    return min(found, key=lambda each: each[0])[1]


def _problems(traced: autopar.Traced, cluster: autopar.Cluster, method: Auto, name: str) -> Iterator[StageProblem]:
    """Searches of which the best is taken; costs of layers are computed for all of them once."""
    whole = StageProblem(
        trace=traced.trace,
        method=method,
        hardware=cluster,
        cache_directory=None,
    )
    counts = [n for n in range(1, _num_layers(traced, method) + 1) if cluster.num_devices % n == 0]
    match name:
        case "equal-mesh":
            yield from (replace(whole, method=replace(method, num_stages=count)) for count in counts)
        case "equal-layer":
            for count, schedule in itertools.product(counts, [method.schedule] if method.schedule else _SCHEDULES):
                yield replace(whole, method=replace(method, schedule=schedule), allows=partial(_is_even, count))
        case "equal-operator":
            yield replace(whole, cut=equal_cuts)
        case _:
            raise AssertionError(name)


def _num_layers(traced: autopar.Traced, method: Auto) -> int:
    options = {"batch_statistics": method.batch_statistics, "random": method.random}
    most, pieces = count_step_layers(traced.trace, **options)
    prepared = prepare(traced.trace, num_layers=most, num_microbatches=1, loop_pieces=pieces, **options)
    return len(model_cuts(prepared.phases, most)) + 1


def _is_even(num_stages: int, start: int, stop: int, num_layers: int) -> bool:
    """True if layers [start, stop) are one of so many stages that are as even as can be."""
    borders = [stage * num_layers // num_stages for stage in range(num_stages + 1)]
    return (start, stop) in itertools.pairwise(borders)


def equal_cuts(phases: Phases, num_layers: int) -> Sequence[int]:
    """Return where layers of as many equations begin, whatever these compute."""
    count = len(layer_order(phases))
    return tuple(layer * count // num_layers for layer in range(1, num_layers))
