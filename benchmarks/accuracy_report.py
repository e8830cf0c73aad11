"""How right predictions are: errors of times, order, regret of choosing by them, and labels of memory.

error       |predicted / measured - 1|, its mean (MAPE), median and worst
spearman    correlation of ranks, ties sharing theirs
regret      in a cell of rows that are choices for one task (equal model, hardware, devices, batch, sequence): the
            measured time of the row predicted fastest, over the fastest measured, minus 1
pairs       of rows of one cell whose measured times differ by more than 5 %; pairs_right: predicted in their order;
            pairs_tied: predicted alike, as rows are whose columns are the same, which no prediction can order
labels      out of memory or not, of the rows that say; false_feasible ran out of memory and was called feasible
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Protocol

import numpy as np

from autopar.hardware.machine import Machine
from benchmarks.accuracy_rows import Row

DIFFERENT = 0.05
"""Times further apart than this have an order."""


class Case(Protocol):
    """A measured row as it can be predicted."""

    @property
    def row(self) -> Row: ...
    @property
    def machine(self) -> Machine: ...
    @property
    def layout(self) -> Hashable:
        """How the task is divided."""
        ...

    @property
    def cell(self) -> Hashable:
        """The task, equal for rows that are choices for one."""
        ...

    @property
    def measured_s(self) -> float | None:
        """None if it ran out of memory."""
        ...

    @property
    def measured_gib(self) -> float | None: ...
    @property
    def out_of_memory(self) -> bool | None:
        """None if the row does not say."""
        ...

    @property
    def counts_tensors(self) -> bool:
        """True if the memory measured is that of tensors alone."""
        ...


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A case and what the simulator says of it."""

    case: Case
    step_s: float
    peak_bytes: float
    """Bytes that the step needs of a device's memory."""
    tensor_bytes: float = 0.0
    """Bytes that tensors take of the peak."""
    cached_bytes: float = 0.0
    """Bytes that an allocator keeps beside the peak while there is room: it gives them back before memory runs out."""

    @property
    def recorded_bytes(self) -> float:
        """Bytes that the case's memory is compared with."""
        return self.tensor_bytes if self.case.counts_tensors else self.peak_bytes + self.cached_bytes

    @property
    def feasible(self) -> bool:
        return self.peak_bytes <= self.case.machine.memory_bytes

    @property
    def error(self) -> float:
        """Relative and signed; the case must have been measured."""
        assert self.case.measured_s is not None
        return self.step_s / self.case.measured_s - 1


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The predictions of a row: with the machine file alone, and with scalars where any were fitted."""

    plain: Predicted
    calibrated: Predicted | None = None
    left_out: Predicted | None = None
    """The prediction with scalars fitted to rows of other sources on the machine."""
    fitted: bool = False
    """The row is one that scalars were fitted to: it is not tested."""

    @property
    def row(self) -> Row:
        return self.plain.case.row

    @property
    def best(self) -> Predicted:
        return self.calibrated or self.plain


def figures(evaluated: Sequence[Evaluated]) -> dict[str, Any]:
    """Return the figures of the rows that nothing was fitted to: those of the best predictions, and of the others."""
    tested = [each for each in evaluated if not each.fitted]
    report: dict[str, Any] = summary([each.best for each in tested])
    if any(each.calibrated for each in evaluated):
        report |= {
            "fitted_rows": len(evaluated) - len(tested),
            "uncalibrated": summary([each.plain for each in tested]),
        }
    left_out = [each.left_out for each in tested if each.left_out]
    return report | {"left_out": summary(left_out)} if left_out else report


def by_source(evaluated: Sequence[Evaluated]) -> dict[str, list[Evaluated]]:
    found: defaultdict[str, list[Evaluated]] = defaultdict(list)
    for each in evaluated:
        found[each.row.source].append(each)
    return dict(sorted(found.items()))


def without_the_largest(evaluated: Sequence[Evaluated]) -> dict[str, Any] | None:
    """Return the figures without the source that more than half of the rows are of, if there is one among others."""
    sizes = Counter(each.row.source for each in evaluated)
    if len(sizes) < 2 or 2 * max(sizes.values()) <= len(evaluated):
        return None
    largest = max(sizes, key=lambda source: sizes[source])
    return {"largest": largest, **figures([each for each in evaluated if each.row.source != largest])}


def summary(predictions: Sequence[Predicted]) -> dict[str, float | int | None]:
    """The figures of one source, None where there are too few rows for one."""
    timed = [each for each in predictions if each.case.measured_s is not None]
    errors = [abs(each.error) for each in timed]
    regrets = cell_regrets(timed)
    pairs, ordered = clear_pairs(timed), ordered_pairs(timed)
    return {
        "rows": len(timed),
        "mape": _rounded(np.mean(errors)) if errors else None,
        "median": _rounded(np.median(errors)) if errors else None,
        "worst": _rounded(max(errors)) if errors else None,
        "bias": _rounded(np.mean([each.error for each in timed])) if errors else None,
        "spearman": spearman([each.step_s for each in timed], [each.case.measured_s or 0.0 for each in timed]),
        "regret_mean": _rounded(np.mean(regrets)) if regrets else None,
        "regret_max": _rounded(max(regrets)) if regrets else None,
        "cells": len(regrets),
        "pairs": len(pairs),
        "pairs_right": sum(ordered),
        "pairs_tied": sum(fast.step_s == slow.step_s for fast, slow in pairs),
        **_labels(predictions),
        **_memory_errors(predictions),
    }


def cell_regrets(timed: Sequence[Predicted]) -> list[float]:
    """One regret per cell of at least two different configurations."""
    found: list[float] = []
    for rows in _cells(timed):
        if len({each.case.layout for each in rows}) < 2:
            continue
        chosen = min(rows, key=lambda each: (each.step_s, each.case.row.line))
        best_s = min(each.case.measured_s or 0.0 for each in rows)
        found.append((chosen.case.measured_s or 0.0) / best_s - 1)
    return found


def ordered_pairs(timed: Sequence[Predicted]) -> list[bool]:
    """Return, for every pair of one cell whose measured times have an order, whether the predictions have the same."""
    return [fast.step_s < slow.step_s for fast, slow in clear_pairs(timed)]


def clear_pairs(timed: Sequence[Predicted]) -> list[tuple[Predicted, Predicted]]:
    """Return every pair of one cell whose measured times have an order, the faster first."""
    pairs = [
        sorted(pair, key=lambda each: each.case.measured_s or 0.0)
        for rows in _cells(timed)
        for pair in combinations(rows, 2)
    ]
    return [
        (fast, slow)
        for fast, slow in pairs
        if (slow.case.measured_s or 0.0) > (1 + DIFFERENT) * (fast.case.measured_s or 0.0)
    ]


def _cells(timed: Sequence[Predicted]) -> list[list[Predicted]]:
    cells: defaultdict[Hashable, list[Predicted]] = defaultdict(list)
    for each in timed:
        cells[each.case.cell].append(each)
    return list(cells.values())


def spearman(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Correlation of ranks, or None where all values of a side are one."""
    if len(set(left)) < 2 or len(set(right)) < 2:
        return None
    return _rounded(np.corrcoef(_ranks(left), _ranks(right))[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    _, inverse, counts = np.unique(np.array(values), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]


def _labels(predictions: Sequence[Predicted]) -> dict[str, int]:
    said = [each for each in predictions if each.case.out_of_memory is not None]
    right = sum(each.feasible != each.case.out_of_memory for each in said)
    false_feasible = sum(each.feasible and bool(each.case.out_of_memory) for each in said)
    return {"oom_right": right, "oom_wrong": len(said) - right, "false_feasible": false_feasible}


def _memory_errors(predictions: Sequence[Predicted]) -> dict[str, float | int | None]:
    recorded = [(each.recorded_bytes, each.case.measured_gib or 0.0) for each in predictions]
    errors = [abs(peak / 2**30 / gib - 1) for peak, gib in recorded if gib]
    return {"memory_rows": len(errors), "memory_mape": _rounded(np.mean(errors)) if errors else None}


def _rounded(value: float | np.floating) -> float:
    return round(float(value), 5)
