"""What the search over stages found for a number of microbatches, and how good the best of that is.

StagesFound, StagesFound, ...  ->  Certificate
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.compiler.inter_op.stage_costs import Partition
from autopar.compiler.inter_op.stage_search import StageSearch
from autopar.compiler.layer_classes import Layers
from autopar.sharding_plan import Certificate

_RUNNERS_UP = 5


@dataclass(frozen=True, kw_only=True, eq=False)
class StagesFound:
    """The outcome of the search for one number of microbatches."""

    layers: Layers
    schedule: str
    remat: bool
    search: StageSearch
    costs_gap: float


def lower_bound_s(ranked: Sequence[StagesFound]) -> float:
    """Seconds that no stages take less than, for all numbers of microbatches."""
    return min(each.search.lower_bound_s * (1 - each.costs_gap) for each in ranked)


def certificate_of(ranked: Sequence[StagesFound], bound_s: float) -> Certificate:
    """How good the first one is, the fastest, with the next best of all."""
    others = [(each, each.search.best) for each in ranked[1:]]
    others += [(each, partition) for each in ranked for partition in each.search.runners_up]
    others.sort(key=lambda other: other[1].step_time_s)
    return Certificate(
        step_time_s=ranked[0].search.step_time_s,
        lower_bound_s=bound_s,
        tried=tuple(sorted(each.layers.num_microbatches for each in ranked)),
        runners_up=tuple((_words(each, partition), partition.step_time_s) for each, partition in others[:_RUNNERS_UP]),
    )


def _words(found: StagesFound, partition: Partition) -> str:
    stages = " | ".join(f"{stage.stop - stage.start} layers on {stage.submesh}" for stage in partition.stages)
    return f"{found.layers.num_microbatches} microbatches, {found.schedule}: {stages}"
