"""Write a step over microbatches as one program: a loop over the microbatches per round, and what is computed once.

    Trace, number of microbatches M  ->  jaxpr with the inputs and results of the step

    total = 0;  for m in [0, M): total += part(rows m·B/M ... (m+1)·B/M of the batch, parameters);  update(total)

The loop is a `lax.scan`. It slices what is split along the batch ([B, ...] becomes [M, B/M, ...]), carries the totals,
and stacks the results of single examples and what a later round reads.

`find_rounds` gives every equation a time, so that each sweep over the microbatches is one loop:

    time   0        1         2         3         4
           once     round 0   once      round 1   once        (two rounds: a GAN, exact batch statistics)

Equations that depend on the microbatch run at odd times, in the body of a loop, all others at even times; the result of
an `accumulate` is there at the time after its round. An equation runs as late as its readers allow, so that no value is
kept between loops: the forward pass of a loss per counted token is in the round after the count. It runs earlier if its
results are smaller than what would have to be kept for it.

A value from before a loop is computed again in its body if that is cheap and saves memory: broadcasts, masks, random
bits, transposed or sliced parameters. A cast to fewer bits stays before the loop.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.compiler.frontend.trace import Trace
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.evaluate import evaluate_equations, read
from autopar.compiler.jaxprs.flops import aval_bytes, equation_flops
from autopar.compiler.jaxprs.normalize import normalize
from autopar.compiler.jaxprs.primitives import COPIES, REORDERINGS, RESHAPES, SLICINGS, SPREADINGS
from autopar.compiler.microbatch.accumulate import accumulate_p, accumulation_axis, accumulation_kind, combine
from autopar.compiler.microbatch.split import MicrobatchedStep
from autopar.compiler.pipeline.prepare import prepare

# What they make is cheaper to make again than to keep.
_MOVES = COPIES | RESHAPES | REORDERINGS | SLICINGS | SPREADINGS
_ONCE = frozenset({"random_seed", "random_split", "random_fold_in", "pure_callback"})
"""Never repeated: keys take no memory, and the user may count the calls of a callback."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rounds:
    """Indices of the step's equations, in program order; `len(once) == len(each) + 1`."""

    step: MicrobatchedStep
    once: tuple[tuple[int, ...], ...]
    """The equations before each round, and after the last."""
    each: tuple[tuple[int, ...], ...]
    """The equations of each microbatch in each round, with what is made again there, and the accumulations."""

    @property
    def equations(self) -> list[jc.JaxprEqn]:
        """The equations of the step, by index."""
        return self.step.jaxpr.jaxpr.eqns


def find_rounds(step: MicrobatchedStep) -> Rounds:
    """Return the rounds of a step: the time of every equation."""
    timetable = _Timetable(step)
    earliest = timetable.earliest()
    swept = [t for t in earliest if t % 2]
    end = max(swept, default=-1) + 1
    times = timetable.settled(earliest, timetable.latest(earliest, end))
    again = timetable.cheap_to_repeat()
    return Rounds(
        step=step,
        once=tuple(tuple(i for i, t in enumerate(times) if t == time) for time in range(0, end + 1, 2)),
        each=tuple(timetable.body(times, again, time) for time in range(1, end, 2)),
    )


