"""What a stage costs, and what a partition of the layers into stages is made of.

Costs are handed in as functions of a range of layers and a submesh, so that this package knows neither jaxprs nor
how a stage is sharded: a dictionary is cost model enough. Several costs of one range and submesh are a front: the
less time, the more memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.compiler.inter_op.submeshes import Submesh


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """One way to run a range of layers on a submesh; times are per microbatch except `once_s`, bytes per device."""

    forward_s: float  # collectives included, as in backward_s
    backward_s: float  # the weight gradient included, and with remat the recomputation
    once_s: float = 0.0  # per step: gradient synchronization that nothing hides, and the update
    weight_s: float = 0.0  # the part of backward_s that is the weight gradient
    state_bytes: float = 0.0
    activation_bytes: float = 0.0  # held for each microbatch in flight
    temporary_bytes: float = 0.0  # while a microbatch runs
    put_off_bytes: float = 0.0  # of these what is there to the end of the task: layers of one task add theirs up
    update_bytes: float = 0.0  # the same as temporary_bytes for the update, when no microbatch is in flight
    choice: Any = None  # what the caller needs to build the stage: mesh shape, remat, ...

    def peak_bytes(self, in_flight: float) -> float:
        """Bytes that a device needs while it holds the activations of so many microbatches."""
        return self.state_bytes + max(self.temporary_bytes + in_flight * self.activation_bytes, self.update_bytes)

    def with_rows(self, factor: float) -> "StageCost":
        """What it is likely to cost with `factor` times as many rows in a microbatch."""
        return replace(
            self,
            forward_s=factor * self.forward_s,
            backward_s=factor * self.backward_s,
            weight_s=factor * self.weight_s,
            activation_bytes=factor * self.activation_bytes,
            temporary_bytes=factor * self.temporary_bytes,
            put_off_bytes=factor * self.put_off_bytes,
        )


# (first layer, layer behind the last, submesh) -> the ways to run them; none if there is none.
StageCosts = Callable[[int, int, Submesh], Sequence[StageCost]]
# (cut, submesh of the layers before it, submesh of the layers behind it) -> seconds per microbatch, there and back.
TransferTime = Callable[[int, Submesh, Submesh], float]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Layers `[start, stop)` on a submesh, in one of the ways that they can run there."""

    start: int
    stop: int
    submesh: Submesh
    cost: StageCost


@dataclass(frozen=True, kw_only=True)
class Partition:
    """All layers in stages, first to last, and the time of a step as the schedule's formula has it."""

    stages: tuple[Stage, ...]
    step_time_s: float

    @property
    def num_devices(self) -> int:
        """Devices that have work; the others idle."""
        return sum(stage.submesh.num_devices for stage in self.stages)
