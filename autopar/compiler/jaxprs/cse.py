"""Compute once what a program computes twice from the same operands, as XLA will: the plan must not pay for it twice.

Remat regions and whatever has side effects stay as they are: a remat region repeats on purpose.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.equation_keys import equation_key, literal_key
from autopar.compiler.jaxprs.evaluate import rewrite
from autopar.compiler.jaxprs.primitives import CONSTRAINTS, CONTROL_FLOW, NESTED


def merge_common_subexpressions(closed: jc.ClosedJaxpr) -> jc.ClosedJaxpr:
    """The same program without the second of two equal equations."""
    jaxpr, _ = jc.open_jaxpr(closed)
    first = _first_equals(jaxpr)
    loops = {
        number: jc.map_subjaxprs(eqn, merge_common_subexpressions)
        for number, eqn in enumerate(jaxpr.eqns)
        if eqn.primitive.name in CONTROL_FLOW
    }
    if all(original == number for number, original in enumerate(first)) and not loops:
        return closed

    made: list[Sequence[Any]] = []

    def once(number: int, eqn: jc.JaxprEqn, values: list[Any]) -> Sequence[Any]:
        again = first[number] < number
        made.append(made[first[number]] if again else jc.bind_equation(eqn, values, loops.get(number)))
        return made[-1]

    return rewrite(closed, once)


def _first_equals(jaxpr: jc.Jaxpr) -> list[int]:
    """For every equation the number of the first one that computes the same: value numbering."""
    numbers: dict[Any, Hashable] = {v: ("input", i) for i, v in enumerate((*jaxpr.constvars, *jaxpr.invars))}
    seen: dict[Hashable, int] = {}
    first: list[int] = []
    for number, eqn in enumerate(jaxpr.eqns):
        key = _key(eqn, numbers)
        first.append(number if key is None else seen.setdefault(key, number))
        numbers.update({v: (first[-1], place) for place, v in enumerate(eqn.outvars)})
    return first


def _key(eqn: jc.JaxprEqn, numbers: dict[Any, Hashable]) -> Hashable | None:
    """Return a key of what an equation computes; None for one that must not be merged."""
    # Two constraints on one value may ask for different things.
    if eqn.effects or eqn.primitive.name in NESTED | CONSTRAINTS or any(True for _ in jc.subjaxprs(eqn)):
        return None
    operands = tuple(_token(a) if isinstance(a, jc.Literal) else numbers[a] for a in eqn.invars)
    return (equation_key(eqn), operands)


def _token(literal: jc.Literal) -> Hashable:
    return ("literal", type(literal.val), literal_key(literal))
