"""An equation before the rules: where its operands have the batch, and what a rule can say about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from autopar.compiler.jaxprs import compat as jc
from autopar.errors import NotSplittable


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a value in a program."""
    return tuple(atom.aval.shape)


@dataclass(frozen=True, kw_only=True)
class Site:
    """An equation at the full and the doubled batch; the batch axis of each operand (None: it has none)."""

    eqn: jc.JaxprEqn
    doubled: jc.JaxprEqn
    axes: tuple[int | None, ...]
    producers: Mapping[jc.Var, jc.JaxprEqn]
    constants: Mapping[jc.Var, Any]

    def shape(self, operand: int) -> tuple[int, ...]:
        return shape_of(self.eqn.invars[operand])


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows stay apart. `own_column`: that column of the indices holds each row's own number."""

    own_column: int | None = None


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """The rows are reduced; the operands at `summands` take part in the reduction without being batched."""

    kind: str
    summands: tuple[int, ...] = ()


Verdict = Rows | Reduced


def batch_axes(aval: Any, doubled: Any) -> tuple[int, ...]:
    """The axes along which a value grows with the batch."""
    full, double = getattr(aval, "shape", ()), getattr(doubled, "shape", ())
    return tuple(i for i, (n, m) in enumerate(zip(full, double, strict=True)) if n != m)


def refuse(eqn: jc.JaxprEqn, found: str) -> NoReturn:
    """Raise for an equation that mixes the examples of the batch."""
    raise NotSplittable(
        f"{jc.describe(eqn)} {found}. A microbatch has only its own examples, so every operation on the "
        "batch must treat them independently or reduce over them. Apply it along another axis or outside of "
        "the train step, or use num_microbatches=1."
    )
