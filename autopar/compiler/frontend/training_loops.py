"""Unroll loops that train (epochs over one buffer, several steps in one call), and conditions of which one branch does.

    carry, ys = scan(update, carry, xs)    ->    carry, y_0 = update(carry, x_0);  carry, y_1 = update(carry, x_1);  ...
    cond(finite, update, keep, state)      ->    select(finite, update(state), keep(state))

A loop or a condition is one equation, which no pipeline can cut and no microbatch can enter. Unrolled, every iteration
that takes a gradient is a round of the schedule. Only loops around a gradient are unrolled, and short ones: a round
costs programs of its own. Of a condition every branch is computed, which costs nothing in the usual case, in which the
branch that trains is taken; where several branches train, each would be paid for in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from autopar.compiler.frontend.trace import Trace
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.dead_code import eliminate_dead
from autopar.compiler.jaxprs.evaluate import evaluate_jaxpr, rewrite
from autopar.errors import InvalidArgument, Unsupported

MOST_ROUNDS = 16
"""Iterations of a loop that is unrolled, those of loops inside of it counted."""


def unroll_training_loops(trace: Trace) -> Trace:
    """The same step, with equal results, without short loops and conditions around gradients; all stay if one has to.

    Plans name the step as it was traced, so the fingerprint stays.
    """
    training = list(filter(_trains, trace.jaxpr.jaxpr.eqns))
    if not training or not all(map(_is_unrolled, training)):
        return trace
    same: dict[str, Any] = {field.name: getattr(trace, field.name) for field in fields(trace)}
    changed: dict[str, Any] = {"jaxpr": _unrolled(trace.jaxpr), "traced": trace}
    return _UnrolledTrace(**same | changed)


@lru_cache(maxsize=4)
def in_microbatches(trace: Trace, count: int) -> Trace:
    """Return the step as so many microbatches take it: with its gradient outside of loops, if it takes any.

    Raises `Unsupported` where a gradient has to stay in its loop.
    """
    if count == 1 or trace.differentiates:
        return trace
    unrolled = unroll_training_loops(trace)
    if not unrolled.differentiates:
        refuse_whole_training(trace, f"{count} microbatches")
    return unrolled


@dataclass(frozen=True, kw_only=True, eq=False)
class _UnrolledTrace(Trace):
    """A step whose loops and conditions around gradients are unrolled."""

    traced: Trace

    @cached_property
    def at_other_batch(self) -> jc.ClosedJaxpr | None:
        """The same step on another batch, with the same unrolled."""
        other = self.traced.at_other_batch
        return None if other is None else _unrolled(other)

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the step as it was traced, which is the one that plans name."""
        return self.traced.fingerprint


def without_gradient(trace: Trace, num_stages: int) -> InvalidArgument:
    """Return the error for stages of a step that takes no gradient."""
    return InvalidArgument(
        f"{trace.name} takes no gradient, so there is no backward pass by which to cut it into {num_stages} stages. "
        "Use DataParallel or ShardParallel, num_stages=1, or parallelize(..., follow=train_step) for the stages "
        "of another step."
    )


def refuse_whole_training(trace: Trace, wanted: str) -> None:
    """Raise `Unsupported` if an unrolled step has its gradient in an equation: its line, and why it was left whole."""
    for eqn in trace.jaxpr.jaxpr.eqns:
        if _trains(eqn) and not _is_unrolled(eqn):
            inside = "a condition" if eqn.primitive.name == "cond" else "a loop"
            raise Unsupported(
                f"{wanted} were asked for, and {trace.name} takes its gradient in {inside}, {jc.describe(eqn)}. "
                f"{_required(eqn)}, or use one program: DataParallel(), or Auto(num_stages=1, num_microbatches=1)."
            )


def _required(eqn: jc.JaxprEqn) -> str:
    """Return the sentence on what an equation around a gradient must be to be unrolled, and what to do, but its end."""
    if eqn.effects:
        return "Its body has effects, as of a callback, which are kept in their order only as a whole. Leave these out"
    if eqn.primitive.name == "cond":
        return (
            "Every branch is computed and one selected, for which only one branch may take a gradient. Choose the "
            "branch in Python by a static argument, or compute the gradient outside and only the update in the branches"
        )
    return (
        f"It is taken apart, which needs at most {MOST_ROUNDS} iterations, known when it is traced. Parallelize the "
        "body of the loop and call it from Python"
    )


def _trains(eqn: jc.JaxprEqn) -> bool:
    """Return whether an equation is a loop or a condition, not differentiated, with a gradient in a body of it."""
    return (
        eqn.primitive.name in ("scan", "while", "cond")
        and jc.ad_phase(eqn) is None
        and any(map(_takes_gradient, jc.subjaxprs(eqn)))
    )


def _takes_gradient(body: Any) -> bool:
    return any(jc.ad_phase(inner) == "backward" for inner in jc.all_equations(body))


def _is_unrolled(eqn: jc.JaxprEqn) -> bool:
    return _trains(eqn) and _rounds(eqn) <= MOST_ROUNDS and not eqn.effects


def _rounds(eqn: jc.JaxprEqn) -> float:
    """Return the rounds of an equation that trains, with those inside of it; infinity for what cannot be unrolled."""
    match eqn.primitive.name:
        case "while":
            return float("inf")
        case "cond":
            (body, *others) = filter(_takes_gradient, jp.branches_of(eqn))
            return float("inf") if others else _rounds_inside(body)
        case _:
            loop = jp.scan_of(eqn)
            return loop.length * _rounds_inside(loop.body)


def _rounds_inside(body: Any) -> float:
    return max(1, sum(_rounds(eqn) for eqn in jc.open_jaxpr(body)[0].eqns if _trains(eqn)))


def _unrolled(closed: jc.ClosedJaxpr) -> jc.ClosedJaxpr:
    return eliminate_dead(rewrite(closed, _run))


def _run(_: int, eqn: jc.JaxprEqn, values: list[Any]) -> Sequence[Any]:
    """The results of an equation; those of a loop or condition that trains by its bodies."""
    if not _is_unrolled(eqn):
        return jc.bind_equation(eqn, values)
    with jc.under_scope_of(eqn):
        return _selected(eqn, values) if eqn.primitive.name == "cond" else _iterated(eqn, values)


def _iterated(eqn: jc.JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    loop = jp.scan_of(eqn)
    body, consts = jc.open_jaxpr(loop.body)
    shared, carry, xs = values[: loop.num_consts], values[loop.num_consts : loop.first_x], values[loop.first_x :]
    rows: list[Sequence[Any]] = [()] * loop.length
    for i in reversed(range(loop.length)) if loop.reverse else range(loop.length):
        results = evaluate_jaxpr(body, consts, [*shared, *carry, *(x[i] for x in xs)], _run)
        carry, rows[i] = results[: loop.num_carry], results[loop.num_carry :]
    return [*carry, *(jnp.stack(ys) for ys in zip(*rows, strict=True))]


def _selected(eqn: jc.JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    which, *operands = values
    branches = [evaluate_jaxpr(*jc.open_jaxpr(body), operands, _run) for body in jp.branches_of(eqn)]
    which = jax.lax.clamp(0, which, len(branches) - 1) if len(branches) > 2 else which > 0
    return [
        cases[0] if all(case is cases[0] for case in cases) else jax.lax.select_n(which, *cases)
        for cases in zip(*branches, strict=True)
    ]
