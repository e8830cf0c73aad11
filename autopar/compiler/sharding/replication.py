"""Warn once of what every device holds or computes whole for want of anything better.

    with one_warning("step"):            note_replicated(reason), note_replicated(reason)  ->  one ReplicatedWarning

Reasons are found in many places while a step is planned; who plans it gathers them.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from autopar.errors import ReplicatedWarning

_gathered: ContextVar[dict[str, None] | None] = ContextVar("replicated", default=None)


def note_replicated(reason: str) -> None:
    """Warn of a value or an equation that is whole on every device, at the end of `one_warning` or else at once."""
    gathered = _gathered.get()
    if gathered is None:
        warnings.warn(reason, ReplicatedWarning, stacklevel=2)
    else:
        gathered[reason] = None


@contextmanager
def gathered_reasons() -> Generator[dict[str, None]]:
    """Gather all that is noted inside, and warn of none of it."""
    gathered: dict[str, None] = {}
    token = _gathered.set(gathered)
    try:
        yield gathered
    finally:
        _gathered.reset(token)


@contextmanager
def one_warning(step: str) -> Generator[None]:
    """Gather all that is noted inside, and warn of it once. What is noted before an error is left to the error."""
    if _gathered.get() is not None:
        yield
        return
    with gathered_reasons() as gathered:
        yield
    if gathered:
        first, *more = gathered
        listed = "".join(f"\n  - {reason}" for reason in gathered)
        text = f"In {step}, {len(gathered)} things are whole on every device:{listed}" if more else first
        warnings.warn(text, ReplicatedWarning, stacklevel=4)
