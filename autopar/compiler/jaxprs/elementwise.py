"""Group values that equations join element by element: a parameter, its gradient, its moments, its successor.

What belongs together is placed together (`placement`) and laid out alike (`value_specs`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import primitives

# Results of the shape of an operand whose axes are not the operand's.
_MOVES_AXES = (
    primitives.CONTROL_FLOW
    | primitives.REORDERINGS
    | {"concatenate", "dot_general", "gather", "reshape", "scatter", "sort"}
)


class Classes:
    """Values that are joined, directly or through others, as a union-find forest."""

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


def joined_values(eqn: jc.JaxprEqn) -> Iterator[tuple[jc.Var, jc.Var]]:
    """Operand and result of every pair that the equation joins: of equal shape, with elements in the same places."""
    if eqn.primitive.name in _MOVES_AXES:
        return
    for out in eqn.outvars:
        for v in eqn.invars:
            if isinstance(v, jc.Var) and _shape(out) and _shape(v) == _shape(out):
                yield v, out


def _shape(v: jc.Var) -> tuple[int, ...]:
    aval: Any = v.aval
    return tuple(aval.shape)
