"""Pause Python's collector of cycles while a pass makes many objects that stay.

Tracing and planning make millions of small objects. The collector goes through all that are there each time their
number has grown by a share: a fifth of the time it takes to plan a large model, for next to nothing that is found.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Generator[None]:
    """Collect no cycles inside; `with` and decorator, also one within another. Other threads are not collected for
    either, in the meantime.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
