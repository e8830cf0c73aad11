"""The costs of stages, and from them the time of a step in closed form.

    StageCost, ...              layers on a submesh, in one of the ways to run them there
    Timing, StageCost, ...  ->  step_time_s, num_in_flight
    all ranges, submeshes   ->  CostTables      the same as arrays, which the search reads

Costs come as functions of a range of layers and a submesh, so that this package knows neither jaxprs nor how a stage
is sharded: a dictionary is cost model enough. Several costs of one range and submesh are a front: the less time, the
more memory. With stages s = 0..S-1, the time x of the transfers over the cut behind a stage (both directions), M
microbatches and V virtual stages per mesh:

    T = sum_s (warmup_s + V x_s) + max_s steady_s + e_0                                   → step_time_s
    e_s = max(tail_s, e_(s+1) - b_s/V - x_s/2),   e_S = 0,   tail_s = update_s

    schedule      warmup             steady, with transfers
    gpipe         f+b                (M-1) max(f+b, x)
    1f1b          f+b                (M-1) (f+b + x)
    eager-1f1b    f+b                (M-1) max(f+b, x)
    interleaved   (f+b)/V            max(M (f+b) - (f+b)/V, (M-1) V x)
    zero-bubble   max(f, w) + b-2w   (M-1) (f+b + x) + w + min(f, w)
    w apart, M=1  f + b-w            0, with tail_s = w/V + update_s and b - w in place of b in e_s

The first microbatch fills and drains the pipeline, the others follow at the pace of the slowest stage. Behind the last
task of stage s, the stages from s on take e_s: the next one ends its last task earlier, by a transfer and a backward
task, but where weight gradients w are tasks of their own, which fill the end (e_0 = max update). A single microbatch
has only its own w to fill it with (the last line). That line is exact for any stages with V = 1. For equal stages and
x = 0 each T is the simulated time of the schedule (interleaved: if S divides M; zero-bubble: if S <= M). For unequal
stages the simulated time of 1F1B is at most T, and GPipe's at most (M-1) (max f + max b - max (f+b)) more, as its two
halves wait for different stages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.compiler.inter_op.submeshes import Submesh
from autopar.errors import InvalidArgument
from autopar.ir.schedule import Schedule, Seconds
from autopar.ir.schedules import check_virtual_stages


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """One way to run a range of layers on a submesh; times are per microbatch except `update_s`, bytes per device."""

    forward_s: float  # collectives included, as in backward_s
    backward_s: float  # the weight gradient included, and with remat the recomputation
    update_s: float = 0.0  # per step: gradient synchronization that nothing hides, and the update
    weight_s: float = 0.0  # the part of backward_s that is the weight gradient
    state_bytes: float = 0.0
    activation_bytes: float = 0.0  # for each microbatch in flight
    temporary_bytes: float = 0.0  # while a microbatch runs
    update_bytes: float = 0.0  # the same as temporary_bytes for the update, when no microbatch is in flight
    choice: Any = None  # what the caller needs to build the stage: mesh shape, remat, ...

    def peak_bytes(self, num_in_flight: float) -> float:
        """Return the bytes that a device needs for the activations of so many microbatches and all else."""
        return self.state_bytes + max(self.temporary_bytes + num_in_flight * self.activation_bytes, self.update_bytes)

    def step_s(self, num_microbatches: int) -> float:
        """Return the seconds of a step of these layers alone."""
        return num_microbatches * (self.forward_s + self.backward_s) + self.update_s

    def in_time(self, share: float) -> "StageCost":
        """Return the cost if all took this share of its time."""
        return replace(
            self,
            forward_s=share * self.forward_s,
            backward_s=share * self.backward_s,
            weight_s=share * self.weight_s,
            update_s=share * self.update_s,
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
    """All layers in stages, first to last, and the time of a step by the closed form of the schedule."""

    stages: tuple[Stage, ...]
    step_time_s: float

    @property
    def num_devices(self) -> int:
        """Devices that have work; the others idle."""
        return sum(stage.submesh.num_devices for stage in self.stages)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A schedule with the numbers that its closed forms take."""

    schedule: Schedule
    num_microbatches: int
    virtual_stages: int = 1
    counts_updates: bool = True
    """False for a step that ends before its update."""

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` for a count below 1, or several stages on a mesh where the schedule has one."""
        if self.num_microbatches < 1 or self.virtual_stages < 1:
            raise InvalidArgument(
                f"A pipeline needs at least 1 microbatch and 1 virtual stage per mesh; it was given "
                f"{self.num_microbatches} and {self.virtual_stages}."
            )
        check_virtual_stages(self.schedule, self.virtual_stages)

    @property
    def _forms(self) -> Schedule:
        return self.schedule.closed_forms(self.virtual_stages)

    @property
    def memory_depends_on_num_stages(self) -> bool:
        """True if the memory of a stage depends on more than the number of stages behind it."""
        return self._forms.memory_depends_on_num_stages

    @property
    def splits_only_microbatch(self) -> bool:
        """True if the weight gradients of the only microbatch are tasks of their own."""
        return self.num_microbatches == 1 and self.schedule.splits_weight_gradients

    def tail_s(self, weight_s: Seconds, update_s: Seconds) -> Seconds:
        """Return the seconds of the step that a stage takes behind the last task that others wait for."""
        own_s = update_s if self.counts_updates else 0.0 * update_s
        return own_s + weight_s / self.virtual_stages if self.splits_only_microbatch else own_s

    def return_s(self, backward_s: Seconds, weight_s: Seconds, transfer_s: Seconds) -> Seconds:
        """Return by how many seconds the last task of a stage ends behind that of the next one, at least."""
        if self.splits_only_microbatch:
            return (backward_s - weight_s) / self.virtual_stages + transfer_s / 2
        if self.schedule.splits_weight_gradients:
            return 0.0 * (backward_s + transfer_s)
        return backward_s / self.virtual_stages + transfer_s / 2

    def warmup_s(self, forward_s: Seconds, backward_s: Seconds, weight_s: Seconds) -> Seconds:
        """Return the seconds that a stage adds to the way of the first microbatch there and back."""
        if self.splits_only_microbatch:
            return forward_s + backward_s - weight_s
        return self._forms.warmup_s(forward_s, backward_s, weight_s, virtual_stages=self.virtual_stages)

    def steady_s(self, forward_s: Seconds, backward_s: Seconds, weight_s: Seconds) -> Seconds:
        """Return the seconds that the other microbatches take if this stage is the slowest and transfers are free."""
        if self.splits_only_microbatch:
            return 0.0 * forward_s
        return self._forms.steady_s(
            forward_s,
            backward_s,
            weight_s,
            num_microbatches=self.num_microbatches,
            virtual_stages=self.virtual_stages,
        )

    def with_transfer_s(self, steady_s: Seconds, transfer_s: Seconds) -> Seconds:
        """Return `steady_s` of a stage together with the cut behind it, which each microbatch crosses V times."""
        link_s = (self.num_microbatches - 1) * self.virtual_stages * self._forms.link_s(transfer_s)
        return np.maximum(steady_s, link_s) if self._forms.hides_transfers else steady_s + link_s

    def num_in_flight(self, *, stages_behind: int, num_stages: int) -> float:
        """Return the microbatches whose activations a stage holds at its fullest."""
        return self._forms.num_in_flight(
            stages_behind=stages_behind,
            num_stages=num_stages,
            num_microbatches=self.num_microbatches,
            virtual_stages=self.virtual_stages,
        )

    def step_time_s(self, costs: Sequence[StageCost], transfers_s: Sequence[float]) -> float:
        """Return T, for the costs of all stages and the transfers over the cuts between them."""
        behind_s = [*transfers_s, 0.0]
        warmups_s = sum(float(self.warmup_s(c.forward_s, c.backward_s, c.weight_s)) for c in costs)
        steadies_s = [
            float(self.with_transfer_s(self.steady_s(c.forward_s, c.backward_s, c.weight_s), x))
            for c, x in zip(costs, behind_s)
        ]
        end_s = 0.0
        for cost, transfer_s in zip(reversed(costs), reversed(behind_s)):
            returned_s = float(self.return_s(cost.backward_s, cost.weight_s, transfer_s))
            end_s = max(float(self.tail_s(cost.weight_s, cost.update_s)), end_s - returned_s)
        return warmups_s + self.virtual_stages * sum(behind_s) + max(steadies_s) + end_s


StageArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


_COLUMNS = 8
"""Seconds forward, backward, of the weight gradient and of the update; bytes of the state, of what a task needs for a
while, of a microbatch in flight, and of the update."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RangeTable:
    """The costs of all ranges on one submesh as an array [column, start, stop, choice].

    `stop` goes up to L, and infinity stands where there is no such choice.
    """

    values: StageArray
    cost: Callable[[int, int, int], StageCost]  # (start, stop, choice)

    def in_time(self, shares: StageArray) -> "RangeTable":
        """Return the costs if each range took its share [start, stop] of its time."""
        values = np.concatenate([shares[..., None] * self.values[:4], self.values[4:]])

        def cost(start: int, stop: int, choice: int) -> StageCost:
            return self.cost(start, stop, choice).in_time(float(shares[start, stop]))

        return RangeTable(values=values, cost=cost)

    def peak_bytes(self, num_in_flight: float) -> StageArray:
        """Return what a device needs with so many microbatches in flight, as `StageCost.peak_bytes` does."""
        state_bytes, temporary_bytes, activation_bytes, update_bytes = self.values[4:]
        there = np.isfinite(state_bytes)
        held_bytes = temporary_bytes + num_in_flight * np.where(there, activation_bytes, 0.0)
        return state_bytes + np.maximum(held_bytes, update_bytes)

    @staticmethod
    def of(num_layers: int, submesh: Submesh, stage_costs: StageCosts) -> "RangeTable":
        """Ask for every cost once."""
        ranges = [(start, stop) for start in range(num_layers) for stop in range(start + 1, num_layers + 1)]
        costs = {each: stage_costs(*each, submesh) for each in ranges}
        most = max(1, *map(len, costs.values()))
        values = np.full((_COLUMNS, num_layers, num_layers + 1, most), np.inf)
        for (start, stop), choices in costs.items():
            for n, cost in enumerate(choices):
                values[:, start, stop, n] = _column(cost)
        return RangeTable(values=values, cost=lambda start, stop, choice: costs[start, stop][choice])


@dataclass(frozen=True, kw_only=True, eq=False)
class TabledCosts:
    """Costs that are made as a table for each submesh, which takes less time than to ask for them one by one."""

    table: Callable[[Submesh], RangeTable]


def _column(cost: StageCost) -> tuple[float, ...]:
    return (
        cost.forward_s,
        cost.backward_s,
        cost.weight_s,
        cost.update_s,
        cost.state_bytes,
        cost.temporary_bytes,
        cost.activation_bytes,
        cost.update_bytes,
    )


def cost_of_column(column: StageArray, choice: Any) -> StageCost:
    """Return the cost that a place of a table holds."""
    forward_s, backward_s, weight_s, update_s, state_bytes, temporary_bytes, activation_bytes, update_bytes = (
        column.tolist()
    )
    return StageCost(
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=weight_s,
        update_s=update_s,
        state_bytes=state_bytes,
        temporary_bytes=temporary_bytes,
        activation_bytes=activation_bytes,
        update_bytes=update_bytes,
        choice=choice,
    )


def range_table(num_layers: int, submesh: Submesh, stage_costs: StageCosts | TabledCosts) -> RangeTable:
    """Return the costs of all ranges on a submesh."""
    if isinstance(stage_costs, TabledCosts):
        return stage_costs.table(submesh)
    return RangeTable.of(num_layers, submesh, stage_costs)


@dataclass(frozen=True, kw_only=True, eq=False)
class CostTables:
    """The costs of all ranges on all submeshes as arrays [submesh, start, stop, choice].

    `stop` goes up to L, and infinity stands where there is no such choice.
    """

    timing: Timing
    num_layers: int
    available: tuple[int, ...]  # devices of each group
    submeshes: tuple[Submesh, ...]
    devices: tuple[int, ...]  # of each submesh
    warmup_s: StageArray
    steady_s: StageArray
    return_s: StageArray  # without the transfer
    tail_s: StageArray
    base_bytes: StageArray
    activation_bytes: StageArray
    update_bytes: StageArray  # state included
    # [cut, source submesh, target submesh]; one submesh more stands for "no stage behind", which costs nothing.
    transfer_s: StageArray
    tables: tuple[RangeTable, ...]  # of each submesh

    @property
    def num_devices(self) -> int:
        """Devices of all groups together."""
        return sum(self.available)

    def cost(self, submesh: int, start: int, stop: int, choice: int) -> StageCost:
        """Return the cost that stands in this place."""
        return self.tables[submesh].cost(start, stop, choice)

    @cached_property
    def hidden_share(self) -> StageArray:
        """The share of a warm-up by which the last task of a stage ends behind that of the next one."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.return_s > 0, self.return_s / self.warmup_s, 0.0)

    @cached_property
    def sizes(self) -> IntArray:
        """The devices of each submesh."""
        return np.array(self.devices, dtype=np.int64)

    @cached_property
    def available_by_group(self) -> IntArray:
        """The devices of each group."""
        return np.array(self.available, dtype=np.int64)

    @cached_property
    def groups(self) -> IntArray:
        """The group of each submesh."""
        return np.array([submesh.group for submesh in self.submeshes], dtype=np.int64)

    @cached_property
    def devices_by_group(self) -> IntArray:
        """[submesh, group]: the devices of each submesh, in the column of its group."""
        counts = np.zeros((len(self.submeshes), len(self.available)), dtype=np.int64)
        counts[np.arange(len(self.submeshes)), self.groups] = self.devices
        return counts

    def limits(self, memory_bytes: Sequence[float], *, num_stages: int) -> IntArray:
        """Return for each choice the most stages behind it with which it fits, -1 if it never does.

        `memory_bytes` are those of a device of each group.

        Microbatches in flight grow with the stages behind: the search has to know no more of memory.
        """
        in_flight = np.array(
            [
                self.timing.num_in_flight(stages_behind=behind, num_stages=max(num_stages, behind + 1))
                for behind in range(self.num_layers)
            ]
        )
        with np.errstate(divide="ignore", invalid="ignore"):  # no such choice, in whatever memory
            memory = np.array([memory_bytes[submesh.group] for submesh in self.submeshes])[:, None, None, None]
            free = memory - self.base_bytes
            most = np.where(self.activation_bytes > 0, free / self.activation_bytes, np.inf)
        most = np.where((free >= 0) & (self.update_bytes <= memory), most, -1.0)
        return np.searchsorted(in_flight, most, side="right").astype(np.int64) - 1


def cost_tables(
    num_layers: int,
    available: Sequence[int],
    submeshes: Sequence[Submesh],
    stage_costs: StageCosts | TabledCosts,
    transfer_s: TransferTime,
    timing: Timing,
) -> CostTables:
    """Ask for every cost once; `available` are the devices of each group."""
    usable = tuple(submesh for submesh in submeshes if submesh.num_devices <= available[submesh.group])
    tables = tuple(range_table(num_layers, submesh, stage_costs) for submesh in usable)
    most = max((table.values.shape[-1] for table in tables), default=1)
    values = np.full((_COLUMNS, len(usable), num_layers, num_layers + 1, most), np.inf)
    for m, table in enumerate(tables):
        values[:, m, :, :, : table.values.shape[-1]] = table.values
    times, (state_bytes, temporary_bytes, activation_bytes, update_bytes) = values[:4], values[4:]
    warmup_s, steady_s, tail_s = seconds_of_schedule(times, timing)
    there = np.isfinite(times[0])
    return CostTables(
        timing=timing,
        num_layers=num_layers,
        available=tuple(available),
        submeshes=usable,
        devices=tuple(submesh.num_devices for submesh in usable),
        warmup_s=warmup_s,
        steady_s=steady_s,
        return_s=timing.return_s(np.where(there, times[1], 0.0), np.where(there, times[2], 0.0), 0.0),
        tail_s=tail_s,
        base_bytes=state_bytes + temporary_bytes,
        activation_bytes=activation_bytes,
        update_bytes=state_bytes + update_bytes,
        transfer_s=_transfers(num_layers, usable, transfer_s),
        tables=tables,
    )


def seconds_of_schedule(times: StageArray, timing: Timing) -> tuple[StageArray, StageArray, StageArray]:
    """Return the seconds of warm-up, steady state and tail for those of a table; infinity where it has no choice."""
    there = np.isfinite(times[0])
    forward_s, backward_s, weight_s, update_s = np.where(there, times, 0.0)
    warmup_s, steady_s = (form(forward_s, backward_s, weight_s) for form in (timing.warmup_s, timing.steady_s))
    tail_s = timing.tail_s(weight_s, update_s)
    return np.where(there, warmup_s, np.inf), np.where(there, steady_s, np.inf), np.where(there, tail_s, np.inf)


def _transfers(num_layers: int, submeshes: Sequence[Submesh], transfer_s: TransferTime) -> StageArray:
    count = len(submeshes)
    array = np.full((num_layers + 1, count + 1, count + 1), np.inf)
    array[num_layers, :, count] = 0.0
    for cut in range(1, num_layers):
        for m, source in enumerate(submeshes):
            for n, target in enumerate(submeshes):
                array[cut, m, n] = transfer_s(cut, source, target)
    return array
