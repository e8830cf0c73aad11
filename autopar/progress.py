"""Show the progress of a long search: its subject, its time, and the best plan so far; pause the collector.

    with search_progress("planning train_step"):
        tell("128 microbatches: layers on 1x8")
        tell_best(0.81)

    planning train_step ━━━━━━━━━━━ 0:00:12  best so far 810 ms  128 microbatches: layers on 1x8

Where standard error is no terminal, what is told after ten seconds, and then at most every ten, is a line there. Both
are turned off by AUTOPAR_PROGRESS=0 in the environment. Passes tell without knowing whom.

Tracing and planning make millions of small objects that stay. Python's collector of cycles goes through all that are
there each time their number has grown by a share: a fifth of the time of planning a large model, for next to nothing
collected. So passes pause it.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

_current: ContextVar[Callable[..., None] | None] = ContextVar("search_progress", default=None)
_heard: ContextVar[Callable[[float], None] | None] = ContextVar("heard_best", default=None)
_LINE_EVERY_S = 10.0


@contextmanager
def search_progress(
    description: str, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
) -> Generator[None]:
    """Show what is told inside, on standard error unless another console is given."""
    console = console or Console(stderr=True)
    shown = os.environ.get("AUTOPAR_PROGRESS") != "0"
    showing = _bar(description, console, shown) if console.is_terminal else _lines(description, console, clock, shown)
    with showing as update:
        token = _current.set(update)
        try:
            yield
        finally:
            _current.reset(token)


@contextmanager
def _bar(description: str, console: Console, shown: bool) -> Generator[Callable[..., None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.fields[best]}"),
        TextColumn("{task.fields[what]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        task = progress.add_task(description, total=None, best="", what="")  # nobody knows how much there is to search
        yield partial(progress.update, task)


@contextmanager
def _lines(
    description: str, console: Console, clock: Callable[[], float], shown: bool
) -> Generator[Callable[..., None]]:
    began = written = clock()
    told = {"best": "", "what": ""}

    def update(**fields: str) -> None:
        nonlocal written
        told.update(fields)
        now = clock()
        if shown and now - written >= _LINE_EVERY_S:
            written = now
            print(", ".join(filter(None, (f"{description}: {now - began:.0f} s", *told.values()))), file=console.file)
            console.file.flush()

    yield update


def say(line: str) -> None:
    """Write a line that stays to standard error, also where it is no terminal."""
    print(line, file=sys.stderr, flush=True)


def tell(what: str) -> None:
    """Show the subject that the search turns to."""
    _update(what=what)


def tell_best(step_time_s: float) -> None:
    """Show the time of a step by the best plan so far."""
    _update(best=f"best so far {1e3 * step_time_s:.4g} ms")
    heard = _heard.get()
    if heard is not None:
        heard(step_time_s)


@contextmanager
def hearing_best(heard: Callable[[float], None]) -> Generator[None]:
    """Call the function with the time of a step, in seconds, by each plan inside that is better than those before."""
    token = _heard.set(heard)
    try:
        yield
    finally:
        _heard.reset(token)


def _update(**fields: Any) -> None:
    update = _current.get()
    if update is not None:
        update(**fields)


@contextmanager
def collector_paused() -> Generator[None]:
    """Collect no cycles inside, not for other threads either; `with` and decorator, also one within another.

    What was made inside counts as old then: hardly any of it is in cycles, and to find these would take as long as to
    trace a step. They wait for the next full collection.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else the caller's frozen objects would be thawed
            gc.freeze()
            gc.unfreeze()
        gc.enable()
