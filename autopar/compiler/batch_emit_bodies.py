"""Rebuild a loop, condition or rematerialised region around the bodies of one microbatch.

What a body needs of the whole batch is computed before it and handed in. Loops close over the microbatch's
index; `cond` and `remat2` get it as a further operand, so that their other parameters stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from autopar.compiler.batch_slice import Microbatch
from autopar.compiler.batch_steps import CALLS, WHOLE, Block, Step, straight_bodies
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.normalize import eliminate_dead

Emit = Callable[[Microbatch, Block, Sequence[Any], Mapping[jc.Var, Any]], list[Any]]


def emit_bodies(
    emit: Emit, microbatch: Microbatch, step: Step, args: list[Any], read_whole: Callable[[Any], Any]
) -> list[Any]:
    """The results of an equation with bodies for one microbatch."""
    with jc.under_scope_of(step.eqn):
        if step.eqn.primitive.name == "scan":
            return _scan(emit, microbatch, step, args)
        if step.eqn.primitive.name == "while":
            return _while(emit, microbatch, step, args)
        hoisted = [_hoisted(step, body, offset, read_whole) for body, offset in straight_bodies(step)]
    if step.eqn.primitive.name == "cond":
        return _cond(emit, microbatch, step, args, hoisted)
    if step.eqn.primitive.name in CALLS:
        with jc.under_scope_of(step.eqn):
            return emit(microbatch, step.bodies[0], args, hoisted[0])
    return _remat(emit, microbatch, step, args, hoisted[0])


def _scan(emit: Emit, microbatch: Microbatch, step: Step, args: list[Any]) -> list[Any]:
    loop, (body,) = jc.loop_of(step.eqn), step.bodies
    last = loop.num_consts + loop.num_carry
    consts, initial, xs = args[: loop.num_consts], args[loop.num_consts : last], args[last:]

    def once(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        results = emit(microbatch, body, [*consts, *carry, *x], {})
        return results[: loop.num_carry], results[loop.num_carry :]

    carry, ys = lax.scan(once, initial, xs, length=loop.length, reverse=loop.reverse, unroll=loop.unroll)
    return [*carry, *ys]


def _while(emit: Emit, microbatch: Microbatch, step: Step, args: list[Any]) -> list[Any]:
    test, body = step.bodies
    num_cond = step.eqn.params["cond_nconsts"]
    last = num_cond + step.eqn.params["body_nconsts"]
    cond_consts, body_consts, initial = args[:num_cond], args[num_cond:last], args[last:]
    return lax.while_loop(
        lambda carry: emit(microbatch, test, [*cond_consts, *carry], {})[0],
        lambda carry: emit(microbatch, body, [*body_consts, *carry], {}),
        initial,
    )


def _hoisted(step: Step, body: Block, offset: int, read_whole: Callable[[Any], Any]) -> dict[jc.Var, Any]:
    """What the body uses of the whole batch, computed outside of it."""
    whole: dict[jc.Var, Any] = dict(zip(body.jaxpr.constvars, body.consts))
    for position, var in enumerate(body.jaxpr.invars):
        if var in body.needed_whole:
            whole[var] = read_whole(step.eqn.invars[offset + position])
    for inner in body.steps:
        if inner.mode == WHOLE or any(v in body.needed_whole for v in inner.eqn.outvars):
            values = [a.val if isinstance(a, jc.Literal) else whole[a] for a in inner.eqn.invars]
            whole.update(zip(inner.eqn.outvars, jc.bind_equation(inner.eqn, values)))
    used = _read_whole_inside(body)
    return {var: value for var, value in whole.items() if var in used}


def _read_whole_inside(body: Block) -> set[jc.Var]:
    used = {v for s in body.steps if s.mode == WHOLE for v in s.eqn.outvars}
    for step in body.steps:
        for inner, offset in straight_bodies(step):
            wanted = [i for i, v in enumerate(inner.jaxpr.invars) if v in inner.needed_whole]
            atoms = [step.eqn.invars[offset + i] for i in wanted]
            used.update(a for a in atoms if isinstance(a, jc.Var))
    return used


def _traced(
    emit: Emit,
    microbatch: Microbatch,
    step: Step,
    args: Sequence[Any],
    hoisted: Sequence[Mapping[jc.Var, Any]],
) -> tuple[list[jc.ClosedJaxpr], list[Any]]:
    """The bodies as jaxprs of the same operands: index (if read), values of the whole batch, `args`."""
    given = [(i, var) for i, group in enumerate(hoisted) for var in group]
    operands = [microbatch.index, *(v for group in hoisted for v in group.values()), *args]

    def trace(own: int, body: Block) -> jc.ClosedJaxpr:
        def run(index: Any, *values: Any) -> list[Any]:
            mine = {var: v for (i, var), v in zip(given, values) if i == own}
            return emit(Microbatch(count=microbatch.count, index=index), body, values[len(given) :], mine)

        return eliminate_dead(jc.trace(run, [jax.typeof(v) for v in operands]))

    bodies = [trace(i, body) for i, body in enumerate(step.bodies)]
    if any(_reads_first_input(body) for body in bodies):
        return bodies, operands
    kept = range(1, len(operands))
    return [jc.with_inputs(body, kept) for body in bodies], operands[1:]


def _reads_first_input(closed: jc.ClosedJaxpr) -> bool:
    jaxpr, _ = jc.open_jaxpr(closed)
    return any(jaxpr.invars[0] in eqn.invars for eqn in jaxpr.eqns)


def _cond(
    emit: Emit,
    microbatch: Microbatch,
    step: Step,
    args: list[Any],
    hoisted: Sequence[Mapping[jc.Var, Any]],
) -> list[Any]:
    branches, operands = _traced(emit, microbatch, step, args[1:], hoisted)
    params = {**step.eqn.params, "branches": tuple(branches)}
    return jc.bind_equation(step.eqn, [args[0], *operands], params)


def _remat(
    emit: Emit,
    microbatch: Microbatch,
    step: Step,
    args: list[Any],
    hoisted: Mapping[jc.Var, Any],
) -> list[Any]:
    (body,), operands = _traced(emit, microbatch, step, args, [hoisted])
    jaxpr, consts = jc.consts_as_inputs(body)
    params = {**step.eqn.params, "jaxpr": jaxpr}
    return jc.bind_equation(step.eqn, [*consts, *operands], params)
