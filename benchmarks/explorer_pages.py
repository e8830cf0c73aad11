"""Measure the pages of plans in a browser: their size, the time to the first paint, and that of an interaction.

    python -m benchmarks.explorer_pages --cases small gpt-39b llama-405b --folder pages --json explorer_pages.json

The plans are by degrees, for GPUs that need not be there, so that a case takes minutes at most. Needs Chromium and
ChromeDriver, as Debian's packages chromium and chromium-driver. An interaction is timed in the page, from before the
event until the frame after it is drawn; each is done several times, and the slowest counts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import autopar
from benchmarks.models.sizes import FAMILIES

MOST_BYTES, MOST_PAINT_MS, MOST_INTERACTION_MS = 5_000_000, 1_000.0, 100.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of the weak scaling, a cluster, and degrees of data, tensor and pipeline parallelism."""

    model: str
    cluster: str
    gpus: int
    degrees: tuple[int, int, int]


CASES = {
    "one": Case(model="350M", cluster="dgx-h100", gpus=1, degrees=(1, 1, 1)),
    "mesh": Case(model="350M", cluster="dgx-h100", gpus=8, degrees=(2, 4, 1)),
    "gpt-39b": Case(model="39B", cluster="p3.16xlarge", gpus=64, degrees=(1, 4, 16)),
    "llama-405b": Case(model="llama-3-405b", cluster="dgx-h100", gpus=10240, degrees=(64, 8, 20)),
    "mixed": Case(model="350M", cluster="1x dgx-a100-80 + 1x p3.16xlarge", gpus=16, degrees=(2, 2, 4)),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A page: bytes, milliseconds, and the requests that it made."""

    case: str
    nbytes: int
    first_paint_ms: float
    interactions_ms: dict[str, float]
    requests: int
    describe_s: float

    @property
    def is_good(self) -> bool:
        """True if the page is as small and as quick as it is to be."""
        slowest = max(self.interactions_ms.values())
        quick = self.first_paint_ms <= MOST_PAINT_MS and slowest <= MOST_INTERACTION_MS
        return self.nbytes <= MOST_BYTES and quick and not self.requests


def main(argv: Sequence[str] | None = None) -> None:
    """Write the pages, measure them, and show the rows; exit code 1 if one is too large or too slow."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--folder", type=Path, default=Path("pages"), help="of the pages and their screenshots")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every page")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for name in args.cases:
        page = (args.folder / f"{name}.html").resolve()
        rows.append(measured(name, page, write_page(CASES[name], page)))
        if args.json is not None:
            args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    Console(width=140).print(table_of(rows))
    sys.exit(0 if all(row.is_good for row in rows) else 1)


def write_page(case: Case, page: Path) -> float:
    """Plan, and write the page; return the seconds that the page took."""
    workload = FAMILIES["gpt"].maker(case.model)()
    cluster = autopar.Cluster.parse(case.cluster)
    cluster = cluster if cluster.is_mixed else cluster.with_devices(case.gpus)
    data, tensor, pipeline = case.degrees
    method = autopar.Megatron(
        data=data, tensor=tensor, pipeline=pipeline, num_microbatches=workload.batch_size // data, zero=int(data > 1)
    )
    step = autopar.parallelize(workload.step, method=method, donate_argnums=(0,), cluster=cluster)
    planned = step.trace(workload.abstract_state, workload.abstract_batch).plan()
    start = time.perf_counter()
    planned.view(page)
    return time.perf_counter() - start


_INTERACTIONS = {
    "choose a mesh": "document.querySelector('#cluster button').click()",
    "zoom": "document.getElementById('in').click()",
    "whole step": "document.getElementById('all').click()",
    "open a layer": "(document.querySelector('#layers button') || document.getElementById('up')).click()",
    "one category": "document.querySelector('#treemap button').click()",
    "search": (
        "const i = document.querySelector('input[type=search]'); i.value = 'h_1'; i.dispatchEvent(new Event('input'))"
    ),
    "sort": "document.querySelector('#tables th button').click()",
}
_TIMED = """
const done = arguments[0], start = performance.now();
ACT;
requestAnimationFrame(() => setTimeout(() => done(performance.now() - start)));
"""
_TIMES = 3


def measured(name: str, page: Path, describe_s: float) -> Row:
    """Open a page in a browser of its own."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for word in ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,1600", "--hide-scrollbars"):
        options.add_argument(word)
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    with webdriver.Chrome(options=options, service=service) as browser:
        browser.get(page.as_uri())
        browser.save_screenshot(str(page.with_suffix(".png")))
        paints: list[dict[str, Any]] = browser.execute_script(
            "return performance.getEntriesByType('paint').map(e => e.toJSON())"
        )
        slowest = {
            words: max(browser.execute_async_script(_TIMED.replace("ACT", act)) for _ in range(_TIMES))
            for words, act in _INTERACTIONS.items()
        }
        return Row(
            case=name,
            nbytes=page.stat().st_size,
            first_paint_ms=max(each["startTime"] for each in paints),
            interactions_ms=slowest,
            requests=browser.execute_script("return performance.getEntriesByType('resource').length"),
            describe_s=describe_s,
        )


def table_of(rows: Sequence[Row]) -> Table:
    """Return one line for each page."""
    table = Table(title="pages of plans")
    for column in ("case", "MB", "written in s", "first paint ms", *_INTERACTIONS, "requests", ""):
        table.add_column(column, justify="left" if column in ("case", "") else "right")
    for row in rows:
        times = (f"{row.interactions_ms[words]:.0f}" for words in _INTERACTIONS)
        figures = f"{row.nbytes / 1e6:.3g}", f"{row.describe_s:.3g}", f"{row.first_paint_ms:.0f}", *times
        table.add_row(row.case, *figures, str(row.requests), "" if row.is_good else "too large or too slow")
    return table


if __name__ == "__main__":
    main()
