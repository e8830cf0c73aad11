"""Bring a traced step into the form that every later pass reads: calls inlined, dead equations removed.

After this pass no equation at any depth is a call of another function (`jit`, `custom_jvp_call`, `custom_vjp_call`,
...): what is left of nested programs are loops (`scan`, `while`), branches (`cond`) and rematerialised regions
(`remat2`), whose bodies are normalised too. Differentiation is over when a step has been traced, so custom rules have
nothing left to say. Name stacks and source lines stay with their equations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp

# The scopes of constraints that were arguments of `jax.jit`.
IN_SHARDINGS, OUT_SHARDINGS = "in_shardings", "out_shardings"


def normalize(closed: jc.ClosedJaxpr) -> jc.ClosedJaxpr:
    """The same function with calls inlined at every depth and without dead equations."""
    return eliminate_dead(_inlined(closed))


def _inlined(closed: Any) -> jc.ClosedJaxpr:
    jaxpr, consts = jc.open_jaxpr(closed)

    def evaluate(*args: Any) -> list[Any]:
        return _evaluate_inlined(jaxpr, consts, args)

    return jc.trace(evaluate, [v.aval for v in jaxpr.invars])


def _evaluate_inlined(jaxpr: jc.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    env: dict[jc.Var, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jc.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        if (called := jp.called_function(eqn)) is not None:
            body, body_consts = jc.open_jaxpr(called)
            asked_in, asked_out = jp.jit_shardings(eqn)
            with jc.under_scope_of(eqn):
                values = _constrained(values, asked_in, IN_SHARDINGS)
                results = _constrained(_evaluate_inlined(body, body_consts, values), asked_out, OUT_SHARDINGS)
        else:
            results = jc.bind_equation(eqn, values, _with_inlined_bodies(eqn))
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _constrained(values: Sequence[Any], shardings: Sequence[Any], scope: str) -> list[Any]:
    """What a user's `jax.jit(..., in_shardings=, out_shardings=)` asks for, said as constraints inside of the step."""
    with jax.named_scope(scope):
        return [
            value if sharding is None else jax.lax.with_sharding_constraint(value, sharding)
            for value, sharding in zip(values, shardings, strict=True)
        ]


def _with_inlined_bodies(eqn: jc.JaxprEqn) -> dict[str, Any] | None:
    """The equation's parameters with normalised loop bodies and branches; None where there are none."""
    if eqn.primitive.name not in ("scan", "while", "cond", "remat2", "checkpoint", "remat"):
        return None
    return jc.map_subjaxprs(eqn, normalize)


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
