"""Cut the forward into layers where few bytes cross and the FLOPs are even.

The forward is a row of n equations with f_i FLOPs; c_k bytes are alive just before equation k. Of all ways to
cut it into L layers, take the least in this order (the clustering of Alpa, OSDI'22, section 6.2, with exact
ties):

    1. C = Σ c_k over the cuts k              → crossing_bytes   bytes that stages may have to send
    2. M = max over layers of Σ f_i           → limit            the slowest stage sets the pace
    3. V = Σ over layers of (Σ f_i)²          → squares          the variance, as the mean is fixed
    4. the cuts that come first

    subject to  Σ f_i ≤ (1 + tolerance) · Σ_all f / L  for every layer.

C is found by a dynamic program over suffixes. All layers that begin at i and respect the limit end in a
window [i + 1, last_i], so one step is a minimum over sliding windows, O(n log n) in numpy. C falls as the
limit rises, so M is the least limit at which C keeps its value, found by bisection. V is additive, and is
minimised over the cuts that lie on some optimal path only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InvalidArgument

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

# FLOPs are sums of doubles: two that differ by less than this are equal.
_RELATIVE_ERROR = 1e-12


def cut_layers(
    flops: Sequence[float],
    crossing_bytes: Sequence[float],
    num_layers: int,
    *,
    tolerance: float = 0.25,
    allowed: Sequence[bool] | None = None,
) -> tuple[int, ...]:
    """The equations at which layers 1, 2, ... begin, `num_layers - 1` of them, strictly increasing.

    `crossing_bytes[k]` are the bytes alive just before equation k, and `allowed[k]` says whether a layer may
    begin there; their entries 0 are not used. If no cuts are within the tolerance, it is doubled (from at
    least 5 %) until some are. The result is deterministic.

    Raises `InvalidArgument` if there are more layers than the allowed cuts make pieces.

    >>> cut_layers([1, 1, 1, 1, 1, 1], [0, 9, 9, 9, 2, 9], 2)
    (3,)
    >>> cut_layers([1, 1, 1, 1, 1, 1], [0, 9, 9, 9, 2, 9], 2, tolerance=0.5)
    (4,)
    """
    num_equations = len(flops)
    assert len(crossing_bytes) == num_equations, (len(crossing_bytes), num_equations)
    may_cut = np.ones(num_equations, bool) if allowed is None else np.array(allowed, bool)
    num_pieces = 1 + int(np.count_nonzero(may_cut[1:]))
    if not 1 <= num_layers <= num_pieces:
        raise InvalidArgument(
            f"{num_layers} layers were asked for, the forward can be cut into 1 to {num_pieces}. "
            f"Ask for at most {num_pieces} layers."
        )
    ends = np.concatenate([[0.0], np.cumsum(np.asarray(flops, np.float64))])
    # A forbidden cut costs infinitely much; so does one at the end, which leaves a layer without equations.
    costs = np.concatenate([np.where(may_cut, np.asarray(crossing_bytes, np.float64), np.inf), [np.inf]])

    limit = _feasible_limit(ends, costs, num_layers, tolerance)
    limit = _least_limit(ends, costs, num_layers, limit)
    last = _last_ends(ends, limit)
    tables = _least_bytes(costs, last, num_layers)
    return _most_even_cuts(ends, costs, last, tables)


def liveness_bytes(values: Iterable[tuple[float, int, int]], num_equations: int) -> tuple[float, ...]:
    """`crossing_bytes` of values given as (bytes, producing equation, last consuming equation).

    A value crosses every cut after its producer, up to its last consumer; -1 produces what is there at the
    start.

    >>> liveness_bytes([(4, 0, 2), (8, 1, 2)], 4)
    (0.0, 4.0, 12.0, 0.0)
    """
    change = np.zeros(num_equations + 1)
    for nbytes, producer, last_consumer in values:
        if last_consumer > producer:
            change[producer + 1] += nbytes
            change[last_consumer + 1] -= nbytes
    return tuple(float(alive) for alive in np.cumsum(change)[:num_equations])


def _feasible_limit(ends: Floats, costs: Floats, num_layers: int, tolerance: float) -> float:
    """The FLOPs that a layer may have: (1 + tolerance) of the mean, relaxed until there are such cuts."""
    while True:
        limit = (1 + tolerance) * ends[-1] / num_layers * (1 + _RELATIVE_ERROR)
        if np.isfinite(_least_bytes(costs, _last_ends(ends, limit), num_layers)[-1][0]):
            return float(limit)
        assert limit <= ends[-1], "a single layer may have everything, so some cuts must be possible"
        tolerance = 2 * max(tolerance, 0.025)


def _least_limit(ends: Floats, costs: Floats, num_layers: int, limit: float) -> float:
    """The least limit, up to rounding, at which no more bytes must cross than at `limit`."""
    least = _least_bytes(costs, _last_ends(ends, limit), num_layers)[-1][0]
    low = float(ends[-1]) / num_layers * (1 - _RELATIVE_ERROR)
    while limit - low > _RELATIVE_ERROR * limit:
        middle = (low + limit) / 2
        if _least_bytes(costs, _last_ends(ends, middle), num_layers)[-1][0] == least:
            limit = middle
        else:
            low = middle
    return limit * (1 + _RELATIVE_ERROR)


def _last_ends(ends: Floats, limit: float) -> Indices:
    """For each beginning i, the last end j with FLOPs of [i, j) within the limit; j = i if there is none."""
    return np.searchsorted(ends, ends + limit, side="right").astype(np.int64) - 1


def _least_bytes(costs: Floats, last: Indices, num_layers: int) -> list[Floats]:
    """Entry [l][i]: the least bytes that cross within equations [i, n) if they are l + 1 layers."""
    n = len(costs) - 1
    tables = [np.where((last == n) & (np.arange(n + 1) < n), 0.0, np.inf)]
    if n == 0:
        tables = [np.zeros(1)]
    first = np.arange(n + 1) + 1
    for _ in range(num_layers - 1):
        tables.append(_window_minima(costs + tables[-1], first, last + 1))
    return tables


def _window_minima(values: Floats, start: Indices, stop: Indices) -> Floats:
    """min(values[start_i:stop_i]), infinite if empty: two overlapping windows of a power of two."""
    length = stop - start
    minima = np.full(len(values), np.inf)
    window, size = values, 1
    while True:
        here = np.flatnonzero((length >= size) & (length < 2 * size))
        minima[here] = np.minimum(window[start[here]], window[stop[here] - size])
        if 2 * size > len(values):
            return minima
        window = np.minimum(window[:-size], window[size:])
        size *= 2


def _most_even_cuts(ends: Floats, costs: Floats, last: Indices, tables: list[Floats]) -> tuple[int, ...]:
    """Of the cuts that the least bytes cross, those with the least sum of squared FLOPs, then the first."""
    num_layers, n = len(tables), len(costs) - 1
    tails = [costs + table for table in tables]

    def next_cuts(begin: int, cut: int) -> Indices:
        """Where the next layer may begin so that the least bytes cross."""
        ahead = tails[num_layers - 2 - cut][begin + 1 : last[begin] + 1]
        return begin + 1 + np.flatnonzero(ahead == tables[num_layers - 1 - cut][begin])

    reached: list[list[int]] = [[0]]
    for cut in range(num_layers - 1):
        mark = np.zeros(n + 1, bool)
        for begin in reached[-1]:
            mark[next_cuts(begin, cut)] = True
        reached.append([int(begin) for begin in np.flatnonzero(mark)])

    squares = np.full(n + 1, np.inf)
    squares[reached[-1]] = (ends[-1] - ends[reached[-1]]) ** 2
    chosen: list[dict[int, int]] = []
    for cut in reversed(range(num_layers - 1)):
        before, best = np.full(n + 1, np.inf), dict[int, int]()
        for begin in reached[cut]:
            cuts = next_cuts(begin, cut)
            sums = (ends[cuts] - ends[begin]) ** 2 + squares[cuts]
            # The first of those that are equal up to rounding.
            best[begin] = int(cuts[np.argmax(sums <= sums.min() * (1 + _RELATIVE_ERROR))])
            before[begin] = sums.min()
        squares = before
        chosen.append(best)
    path = itertools.accumulate(reversed(chosen), lambda begin, best: best[begin], initial=0)
    return tuple(path)[1:]
