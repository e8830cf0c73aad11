"""Fit a machine's figures to measurements: the least relative errors, by the formulas of `autopar.machine`.

    memory     t = bytes / memory_bandwidth for what fits into no cache; kernel_s is what the least takes, from a cache
    products   t = kernel_s + (w + half) / rate                                   rate by type, one half for all
    links      t = passes (n-1) α + passes (n-1)/n (ramp / bandwidth + b / bandwidth)

All are linear in what is sought, or in its quotients, and none of that is negative: the best of the least squares over
every subset of the unknowns, the others being zero. They are weighted in rounds so that what becomes least is the sum
of |log(fitted / measured)|: too slow and too fast count alike, and a run that something else slowed down counts once.
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
# Below this, errors of a logarithm count by their squares.
_EXACT = 0.01


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
    bandwidth, kernel_s = 1 / per_byte, least.seconds
    products = [replace(each, seconds=each.seconds - kernel_s) for each in measured if each.what == "product"]
    rates, half = _fit_products(products, bandwidth)
    return Rates(kernel_s=kernel_s, memory_bandwidth=bandwidth, matmul_flops=rates, matmul_half_flops=half)


def _fit_products(products: Sequence[Measurement], bandwidth: float) -> tuple[dict[str, float], float]:
    """The rate of each type, and the FLOPs at which half of it is reached."""
    of_type: dict[str, list[Measurement]] = {}
    for dtype in dict.fromkeys(each.dtype for each in products):
        every = [each for each in products if each.dtype == dtype]
        # A product that only waits for memory says nothing of the rate.
        of_type[dtype] = [each for each in every if each.seconds > 1.2 * each.nbytes / bandwidth] or every
    halves: list[float] = []
    for some in of_type.values():
        per_flop, over_s = least_squares([(each.flops, 1.0) for each in some], [each.seconds for each in some])
        halves.append(over_s / per_flop if per_flop else 0.0)
    half = float(np.median(halves))
    rates = {
        dtype: 1 / least_squares([(each.flops + half,) for each in some], [each.seconds for each in some])[0]
        for dtype, some in of_type.items()
    }
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
    """The x ≥ 0 for which the sum of |log(rows · x / seconds)| is about the least."""
    matrix, expected = np.asarray(rows, float), np.asarray(seconds, float)
    scale, found = expected, np.zeros(matrix.shape[1])
    for _ in range(_ROUNDS):
        found = _nonnegative(matrix / scale[:, None], expected / scale)
        fitted = np.maximum(matrix @ found, 1e-6 * expected)
        # (measured - fitted)² / scale² is |log(measured / fitted)|, to first order in the change of fitted.
        logs = np.log(expected / fitted)
        mean = np.where(np.abs(logs) < 1e-6, fitted, (expected - fitted) / np.where(logs == 0, 1, logs))
        scale = np.sqrt(fitted * mean * np.maximum(np.abs(logs), _EXACT))
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