class _Timetable:
    """The equations of a step, which of them depend on the microbatch, and the passes that find their times."""

    def __init__(self, step: MicrobatchedStep) -> None:
        jaxpr = step.jaxpr.jaxpr
        self.eqns = jaxpr.eqns
        self.num_microbatches = step.num_microbatches
        inputs = list(zip(jaxpr.invars, step.inputs, strict=True))
        self.given = {*jaxpr.constvars, *jaxpr.invars}
        self.varying = {v for v, spec in inputs if spec.kind != "whole"}
        self.sliced = frozenset(self.varying)
        for eqn in self.eqns:
            if eqn.primitive is not accumulate_p and not self.varying.isdisjoint(jc.operands(eqn)):
                self.varying.update(eqn.outvars)
        self.swept = [
            eqn.primitive is accumulate_p or not self.varying.isdisjoint(jc.operands(eqn)) for eqn in self.eqns
        ]
        self.readers: dict[jc.Var, list[int]] = {}
        for index, eqn in enumerate(self.eqns):
            for v in jc.operands(eqn):
                self.readers.setdefault(v, []).append(index)

    def earliest(self) -> list[int]:
        """Return the earliest time of each equation: when its operands are there."""
        known: dict[jc.Var, int] = {}
        times: list[int] = []
        for index in range(len(self.eqns)):
            times.append(self._from(index, max((known.get(v, 0) for v in jc.operands(self.eqns[index])), default=0)))
            self._note(known, index, times[-1])
        return times

    def latest(self, earliest: Sequence[int], end: int) -> list[int]:
        """Return the latest time of each equation: when the first reader needs its results.

        Side effects keep their order: they happen at the earliest time.
        """
        due: dict[jc.Var, int] = {}
        times = list(earliest)
        for index in reversed(range(len(self.eqns))):
            eqn = self.eqns[index]
            if not eqn.effects:
                times[index] = self._until(index, min((due.get(v, end) for v in eqn.outvars), default=end))
            assert times[index] >= earliest[index], (eqn.primitive.name, times[index], earliest[index])
            for v in jc.operands(eqn):
                due[v] = min(due.get(v, end), times[index])
        return times

    def settled(self, earliest: Sequence[int], latest: Sequence[int]) -> list[int]:
        """Return the latest times, but earlier ones where the results are smaller than the operands that would be kept.

        They may be as large if no other equation reads the operands that late.
        """
        known: dict[jc.Var, int] = {}
        times = list(latest)
        for index, eqn in enumerate(self.eqns):
            made = {v: known[v] for v in jc.operands(eqn) if v in known}
            early = [v for v, time in made.items() if time < latest[index]]
            spared = sum(map(self._bytes, early)) - sum(map(self._bytes, eqn.outvars))
            last = all(times[i] <= known[v] for v in early for i in self.readers[v] if i != index)
            if spared > 0 or (early and last and spared == 0):
                times[index] = self._from(index, max(earliest[index], *made.values()))
            self._note(known, index, times[index])
        return times

    def _from(self, index: int, time: int) -> int:
        return time | 1 if self.swept[index] else time

    def _until(self, index: int, time: int) -> int:
        if self.eqns[index].primitive is accumulate_p:
            time -= 1
        return time - (time + self.swept[index]) % 2

    def _note(self, known: dict[jc.Var, int], index: int, time: int) -> None:
        done = time + 1 if self.eqns[index].primitive is accumulate_p else time
        known.update(dict.fromkeys(self.eqns[index].outvars, done))

    def _bytes(self, v: jc.Var) -> int:
        """Return the bytes that keeping a value between loops takes: one that varies is kept for every microbatch."""
        return aval_bytes(v.aval) * (self.num_microbatches if v in self.varying else 1)

    def cheap_to_repeat(self) -> list[bool]:
        """Return for each equation whether repeating it in a loop costs less than keeping its results."""
        origins: dict[jc.Var, frozenset[jc.Var]] = {}
        cheap: list[bool] = []
        for eqn in self.eqns:
            sources = frozenset[jc.Var]().union(*(origins.get(v, {v}) for v in jc.operands(eqn)))
            cheap.append(_is_light(eqn) and self._saves(eqn, sources))
            if cheap[-1]:
                origins.update(dict.fromkeys(eqn.outvars, sources))
        return cheap

    def _saves(self, eqn: jc.JaxprEqn, sources: frozenset[jc.Var]) -> bool:
        moves = eqn.primitive.name in _MOVES
        if moves and sources <= self.given:
            return True
        # Slices of the batch are at hand in every loop.
        kept = sum(self._bytes(v) for v in sources - self.sliced)
        made = sum(self._bytes(v) for v in eqn.outvars)
        return made > kept or (moves and made == kept)

    def body(self, times: Sequence[int], cheap: Sequence[bool], time: int) -> tuple[int, ...]:
        """Return the equations that the loop at `time` runs: its own, and those that it repeats for them."""
        needed: set[jc.Var] = set()
        indices: list[int] = []
        for index in reversed(range(len(self.eqns))):
            eqn = self.eqns[index]
            repeated = times[index] < time and cheap[index] and not needed.isdisjoint(eqn.outvars)
            if times[index] == time or repeated:
                indices.append(index)
                needed.update(jc.operands(eqn))
        return tuple(reversed(indices))


def _is_light(eqn: jc.JaxprEqn) -> bool:
    """Return whether an equation does at most one operation per element of results, and nothing that happens once."""
    if eqn.effects or eqn.primitive is accumulate_p or eqn.primitive.name in _ONCE:
        return False
    avals: list[Any] = [v.aval for v in eqn.outvars]
    has_body = next(jc.subjaxprs(eqn), None) is not None
    return not has_body and equation_flops(eqn) <= sum(a.size for a in avals)


