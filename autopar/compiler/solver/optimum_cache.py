"""Keep optima in files, by a fingerprint of the whole problem: planning the same program again costs no solving."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from autopar.compiler.solver.problem import MRF, FloatArray, Optimum
from autopar.compiler.solver.solve import solve

CACHE_VERSION = 6
"""Changes whenever what is kept, or what an optimum is, changes."""


def solve_or_recall(problem: MRF, directory: Path | None, *, time_limit_s: float, max_gap: float) -> Optimum:
    """Return the optimum of a problem, kept in a directory if one is given."""

    def solved() -> Optimum:
        return solve(problem, time_limit_s=time_limit_s, max_gap=max_gap)

    if directory is None:
        return solved()
    return cached(problem_fingerprint(problem, str(time_limit_s), str(max_gap)), directory, solved)


def cached(key: str, directory: Path, make: Callable[[], Optimum]) -> Optimum:
    """Return the optimum kept in `directory` under `key`, else the one that `make` returns, which is then kept.

    A file that cannot be read is made again, and a directory that cannot be written to is left alone.
    """
    path = directory / f"{key}.json"
    kept = _read(path)
    if kept is None:
        kept = make()
        _write(path, kept)
    return kept


def problem_fingerprint(problem: MRF, *more: str) -> str:
    """Return a hash, equal for equal problems with equal `more` only: whatever else the optimum depends on, as text."""
    digest = hashlib.sha256(f"{CACHE_VERSION} {more!r}".encode())
    arrays: dict[int, bytes] = {}

    def add(label: str, values: FloatArray) -> None:
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
            assignment=tuple(int(option) for option in kept["assignment"]),
            value=float(kept["value"]),
            lower_bound=float(kept["lower_bound"]),
            seconds=float(kept["seconds"]),
            how=str(kept["how"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, optimum: Optimum) -> None:
    """Write under another name first: whoever reads meanwhile sees the whole file or none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False) as file:
            json.dump(asdict(optimum), file)
        os.replace(file.name, path)
    except OSError:
        return
