"""What the time of a step and the memory of a stage are under a schedule, in closed form.

With stages s = 0..S-1, their times per microbatch f, b (w of it for the weight gradient), t = f + b, the time x of
the transfers over the cut behind a stage (both directions), M microbatches and V virtual stages per mesh:

    T = sum_s (fill_s + c x_s) + max_s hold_s + max_s once_s                              → step_time_s

    schedule      fill               c  hold                            in flight, a stages behind
    gpipe         t                  1  (M-1) max(t, x)                 M
    1f1b          t                  1  (M-1) (t + x)                   min(M, a+1)
    eager-1f1b    t                  1  (M-1) max(t, x)                 min(M, 2a+1)
    interleaved   t/V                V  max(M t - t/V, (M-1) V x)       min(M, (2a + (V-1) S + 1) / V)
    zero-bubble   max(f, w) + b-2w   1  (M-1) (t + x) + w + min(f, w)   min(M, S)

The first microbatch fills and drains the pipeline, the others follow at the pace of the slowest stage. A stage of
1F1B has no microbatch to spare while a transfer is under way: with S equal stages its period is t + x (S-1)/S, which
eager 1F1B avoids. For equal stages and x = 0 each T is what the simulation of the schedule takes (interleaved: if S
divides M; zero-bubble: if S <= M). For unequal stages the simulation of 1F1B takes at most T, and GPipe's at most
(M-1) (max f + max b - max t) more, as its two halves wait for different stages.
The interleaved schedule is priced as if each mesh's share of the layers were one range of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.compiler.inter_op.submeshes import Submesh
from autopar.errors import InvalidArgument

# --- What a stage costs, and what a partition of the layers into stages is made of ---
# Costs are handed in as functions of a range of layers and a submesh, so that this package knows neither jaxprs nor
# how a stage is sharded: a dictionary is cost model enough. Several costs of one range and submesh are a front: the
# less time, the more memory.


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


SCHEDULES = ("1f1b", "eager-1f1b", "gpipe", "interleaved", "zero-bubble")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A schedule, and the numbers that its formulas take."""

    schedule: str
    num_microbatches: int
    virtual_stages: int = 1

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` for an unknown schedule or a count below 1."""
        if self.schedule not in SCHEDULES:
            raise InvalidArgument(f"Schedule '{self.schedule}' is unknown. Use one of: {', '.join(SCHEDULES)}.")
        if self.num_microbatches < 1 or self.virtual_stages < 1:
            raise InvalidArgument(
                f"A pipeline needs at least 1 microbatch and 1 virtual stage per mesh; it was given "
                f"{self.num_microbatches} and {self.virtual_stages}."
            )

    @property
    def formulas(self) -> str:
        """The row of the table; with one stage per mesh the interleaved schedule is 1F1B."""
        return "1f1b" if self.schedule == "interleaved" and self.virtual_stages == 1 else self.schedule

    @property
    def depends_on_num_stages(self) -> bool:
        """Whether the memory of a stage depends on more than the number of stages behind it."""
        return self.formulas in ("interleaved", "zero-bubble")

    @property
    def crossings(self) -> int:
        """How often a microbatch crosses a cut."""
        return self.virtual_stages if self.formulas == "interleaved" else 1


def fill_s(timing: Timing, forward_s: Any, backward_s: Any, weight_s: Any) -> Any:
    """Seconds that a stage adds to the way of the first microbatch; numbers or arrays."""
    match timing.formulas:
        case "zero-bubble":
            return np.maximum(forward_s, weight_s) + backward_s - 2 * weight_s
        case "interleaved":
            return (forward_s + backward_s) / timing.virtual_stages
        case _:
            return forward_s + backward_s


def hold_s(timing: Timing, forward_s: Any, backward_s: Any, weight_s: Any) -> Any:
    """Seconds that the other microbatches take, if this stage is the slowest and transfers are free."""
    stage_s = forward_s + backward_s
    others_s = (timing.num_microbatches - 1) * stage_s
    match timing.formulas:
        case "zero-bubble":
            return others_s + weight_s + np.minimum(forward_s, weight_s)
        case "interleaved":
            return others_s + stage_s * (1 - 1 / timing.virtual_stages)
        case _:
            return others_s


def with_transfer_s(timing: Timing, stage_hold_s: Any, transfer_s: Any) -> Any:
    """`hold_s` of a stage together with the cut behind it."""
    link_s = (timing.num_microbatches - 1) * timing.crossings * transfer_s
    if timing.formulas in ("1f1b", "zero-bubble"):
        return stage_hold_s + link_s
    return np.maximum(stage_hold_s, link_s)


def in_flight(timing: Timing, *, stages_behind: int, num_stages: int) -> float:
    """Microbatches whose activations a stage holds at its fullest; it never falls if there are more stages."""
    match timing.formulas:
        case "gpipe":
            most = float(timing.num_microbatches)
        case "1f1b":
            most = float(stages_behind + 1)
        case "eager-1f1b":
            most = float(2 * stages_behind + 1)
        case "zero-bubble":
            most = float(num_stages)
        case _:
            most = (2 * stages_behind + (timing.virtual_stages - 1) * num_stages + 1) / timing.virtual_stages
    return min(float(timing.num_microbatches), most)


def step_time_s(timing: Timing, costs: Sequence[StageCost], transfers_s: Sequence[float]) -> float:
    """T of the formula, for the costs of all stages and the transfers over the cuts between them."""
    behind_s = [*transfers_s, 0.0]
    fills_s = sum(float(fill_s(timing, c.forward_s, c.backward_s, c.weight_s)) for c in costs)
    holds_s = [
        float(with_transfer_s(timing, hold_s(timing, c.forward_s, c.backward_s, c.weight_s), x))
        for c, x in zip(costs, behind_s)
    ]
    return fills_s + timing.crossings * sum(behind_s) + max(holds_s) + max(c.once_s for c in costs)


# --- The costs of all ranges and submeshes as arrays, so that the search need not look at one after another ---
# An array is indexed [submesh, start, stop, choice], with `stop` up to L and infinity where there is no such choice.
# A choice fits a device up to some number of stages behind it, as microbatches in flight grow with that number; one
# array of those limits, -1 for never, is all that the search has to know of memory.

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class ChoiceTables:
    """All that the search reads."""

    timing: Timing
    num_layers: int
    num_devices: int
    submeshes: tuple[Submesh, ...]
    devices: tuple[int, ...]  # of each submesh
    fill_s: Floats  # [submesh, start, stop, choice]
    hold_s: Floats
    once_s: Floats
    base_bytes: Floats
    activation_bytes: Floats
    update_bytes: Floats  # state included
    # [cut, source submesh, target submesh]; one submesh more stands for "no stage behind", which costs nothing.
    transfer_s: Floats
    costs: dict[tuple[int, int, int], Sequence[StageCost]]  # (submesh, start, stop)

    def limits(self, memory_bytes: float, *, num_stages: int) -> Ints:
        """For each choice the most stages behind it with which it fits, -1 if it never does."""
        flights = np.array(
            [
                in_flight(self.timing, stages_behind=behind, num_stages=max(num_stages, behind + 1))
                for behind in range(self.num_layers)
            ]
        )
        with np.errstate(divide="ignore", invalid="ignore"):  # no such choice, in whatever memory
            free = memory_bytes - self.base_bytes
            most = np.where(self.activation_bytes > 0, free / self.activation_bytes, np.inf)
        most = np.where((free >= 0) & (self.update_bytes <= memory_bytes), most, -1.0)
        return np.searchsorted(flights, most, side="right").astype(np.int64) - 1


def choice_tables(
    num_layers: int,
    num_devices: int,
    submeshes: Sequence[Submesh],
    stage_costs: StageCosts,
    transfer_s: TransferTime,
    timing: Timing,
) -> ChoiceTables:
    """Ask for every cost once."""
    usable = tuple(submesh for submesh in submeshes if submesh.num_devices <= num_devices)
    costs = {
        (m, start, stop): found
        for m, submesh in enumerate(usable)
        for start in range(num_layers)
        for stop in range(start + 1, num_layers + 1)
        if (found := stage_costs(start, stop, submesh))
    }
    places = np.array([(*key, n) for key, found in costs.items() for n in range(len(found))], dtype=np.int64)
    rows = np.array([_row(cost) for found in costs.values() for cost in found], dtype=np.float64)
    at = tuple(places.reshape(-1, 4).T)
    forward_s, backward_s, weight_s, once_s, base_bytes, activation_bytes, update_bytes = rows.reshape(-1, 7).T
    shape = (len(usable), num_layers, num_layers + 1, max(map(len, costs.values()), default=1))

    def spread(values: Floats) -> Floats:
        array = np.full(shape, np.inf)
        array[at] = values
        return array

    return ChoiceTables(
        timing=timing,
        num_layers=num_layers,
        num_devices=num_devices,
        submeshes=usable,
        devices=tuple(submesh.num_devices for submesh in usable),
        fill_s=spread(fill_s(timing, forward_s, backward_s, weight_s)),
        hold_s=spread(hold_s(timing, forward_s, backward_s, weight_s)),
        once_s=spread(once_s),
        base_bytes=spread(base_bytes),
        activation_bytes=spread(activation_bytes),
        update_bytes=spread(update_bytes),
        transfer_s=_transfers(num_layers, usable, transfer_s),
        costs=costs,
    )


def _row(cost: StageCost) -> tuple[float, ...]:
    return (
        cost.forward_s,
        cost.backward_s,
        cost.weight_s,
        cost.once_s,
        cost.state_bytes + cost.temporary_bytes,
        cost.activation_bytes,
        cost.state_bytes + cost.update_bytes,
    )


def _transfers(num_layers: int, submeshes: Sequence[Submesh], transfer_s: TransferTime) -> Floats:
    count = len(submeshes)
    array = np.full((num_layers + 1, count + 1, count + 1), np.inf)
    array[num_layers, :, count] = 0.0
    for cut in range(1, num_layers):
        for m, source in enumerate(submeshes):
            for n, target in enumerate(submeshes):
                array[cut, m, n] = transfer_s(cut, source, target)
    return array