def carried_between(rounds: Rounds) -> Mapping[jc.Var, int]:
    """The round of each value of single microbatches that leaves its loop: to be joined, or for a later round."""
    eqns = rounds.equations
    home: dict[jc.Var, int] = {}
    leaving: dict[jc.Var, int] = {}
    for number, body in enumerate(rounds.each):
        own = {v for i in body if eqns[i].primitive is not accumulate_p for v in eqns[i].outvars}
        for i in body:
            joined = eqns[i].primitive is accumulate_p and accumulation_kind(eqns[i]) == "concatenate"
            for v in jc.operands(eqns[i]):
                if v in home and v not in own:
                    leaving[v] = home[v]
                elif joined and v in own:
                    leaving.setdefault(v, number)
        for v in own:
            home.setdefault(v, number)
    return leaving


# The program of the loops

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
    looped = loop_over(prepared.phases.step, [v.aval for v in trace.jaxpr.jaxpr.invars])
    wanted, given = ([(a.shape, a.dtype) for a in closed.out_avals] for closed in (trace.jaxpr, looped))
    assert given == wanted, (given, wanted)
    return looped


def loop_over(step: MicrobatchedStep, avals: Sequence[Any]) -> jc.ClosedJaxpr:
    """The program of a microbatched step on whole inputs of these types."""
    rounds = find_rounds(step)
    leaving = carried_between(rounds)

    def run(*leaves: Any) -> list[Any]:
        values = _given(step, leaves)
        for number, indices in enumerate(rounds.once):
            evaluate_equations([rounds.equations[i] for i in indices], values.once)
            if number < len(rounds.each):
                kept = [v for v, home in leaving.items() if home == number]
                _run_round([rounds.equations[i] for i in rounds.each[number]], kept, values, step.num_microbatches)
        return [read(atom, values.once) for atom in step.jaxpr.jaxpr.outvars]

    return normalize(jc.trace(run, avals))


@dataclass(frozen=True, kw_only=True)
class _Values:
    """The values known between loops: those that the microbatches share, and those of each, stacked along axis 0."""

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
    """Join the parts that `_parted` made."""
    order = [*range(1, axis + 1), 0, *range(axis + 1, parts.ndim)]
    apart = lax.transpose(parts, order) if axis else parts
    shape = apart.shape
    return lax.reshape(apart, (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :]))


def _run_round(body: Sequence[jc.JaxprEqn], kept: Sequence[jc.Var], values: _Values, count: int) -> None:
    """Loop over the microbatches; enter the completed values, and the values that are kept of each microbatch."""
    bound = [eqn for eqn in body if eqn.primitive is not accumulate_p]
    completed = [eqn for eqn in body if eqn.primitive is accumulate_p]
    added = [eqn for eqn in completed if accumulation_kind(eqn) != "concatenate"]
    made = {v for eqn in bound for v in eqn.outvars}
    reads = [v for v in dict.fromkeys(v for e in (*bound, *added) for v in jc.operands(e)) if v not in made]
    sliced = {v: values.stacked[v] for v in reads if v in values.stacked}

    def one(totals: list[Any], rows: Mapping[jc.Var, Any]) -> tuple[list[Any], list[Any]]:
        known = ChainMap(dict(rows), values.once)
        evaluate_equations(bound, known)
        parts = [read(eqn.invars[0], known) for eqn in added]
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
            values.once[eqn.outvars[0]] = total / count if accumulation_kind(eqn) == "mean" else total
    for eqn in completed:
        if eqn not in added:
            values.once[eqn.outvars[0]] = _concatenated(eqn, values, count)


def _concatenated(eqn: jc.JaxprEqn, values: _Values, count: int) -> Any:
    (operand,) = eqn.invars
    with jc.under_scope_of(eqn):
        if operand in values.stacked:
            return _joined(values.stacked[operand], accumulation_axis(eqn))
        # Rows that are the same for every microbatch: zeros, or a broadcast parameter.
        return _joined(_lax.broadcast(jnp.asarray(read(operand, values.once)), (count,)), accumulation_axis(eqn))


def _start(eqn: jc.JaxprEqn) -> Any:
    """The neutral element of an accumulation."""
    aval: Any = eqn.outvars[0].aval
    with jc.under_scope_of(eqn):
        return _lax.full(aval.shape, _neutral(accumulation_kind(eqn), aval.dtype), aval.dtype)


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
    kind = accumulation_kind(eqn)
    with jc.under_scope_of(eqn):
        part = jnp.asarray(part, total.dtype)
        return combine("sum" if kind == "mean" else kind, accumulation_axis(eqn), [total, part])
