"""Replace primitives of other packages by the equations that they stand for.

    linear_solve[solver=LU] a b   ->   lu a; triangular_solve; triangular_solve

A package that makes a primitive of its own, for a rule of differentiation or of `jax.vmap`, tells how it is evaluated:
`primitive.def_impl`. A traced step has both behind it, so what is evaluated may stand in its place: its equations have
sharding rules, keep examples apart, and need no kernel that sees whole arrays. A primitive stays as it is

    if a sharding rule is registered for it
    if a platform has a lowering of its own for it, which may be a kernel that is faster
    if its implementation cannot be traced (NumPy, a foreign function), or has effects
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.evaluate import evaluate_jaxpr, rewrite
from autopar.compiler.jaxprs.normalize import normalize
from autopar.compiler.jaxprs.primitives import NESTED
from autopar.compiler.sharding.primitive_rules import has_rule
from autopar.errors import Unsupported


def normalize_step(closed: jc.ClosedJaxpr) -> jc.ClosedJaxpr:
    """Return a traced step in normal form, without primitives that have an implementation of traceable code."""
    _check_refs(closed)
    normal = normalize(jc.without_refs(closed))
    if not any(_may_expand(eqn) for eqn in jc.all_equations(normal)):
        return normal
    return normalize(rewrite(normal, _expanded))


def _check_refs(closed: jc.ClosedJaxpr) -> None:
    """Raise `Unsupported` for a reference that a step reads or writes and did not make."""
    jaxpr, consts = jc.open_jaxpr(closed)
    theirs = {v for v, const in zip(jaxpr.constvars, consts, strict=True) if isinstance(const, jax.Ref)}
    for eqn in jaxpr.eqns:
        if not theirs.isdisjoint(jc.operands(eqn)):
            raise Unsupported(
                f"{jc.describe(eqn)} uses a jax.Ref that was made outside of the step, and devices do not share one. "
                "Make it inside of the step by jax.new_ref, or pass its value as an argument, return the new one, and "
                "write that into the reference after the call."
            )


def _may_expand(eqn: jc.JaxprEqn) -> bool:
    return not (eqn.effects or has_rule(eqn.primitive.name)) and jc.implementation_of(eqn) is not None


def _expanded(_: int, eqn: jc.JaxprEqn, values: list[Any]) -> Sequence[Any]:
    """Return the results of an equation; of one that may be replaced, by its implementation."""
    if eqn.primitive.name in NESTED:
        return jc.bind_equation(eqn, values, jc.map_subjaxprs(eqn, lambda body: rewrite(body, _expanded)))
    made = _traced(eqn) if _may_expand(eqn) else None
    if made is None:
        return jc.bind_equation(eqn, values)
    with jc.under_scope_of(eqn):
        return evaluate_jaxpr(*jc.open_jaxpr(made), values, _expanded)


def _traced(eqn: jc.JaxprEqn) -> jc.ClosedJaxpr | None:
    """Return the program of an equation's implementation; None if it is no traceable code, or gives other types."""
    implementation = jc.implementation_of(eqn)
    assert implementation is not None, jc.describe(eqn)
    try:
        made = normalize(jc.trace(implementation, [v.aval for v in eqn.invars]))
    # Whatever code of other people raises on values that are only traced: JAX runs it otherwise, by its lowering.
    except Exception:
        return None
    same = _types(jc.open_jaxpr(made)[0].outvars) == _types(eqn.outvars)
    return made if same else None


def _types(values: Sequence[Any]) -> list[Any]:
    return [(v.aval.shape, v.aval.dtype) for v in values]
