"""Results of weak scaling: one row for each model and method, as JSON and as a table.

The share of linear scaling is what a GPU does among n, relative to one in the smallest run of the same method:

    share(n) = (FLOPs(n) / time(n) / n)  /  (FLOPs(n₀) / time(n₀) / n₀)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from autopar.errors import InvalidArgument
from benchmarks.models.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Row:
    """Plan of a method for a model on a number of GPUs; figures are None where there are none."""

    model: str
    gpus: int
    method: str
    step_time_s: float | None
    tflops_per_gpu: float | None
    """FLOPs of the model, not those of recomputation."""
    tokens_per_s: float | None
    """Images, for models of images."""
    peak_gib: float | None
    plan_time_s: float | None
    lower_bound_s: float | None
    plan: str | None
    """A file or a summary; or why there is no step time."""


def row_of(
    workload: Workload,
    *,
    gpus: int,
    method: str,
    step_time_s: float | None,
    plan: str | None,
    peak_bytes: float | None = None,
    plan_time_s: float | None = None,
    lower_bound_s: float | None = None,
) -> Row:
    """A row with the rates that follow from the time of a step."""
    known = step_time_s is not None
    return Row(
        model=workload.name,
        gpus=gpus,
        method=method,
        step_time_s=step_time_s,
        tflops_per_gpu=workload.flops / step_time_s / gpus / 1e12 if known else None,
        tokens_per_s=workload.tokens / step_time_s if known else None,
        peak_gib=None if peak_bytes is None else peak_bytes / 2**30,
        plan_time_s=plan_time_s,
        lower_bound_s=lower_bound_s,
        plan=plan,
    )


def share_of_linear(row: Row, rows: Sequence[Row]) -> float | None:
    """The share of linear scaling of a row among others."""
    alike = [each for each in rows if each.method == row.method and each.tflops_per_gpu is not None]
    if row.tflops_per_gpu is None:
        return None
    smallest = min(alike, key=lambda each: each.gpus)
    assert smallest.tflops_per_gpu is not None
    return row.tflops_per_gpu / smallest.tflops_per_gpu


def write_json(rows: Sequence[Row], path: Path) -> None:
    """Write the rows as a list of objects."""
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


def read_json(path: Path) -> list[Row]:
    """The rows of a file that `write_json` wrote; `InvalidArgument` for another."""
    try:
        return [Row(**fields) for fields in json.loads(path.read_text(encoding="utf-8"))]
    except (json.JSONDecodeError, TypeError):
        raise InvalidArgument(
            f"--json {path} is there, and holds no rows of this benchmark to add others to. Give another file."
        ) from None


def merged(rows: Sequence[Row], before: Sequence[Row]) -> list[Row]:
    """The rows with those before them that are of another model, number of GPUs or method; by model size and method."""
    new = {(row.model, row.gpus, row.method) for row in rows}
    kept = [row for row in before if (row.model, row.gpus, row.method) not in new]
    methods = list(dict.fromkeys(row.method for row in (*kept, *rows)))
    return sorted((*kept, *rows), key=lambda row: (row.gpus, methods.index(row.method)))


def rows_table(rows: Sequence[Row]) -> Table:
    """The rows as a table, the share of linear scaling beside them."""
    table = Table(box=box.SIMPLE_HEAD)
    columns = ("model", "GPUs", "method", "s/step", "TFLOPS/GPU", "of linear", "tokens/s", "peak GiB", "plan s")
    for name in (*columns, "bound s", "plan"):
        justify = "left" if name in ("model", "method", "plan") else "right"
        table.add_column(name, justify=justify, no_wrap=name != "plan")
    for row in rows:
        share = share_of_linear(row, rows)
        numbers = (
            _number(row.step_time_s),
            _number(row.tflops_per_gpu),
            "-" if share is None else f"{100 * share:.0f} %",
            "-" if row.tokens_per_s is None else f"{row.tokens_per_s:.0f}",
            *map(_number, (row.peak_gib, row.plan_time_s, row.lower_bound_s)),
        )
        cells = (row.model, str(row.gpus), row.method, *numbers, row.plan or "-")
        table.add_row(*map(Text, cells))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
