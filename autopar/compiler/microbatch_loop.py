"""Write a step over microbatches as one program: what is computed once, and a loop over the microbatches per round.

    Trace, number of microbatches M  ->  jaxpr with the inputs and results of the step

    total = 0;  for m in [0, M): total += part(rows m·B/M ... (m+1)·B/M of the batch, parameters);  update(total)

The loop is a `lax.scan`. It slices what is split along the batch ([B, ...] becomes [M, B/M, ...]), carries the totals,
and stacks the results for single examples and what a further round reads again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.compiler.frontend.trace import Trace
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.normalize import normalize
from autopar.compiler.loop_rounds import carried_between, find_rounds
from autopar.compiler.microbatch.accumulate import accumulate_p, combine
from autopar.compiler.microbatch.split import MicrobatchedStep
from autopar.compiler.pipeline.prepare import prepare

_lax: Any = lax  # annotated in part, which a strict checker does not take


def microbatch_loop(trace: Trace, num_microbatches: int, batch_statistics: str, random: str) -> jc.ClosedJaxpr:
    """The step with its batch in microbatches, one after the other; with one microbatch the step as it is traced."""
    if num_microbatches == 1:
        return trace.jaxpr
    prepared = prepare(
        trace,
        num_layers=1,
        num_microbatches=num_microbatches,
        loop_pieces=1,
        batch_statistics=batch_statistics,
        random=random,
    )
    looped = loop_over(prepared.regions.step, [v.aval for v in trace.jaxpr.jaxpr.invars])
    wanted, found = ([(a.shape, a.dtype) for a in closed.out_avals] for closed in (trace.jaxpr, looped))
    assert found == wanted, (found, wanted)
    return looped


def loop_over(step: MicrobatchedStep, avals: Sequence[Any]) -> jc.ClosedJaxpr:
    """The program of a microbatched step on whole inputs of these types."""
    rounds = find_rounds(step)
    leaving = carried_between(rounds)

    def run(*leaves: Any) -> list[Any]:
        values = _given(step, leaves)
        for number, indices in enumerate(rounds.once):
            for i in indices:
                eqn = rounds.equations[i]
                values.once.update(zip(eqn.outvars, jc.bind_equation(eqn, _read_all(eqn, values.once)), strict=True))
            if number < len(rounds.each):
                kept = [v for v, home in leaving.items() if home == number]
                _run_round([rounds.equations[i] for i in rounds.each[number]], kept, values, step.num_microbatches)
        return [_read(atom, values.once) for atom in step.jaxpr.jaxpr.outvars]

    return normalize(jc.trace(run, avals))


@dataclass(frozen=True, kw_only=True)
class _Values:
    """What is known between loops: what the microbatches share, and what each has, stacked along a new axis 0."""

    once: dict[jc.Var, Any]
    stacked: dict[jc.Var, Any]


def _given(step: MicrobatchedStep, leaves: Sequence[Any]) -> _Values:
    jaxpr, consts = jc.open_jaxpr(step.jaxpr)
    values = _Values(once=dict(zip(jaxpr.constvars, consts, strict=True)), stacked={})
    for var, given in zip(jaxpr.invars, step.inputs, strict=True):
        if given.leaf is None:
            values.stacked[var] = lax.iota(jnp.int32, step.num_microbatches)
        elif given.kind == "whole":
            values.once[var] = leaves[given.leaf]
        else:
            values.stacked[var] = _parted(leaves[given.leaf], given.axis, step.num_microbatches)
    return values


def _parted(value: Any, axis: int, count: int) -> Any:
    """Contiguous parts of an axis, along a new axis 0."""
    *before, size = value.shape[: axis + 1]
    apart = lax.reshape(value, (*before, count, size // count, *value.shape[axis + 1 :]))
    return lax.transpose(apart, (axis, *(i for i in range(apart.ndim) if i != axis))) if axis else apart


def _joined(parts: Any, axis: int) -> Any:
    """What `_parted` took apart."""
    order = [*range(1, axis + 1), 0, *range(axis + 1, parts.ndim)]
    apart = lax.transpose(parts, order) if axis else parts
    shape = apart.shape
    return lax.reshape(apart, (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :]))


def _read(atom: Any, *known: Mapping[jc.Var, Any]) -> Any:
    if isinstance(atom, jc.Literal):
        return atom.val
    return next(values[atom] for values in known if atom in values)


def _read_all(eqn: jc.JaxprEqn, *known: Mapping[jc.Var, Any]) -> list[Any]:
    return [_read(atom, *known) for atom in eqn.invars]


def _run_round(body: Sequence[jc.JaxprEqn], kept: Sequence[jc.Var], values: _Values, count: int) -> None:
    """Loop over the microbatches; enter the completed values, and the values that are kept of each microbatch."""
    bound = [eqn for eqn in body if eqn.primitive is not accumulate_p]
    completed = [eqn for eqn in body if eqn.primitive is accumulate_p]
    added = [eqn for eqn in completed if eqn.params["kind"] != "concatenate"]
    made = {v for eqn in bound for v in eqn.outvars}
    reads = [v for v in dict.fromkeys(v for e in (*bound, *added) for v in jc.operands(e)) if v not in made]
    sliced = {v: values.stacked[v] for v in reads if v in values.stacked}

    def one(totals: list[Any], rows: Mapping[jc.Var, Any]) -> tuple[list[Any], list[Any]]:
        known = dict(rows)
        for eqn in bound:
            known.update(zip(eqn.outvars, jc.bind_equation(eqn, _read_all(eqn, known, values.once)), strict=True))
        parts = [_read(eqn.invars[0], known, values.once) for eqn in added]
        return [_add(*each) for each in zip(added, totals, parts, strict=True)], [known[v] for v in kept]

    names = list(sliced)
    totals, stacked = _lax.scan(
        lambda carry, rows: one(carry, dict(zip(names, rows, strict=True))),
        [_start(eqn) for eqn in added],
        list(sliced.values()),
        length=count,
    )
    values.stacked.update(zip(kept, stacked, strict=True))
    for eqn, total in zip(added, totals, strict=True):
        with jc.under_scope_of(eqn):
            values.once[eqn.outvars[0]] = total / count if eqn.params["kind"] == "mean" else total
    for eqn in completed:
        if eqn not in added:
            values.once[eqn.outvars[0]] = _concatenated(eqn, values, count)


def _concatenated(eqn: jc.JaxprEqn, values: _Values, count: int) -> Any:
    (operand,) = eqn.invars
    with jc.under_scope_of(eqn):
        if operand in values.stacked:
            return _joined(values.stacked[operand], eqn.params["axis"])
        # Rows that are the same for every microbatch: zeros, or a broadcast parameter.
        return _joined(_lax.broadcast(jnp.asarray(_read(operand, values.once)), (count,)), eqn.params["axis"])


def _start(eqn: jc.JaxprEqn) -> Any:
    """The neutral element of an accumulation."""
    aval: Any = eqn.outvars[0].aval
    with jc.under_scope_of(eqn):
        return _lax.full(aval.shape, _neutral(eqn.params["kind"], aval.dtype), aval.dtype)


def _neutral(kind: str, dtype: Any) -> Any:
    if kind in ("sum", "mean", "or"):
        return 0
    if kind == "and":
        return True
    assert kind in ("max", "min"), kind
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf if kind == "max" else jnp.inf
    limits = jnp.iinfo(dtype)
    return limits.min if kind == "max" else limits.max


def _add(eqn: jc.JaxprEqn, total: Any, part: Any) -> Any:
    kind = eqn.params["kind"]
    with jc.under_scope_of(eqn):
        part = jnp.asarray(part, total.dtype)
        return combine("sum" if kind == "mean" else kind, eqn.params["axis"], [total, part])
