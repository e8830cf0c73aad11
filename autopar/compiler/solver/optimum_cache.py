"""Keep optima in files, by a fingerprint of the whole problem: planning the same program again costs no solving."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from autopar.compiler.solver.problem import MRF, FloatArray, Optimum, assignment_cost
from autopar.compiler.solver.solve import ROUND_OFF, solve
from autopar.kept_files import keep_text, read_text

CACHE_VERSION = 7
"""Changes whenever what is kept, or what an optimum is, changes."""


def solve_or_recall(problem: MRF, directory: Path | None, *, time_limit_s: float, max_gap: float) -> Optimum:
    """Return the optimum of a problem, kept in a directory if one is given."""
    make = partial(solve, problem, time_limit_s=time_limit_s, max_gap=max_gap)
    return cached(problem, directory, make, str(time_limit_s), str(max_gap))


def cached(problem: MRF, directory: Path | None, make: Callable[[], Optimum], *more: str) -> Optimum:
    """Return the optimum of a problem that is kept in `directory`, else the one that `make` returns, and keep that.

    `more` is whatever else the optimum depends on. A file that cannot be read, or whose optimum is of no such problem,
    is made again, and a directory that cannot be written to is left alone; without a directory nothing is kept.
    """
    if directory is None:
        return make()
    name = f"{problem_fingerprint(problem, *more)}.json"
    text = read_text(directory, name)
    kept = None if text is None else _optimum_of(text)
    if kept is None or not _holds(problem, kept):
        kept = make()
        keep_text(directory, name, json.dumps(vars(kept)))
    return kept


def _holds(problem: MRF, kept: Optimum) -> bool:
    """Return whether an assignment is one of the problem, and costs what is said, and no less than its bound."""
    sizes = [cost.size for cost in problem.costs]
    if len(kept.assignment) != len(sizes) or not all(map(lambda o, size: 0 <= o < size, kept.assignment, sizes)):
        return False
    slack = ROUND_OFF * abs(kept.value)
    return (
        abs(assignment_cost(problem, kept.assignment) - kept.value) <= slack and kept.lower_bound <= kept.value + slack
    )


def problem_fingerprint(problem: MRF, *more: str) -> str:
    """Return a hash, equal for equal problems with equal `more` only: whatever else the optimum depends on, as text."""
    contents: dict[tuple[tuple[int, ...], bytes], int] = {}
    known: dict[int, int] = {}

    def number(values: FloatArray) -> int:
        """Return the number of an array's content. Many edges share an array, and many arrays a content."""
        if id(values) not in known:
            content = values.shape, np.ascontiguousarray(values, np.float64).tobytes()
            known[id(values)] = contents.setdefault(content, len(contents))
        return known[id(values)]

    nodes = [number(cost) for cost in problem.costs]
    edges = [(i, j, number(matrix)) for (i, j), matrix in sorted(problem.edges.items(), key=lambda item: item[0])]
    digest = hashlib.sha256(f"{CACHE_VERSION} {more!r} {nodes} {edges} {[shape for shape, _ in contents]}".encode())
    for _, values in contents:
        digest.update(values)
    return digest.hexdigest()


def _optimum_of(text: str) -> Optimum | None:
    """Return the optimum that was written; None if it is something else."""
    try:
        kept: Mapping[str, Any] = json.loads(text)
        return Optimum(
            assignment=tuple(int(option) for option in kept["assignment"]),
            value=float(kept["value"]),
            lower_bound=float(kept["lower_bound"]),
            seconds=float(kept["seconds"]),
            how=str(kept["how"]),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
