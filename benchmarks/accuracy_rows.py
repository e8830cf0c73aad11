"""Read a file of measurements: CSV with one measured step per row, every row read or named with what is wrong.

    row = read_measurements(path).rows[0]
    row.number("dp"), row.whole("layers"), row["model"]

There are two kinds of files, told apart by their columns: steps of any framework (`RUNS`), and steps of JAX programs
with their plans (`STEPS`).

An absent cell is None. A row with a cell that should be a number and is not, or with more cells than columns, is
unreadable: it is counted, never guessed.
"""

import csv
import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from autopar.errors import InvalidArgument

COLUMNS = (
    "src", "licence", "framework", "model", "params_b", "hw", "ngpu", "gpus_per_node", "dp", "tp", "pp", "vp", "cp",
    "ep", "zero", "mbs", "gbs", "seq", "layers", "hidden", "heads", "vocab", "recompute", "kernel", "step_s",
    "samples_s", "tok_s_gpu", "tflops_gpu", "mfu", "mem_gib", "oom", "pred", "note",
)  # fmt: skip
WORDS = frozenset(("src", "licence", "framework", "model", "hw", "zero", "recompute", "kernel", "note"))
NUMBERS = tuple(name for name in COLUMNS if name not in WORDS)
STEP_COLUMNS = (
    "id", "source", "url", "stack", "model", "family", "layers", "hidden", "ffn", "heads", "kv_heads", "head_dim",
    "vocab", "experts", "top_k", "seq", "global_batch", "microbatches", "dtype", "machine", "devices", "hosts", "data",
    "fsdp", "tensor", "sequence", "expert", "pipeline", "schedule", "zero", "remat", "attention", "step_s",
    "tflops_reported", "peak_gib", "oom", "notes", "group", "complete",
)  # fmt: skip
STEP_WORDS = frozenset((
    "id", "source", "url", "stack", "model", "family", "dtype", "machine", "schedule", "remat", "attention", "notes",
    "group", "complete",
))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of one kind of file: those that are not words hold numbers, `source` may say where a row is from."""

    names: tuple[str, ...]
    words: frozenset[str]
    source: str


RUNS = Columns(names=COLUMNS, words=WORDS, source="src")
STEPS = Columns(names=STEP_COLUMNS, words=STEP_WORDS, source="source")
SOURCES = frozenset((RUNS.source, STEPS.source))
NO_SOURCE = "no source"
"""The label of rows that do not say where they are from."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured step: its cells as text, and the line of the file it stands in."""

    line: int
    cells: tuple[tuple[str, str], ...]

    def __getitem__(self, column: str) -> str:
        return dict(self.cells)[column]

    @cached_property
    def digest(self) -> str:
        """A name of the row by its cells but the source, wherever it stands in the file."""
        return hashlib.sha256(repr([text for name, text in self.cells if name not in SOURCES]).encode()).hexdigest()

    def number(self, column: str) -> float | None:
        """The number in a column, or None if there is none."""
        text = self[column]
        return float(text) if text else None

    def whole(self, column: str) -> int | None:
        """The integer in a column, or None if there is none."""
        number = self.number(column)
        return None if number is None else round(number)

    @property
    def name(self) -> str:
        """The row's id, or where it stands."""
        return dict(self.cells).get("id") or f"line {self.line}"

    @property
    def source(self) -> str:
        """The source as the row names it, of a run the repository: a label, which nothing that is predicted reads."""
        cells = dict(self.cells)
        named = cells[STEPS.source] if STEPS.source in cells else cells[RUNS.source].partition(":")[0]
        return named or NO_SOURCE


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """The rows of a file that can be read, and why the others cannot, by line."""

    columns: Columns
    rows: tuple[Row, ...]
    unreadable: tuple[tuple[int, str], ...]


def read_measurements(path: Path) -> Measurements:
    """The rows of a CSV file; `InvalidArgument` if there is no such file, or columns are missing."""
    if not path.is_file():
        raise InvalidArgument(f"There is no file {str(path)!r}. Give --measurements a CSV file of measured steps.")
    try:
        return _read(path)
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"{str(path)!r} holds the byte {error.object[error.start]:#x}, but must be text in UTF-8. Save it so."
        ) from error
    except csv.Error as error:
        raise InvalidArgument(f"{str(path)!r} is not CSV: {error}. Save it as CSV in UTF-8.") from error


def _read(path: Path) -> Measurements:
    rows: list[Row] = []
    unreadable: list[tuple[int, str]] = []
    # A spreadsheet begins its CSV with a byte order mark.
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, restkey="", restval=None)
        found = reader.fieldnames or ()
        columns = STEPS if STEPS.source in found else RUNS
        missing = [column for column in columns.names if column not in found]
        if missing:
            raise InvalidArgument(
                f"{str(path)!r} has the columns {', '.join(found) or 'none'}; {', '.join(missing)} must be there too. "
                "Add them, empty where nothing was recorded."
            )
        for cells in reader:
            problem = _problem(cells, columns)
            if problem:
                unreadable.append((reader.line_num, problem))
            else:
                read = tuple((name, cells[name].strip()) for name in columns.names)
                rows.append(Row(line=reader.line_num, cells=read))
    return Measurements(columns=columns, rows=tuple(rows), unreadable=tuple(unreadable))


def _problem(cells: dict[str, str | None], columns: Columns) -> str | None:
    """Why a row cannot be read, or None."""
    if "" in cells:
        return "has more cells than there are columns"
    for name in columns.names:
        text = cells[name]
        if text is None:
            return f"ends before its column {name}"
        if name in columns.words or not text.strip():
            continue
        try:
            number = float(text)
        except ValueError:
            return f"has {text!r} in column {name}, where a number must be"
        if not math.isfinite(number) or number < 0:
            return f"has {text!r} in column {name}, where a finite number of at least 0 must be"
    return None
