"""Plain text of what rich renders, the same on every terminal, and of counts and sizes in words."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType

WIDTH = 110
"""Width of a line, in characters."""


def as_text(shown: RenderableType, width: int = WIDTH) -> str:
    """Return the lines, without color and without blanks at their ends."""
    text = io.StringIO()
    Console(file=text, width=width, color_system=None, legacy_windows=False).print(shown)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())


def microbatches_in_words(count: int) -> str:
    """Return `"1 microbatch"`, `"8 microbatches"`."""
    return f"{count} microbatch{'es' * (count != 1)}"


def size_words(nbytes: float) -> str:
    """Return bytes in the largest unit that has a whole of them.

    >>> size_words(3.5 * 2**30)
    '3.5 GiB'
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes:.0f} bytes"
