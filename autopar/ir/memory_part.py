"""A part of what a device holds at its fullest moment: a category, the user's name, and bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Literal, NamedTuple

Category = Literal[
    "parameters",
    "optimizer",
    "batch",
    "other inputs",
    "gradients",
    "activations",
    "collective buffers",
    "temporaries",
]
"""Parameters are the state that the forward pass reads, optimizer is all other state."""


class MemoryPart(NamedTuple):
    """Arrays of one category and one name, and the bytes of them that a device holds."""

    category: Category
    name: str
    """The path of an input, the scope of the layer of activations, or else what made it."""
    nbytes: float


def joined_parts(parts: Iterable[MemoryPart]) -> tuple[MemoryPart, ...]:
    """Return the parts with those of one category and name added up, the largest first."""
    sums: defaultdict[tuple[Category, str], float] = defaultdict(float)
    for part in parts:
        sums[part.category, part.name] += part.nbytes
    found = (MemoryPart(category, name, nbytes) for (category, name), nbytes in sums.items() if nbytes)
    return tuple(sorted(found, key=lambda part: (-part.nbytes, part.category, part.name)))
