"""Drop the equations of a program that nothing needs, and the gradient of a mask that a kernel of attention makes."""

from __future__ import annotations

from collections.abc import Collection

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.primitives import ATTENTION


def eliminate_dead(closed: jc.ClosedJaxpr) -> jc.ClosedJaxpr:
    """Drop every equation that no result and no side effect needs."""
    jaxpr, _ = jc.open_jaxpr(closed)
    needed = {v for v in jaxpr.outvars if isinstance(v, jc.Var)}
    kept: list[jc.JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(v in needed for v in eqn.outvars):
            kept.append(_needed_part(eqn, needed))
            needed.update(v for v in eqn.invars if isinstance(v, jc.Var))
    return jc.with_equations(closed, kept[::-1])


def _needed_part(eqn: jc.JaxprEqn, needed: Collection[jc.Var]) -> jc.JaxprEqn:
    """The equation; a kernel of attention without the gradient of its bias, a mask for example, if nothing needs it."""
    if eqn.primitive.name not in ATTENTION or len(eqn.outvars) != 4 or eqn.outvars[3] in needed:
        return eqn
    return jp.without_bias_gradient(eqn) if jp.attention_of(eqn).bias_gradient else eqn
