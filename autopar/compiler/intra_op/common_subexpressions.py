"""Compute once what a program computes twice from the same operands, as XLA will: the plan must not pay for it twice.

Loops, branches, remat regions and whatever has side effects stay as they are: a remat region repeats on purpose.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from autopar.compiler import jax_compat as jc
from autopar.compiler.intra_op.free_values import NESTED
from autopar.compiler.intra_op.sharding_rules import equation_key


def merge_common_subexpressions(closed: jc.ClosedJaxpr) -> jc.ClosedJaxpr:
    """The same program without the second of two equal equations."""
    jaxpr, consts = jc.open_jaxpr(closed)

    def run(*args: Any) -> list[Any]:
        env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        numbers: dict[Any, Hashable] = {v: number for number, v in enumerate(env)}
        known: dict[Hashable, list[Any]] = {}
        for position, eqn in enumerate(jaxpr.eqns):
            key = _key(eqn, numbers)
            values = [a.val if isinstance(a, jc.Literal) else env[a] for a in eqn.invars]
            if key is None or key not in known:
                results = jc.bind_equation(eqn, values)
                key = ("made by", position) if key is None else key
                known[key] = results
            env.update(zip(eqn.outvars, known[key], strict=True))
            numbers.update({v: (key, place) for place, v in enumerate(eqn.outvars)})
        return [a.val if isinstance(a, jc.Literal) else env[a] for a in jaxpr.outvars]

    if not _has_duplicates(jaxpr):
        return closed
    return jc.trace(run, [v.aval for v in jaxpr.invars])


def _has_duplicates(jaxpr: jc.Jaxpr) -> bool:
    numbers: dict[Any, Hashable] = {v: number for number, v in enumerate((*jaxpr.constvars, *jaxpr.invars))}
    seen: dict[Hashable, int] = {}
    for position, eqn in enumerate(jaxpr.eqns):
        key = _key(eqn, numbers)
        if key is not None and key in seen:
            return True
        number = len(seen) if key is None else seen.setdefault(key, len(seen))
        numbers.update({v: (number, position if key is None else -1, place) for place, v in enumerate(eqn.outvars)})
    return False


def _key(eqn: jc.JaxprEqn, numbers: dict[Any, Hashable]) -> Hashable | None:
    """What an equation computes; None for what must not be merged."""
    if eqn.effects or eqn.primitive.name in NESTED or any(True for _ in jc.subjaxprs(eqn)):
        return None
    operands = tuple(_token(a) if isinstance(a, jc.Literal) else numbers[a] for a in eqn.invars)
    return (equation_key(eqn), operands)


def _token(literal: jc.Literal) -> Hashable:
    return ("literal", str(literal.aval), repr(literal.val))
