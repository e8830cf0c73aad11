"""Drop the equations of a program that nothing needs."""

from __future__ import annotations

from autopar.compiler.jaxprs import compat as jc


def eliminate_dead(closed: jc.ClosedJaxpr) -> jc.ClosedJaxpr:
    """Drop every equation that no result and no side effect needs."""
    jaxpr, _ = jc.open_jaxpr(closed)
    needed = {v for v in jaxpr.outvars if isinstance(v, jc.Var)}
    kept: list[jc.JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(v in needed for v in eqn.outvars):
            kept.append(eqn)
            needed.update(v for v in eqn.invars if isinstance(v, jc.Var))
    return jc.with_equations(closed, kept[::-1])
