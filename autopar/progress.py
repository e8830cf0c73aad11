"""Show the progress of a long search: its subject, its time, and the best plan so far; pause the collector.

    with search_progress("planning train_step"):
        tell("128 microbatches: layers on 1x8")
        tell_best(0.81)

    planning train_step ━━━━━━━━━━━ 0:00:12  best so far 810 ms  128 microbatches: layers on 1x8

Nothing is shown where standard error is no terminal. Passes tell without knowing whom.

Tracing and planning make millions of small objects that stay. Python's collector of cycles goes through all that are
there each time their number has grown by a share: a fifth of the time of planning a large model, for next to nothing
collected. So passes pause it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

_current: ContextVar[Progress | None] = ContextVar("search_progress", default=None)


@contextmanager
def search_progress(description: str, console: Console | None = None) -> Generator[None]:
    """Show what is told inside, on standard error unless another console is given."""
    console = console or Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.fields[best]}"),
        TextColumn("{task.fields[what]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        shown.add_task(description, total=None, best="", what="")  # nobody knows how much there is to search
        token = _current.set(shown)
        try:
            yield
        finally:
            _current.reset(token)


def say(line: str) -> None:
    """Write a line that stays to standard error, also where it is no terminal."""
    print(line, file=sys.stderr, flush=True)


def tell(what: str) -> None:
    """Show the subject that the search turns to."""
    _update(what=what)


def tell_best(step_time_s: float) -> None:
    """Show the time of a step by the best plan so far."""
    _update(best=f"best so far {1e3 * step_time_s:.4g} ms")


def _update(**fields: Any) -> None:
    shown = _current.get()
    if shown is not None:
        shown.update(shown.task_ids[0], **fields)


@contextmanager
def collector_paused() -> Generator[None]:
    """Collect no cycles inside, not for other threads either; `with` and decorator, also one within another."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
