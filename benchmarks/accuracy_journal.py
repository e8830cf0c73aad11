"""Keep the predictions of a long run as they are made: one that was stopped goes on where it stopped.

    journal = Journal(path)
    journal.known(row), journal.add(row, Entry(...)), journal.close()

A journal is a file with one JSON object to a line. Its first line is a digest of the sources that predict; a journal
of other sources says nothing about these, and is begun anew.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import autopar
import benchmarks
from benchmarks.accuracy_rows import Row


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The prediction for a row, in seconds and bytes, or the reason that there can be none."""

    step_s: float = 0.0
    peak_bytes: float = 0.0
    unusable: str = ""
    parts: dict[str, Any] | None = None
    """The parts of the step, as `StepParts.to_data` writes them, where it is priced anew for other figures."""


class Journal:
    """Entries by row, each written to the file as soon as it is added; without a path nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        """Read what runs of the same sources have left."""
        self._path = path
        self._entries: dict[str, Entry] = {}
        if path is None:
            return
        header, *lines = (path.read_text(encoding="utf-8") if path.is_file() else "").split("\n")
        # The last line is cut off where a run was killed.
        complete = [line for line in lines if line.endswith("}}")] if header == sources_digest() else []
        self._entries = {each["row"]: Entry(**each["entry"]) for each in map(json.loads, complete)}
        path.write_text("\n".join([sources_digest(), *complete, ""]), encoding="utf-8")

    def known(self, row: Row) -> Entry | None:
        """Return what is written of a row."""
        return self._entries.get(row.digest)

    def add(self, row: Row, entry: Entry) -> None:
        """Write the entry of a row."""
        self._entries[row.digest] = entry
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"row": row.digest, "entry": asdict(entry)}) + "\n")

    def close(self) -> None:
        """Remove the file: the run has ended, and what it found is told elsewhere."""
        if self._path is not None:
            self._path.unlink()


@cache
def sources_digest() -> str:
    """Return a digest of all files that a prediction depends on."""
    digest = hashlib.sha256()
    for package in (autopar, benchmarks):
        root = Path(str(package.__file__)).parent
        for path in sorted([*root.rglob("*.py"), *root.rglob("machines/*.json")]):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()
