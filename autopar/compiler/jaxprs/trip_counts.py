"""Work out how often a `while` loop runs its body, where literals say so.

A loop counts if its condition is one comparison, each side of which starts at a literal and gains a literal
in each trip (0 for a bound):

    fori_loop(2, 9, ...)      i = 2; i < 9; i = i + 1      7 trips
"""

from __future__ import annotations

import math
from typing import Any

from autopar.compiler.jaxprs.compat import JaxprEqn, Literal, open_jaxpr
from autopar.compiler.jaxprs.params import while_of


def trip_count(eqn: JaxprEqn) -> int:
    """Trips of a `while` equation; 1 if its literals do not tell."""
    loop = while_of(eqn)
    cond, body = open_jaxpr(loop.cond)[0], open_jaxpr(loop.body)[0]
    if len(cond.eqns) != 1 or cond.eqns[0].primitive.name not in ("lt", "le", "gt", "ge"):
        return 1

    def start_and_step(operand: Any) -> tuple[Any, Any]:
        """Return the first value of an operand of the comparison and its gain in each trip; None if unknown."""
        if isinstance(operand, Literal):
            return operand.val, 0
        if operand not in cond.invars:
            return None, None
        position = cond.invars.index(operand)
        if position < loop.cond_consts:
            return _literal(eqn.invars[position]), 0
        carry = position - loop.cond_consts
        start = _literal(eqn.invars[loop.first_carry + carry])
        return start, _step(body, body.invars[loop.body_consts + carry], body.outvars[carry])

    (left, left_step), (right, right_step) = (start_and_step(operand) for operand in cond.eqns[0].invars)
    if any(part is None for part in (left, left_step, right, right_step)):
        return 1
    return _trips_of(cond.eqns[0].primitive.name, float(right - left), float(left_step - right_step))


def _trips_of(comparison: str, distance: float, step: float) -> int:
    """Return the number of trips for which left < right (lt, le, gt, ge) holds.

    Left is `distance` below right at first, and gains `step` in each trip.
    """
    if comparison in ("gt", "ge"):
        comparison, distance, step = {"gt": "lt", "ge": "le"}[comparison], -distance, -step
    if step <= 0:
        return 1 if distance >= 0 else 0  # for ever, or not at all
    return max(0, math.ceil(distance / step) if comparison == "lt" else math.floor(distance / step) + 1)


def _literal(var: Any) -> Any:
    return var.val if isinstance(var, Literal) else None


def _step(body: Any, before: Any, after: Any) -> Any:
    """The literal that one trip adds to `before` to give `after`; None if it does anything else."""
    if after is before:
        return 0
    for eqn in body.eqns:
        if not isinstance(after, Literal) and after in eqn.outvars and eqn.primitive.name in ("add", "sub"):
            left, right = eqn.invars
            if left is before and isinstance(right, Literal):
                return right.val if eqn.primitive.name == "add" else -right.val
            if right is before and isinstance(left, Literal) and eqn.primitive.name == "add":
                return left.val
    return None
