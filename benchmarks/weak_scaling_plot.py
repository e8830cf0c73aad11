"""Draw weak scaling: TFLOPS of each GPU and the share of linear scaling over the number of GPUs, a line per method."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autopar.errors import InvalidArgument
from benchmarks.weak_scaling_rows import Row, share_of_linear


def check_plot(path: Path) -> None:
    """Raise `InvalidArgument` unless there is matplotlib, and it can draw to such a file."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidArgument(
            f"--plot {path} needs matplotlib, which is not installed. Install it with pip install 'autopar[plot]', or "
            "leave --plot out: --json writes the same figures."
        )
    if path.suffix != ".png":
        raise InvalidArgument(f"--plot is {str(path)!r}, it must be a file whose name ends in .png. Rename it.")


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw the rows to a PNG file; what is out of memory has a cross at the bottom."""
    # Imported here: only drawing needs it, and the canvas without a window works everywhere.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    rates, shares = figure.subplots(1, 2)
    for method in dict.fromkeys(row.method for row in rows):
        timed = sorted((r for r in rows if r.method == method and r.step_time_s is not None), key=lambda r: r.gpus)
        gpus = [row.gpus for row in timed]
        (line,) = rates.plot(gpus, [row.tflops_per_gpu for row in timed], marker="o", label=method)
        shares.plot(gpus, [share_of_linear(row, rows) for row in timed], marker="o", color=line.get_color())
        lacking = [row.gpus for row in rows if row.method == method and row.step_time_s is None]
        place = 0.6 * list(dict.fromkeys(row.method for row in rows)).index(method)
        rates.plot(lacking, [place] * len(lacking), marker="x", linestyle="", color=line.get_color())
    counts = sorted({row.gpus for row in rows})
    _label(rates, counts, "TFLOPS per GPU")
    _label(shares, counts, "share of linear scaling")
    rates.legend(title="x: out of memory" if any(row.step_time_s is None for row in rows) else None)
    figure.suptitle(title)
    figure.savefig(path)


def _label(axes: Any, counts: Sequence[int], quantity: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("GPUs")
    axes.set_ylabel(quantity)
