"""Unroll loops that train: several epochs over one buffer, several steps in one call, an attack of several steps.

    carry, ys = scan(update, carry, xs)    ->    carry, y_0 = update(carry, x_0);  carry, y_1 = update(carry, x_1);  ...

A loop is one equation, which no pipeline can cut and no microbatch can enter. Unrolled, every iteration that takes a
gradient is a round of the schedule. Only loops around a gradient are unrolled, and short ones: a round costs programs
of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

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
    """The same step, with equal results, without short loops around gradients.

    Plans name the step as it was traced, so the fingerprint stays.
    """
    if not any(_is_unrolled(eqn) for eqn in trace.jaxpr.jaxpr.eqns):
        return trace
    same: dict[str, Any] = {field.name: getattr(trace, field.name) for field in fields(trace)}
    changed: dict[str, Any] = {"jaxpr": _unrolled(trace.jaxpr), "traced": trace}
    return _UnrolledTrace(**same | changed)


@dataclass(frozen=True, kw_only=True, eq=False)
class _UnrolledTrace(Trace):
    """A step whose training loops are unrolled."""

    traced: Trace

    @cached_property
    def at_other_batch(self) -> jc.ClosedJaxpr | None:
        """The same step on another batch, with the same loops unrolled."""
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


def refuse_long_training_loops(trace: Trace, wanted: str) -> None:
    """Raise `Unsupported` if an unrolled step has its gradient in a loop: a long one, or one of unknown length."""
    for eqn in trace.jaxpr.jaxpr.eqns:
        if _trains(eqn):
            raise Unsupported(
                f"{wanted} were asked for, and {trace.name} takes its gradient in a loop, {jc.describe(eqn)}. A "
                f"pipeline takes every iteration apart, for which a loop must have at most {MOST_ROUNDS} iterations, "
                "known when it is traced. Parallelize the body of the loop and call it from Python, or use one stage."
            )


def _trains(eqn: jc.JaxprEqn) -> bool:
    """Return whether an equation is a loop that is not differentiated and takes a gradient in its body."""
    return (
        eqn.primitive.name in ("scan", "while")
        and jc.ad_phase(eqn) is None
        and any(jc.ad_phase(inner) == "backward" for body in jc.subjaxprs(eqn) for inner in jc.all_equations(body))
    )


def _is_unrolled(eqn: jc.JaxprEqn) -> bool:
    return _trains(eqn) and _iterations(eqn) <= MOST_ROUNDS and not eqn.effects


def _iterations(eqn: jc.JaxprEqn) -> float:
    """Return the iterations of a loop with those of the training loops inside of it; infinity if that is unknown."""
    if eqn.primitive.name == "while":
        return float("inf")
    loop = jp.scan_of(eqn)
    inside = [_iterations(inner) for inner in jc.open_jaxpr(loop.body)[0].eqns if _trains(inner)]
    return loop.length * max(1, sum(inside))


def _unrolled(closed: jc.ClosedJaxpr) -> jc.ClosedJaxpr:
    return eliminate_dead(rewrite(closed, _run))


def _run(_: int, eqn: jc.JaxprEqn, values: list[Any]) -> Sequence[Any]:
    """The results of an equation; those of a training loop by its iterations, one after another."""
    if not _is_unrolled(eqn):
        return jc.bind_equation(eqn, values)
    loop = jp.scan_of(eqn)
    body, consts = jc.open_jaxpr(loop.body)
    shared, carry, xs = values[: loop.num_consts], values[loop.num_consts : loop.first_x], values[loop.first_x :]
    rows: list[Sequence[Any]] = [()] * loop.length
    with jc.under_scope_of(eqn):
        for i in reversed(range(loop.length)) if loop.reverse else range(loop.length):
            results = evaluate_jaxpr(body, consts, [*shared, *carry, *(x[i] for x in xs)], _run)
            carry, rows[i] = results[: loop.num_carry], results[loop.num_carry :]
        return [*carry, *(jnp.stack(ys) for ys in zip(*rows, strict=True))]
