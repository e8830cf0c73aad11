"""Plain text of what rich renders, the same on every terminal, and of counts in words."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType

WIDTH = 110
"""Of a line, in characters."""


def as_text(shown: RenderableType, width: int = WIDTH) -> str:
    """Return the lines, without color and without blanks at their ends."""
    text = io.StringIO()
    Console(file=text, width=width, color_system=None, legacy_windows=False).print(shown)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())


def microbatches_in_words(count: int) -> str:
    """Return `"1 microbatch"`, `"8 microbatches"`."""
    return f"{count} microbatch{'es' * (count != 1)}"
