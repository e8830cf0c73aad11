"""Bring a traced step into the form that every later pass reads: calls inlined, dead equations removed.

    jit, custom_jvp_call, custom_vjp_call   the equations of the function that is called
    custom_linear_solve                     the equations of its solver
    shard_map, pmap                         the same function under `jax.vmap` (`manual_regions`)
    collectives over an axis of `jax.vmap`  reductions of the mapped dimension
    while, mapped by `jax.vmap`             a loop until the last example has ended; the others keep their results
    platform_dependent, inside of kernels   the branch that is not for kernels, such as the gather of `jnp.diag`
    reshape that reads in another order     a transpose, then a plain reshape
    tile of rows, a few times               a concatenation of them

What is left of nested programs are loops (`scan`, `while`), branches (`cond`) and rematerialised regions (`remat2`),
whose bodies are normalised too. Custom rules of differentiation are dropped: a step that has been traced is not
differentiated any more. Equations keep their name stacks and source lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.copying import Replaced, copy_program
from autopar.compiler.jaxprs.dead_code import eliminate_dead
from autopar.compiler.jaxprs.evaluate import evaluate_jaxpr, rewrite
from autopar.compiler.jaxprs.manual_regions import mapped_region
from autopar.compiler.jaxprs.primitives import MANUAL, NESTED

_OVER_MAPPED_AXES = {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}

_REWRITTEN = MANUAL | NESTED | {"custom_linear_solve", *_OVER_MAPPED_AXES}
"""Equations beside calls that are others here, or whose bodies are."""

_FEW = 8
"""The most times that repeated rows are written out one after another."""

# The scopes of constraints that were arguments of `jax.jit`.
IN_SHARDINGS, OUT_SHARDINGS = "in_shardings", "out_shardings"


def normalize(closed: jc.ClosedJaxpr) -> jc.ClosedJaxpr:
    """The same function with calls inlined at every depth and without dead equations."""
    if jc.says_where(closed):  # types are found anew, which a copy keeps
        return eliminate_dead(rewrite(closed, _inlined))
    copied = copy_program(closed, _replacement, jc.SourcePlace.here().of_program())
    return eliminate_dead(copied)


def _replacement(eqn: jc.JaxprEqn, place: jc.SourcePlace) -> Replaced | None:
    """Return the function that an equation calls, or what `_inlined` makes of it; None if it stays."""
    called = jp.called_function(eqn)
    if called is not None and not any(map(any, jp.jit_shardings(eqn))):
        return Replaced(called, place.inside(eqn), again=True)
    is_other = (eqn.primitive.name == "reshape" and jp.read_order(eqn) is not None) or bool(_repeated(eqn))
    if called is None and not (eqn.primitive.name in _REWRITTEN or eqn.effects or is_other):
        return None
    with place.context():
        made = jc.trace(lambda *values: _inlined(0, eqn, list(values)), [v.aval for v in eqn.invars])
    return Replaced(made, place, again=False)


def _inlined(_: int, eqn: jc.JaxprEqn, values: list[Any]) -> Sequence[Any]:
    """The results of an equation whose calls, at every depth, are evaluated in its place."""
    called = jp.called_function(eqn)
    if eqn.primitive.name == "reshape" and (order := jp.read_order(eqn)) is not None:
        with jc.under_scope_of(eqn):
            values[0] = lax.transpose(values[0], order)
        return jc.bind_equation(eqn, values, {"dimensions": None})
    if repeated := _repeated(eqn):
        with jc.under_scope_of(eqn):
            for dimension, times in repeated.items():
                values[0] = lax.concatenate([values[0]] * times, dimension)
            rest = tuple(1 if d in repeated else times for d, times in enumerate(jp.repetitions(eqn)))
        return values if set(rest) == {1} else jc.bind_equation(eqn, values, {"reps": rest})
    if (axes := jp.mapped_axes(eqn)) is not None:
        with jc.under_scope_of(eqn):
            return [_OVER_MAPPED_AXES[eqn.primitive.name](value, axes) if axes else value for value in values]
    if eqn.primitive.name in MANUAL and (region := mapped_region(eqn)) is not None:
        with jc.under_scope_of(eqn):
            return evaluate_jaxpr(*jc.open_jaxpr(region), values, _inlined)
    if eqn.primitive.name == "custom_linear_solve":
        with jc.under_scope_of(eqn):
            return evaluate_jaxpr(*jc.open_jaxpr(jp.linear_solver(eqn)), jp.solver_operands(eqn, values), _inlined)
    if eqn.primitive.name == "while" and jp.while_of(eqn).cond.out_avals[0].shape:
        return _until_all_end(eqn, values)
    if (branch := jp.branch_of_devices(eqn)) is not None:
        with jc.under_scope_of(eqn):
            return evaluate_jaxpr(*jc.open_jaxpr(branch), values[1:], _inlined)
    if called is None:
        return jc.bind_equation(eqn, values, _with_inlined_bodies(eqn))
    asked_in, asked_out = jp.jit_shardings(eqn)
    with jc.under_scope_of(eqn):
        values = _constrained(values, asked_in, IN_SHARDINGS)
        return _constrained(evaluate_jaxpr(*jc.open_jaxpr(called), values, _inlined), asked_out, OUT_SHARDINGS)


def _repeated(eqn: jc.JaxprEqn) -> dict[int, int]:
    """Return how often an equation repeats each dimension of several elements; none where that is often."""
    if eqn.primitive.name != "tile":
        return {}
    aval: Any = eqn.invars[0].aval
    repeated = {d: n for d, n in enumerate(jp.repetitions(eqn)) if n > 1 and aval.shape[d] > 1}
    return repeated if math.prod(repeated.values()) <= _FEW else {}


def _until_all_end(eqn: jc.JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Return the results of a loop under `jax.vmap` whose examples end one by one: each keeps what it ended with."""
    loop = jp.while_of(eqn)
    of_cond, of_body = values[: loop.cond_consts], values[loop.cond_consts : loop.first_carry]
    with jc.under_scope_of(eqn):
        cond, body = normalize(loop.cond), normalize(loop.body)

    def goes_on(carry: Sequence[Any]) -> Any:
        return jc.jaxpr_as_fun(cond)(*of_cond, *carry)[0]

    def once(carry: Sequence[Any]) -> list[Any]:
        on = goes_on(carry)
        after = jc.jaxpr_as_fun(body)(*of_body, *carry)
        dims = range(on.ndim)  # the mapped dimensions come first in all that is carried
        masks = [lax.broadcast_in_dim(on, old.shape, dims) for old in carry]
        return [lax.select_n(mask, old, new) for mask, old, new in zip(masks, carry, after, strict=True)]

    with jc.under_scope_of(eqn):
        return lax.while_loop(lambda carry: goes_on(carry).any(), once, list(values[loop.first_carry :]))


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
    with jc.under_scope_of(eqn):
        return jc.map_subjaxprs(eqn, normalize)
