"""Cut a prepared step into stages: place its equations on them, and gather these into tasks.

PreparedStep, StageCut  ->  StageGraph
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from autopar.compiler.pipeline.build_stage_graph import build_stage_graph
from autopar.compiler.pipeline.lanes import with_lanes
from autopar.compiler.pipeline.placement import layer_order, place_equations
from autopar.compiler.pipeline.prepare import PreparedStep
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.errors import PlanMismatch
from autopar.ir.plan import Plan
from autopar.ir.schedules import get_schedule


@dataclass(frozen=True, kw_only=True)
class StageCut:
    """The places at which a step is cut into stages, and how the tasks of their backward pass are made."""

    cuts: tuple[int, ...]
    """The forward equations at which layers 1, 2, ... begin."""
    stages: tuple[tuple[int, int], ...]
    """The layers `[start, stop)` of every stage."""
    remat_stages: frozenset[int] = frozenset()
    """Stages whose backward task computes the forward again."""
    split_weight_gradients: bool = False
    """Weight gradients are tasks of their own."""
    host_state: tuple[tuple[str, ...], ...] = ()
    """Parts of the state that are kept on the host, each of which has updates of its own."""
    shares: tuple[int, ...] = ()
    """The microbatches of each lane, if the only stage is made lanes."""

    @staticmethod
    def of(plan: Plan) -> StageCut:
        """Return the cut that a plan has decided."""
        layers = tuple(stage.layers for stage in plan.stages)
        return StageCut(
            cuts=plan.cuts,
            stages=layers[:1] if plan.shares else layers,
            shares=plan.shares,
            remat_stages=frozenset(s for s, stage in enumerate(plan.stages) if stage.remat),
            split_weight_gradients=get_schedule(plan.schedule).splits_weight_gradients,
            host_state=plan.host_state,
        )


def cut_stages(prepared: PreparedStep, cut: StageCut) -> StageGraph:
    """Return the stages as tasks. Raises `PlanMismatch` for a cut behind the last forward equation."""
    stage_of_layer = [s for s, layers in enumerate(cut.stages) for _ in range(*layers)]
    order = layer_order(prepared.phases)
    if cut.cuts and cut.cuts[-1] >= len(order):
        raise PlanMismatch(
            f"The plan begins a layer at forward equation {cut.cuts[-1]}, {prepared.trace.name} has {len(order)} of "
            "them. Make a new plan with step.trace(...).plan(), or load the one that belongs to this program."
        )
    layer_stage = {i: stage_of_layer[bisect_right(cut.cuts, p)] for p, i in enumerate(order)}
    graph = build_stage_graph(
        place_equations(prepared.phases, layer_stage=layer_stage, num_stages=len(cut.stages)),
        name=prepared.trace.name,
        inputs=prepared.inputs,
        outputs=prepared.outputs,
        input_names=prepared.input_names,
        leaf_names=[leaf.name for leaf in prepared.trace.inputs],
        state_outputs=prepared.state_outputs,
        remat_stages=cut.remat_stages,
        split_weight_gradients=cut.split_weight_gradients,
        host_state=cut.host_state,
    )
    return with_lanes(graph, cut.shares) if cut.shares else graph
