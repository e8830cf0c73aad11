"""Fit a machine's figures to measurements: least squares of the relative errors, on the lines of `autopar.machine`.

    memory     t = bytes / memory_bandwidth for what fits into no cache; kernel_s is what the least leaves over
    products   t = kernel_s + (w + half) / rate                                   rate by type, one half for all
    links      t = passes (n-1) α + passes (n-1)/n (ramp / bandwidth + b / bandwidth)

The first and the last are linear in what is sought, none of which is negative: the best of the least squares over
every subset of the unknowns, the others being zero. The second is so in the rates, and in the half: in turn. An error
is relative to what is fitted, in rounds: relative to what was measured, those that are too slow would count less.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.machine import Link, Machine
from autopar.measurements import Measurement

_ROUNDS = 30


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What the measurements say of one device."""

    kernel_s: float
    memory_bandwidth: float
    matmul_flops: dict[str, float]
    matmul_half_flops: float


def fit_rates(measured: Sequence[Measurement]) -> Rates:
    """The rates of a device from its products and its memory traffic."""
    memory = [each for each in measured if each.what == "memory"]
    least, *others = sorted(memory, key=lambda each: each.nbytes)
    (per_byte,) = least_squares([(each.nbytes,) for each in others], [each.seconds for each in others])
    bandwidth, kernel_s = 1 / per_byte, max(0.0, least.seconds - least.nbytes * per_byte)
    products = [each for each in measured if each.what == "product"]
    # A product that only waits for memory says nothing of the rate.
    bound = [each for each in products if each.seconds > 1.2 * (kernel_s + each.nbytes / bandwidth)]
    rates, half = _fit_products([replace(each, seconds=each.seconds - kernel_s) for each in bound or products])
    return Rates(kernel_s=kernel_s, memory_bandwidth=bandwidth, matmul_flops=rates, matmul_half_flops=half)


def _fit_products(products: Sequence[Measurement]) -> tuple[dict[str, float], float]:
    """The rate of each type, and the FLOPs at which half of it is reached."""
    types = sorted({each.dtype for each in products})
    of_type = {dtype: [each for each in products if each.dtype == dtype] for dtype in types}
    half, rates = 0.0, dict[str, float]()
    for _ in range(_ROUNDS):
        for dtype, some in of_type.items():
            (per_flop,) = least_squares([(each.flops + half,) for each in some], [each.seconds for each in some])
            rates[dtype] = 1 / per_flop
        # t = w/r + half/r: what the FLOPs leave over is a multiple of half.
        weights = np.array([1 / each.seconds for each in products])
        slopes = np.array([1 / rates[each.dtype] for each in products]) * weights
        over = np.array([each.seconds - each.flops / rates[each.dtype] for each in products]) * weights
        half = max(0.0, float(slopes @ over / (slopes @ slopes)))
    return rates, half


def fit_link(measured: Sequence[Measurement]) -> Link:
    """One level of the network from collectives inside it, and from transfers."""
    rows = [_ring_row(each) for each in measured]
    latency_s, ramp_s, per_byte = least_squares(rows, [each.seconds for each in measured])
    bandwidth = 1 / per_byte if per_byte else max(each.nbytes / each.seconds for each in measured)
    return Link(latency_s=latency_s, bandwidth=bandwidth, ramp_bytes=ramp_s * bandwidth)


def _ring_row(each: Measurement) -> tuple[float, float, float]:
    """The factors of latency, of ramp / bandwidth, and of 1 / bandwidth."""
    if each.what in ("transfer", "collective-permute"):
        return 1.0, 1.0, each.nbytes
    passes, n = 2 if each.what == "all-reduce" else 1, each.group_size
    return passes * (n - 1), passes * (n - 1) / n, passes * (n - 1) / n * each.nbytes


def predicted_s(machine: Machine, each: Measurement) -> float:
    """What the machine's formulas say that a measured work takes."""
    if each.what == "product":
        return machine.matmul_s(each.flops, each.nbytes, each.dtype)
    if each.what == "memory":
        return machine.memory_s(each.nbytes)
    if each.what == "transfer":
        return machine.transfer_s(each.nbytes, same_host=True)
    return machine.collective_s(each.what, each.nbytes, each.group_size)


def least_squares(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """The x ≥ 0 for which rows · x has the least sum of squared errors, relative to itself."""
    matrix, expected = np.asarray(rows, float), np.asarray(seconds, float)
    scale, found = expected, np.zeros(matrix.shape[1])
    for _ in range(_ROUNDS):
        found = _nonnegative(matrix / scale[:, None], expected / scale)
        scale = matrix @ found
    return tuple(float(x) for x in found)


def _nonnegative(matrix: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """The least squares over the best subset of columns that gives no negative."""
    columns = range(matrix.shape[1])
    # Bytes and counts differ by nine digits: columns of one size are solved better.
    sizes = np.linalg.norm(matrix, axis=0)
    best, least = np.zeros(len(columns)), math.inf
    for subset in itertools.chain.from_iterable(itertools.combinations(columns, n + 1) for n in columns):
        chosen = list(subset)
        found = np.linalg.lstsq(matrix[:, chosen] / sizes[chosen], expected, rcond=None)[0] / sizes[chosen]
        error = float(np.sum((matrix[:, chosen] @ found - expected) ** 2))
        if (found >= 0).all() and error < least * (1 - 1e-12):
            best, least = np.zeros(len(columns)), error
            best[chosen] = found
    return best
