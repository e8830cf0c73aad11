"""Find the values that every device may compute by itself at no cost worth counting.

These are called free: they come from small inputs and constants alone by cheap equations, as step counters, iotas,
masks and schedules do. A free value has no layout: each reader takes the part that it wants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.flops import equation_flops
from autopar.compiler.jaxprs.primitives import ATTENTION, DRAWS, NESTED, PRODUCTS, SCATTERS, SORTS

MAX_UNSPLIT_ELEMENTS = 64
"""Arrays of at most so many elements are never split."""

# Scatters are not fused into their readers: the whole array would stand in memory on every device.
_EXPENSIVE = ATTENTION | DRAWS | PRODUCTS | SORTS | SCATTERS


def below_split_size(aval: Any) -> bool:
    """Return whether an array is too small to be worth splitting."""
    return math.prod(getattr(aval, "shape", ())) <= MAX_UNSPLIT_ELEMENTS


def free_results(eqn: jc.JaxprEqn, operands: Sequence[bool]) -> list[bool]:
    """Return for each result whether it is free, given which operands are."""
    if eqn.primitive.name in NESTED:
        return _free_nested(eqn, list(operands))
    if eqn.effects or not all(operands):
        return [False] * len(eqn.outvars)
    sizes = [math.prod(getattr(v.aval, "shape", ())) for v in eqn.outvars]
    cheap = eqn.primitive.name not in _EXPENSIVE and equation_flops(eqn) <= 4 * sum(sizes)
    return [cheap or size <= MAX_UNSPLIT_ELEMENTS for size in sizes]


def free_variables(jaxpr: jc.Jaxpr, inputs: Sequence[bool]) -> set[jc.Var]:
    """The free variables of a jaxpr, given which of its inputs are; constants are."""
    free = {*jaxpr.constvars, *(v for v, is_free in zip(jaxpr.invars, inputs, strict=True) if is_free)}
    for eqn in jaxpr.eqns:
        results = free_results(eqn, [isinstance(a, jc.Literal) or a in free for a in eqn.invars])
        free.update(v for v, is_free in zip(eqn.outvars, results, strict=True) if is_free)
    return free


def free_outputs(jaxpr: jc.Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Return for each result of a jaxpr whether it is free."""
    free = free_variables(jaxpr, inputs)
    return [isinstance(v, jc.Literal) or v in free for v in jaxpr.outvars]


def free_carry(body: jc.Jaxpr, consts: Sequence[bool], carry: Sequence[bool], xs: Sequence[bool]) -> list[bool]:
    """Return for each part of a loop's carry whether it is free: it comes in free and the body keeps it so."""
    carry = list(carry)
    while True:
        after = free_outputs(body, [*consts, *carry, *xs])[: len(carry)]
        kept = [a and b for a, b in zip(carry, after, strict=True)]
        if kept == carry:
            return kept
        carry = kept


def free_in_body(loop: jp.Scan, operands: Sequence[bool]) -> list[bool]:
    """Return for each input of a scan's body whether it is free, by the operands of the scan that are."""
    body, first_xs = jc.open_jaxpr(loop.body)[0], loop.num_consts + loop.num_carry
    consts, carry, xs = operands[: loop.num_consts], operands[loop.num_consts : first_xs], operands[first_xs:]
    return [*consts, *free_carry(body, consts, carry, xs), *xs]


def _free_nested(eqn: jc.JaxprEqn, operands: list[bool]) -> list[bool]:
    match eqn.primitive.name:
        case "scan":
            loop = jp.scan_of(eqn)
            return free_outputs(jc.open_jaxpr(loop.body)[0], free_in_body(loop, operands))
        case "while":
            loop = jp.while_of(eqn)
            own = operands[loop.cond_consts : loop.cond_consts + loop.body_consts]
            carry = free_carry(jc.open_jaxpr(loop.body)[0], own, operands[loop.cond_consts + loop.body_consts :], [])
            asked = free_outputs(jc.open_jaxpr(loop.cond)[0], [*operands[: loop.cond_consts], *carry])
            return carry if all(asked) else [False] * len(carry)
        case "cond":
            branches = [free_outputs(jc.open_jaxpr(b)[0], operands[1:]) for b in jp.branches_of(eqn)]
            return [operands[0] and all(each) for each in zip(*branches, strict=True)]
        case _:
            return free_outputs(jc.open_jaxpr(next(jc.subjaxprs(eqn)))[0], operands)
