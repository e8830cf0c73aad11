"""Cut a prepared step into stages: place its equations on them, and gather these into tasks.

PreparedStep, StageCut  ->  StageGraph

The step is cut once for every lane, and the lanes are joined. Gradients of a parameter that is tied in one of them are
summed apart in all, so that each has sums of the same values.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

from autopar.compiler.pipeline.build_stage_graph import build_stage_graph
from autopar.compiler.pipeline.lanes import with_lanes
from autopar.compiler.pipeline.phases import Phases
from autopar.compiler.pipeline.placement import Placement, layer_order, place_equations
from autopar.compiler.pipeline.prepare import PreparedStep
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.errors import PlanMismatch
from autopar.ir.plan import Plan, lanes_of
from autopar.ir.schedules import get_schedule


@dataclass(frozen=True, kw_only=True)
class StageCut:
    """The places at which a step is cut into stages, and how the tasks of their backward pass are made."""

    cuts: tuple[int, ...]
    """The forward equations at which layers 1, 2, ... begin."""
    stages: tuple[tuple[int, int], ...]
    """The layers `[start, stop)` of every stage; each lane has all layers, and the lanes follow each other."""
    recomputed: tuple[int, ...] = ()
    """How many of its first layers the backward task of each stage computes again; empty for none."""
    split_weight_gradients: bool = False
    """True if weight gradients are tasks of their own."""
    host_state: tuple[tuple[str, ...], ...] = ()
    """Parts of the state that are kept on the host, each of which has updates of its own."""
    shares: tuple[int, ...] = ()
    """The number of microbatches of each lane; empty for one pipeline that runs all."""

    @staticmethod
    def of(plan: Plan) -> StageCut:
        """Return the cut that a plan has decided."""
        return StageCut(
            cuts=plan.cuts,
            stages=tuple(stage.layers for stage in plan.stages),
            shares=plan.shares,
            recomputed=tuple(stage.recomputed for stage in plan.stages),
            split_weight_gradients=get_schedule(plan.schedule).splits_weight_gradients,
            host_state=plan.host_state,
        )

    def shape_of(self, lane: range) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
        """Return the layers of the stages of a lane, and how many each computes again."""
        return self.stages[lane.start : lane.stop], self.recomputed[lane.start : lane.stop]


@lru_cache(maxsize=2)
def cut_stages(prepared: PreparedStep, cut: StageCut) -> StageGraph:
    """Return the stages as tasks. Raises `PlanMismatch` for a cut behind the last forward equation.

    The last two are remembered, as a plan is simulated when its layouts are chosen.
    """
    order = layer_order(prepared.phases)
    if cut.cuts and cut.cuts[-1] >= len(order):
        raise PlanMismatch(
            f"The plan begins a layer at forward equation {cut.cuts[-1]}, {prepared.trace.name} has {len(order)} of "
            "them. Make a new plan with step.trace(...).plan(), or load the one that belongs to this program."
        )
    place = partial(_placed, prepared.phases, cut.cuts)
    if not cut.shares:
        return _graph(prepared, cut, place(cut.stages), cut.stages, cut.recomputed)
    shapes = [cut.shape_of(lane) for lane in lanes_of(cut.stages)]
    deferred = frozenset[int]().union(*(place(stages).deferred for stages in {stages for stages, _ in shapes}))
    graphs = {shape: _graph(prepared, cut, place(shape[0], deferred), *shape) for shape in set(shapes)}
    return with_lanes([graphs[shape] for shape in shapes], cut.shares)


@lru_cache(maxsize=6)
def _placed(
    phases: Phases, cuts: tuple[int, ...], stages: tuple[tuple[int, int], ...], deferred: frozenset[int] = frozenset()
) -> Placement:
    """Return the placement of a cut; the last few are remembered, as stages that recompute have the same."""
    stage_of_layer = [s for s, layers in enumerate(stages) for _ in range(*layers)]
    layer_stage = {i: stage_of_layer[bisect_right(cuts, p)] for p, i in enumerate(layer_order(phases))}
    return place_equations(phases, layer_stage=layer_stage, num_stages=len(stages), deferred=deferred)


def _layer_of(phases: Phases, cuts: tuple[int, ...]) -> Mapping[int, int]:
    """Return the layer of each equation that runs with the microbatches."""
    return _placed(phases, cuts, tuple((layer, layer + 1) for layer in range(len(cuts) + 1))).stages


def _graph(
    prepared: PreparedStep,
    cut: StageCut,
    placement: Placement,
    stages: tuple[tuple[int, int], ...],
    recomputed: tuple[int, ...],
) -> StageGraph:
    again = {s: range(stages[s][0], stages[s][0] + count) for s, count in enumerate(recomputed) if count}
    return build_stage_graph(
        placement,
        name=prepared.trace.name,
        inputs=prepared.inputs,
        outputs=prepared.outputs,
        input_names=prepared.input_names,
        leaf_names=[leaf.name for leaf in prepared.trace.inputs],
        state_outputs=prepared.state_outputs,
        again=again,
        layer_of=_layer_of(prepared.phases, cut.cuts) if again else {},
        split_weight_gradients=cut.split_weight_gradients,
        host_state=cut.host_state,
    )
