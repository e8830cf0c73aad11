"""Fit the scalars of a machine to some of its rows, to be tested on the others.

At most ten scalars (`Scalars`) are fitted to the rows of one site, however many there are: what
minimizes, over the logarithms x of the scalars,

    Σ over rows of ρ(ln(predicted / measured) / noise) + Σ over scalars of (x / width)²

with ρ(z) = 2 (sqrt(1 + z²) - 1), which bends to |z| so that single rows that ran badly do not bend the machine. The
widths say how far the figures of a machine file may be from the truth; few rows move only what they tell about. The
start is the machine file, the method deterministic.
"""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from scipy.optimize import least_squares

from benchmarks.accuracy_cases import Case
from benchmarks.accuracy_report import Evaluated, Predicted
from benchmarks.accuracy_rows import SOURCES

MEASURED = frozenset(("step_s", "samples_s", "tok_s_gpu", "tflops_gpu", "mfu", "mem_gib", "oom", "pred"))
"""Columns of what came out of a run; which rows are fitted to does not depend on them."""
NOISE = 0.02
"""Relative noise of one measured step."""


@dataclass(frozen=True, kw_only=True)
class Scalars:
    """Factors on the figures of a machine, 1 without calibration; what is fitted, and nothing else is."""

    matmul_rate: float = 1.0
    matmul_half: float = 1.0
    memory_rate: float = 1.0
    launch: float = 1.0
    intra_latency: float = 1.0
    intra_rate: float = 1.0
    intra_partial: float = 1.0
    inter_rate: float = 1.0
    overlap: float = 1.0
    step_s: float = 0.0
    """Added to every step, in seconds."""


# Scalar -> lower bound, upper bound, width of ln(scalar).
BOUNDS: dict[str, tuple[float, float, float]] = {
    "matmul_rate": (0.3, 1.3, 0.15),
    "matmul_half": (0.1, 20.0, 1.0),
    "memory_rate": (0.3, 1.18, 0.3),
    "launch": (0.2, 5.0, 0.5),
    "intra_latency": (0.1, 20.0, 1.0),
    "intra_rate": (0.2, 1.3, 0.3),
    "intra_partial": (0.1, 10.0, 2.0),
    "inter_rate": (0.1, 1.5, 0.25),
    "overlap": (0.1, 2.0, 0.5),
}
LONGEST_FIXED_S = 0.1
"""The fixed time of a step, of the optimizer's synchronizations and the data's loading; its width is half of it."""

Predict = Callable[[Sequence[Case], Scalars], list[Predicted]]
"""The predictions of cases on one machine, whose figures are multiplied by scalars."""


def evaluated_runs(
    cases: Sequence[Case], fraction: float | None, predict: Predict, *, leave_out: bool
) -> tuple[list[Evaluated], dict[str, Scalars]]:
    """The predictions of runs with scalars fitted to that fraction of the rows of each site, and these by site.

    With `leave_out`, they are predicted by what is fitted to those rows of other sources on their machine, too.
    """
    # Sites too small for one row to be a fraction of theirs are taken together, by the kind of machine.
    sizes = Counter(case.site for case in cases)
    sites: defaultdict[str, list[Case]] = defaultdict(list)
    for case in cases:
        sites[case.site if sizes[case.site] * (fraction or 1) >= 1 else case.kind_of_site].append(case)
    evaluated: list[Evaluated] = []
    scalars: dict[str, Scalars] = {}
    for site, here in sorted(sites.items()):
        plain = predict(here, Scalars())
        if not fraction:
            evaluated += [Evaluated(plain=each) for each in plain]
            continue
        fitted = chosen_for_fit(here, fraction)
        scalars[site] = fitted_scalars([case for case in here if case.row.line in fitted], predict)
        evaluated += [
            Evaluated(plain=before, calibrated=after, fitted=before.case.row.line in fitted)
            for before, after in zip(plain, predict(here, scalars[site]))
        ]
    if fraction and leave_out:
        lines = {each.row.line for each in evaluated if each.fitted}
        evaluated = _with_left_out(evaluated, [case for case in cases if case.row.line in lines], predict)
    return sorted(evaluated, key=lambda each: each.row.line), scalars


def _with_left_out(evaluated: Sequence[Evaluated], known: Sequence[Case], predict: Predict) -> list[Evaluated]:
    groups: defaultdict[tuple[str, str], list[Evaluated]] = defaultdict(list)
    for each in evaluated:
        groups[each.row.source, each.plain.case.machine.name].append(each)
    found: list[Evaluated] = []
    for (source, machine), here in groups.items():
        others = [case for case in known if case.row.source != source and case.machine.name == machine]
        predictions = predict([each.plain.case for each in here], fitted_scalars(others, predict))
        found += [replace(each, left_out=left_out) for each, left_out in zip(here, predictions)]
    return found


def chosen_for_fit(cases: Sequence[Case], fraction: float) -> set[int]:
    """The lines of that fraction of the cases, evenly among them in the order of what was run, not of what it took."""
    usable = sorted((case for case in cases if case.measured_s is not None), key=_configuration)
    count = math.ceil(fraction * len(usable))
    return {usable[int((index + 0.5) * len(usable) / count)].row.line for index in range(count)}


def _configuration(case: Case) -> tuple[object, ...]:
    """Key of what was run: like runs stand together, and equal ones in the order of a digest of what they are."""
    model, layout = case.model, case.layout
    task = (case.machine.name, model.parameters, layout.sequence, layout.devices)
    degrees = (layout.tp, layout.pp, layout.cp, layout.ep, layout.dp)
    return (*task, *degrees, layout.microbatch, layout.microbatches, _digest(case), case.row.line)


def _digest(case: Case) -> str:
    told = (text for name, text in case.row.cells if name not in MEASURED | SOURCES)
    return hashlib.sha256("|".join(told).encode()).hexdigest()


def fitted_scalars(cases: Sequence[Case], predict: Predict) -> Scalars:
    """The scalars that fit the measured times of cases on one machine; those of the machine file if there are none."""
    cases = [case for case in cases if case.measured_s is not None]
    measured = np.array([case.measured_s for case in cases])
    if not len(measured):
        return Scalars()
    widths = np.array([width for _, _, width in BOUNDS.values()])
    low = [math.log(bound) for bound, _, _ in BOUNDS.values()] + [0.0]
    high = [math.log(bound) for _, bound, _ in BOUNDS.values()] + [1.0]

    def residuals(x: np.ndarray) -> np.ndarray:
        times = [each.step_s for each in predict(cases, _scalars(x))]
        errors = np.log(np.array(times) / measured) / NOISE
        # The square root of ρ keeps the sum of squares what the docstring says, and the priors quadratic.
        robust = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
        return np.concatenate([robust, x[:-1] / widths, [2 * x[-1]]])

    start = np.array([0.0] * len(BOUNDS) + [0.01])
    scale = np.append(widths, 0.25)
    solved = least_squares(residuals, start, bounds=(low, high), x_scale=scale, max_nfev=60)
    return _scalars(solved.x)


def _scalars(x: np.ndarray) -> Scalars:
    factors = {name: math.exp(value) for name, value in zip(BOUNDS, x[:-1])}
    return Scalars(**factors, step_s=float(x[-1]) * LONGEST_FIXED_S)


assert [*BOUNDS, "step_s"] == [each.name for each in fields(Scalars)] and len(BOUNDS) < 10
