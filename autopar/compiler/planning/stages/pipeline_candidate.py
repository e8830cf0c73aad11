"""Stages as they are found by their layers, before their layouts are chosen as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.compiler.inter_op.stage_costs import Stage, StageCost, Timing
from autopar.compiler.planning.stages.layer_classes import Layers
from autopar.compiler.planning.stages.stage_problem import StageProblem
from autopar.compiler.planning.stages.virtual_stages import VirtualStage, simulate_schedule_s
from autopar.ir.clocks import Hosts
from autopar.plain_text import microbatches_in_words

WHOLE_SHARE = 0.85
"""Least share of the time by their layers that stages take as a whole: small layers gain the most."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineCandidate:
    """Stages for one number of microbatches and one schedule."""

    layers: Layers
    timing: Timing
    """The schedule; the search has the layers of all virtual stages on a mesh as one stage."""
    bound_s: float
    """Seconds that no stages searched together with these are expected to undercut."""
    stages: tuple[Stage, ...]
    virtual_stages: tuple[VirtualStage, ...]
    hosts: Hosts

    @cached_property
    def step_time_s(self) -> float:
        """Simulated seconds of a step."""
        return self.simulate_s([stage.cost for stage in self.stages])

    def simulate_s(self, costs: Sequence[StageCost]) -> float:
        """Return the simulated seconds of a step for other costs of the meshes."""
        return simulate_schedule_s(self.timing, self.virtual_stages, costs, self.hosts)

    @cached_property
    def share_without_links(self) -> float:
        """The share of the simulated seconds that a step takes where nothing that is sent between stages takes time."""
        stages = tuple(replace(stage, link_s=0.0) for stage in self.virtual_stages)
        return replace(self, virtual_stages=stages).step_time_s / self.step_time_s

    @property
    def stages_key(self) -> object:
        """Equal for stages that differ in their schedule at most."""
        stages = tuple((stage.start, stage.stop, stage.submesh, stage.cost.choice) for stage in self.stages)
        splits = self.timing.schedule.splits_weight_gradients
        return tuple(stage.layers for stage in self.virtual_stages), splits, stages

    @cached_property
    def stage_keys(self) -> tuple[tuple[object, ...], ...]:
        """Equal for stages, of candidates of the same layers, that take about the same time as a whole."""
        return tuple(
            (
                self.layers,
                tuple(self.layers.class_of[slice(*each.layers)] for each in self.virtual_stages if each.mesh == mesh),
                stage.submesh,
                stage.cost.choice,
            )
            for mesh, stage in enumerate(self.stages)
        )

    @cached_property
    def scheduled_otherwise(self) -> tuple[object, ...]:
        """The same, whether weight gradients are tasks of their own or not: equal for stages that take alike times."""
        return tuple((self.timing.num_microbatches, *key) for key in self.whatever_microbatches)

    @cached_property
    def whatever_microbatches(self) -> tuple[tuple[object, ...], ...]:
        """The same for any number of microbatches: equal for stages whose layouts are likely to be alike."""
        return tuple((self.layers.cuts, *key[1:]) for key in self.stage_keys)

    def peak_shares(self, problem: StageProblem) -> list[float]:
        """Return by stage the share of its memory that a device needs, by sums over layers (roomy: by what stays)."""
        count = len(self.stages)
        return [
            stage.cost.peak_bytes(self.timing.num_in_flight(stages_behind=count - 1 - number, num_stages=count))
            / problem.memory_of(stage.submesh)
            for number, stage in enumerate(self.stages)
        ]

    @property
    def waiting_share(self) -> float:
        """The share of the step in which the pipeline fills and drains, if each mesh had one stage."""
        warmups_s = [stage.cost.forward_s + stage.cost.backward_s for stage in self.stages]
        return (sum(warmups_s) - max(warmups_s)) / self.step_time_s

    @property
    def gain_from_splitting(self) -> float:
        """The share of the step that splitting off weight gradients can gain, by which meshes wait for each other.

        All that the busiest mesh waits but a third of what fills the pipeline, where forward, input and weight
        gradients take equal times: weight gradients also fill the time in which values are sent.
        """
        count = self.timing.num_microbatches
        busy_s = max(count * (each.cost.forward_s + each.cost.backward_s) + each.cost.update_s for each in self.stages)
        return 1 - busy_s / self.step_time_s - self.waiting_share / 3

    def __str__(self) -> str:
        timing, stages = self.timing, self.stages
        named = " | ".join(f"{stage.stop - stage.start} layers on {stage.submesh}" for stage in stages)
        virtual = f" x {timing.virtual_stages}" if timing.virtual_stages > 1 else ""
        return f"{microbatches_in_words(timing.num_microbatches)}, {timing.schedule.name}{virtual}: {named}"
