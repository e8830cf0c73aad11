"""Solve a choice problem: exact reductions, bounds, searches; branch and bound on what is left."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from autopar.compiler.solver.constrained import minimize_within_rows
from autopar.compiler.solver.minimize import Effort, minimize
from autopar.compiler.solver.problem import Floats, Optimum, Problem, Row, choice_value
from autopar.errors import SolverFailed

SHARE_WITHOUT_ROWS = 0.25
"""Share of the time that goes to the optimum without rows, unless that is what is asked for."""
MAX_GAP = 1e-3
"""Gap that is small enough where nothing else is said, and for the optimum without rows before that with them."""


def solve(
    problem: Problem,
    *,
    violated_rows: Callable[[Sequence[int]], Sequence[Row]] | None = None,
    time_limit_s: float = 60,
    max_gap: float = MAX_GAP,
    starts: Sequence[Sequence[int]] = (),
) -> Optimum:
    """The choice of least cost that violates no row.

    `violated_rows` is shown candidates and returns the rows that they violate, none if there are none; they hold from
    then on. `starts` are choices known to be good. Branch and bound, which may take long, is left out where the gap is
    at most `max_gap`, and ends at the time limit; the result has its bound.

    Raises `Infeasible` if no choice is possible, and `SolverFailed` if none was found in time.
    """
    began = time.monotonic()
    known = [tuple(int(state) for state in states) for states in starts]
    # With rows the optimum without them is a bound only, not worth the whole time.
    share = 1.0 if violated_rows is None else SHARE_WITHOUT_ROWS
    gap = max_gap if violated_rows is None else min(max_gap, MAX_GAP)
    without = Effort(deadline=began + share * time_limit_s, max_gap=gap)
    found = minimize(problem, without)
    proven = found.states is None or without.is_enough(found.value, found.bound)
    if not proven and violated_rows is not None and not violated_rows(found.states or ()):
        # Rows that leave so good a choice are not likely to matter.
        found = minimize(problem, replace(without, deadline=began + time_limit_s))
    candidates = [*known] if found.states is None else [found.states, *known]
    if violated_rows is not None and candidates:
        effort = Effort(deadline=began + time_limit_s, max_gap=max_gap)
        within = minimize_within_rows(problem, violated_rows, effort, candidates, found.bound)
        found = replace(within, how=(*found.how, *within.how))
        candidates = [] if within.states is None else [within.states]
    best = min(candidates, key=lambda states: choice_value(problem, states), default=None)
    if best is None or np.isinf(value := choice_value(problem, best)):
        raise SolverFailed(
            f"No choice for the {len(problem.costs)} nodes was found within {time_limit_s} s, nor proof that there is "
            "none; one is required. Raise the time limit, or allow more states."
        )
    return Optimum(
        states=best,
        value=value,
        lower_bound=min(value, found.bound),
        seconds=time.monotonic() - began,
        how=", ".join(step if times == 1 else f"{times} x {step}" for step, times in Counter(found.how).items()),
    )


# --- Keep optima in files, by a fingerprint of the whole problem: planning the same program again costs no solving ---

FORMAT = 3
"""Changes whenever what is kept, or what an optimum is, changes."""


def solve_or_recall(problem: Problem, directory: Path | None, *, time_limit_s: float, max_gap: float) -> Optimum:
    """The optimum of a problem, kept in a directory if one is given; as `solve`, without rows."""

    def solved() -> Optimum:
        return solve(problem, time_limit_s=time_limit_s, max_gap=max_gap)

    if directory is None:
        return solved()
    return cached(problem_fingerprint(problem, str(time_limit_s), str(max_gap)), directory, solved)


def cached(key: str, directory: Path, make: Callable[[], Optimum]) -> Optimum:
    """The optimum kept in `directory` under `key`, else the one that `make` returns, which is then kept.

    A file that cannot be read is made again, and a directory that cannot be written to is left alone.
    """
    path = directory / f"{key}.json"
    kept = _read(path)
    if kept is None:
        kept = make()
        _write(path, kept)
    return kept


def problem_fingerprint(problem: Problem, *more: str) -> str:
    """Equal for equal problems only, and for equal `more`: whatever else the optimum depends on, as text."""
    digest = hashlib.sha256(f"{FORMAT} {more!r}".encode())
    arrays: dict[int, bytes] = {}

    def add(label: str, values: Floats) -> None:
        # Many edges share a matrix: hash each once.
        if id(values) not in arrays:
            arrays[id(values)] = hashlib.sha256(np.ascontiguousarray(values, np.float64).tobytes()).digest()
        digest.update(f"{label} {values.shape}".encode() + arrays[id(values)])

    for number, cost in enumerate(problem.costs):
        add(f"node {number}", cost)
    for ends, matrix in sorted(problem.edges.items(), key=lambda item: item[0]):
        add(f"edge {ends}", matrix)
    return digest.hexdigest()


def _read(path: Path) -> Optimum | None:
    try:
        kept: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Optimum(
            states=tuple(int(state) for state in kept["states"]),
            value=float(kept["value"]),
            lower_bound=float(kept["lower_bound"]),
            seconds=float(kept["seconds"]),
            how=str(kept["how"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, optimum: Optimum) -> None:
    """Under another name first: whoever reads meanwhile sees the whole file or none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False) as file:
            json.dump(asdict(optimum), file)
        os.replace(file.name, path)
    except OSError:
        return
