"""The costs of all ranges and submeshes as arrays, so that the search need not look at one after another.

An array is indexed [submesh, start, stop, choice], with `stop` up to L and infinity where there is no such choice.
A choice fits a device up to some number of stages behind it, as microbatches in flight grow with that number; one
array of those limits, -1 for never, is all that the search has to know of memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.compiler.inter_op.schedule_times import Timing, fill_s, hold_s, in_flight
from autopar.compiler.inter_op.stage_costs import StageCost, StageCosts, TransferTime
from autopar.compiler.inter_op.submeshes import Submesh

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
