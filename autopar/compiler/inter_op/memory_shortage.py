"""Find a partition that fits whatever it costs, or say how much memory is missing.

    D[s, i] = min over k > i, submesh m with a choice that fits with s-1 stages behind:  |m| + D[s-1, k]

is the fewest devices on which layers [i, L) run as s stages; some partition fits if D[s, 0] is no more than there are
for some s. The least memory is found by halving the distance between one that is enough and one that is not.
"""

from typing import NoReturn

import numpy as np

from autopar.compiler.inter_op.choice_tables import ChoiceTables, Ints
from autopar.compiler.inter_op.schedule_times import in_flight
from autopar.compiler.inter_op.stage_labels import Choice
from autopar.errors import InvalidArgument, MemoryTooSmall

_NEVER = 1 << 30
_HALVINGS = 12  # of the memory: a quarter of a per mille of the range


def fewest_devices(tables: ChoiceTables, limits: Ints, num_stages: int) -> list[Choice] | None:
    """A partition of at most so many stages on the fewest devices, or None if there are not enough."""
    most_behind = limits.max(axis=-1)
    sizes = np.array(tables.devices, dtype=np.int64)
    needed = [np.full(tables.num_layers + 1, _NEVER)]
    needed[0][-1] = 0
    for behind in range(num_stages):
        sums = np.where(most_behind >= behind, sizes[:, None, None] + needed[-1][None, None, :], _NEVER)
        needed.append(np.append(np.minimum(sums.min(axis=(0, 2)), _NEVER), _NEVER))
    best = min(range(1, num_stages + 1), key=lambda count: needed[count][0])
    if needed[best][0] > tables.num_devices:
        return None
    stages: list[Choice] = []
    start = 0
    for behind in range(best - 1, -1, -1):
        sums = np.where(most_behind[:, start] >= behind, sizes[:, None] + needed[behind][None, :], _NEVER)
        m, stop = (int(n) for n in np.unravel_index(sums.argmin(), sums.shape))
        fits = limits[m, start, stop] >= behind
        stages.append((m, start, stop, int(np.where(fits, tables.fill_s[m, start, stop], np.inf).argmin())))
        start = stop
    return stages


def raise_no_partition(tables: ChoiceTables, memory_bytes: float, num_stages: int) -> NoReturn:
    """`MemoryTooSmall` with the least memory that is enough, or `InvalidArgument` if none is."""
    counts = sorted({1 << power for power in range(num_stages.bit_length())} | {num_stages}) if num_stages else []
    if not tables.timing.depends_on_num_stages:
        counts = counts[-1:]

    def fitting(budget_bytes: float) -> tuple[list[Choice], int] | None:
        for count in counts:
            stages = fewest_devices(tables, tables.limits(budget_bytes, num_stages=count), count)
            if stages is not None:
                return stages, count
        return None

    needs = np.maximum(
        tables.base_bytes + tables.activation_bytes * tables.timing.num_microbatches, tables.update_bytes
    )
    high = float(np.max(needs[np.isfinite(needs)], initial=0.0)) if tables.costs else 0.0
    found = fitting(high) if tables.costs and counts else None
    if found is None or high <= memory_bytes:
        raise InvalidArgument(
            f"There is no way to run {tables.num_layers} layers in at most {num_stages} stages on {tables.num_devices} "
            f"devices with submeshes {', '.join(map(str, tables.submeshes)) or '(none)'}, whatever memory they have. "
            "Give more devices, smaller submeshes or more stages."
        )
    low = memory_bytes
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        better = fitting(middle)
        low, high, found = (low, middle, better) if better is not None else (middle, high, found)
    raise MemoryTooSmall(_shortage(tables, memory_bytes, *found))


def _shortage(tables: ChoiceTables, memory_bytes: float, stages: list[Choice], count: int) -> str:
    peaks: list[tuple[float, int, float]] = []
    for number, (m, start, stop, _) in enumerate(stages):
        flight = in_flight(tables.timing, stages_behind=len(stages) - 1 - number, num_stages=count)
        peaks.append((min(cost.peak_bytes(flight) for cost in tables.costs[m, start, stop]), number, flight))
    peak, number, flight = max(peaks)
    m, start, stop, _ = stages[number]
    gib = 2.0**30
    return (
        f"No partition of {tables.num_layers} layers into stages on {tables.num_devices} devices fits into "
        f"{memory_bytes / gib:.3g} GiB per device. The smallest found has {len(stages)} stages; its stage {number}, "
        f"layers [{start}, {stop}) on {tables.submeshes[m]} devices with {flight:.3g} microbatches in flight, needs "
        f"{peak / gib:.3g} GiB: {(peak - memory_bytes) / gib:.3g} GiB are missing. Use more devices, recompute "
        f'activations, more and smaller microbatches, or schedule="1f1b" (now "{tables.timing.schedule}").'
    )
