"""Classes of what belongs together, directly or through others: a union-find forest."""

from __future__ import annotations

from collections.abc import Hashable


class Joined:
    """Disjoint classes; what was never joined is one by itself."""

    def __init__(self) -> None:
        self._parent: dict[Hashable, Hashable] = {}

    def find(self, value: Hashable) -> Hashable:
        """The representative of a value's class."""
        root = value
        while (parent := self._parent.get(root, root)) != root:
            root = parent
        while (parent := self._parent.get(value, value)) != root:
            self._parent[value], value = root, parent
        return root

    def join(self, a: Hashable, b: Hashable) -> None:
        """Make one class of two."""
        self._parent[self.find(a)] = self.find(b)
