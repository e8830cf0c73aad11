"""What the search over stages found for a number of microbatches, and how good the best of that is.

StagesFound, StagesFound, ...  ->  Certificate
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.compiler.inter_op.search import StageSearch
from autopar.compiler.inter_op.stage_costs import Partition, StageCost, Timing
from autopar.compiler.layer_classes import Layers
from autopar.compiler.stage_parts import StagePart, played_s
from autopar.ir.plan_sharding import Certificate

_RUNNERS_UP = 5


@dataclass(frozen=True, kw_only=True, eq=False)
class StagesFound:
    """The outcome of the search for one number of microbatches."""

    layers: Layers
    schedule: str
    virtual_stages: int
    """Stages on each mesh; the search has their layers as one stage."""
    remat: bool
    search: StageSearch
    parts: tuple[StagePart, ...]
    """The stages of the best partition."""
    costs_gap: float

    @cached_property
    def step_time_s(self) -> float:
        """Seconds of the best stages, their schedule played through."""
        return self.played_s([stage.cost for stage in self.search.best.stages])

    def played_s(self, costs: Sequence[StageCost]) -> float:
        """The same for other costs of the meshes."""
        return played_s(self.timing, self.parts, costs)

    @property
    def timing(self) -> Timing:
        """The schedule with its numbers."""
        return Timing(
            schedule=self.schedule,
            num_microbatches=self.layers.num_microbatches,
            virtual_stages=self.virtual_stages,
        )

    @property
    def gain_from_splitting(self) -> float:
        """What of the step putting off weight gradients can gain: where forward, input and weight gradients take equal
        times, two thirds of what fills the pipeline.
        """
        fills_s = [stage.cost.forward_s + stage.cost.backward_s for stage in self.search.best.stages]
        return 2 / 3 * (sum(fills_s) - max(fills_s)) / self.step_time_s


def lower_bound_s(ranked: Sequence[StagesFound]) -> float:
    """Seconds that no stages take less than by the formulas of the schedules that were tried."""
    return min(each.search.lower_bound_s * (1 - each.costs_gap) for each in ranked)


def certificate_of(ranked: Sequence[StagesFound], bound_s: float) -> Certificate:
    """How good the first one is, the fastest, with the next best of all by the schedule's formula."""
    step_time_s = ranked[0].step_time_s
    others = [(each, each.search.best) for each in ranked[1:]]
    others += [(each, partition) for each in ranked for partition in each.search.runners_up]
    others = sorted(
        (other for other in others if other[1].step_time_s >= step_time_s), key=lambda other: other[1].step_time_s
    )
    return Certificate(
        step_time_s=step_time_s,
        lower_bound_s=min(bound_s, step_time_s),
        tried=tuple(sorted({each.layers.num_microbatches for each in ranked})),
        runners_up=tuple((_words(each, partition), partition.step_time_s) for each, partition in others[:_RUNNERS_UP]),
    )


def _words(found: StagesFound, partition: Partition) -> str:
    stages = " | ".join(f"{stage.stop - stage.start} layers on {stage.submesh}" for stage in partition.stages)
    virtual = f" x {found.virtual_stages}" if found.virtual_stages > 1 else ""
    return f"{found.layers.num_microbatches} microbatches, {found.schedule}{virtual}: {stages}"
