"""Bring a traced step into the form that every later pass reads: calls inlined, dead equations removed.

A reshape that reads its operand in another order of dimensions becomes a transpose and a plain reshape, and a
collective over an axis that `jax.vmap` binds the reduction that it is.

After this pass no equation at any depth is a call of another function (`jit`, `custom_jvp_call`, `custom_vjp_call`,
...): what is left of nested programs are loops (`scan`, `while`), branches (`cond`) and rematerialised regions
(`remat2`), whose bodies are normalised too. Differentiation is over when a step has been traced, so custom rules have
nothing left to say. Name stacks and source lines stay with their equations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.dead_code import eliminate_dead
from autopar.compiler.jaxprs.evaluate import evaluate_jaxpr, rewrite
from autopar.compiler.jaxprs.primitives import NESTED

_OVER_MAPPED_AXES = {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}

# The scopes of constraints that were arguments of `jax.jit`.
IN_SHARDINGS, OUT_SHARDINGS = "in_shardings", "out_shardings"


def normalize(closed: jc.ClosedJaxpr) -> jc.ClosedJaxpr:
    """The same function with calls inlined at every depth and without dead equations."""
    return eliminate_dead(rewrite(closed, _inlined))


def _inlined(_: int, eqn: jc.JaxprEqn, values: list[Any]) -> Sequence[Any]:
    """The results of an equation whose calls, at every depth, are evaluated in its place."""
    called = jp.called_function(eqn)
    if eqn.primitive.name == "reshape" and (order := jp.read_order(eqn)) is not None:
        with jc.under_scope_of(eqn):
            values[0] = lax.transpose(values[0], order)
        return jc.bind_equation(eqn, values, {"dimensions": None})
    if axes := jp.mapped_axes(eqn):
        with jc.under_scope_of(eqn):
            return [_OVER_MAPPED_AXES[eqn.primitive.name](value, axes) for value in values]
    if called is None:
        return jc.bind_equation(eqn, values, _with_inlined_bodies(eqn))
    asked_in, asked_out = jp.jit_shardings(eqn)
    with jc.under_scope_of(eqn):
        values = _constrained(values, asked_in, IN_SHARDINGS)
        return _constrained(evaluate_jaxpr(*jc.open_jaxpr(called), values, _inlined), asked_out, OUT_SHARDINGS)


def _constrained(values: Sequence[Any], shardings: Sequence[Any], scope: str) -> list[Any]:
    """Return the values under the constraints that a user's `jax.jit(..., in_shardings=, out_shardings=)` asks for."""
    with jax.named_scope(scope):
        return [
            value if sharding is None else jax.lax.with_sharding_constraint(value, sharding)
            for value, sharding in zip(values, shardings, strict=True)
        ]


def _with_inlined_bodies(eqn: jc.JaxprEqn) -> dict[str, Any] | None:
    """The equation's parameters with normalised loop bodies and branches; None where there are none."""
    if eqn.primitive.name not in NESTED:
        return None
    return jc.map_subjaxprs(eqn, normalize)
