"""Hold what is computed of a block while it is evaluated, and hold back what waits for other values.

Value, array  ->  the array that a reader of the value is given, behind what it waits for
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jax import lax

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.sharding.layout import replicated
from autopar.compiler.spmd.local_program import LocalBlock, Value

_lax: Any = lax


class EvaluatedValues(dict[Value, Any]):
    """Arrays by the values that they are of; of a block, what is computed so far."""

    @classmethod
    def of_inputs(cls, block: LocalBlock, consts: Sequence[Any], args: Sequence[Any]) -> EvaluatedValues:
        """Return the inputs and the constants of a block."""
        values = cls(zip(block.inputs, args, strict=True))
        for v, const in zip(block.jaxpr.constvars, consts, strict=True):
            aval: Any = v.aval
            values[Value(v, replicated(aval.ndim))] = const
        return values

    def read(self, value: Value | jc.Literal) -> Any:
        """Return what was computed for a value, or a constant."""
        return value.val if isinstance(value, jc.Literal) else self[value]

    def read_after(self, values: Iterable[Value | jc.Literal], after: Sequence[Value]) -> list[Any]:
        """Return the same of several, not before all of `after` is there.

        Without that XLA sees what was gathered before, and keeps it until now; or it ends a sum as late as it can, and
        keeps what it sums. Who reads `after` later reads it behind the barrier, or nothing would wait for it.
        """
        found = [self.read(value) for value in values]
        if after:
            found, there = _lax.optimization_barrier((found, [self[value] for value in after]))
            self.update(zip(after, there, strict=True))
        return found
