"""The least time that the layers before a cut can take: a relaxation that bounds every partition from below.

Under a cap on `steady_s` (see `stage_costs`), with x the transfer over a cut:

    G[0, n, d] = 0
    G[k, n, d] = min over i < k and submesh m of  G[i, m, d - |m|] + warmup(i, k, m) + V x(k, m, n)   → before_s

is the least sum for layers [0, k) on at most d devices, if the stage behind them is on submesh n. Where a cluster has
several groups of devices, d has a number for each, and |m| is in the place of the group that m is of. It is exact but
for memory: it supposes behind each cut the fewest stages that can run the layers there. Where memory is short, that is
far from exact; then, for more work, the stages behind count, too (`by_stages`),

    G[k, n, d, b] = min over i < k and submesh m that has room for (i, k) with b stages behind, of
                    G[i, m, d - |m|, b + 1] + warmup(i, k, m) + V x(k, m, n)

Where there must be a number of stages at least, or exactly, they count too: G[0, n, d, b] is 0 for such b alone.

Where the order of labels goes from the last stage to the first, G is the bound on what they still lack.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.compiler.inter_op.stage_costs import CostTables, IntArray, StageArray

_MAX_UNITS = 2048  # states of d; above, devices are counted in larger units
_MAX_SUMS = 1 << 25  # sums in G, of 256 MiB; above, the same
_PRICES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)  # of all devices together, in sums of warm-ups
_NEVER = 1 << 30  # stages or devices that no cluster has


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefixBounds:
    """Bounds for all partitions whose `steady_s` is at most a cap."""

    cap_s: float
    transfer_s: StageArray  # [cut, source, target], V x; infinity where the cap forbids it
    places: IntArray  # [submesh, start, stop] in fastest_s; the last one for a range that cannot occur
    fastest_s: StageArray  # [place, stages behind] of the choices that may occur
    stages_before: IntArray  # [cut], at least so many
    devices_before: IntArray
    before_s: StageArray  # [cut, submesh behind, units of each group, ..., stages behind]
    units: IntArray  # devices, by group
    tail_s: float  # of the first stage, at least so much
    exposed_share: float  # of the sum before a cut: at least so much of it hides no update behind the cut

    @cached_property
    def furthest(self) -> IntArray:
        """For each layer, the end of the longest stage that starts with it; the layer where there is none."""
        there = np.asarray((self.places < len(self.fastest_s) - 1).any(axis=0))
        count, ends = there.shape
        return np.where(there.any(axis=1), ends - 1 - there[:, ::-1].argmax(axis=1), np.arange(count))

    @property
    def bound_s(self) -> float:
        """Return the least sum of warm-ups and transfers, and the least tail."""
        return float(self.before_s[-1, -1, ..., 0].flat[-1]) + self.tail_s

    def with_behind(self, stages: Any) -> Any:
        """Return the place of so many stages behind in the last axis of `fastest_s` and of `before_s`.

        More than there are places for take nothing that memory has no room for.
        """
        return np.minimum(stages, self.fastest_s.shape[-1] - 1)


def most_stages(tables: CostTables, limits: IntArray, cap_s: float, sum_s: float) -> int:
    """Return the largest number of stages whose sum of warm-ups may be below `sum_s`, and which may fit; 0 for none.

    Devices have a price p in place of a number, with which W bounds from below what S stages need of all D devices:

        W[S, k] = min over i < k and submesh m of  W[S-1, i] + warmup(i, k, m) + p |m|,   W[S, L] - p D <= the sum
    """
    there = (tables.steady_s <= cap_s) & (limits >= 0)
    fastest_s = np.where(there, tables.warmup_s, np.inf).min(axis=-1)
    least_s = np.zeros(tables.num_layers + 1)  # [stages]
    for share in _PRICES:
        price_s = share * sum_s / tables.num_devices
        each_s = (fastest_s + price_s * tables.sizes[:, None, None]).min(axis=0)
        before_s = np.where(np.arange(tables.num_layers + 1), np.inf, 0.0)
        for stages in range(tables.num_layers + 1):
            least_s[stages] = max(least_s[stages], before_s[-1] - price_s * tables.num_devices)
            before_s = (before_s[:-1, None] + each_s).min(axis=0)
    return int(np.flatnonzero(least_s < sum_s).max(initial=0))


def prefix_bounds(
    tables: CostTables,
    limits: IntArray,
    cap_s: float,
    *,
    num_stages: int,
    least_stages: int = 1,
    by_stages: bool = False,
) -> PrefixBounds | None:
    """The bounds under a cap for a number of stages from the least to at most so many, or None if none is left.

    Of these, more than the most are left out where that is the least as well.
    """
    allowed = _allowed((tables.steady_s <= cap_s) & (limits >= 0), limits)
    possible = np.asarray(allowed.any(axis=-1))
    binding = limits[allowed & (limits < num_stages - 1)] if by_stages else limits[:0]
    num_behind = 2 + int(binding.max(initial=-1))
    if least_stages > 1:
        num_behind = max(num_behind, least_stages + 2)
    is_exact = 1 < least_stages == num_stages
    # Of the numbers of stages that are told apart, those that all of a partition may have.
    wholes = range(least_stages if least_stages > 1 else 0, least_stages + 1 if is_exact else num_behind + 1)
    devices, units = np.array(tables.devices, dtype=np.int64), _units(tables, possible, num_behind)
    sizes = tables.devices_by_group // units
    weights = _least_weights(possible, np.column_stack([devices, np.ones_like(devices), sizes]))
    devices_before, stages_before, *lows = _least_before(weights)
    if devices_before[-1] > tables.num_devices:
        return None
    crossing_s = _crossings(tables, cap_s)
    places, fastest_s = _fastest(tables.warmup_s, allowed, limits, num_behind)
    available = np.array(tables.available) // units
    highs = [n - each for n, each in zip(available, _least_behind(weights[2:]), strict=True)]
    before_s = _relaxed(places, fastest_s, crossing_s, possible, sizes, available, lows, highs, wholes)
    if not np.isfinite(before_s[-1, -1, ..., 0].flat[-1]):
        return None
    return PrefixBounds(
        cap_s=cap_s,
        transfer_s=crossing_s,
        places=places,
        fastest_s=fastest_s,
        stages_before=stages_before,
        devices_before=devices_before,
        before_s=before_s,
        units=units,
        tail_s=float(np.where(allowed[:, 0], tables.tail_s[:, 0], np.inf).min()),
        exposed_share=_exposed_share(tables, allowed),
    )


def least_time_s(tables: CostTables) -> float:
    """Return a time that no partition undercuts, in less work than other bounds: devices are not counted.

    The largest steady_s is no less than the mean over all devices D, those that idle included:

        W[k] = min over i < k and submesh m of  W[i] + warmup(i, k, m) + |m| / D steady(i, k, m)
    """
    shares = np.array(tables.devices, dtype=np.float64) / tables.num_devices
    least_s = (tables.warmup_s + shares[:, None, None, None] * tables.steady_s).min(axis=-1)
    before_s = np.zeros(tables.num_layers + 1)
    for stop in range(1, tables.num_layers + 1):
        before_s[stop] = (before_s[:stop] + least_s[:, :stop, stop]).min()
    return float(before_s[-1])


def _crossings(tables: CostTables, cap_s: float) -> StageArray:
    with np.errstate(invalid="ignore"):  # no microbatch behind the first, and no way across
        link_s = tables.timing.with_transfer_s(0.0, tables.transfer_s)
    return np.where(link_s <= cap_s, tables.timing.virtual_stages * tables.transfer_s, np.inf)


def _allowed(usable: NDArray[np.bool_], limits: IntArray) -> NDArray[np.bool_]:
    """The choices that fit with the fewest stages that can be behind them."""
    num_layers = usable.shape[1]
    stages = np.full(num_layers + 1, _NEVER)
    stages[-1] = 0
    allowed = np.zeros_like(usable)
    for start in range(num_layers - 1, -1, -1):
        behind = stages[start + 1 :]
        fits = usable[:, start, start + 1 :] & (limits[:, start, start + 1 :] >= behind[None, :, None])
        allowed[:, start, start + 1 :] = fits
        stops = fits.any(axis=(0, 2))
        if stops.any():
            stages[start] = 1 + behind[stops].min()
    return allowed


def _fastest(
    warmup_s: StageArray, allowed: NDArray[np.bool_], limits: IntArray, num_behind: int
) -> tuple[IntArray, StageArray]:
    """The place of each range, and there the least warm-up of a choice that fits with so many stages behind it."""
    possible = allowed.any(axis=-1)
    there = np.nonzero(possible)
    count = len(there[0])
    places = np.full(possible.shape, count)
    places[there] = rows = np.arange(count)
    each_s = np.where(allowed[there], warmup_s[there], np.inf)
    limit = np.clip(limits[there], 0, num_behind - 1)
    fastest_s = np.full((count + 1, num_behind), np.inf)
    for choice in range(each_s.shape[-1]):
        at = rows, limit[:, choice]
        fastest_s[at] = np.minimum(fastest_s[at], each_s[:, choice])
    return places, np.minimum.accumulate(fastest_s[:, ::-1], axis=-1)[:, ::-1].copy()


def _least_weights(possible: NDArray[np.bool_], weights: IntArray) -> IntArray:
    """[kind, start, stop]: the least weight of a submesh that may run a range, for weights [submesh, kind]."""
    return np.where(possible, weights.T[:, :, None, None], _NEVER).min(axis=1, initial=_NEVER)


def _least_before(least_weights: IntArray) -> IntArray:
    """[kind, cut]: the least total weight of submeshes that run the layers before it."""
    count, num_layers, _ = least_weights.shape
    least = np.full((count, num_layers + 1), _NEVER)
    least[:, 0] = 0
    for stop in range(1, num_layers + 1):
        least[:, stop] = (least_weights[:, :stop, stop] + least[:, :stop]).min(axis=1)
    return least


def _least_behind(least_weights: IntArray) -> IntArray:
    """[kind, cut]: the least total weight of submeshes that run the layers behind it."""
    count, num_layers, _ = least_weights.shape
    least = np.full((count, num_layers + 1), _NEVER)
    least[:, -1] = 0
    for start in range(num_layers - 1, -1, -1):
        least[:, start] = (least_weights[:, start, start + 1 :] + least[:, start + 1 :]).min(axis=1)
    return least


def _exposed_share(tables: CostTables, allowed: NDArray[np.bool_]) -> float:
    """Return the least share of warm-ups and transfers in which stages behind cannot have ended."""
    most = float(tables.hidden_share[allowed].max(initial=0.5 / tables.timing.virtual_stages))
    return max(0.0, 1.0 - most)


def _units(tables: CostTables, possible: NDArray[np.bool_], num_behind: int) -> IntArray:
    """Return by group how many devices count as one: all counts are rounded down, which only lowers the bound."""
    cuts = (tables.num_layers + 1) * (len(tables.devices) + 1)
    most = max(1, min(_MAX_UNITS, _MAX_SUMS // (cuts * num_behind))) ** (1 / len(tables.available))
    used: list[bool] = np.asarray(possible.any(axis=(1, 2))).tolist()
    units: list[int] = []
    for group, available in enumerate(tables.available):
        of_each = zip(tables.devices, tables.groups.tolist(), used, strict=True)
        devices = [n for n, of, is_used in of_each if of == group and is_used] or [1]
        common = int(np.gcd.reduce(devices))
        enough = [n for n in (common, *sorted(devices)) if available // n <= most]
        units.append(enough[0] if enough else common)
    return np.array(units, dtype=np.int64)


def _relaxed(
    places: IntArray,
    fastest_s: StageArray,
    crossing_s: StageArray,
    possible: NDArray[np.bool_],
    sizes: IntArray,
    available: IntArray,
    lows: Sequence[IntArray],
    highs: Sequence[IntArray],
    wholes: range,
) -> StageArray:
    """G, for as many devices as can be before each cut, by group from low to high; infinity for others.

    `sizes` [submesh, group], `available` [group] and what can be before each cut are in units. `wholes` are the numbers
    of stages of a partition.
    """
    (count, num_layers, _), num_behind = places.shape, fastest_s.shape[-1]
    one_more = int(num_behind > 1)  # the last number of stages behind stands for all larger ones, too
    before_s = np.full((num_layers + 1, count + 1, *(available + 1), num_behind + one_more), np.inf)
    before_s[0, ..., wholes.start : wholes.stop] = 0.0
    room = np.empty((num_layers, *(available + 1), num_behind))
    units = (slice(None), *[None] * len(available))
    # [submesh, stop]: the first layer that a stage up to `stop` begins with, and the one behind the last; 0 for none.
    behind_last = np.where(possible.any(axis=1), num_layers - possible[:, ::-1].argmax(axis=1), 0)
    begins, ends = possible.argmax(axis=1).tolist(), behind_last.tolist()
    each_size = [tuple(size) for size in sizes.tolist()]
    for stop in range(1, num_layers + 1):
        low, high = [int(each[stop]) for each in lows], [int(each[stop]) for each in highs]
        if any(map(operator.gt, low, high)):
            continue
        most_behind = min(num_behind, num_layers - stop + 1)
        ending_s = np.full((count, *(most + 1 - least for least, most in zip(low, high)), most_behind), np.inf)
        for m, size in enumerate(each_size):
            first, begin, end = list(map(max, low, size)), begins[m][stop], ends[m][stop]
            if not end or any(map(operator.gt, first, high)):
                continue
            of = list(zip(first, high, size, low))
            sums = room[: end - begin, *[slice(b + 1 - a) for a, b, _, _ in of], :most_behind]
            earlier = [slice(a - mine, b + 1 - mine) for a, b, mine, _ in of]
            earlier_s = before_s[begin:end, m, *earlier, one_more : one_more + most_behind]
            np.add(earlier_s, fastest_s[places[m, begin:end, stop], :most_behind][units], out=sums)
            np.minimum.reduce(sums, out=ending_s[m, *[slice(a - least, b + 1 - least) for a, b, _, least in of]])
        crossed_s = np.minimum.reduce(ending_s[:, None] + crossing_s[stop, :count][..., *units[1:], None])
        there = before_s[stop, :, *[slice(least, most + 1) for least, most in zip(low, high)]]
        there[..., :most_behind], there[..., most_behind:] = crossed_s, crossed_s[..., -1:]
    return before_s[..., :num_behind]


def relaxed_path(tables: CostTables, bounds: PrefixBounds) -> list[tuple[int, int, int]]:
    """The (start, stop, submesh) that attain `before_s` of all layers, first to last."""
    path: list[tuple[int, int, int]] = []
    sizes = tables.devices_by_group // bounds.units
    stop, behind, left = tables.num_layers, len(tables.devices), np.array(tables.available) // bounds.units
    while stop:
        best: tuple[float, int, int] = (np.inf, 0, 0)
        here, earlier = bounds.with_behind(len(path)), bounds.with_behind(len(path) + 1)
        for m, size in enumerate(sizes):
            if (size <= left).all():
                earlier_s = bounds.before_s[:stop, m, *(left - size), earlier]
                sums = earlier_s + bounds.fastest_s[bounds.places[m, :stop, stop], here]
                start = int(sums.argmin())
                best = min(best, (float(sums[start] + bounds.transfer_s[stop, m, behind]), start, m))
        _, start, m = best
        path.append((start, stop, m))
        stop, behind, left = start, m, left - sizes[m]
    return path[::-1]
