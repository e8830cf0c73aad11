"""Decide the step of one microbatch for an equation without bodies, given the states of its operands.

    an operand is batched    rows stay apart (Batched), or are reduced over (Partial)
    an operand is partial    stays partial in linear equations of a gradient, else it is completed first
    neither                  shared, or the beginning of a batch axis: of the full size, then sliced

Where the rules say no, what depends on the batch alone can still be taken of the whole batch (`batch_axes`).
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar.compiler.frontend.batch_dimensions import batch_axes
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.linearity import BILINEAR, linear_operands
from autopar.compiler.jaxprs.primitives import JOINS, REARRANGEMENTS
from autopar.compiler.microbatch.rules import row_verdict
from autopar.compiler.microbatch.states import (
    COMPLETE,
    DRAW,
    FIRST,
    KEEP,
    SHARE,
    SOURCE,
    SPLIT,
    SUM,
    AnalysisState,
    Batched,
    BatchSizes,
    EquationPlace,
    Invariant,
    Local,
    MicrobatchStep,
    Partial,
    Provenance,
    ReducedBatch,
    Rows,
    Site,
    State,
    Unfinished,
    Verdict,
    Whole,
    completed,
    describe_beside,
    provenances,
    refuse,
)


@dataclass(kw_only=True)
class Scope:
    """The program or body under analysis. A body sees where the operands it is given come from."""

    place: EquationPlace = ()
    straight: bool = True
    """True if it runs exactly once per microbatch, so what it needs of the whole batch can be computed before it."""
    states: dict[jc.Var, State] = field(default_factory=dict[jc.Var, State])
    producers: ChainMap[jc.Var, jc.JaxprEqn] = field(default_factory=lambda: ChainMap())
    constants: ChainMap[jc.Var, Any] = field(default_factory=lambda: ChainMap())

    @property
    def top(self) -> bool:
        return not self.place

    def read(self, atom: Any) -> State:
        if isinstance(atom, jc.Literal):
            return Invariant(zero=_is_zero(atom))
        return self.states[atom]

    def inside(self, place: EquationPlace, straight: bool, invars: Sequence[jc.Var], atoms: Sequence[Any]) -> Scope:
        """The scope of a body; `atoms` are what its inputs are given, None for those that a loop changes."""
        inner = Scope(
            place=place,
            straight=straight,
            producers=self.producers.new_child(),
            constants=self.constants.new_child(),
        )
        for var, atom in zip(invars, atoms, strict=True):
            if isinstance(atom, jc.Var) and atom in self.producers:
                inner.producers[var] = self.producers[atom]
            if isinstance(atom, jc.Var) and atom in self.constants:
                inner.constants[var] = self.constants[atom]
        return inner


def _is_zero(atom: jc.Literal) -> bool:
    return getattr(atom.aval, "shape", None) == () and not np.any(atom.val)


def make_step(
    eqn: jc.JaxprEqn,
    at_other_batch: jc.JaxprEqn,
    mode: str,
    operands: Sequence[State],
    results: Sequence[State],
    uses: Sequence[str] = (),
    **more: Any,
) -> MicrobatchStep:
    """Return a step, whose operands are used as they are unless `uses` says otherwise."""
    return MicrobatchStep(
        eqn=eqn,
        at_other_batch=at_other_batch,
        mode=mode,
        operands=tuple(operands),
        results=tuple(results),
        uses=tuple(uses) or (KEEP,) * len(eqn.invars),
        **more,
    )


def flat_step(
    analysis: AnalysisState,
    scope: Scope,
    place: EquationPlace,
    eqn: jc.JaxprEqn,
    at_other_batch: jc.JaxprEqn,
    states: list[State],
) -> MicrobatchStep:
    """Return the step of one microbatch for an equation without bodies."""
    if eqn.primitive.name in ("optimization_barrier", "debug_callback", "debug_print"):
        # What a callback shows of the batch is its value, not the part of one microbatch.
        shown = scope.top and not eqn.outvars
        uses = [COMPLETE if shown and isinstance(s, Partial) else KEEP for s in states]
        return make_step(eqn, at_other_batch, SPLIT, states, states[: len(eqn.outvars)], uses)
    verdict = _verdict(analysis.sizes, scope, eqn, at_other_batch, states)
    states, uses = _settled(analysis, scope, eqn, at_other_batch, states, verdict)
    analysis.note_crossing(states)
    if verdict is not None:
        return _batched(analysis, place, eqn, at_other_batch, states, uses, verdict)
    partial = next((s for s in states if isinstance(s, Partial)), None)
    if partial is not None:
        results = [Partial(kind=partial.kind, provenance=provenances(states))] * len(eqn.outvars)
        return make_step(eqn, at_other_batch, SPLIT, states, results, uses)
    return _from_shared(analysis, place, eqn, at_other_batch, states, uses)


def sliced_state(sizes: BatchSizes, aval: Any, at_other_batch: Any, provenance: Provenance) -> State:
    """Return the state of a value of the full size: sliced if it has one axis that is proportional to the batch."""
    axes = batch_axes(aval, at_other_batch)
    if not axes:
        return Invariant(provenance=provenance)
    if len(axes) == 1 and sizes.in_proportion(aval.shape[axes[0]], at_other_batch.shape[axes[0]]):
        return Batched(axis=axes[0], provenance=provenance)
    return Whole(provenance=provenance)


def _verdict(
    sizes: BatchSizes, scope: Scope, eqn: jc.JaxprEqn, at_other_batch: jc.JaxprEqn, states: list[State]
) -> Verdict | None:
    """Return what the rules say of the rows of the operands; None if no operand has rows."""
    if not any(isinstance(s, Batched) for s in states):
        return None
    axes = tuple(s.axis if isinstance(s, Batched) else None for s in states)
    site = Site(
        eqn=eqn,
        at_other_batch=at_other_batch,
        sizes=sizes,
        axes=axes,
        producers=scope.producers,
        constants=scope.constants,
    )
    return row_verdict(site)


def _settled(
    analysis: AnalysisState,
    scope: Scope,
    eqn: jc.JaxprEqn,
    at_other_batch: jc.JaxprEqn,
    states: list[State],
    verdict: Verdict | None,
) -> tuple[list[State], list[str]]:
    """Accumulate the operands that the equation needs complete. Return the states and the use of each operand."""
    late = [scope.top and verdict is None and _is_late(s, states) for s in states]
    group = None if any(late) else _summands(scope, eqn, at_other_batch, states, verdict)
    if group is not None:
        return states, [_use(s, i in group) for i, s in enumerate(states)]
    settled, uses = list(states), [KEEP] * len(states)
    for i, state in enumerate(states):
        if scope.top and (isinstance(state, Partial) or late[i]):
            settled[i], uses[i] = completed(state), COMPLETE
        elif isinstance(state, Partial):
            settled[i] = _unfinished(analysis, scope, eqn, state)
    return settled, uses


def _is_late(state: State, states: Sequence[State]) -> bool:
    """Return whether an operand is a statistic per microbatch and another is accumulated: the mean stands for it."""
    return isinstance(state, Local) and state.provenance.round < max(s.provenance.round for s in states)


def _use(state: State, summand: bool) -> str:
    if not summand:
        return KEEP
    match state:
        case Invariant(zero=False):
            return FIRST
        case Local():
            return SHARE
        case _:
            return KEEP


def _summands(
    scope: Scope, eqn: jc.JaxprEqn, at_other_batch: jc.JaxprEqn, states: list[State], verdict: Verdict | None
) -> frozenset[int] | None:
    """Return the operands that take part in the sum over microbatches; None if partial ones must be completed."""
    partial = [i for i, s in enumerate(states) if isinstance(s, Partial)]
    if isinstance(verdict, ReducedBatch):
        fits = all(i in verdict.summands and _kind(states[i]) == verdict.kind for i in partial)
        if not fits:
            refuse(eqn, "adds the batch's examples to a value that is reduced over them in another way")
        return frozenset(verdict.summands if verdict.kind == SUM else ())
    if not partial:
        return frozenset()
    if verdict is not None or (scope.top and jc.ad_phase(eqn) is None):
        return None
    kind, grows = str(_kind(states[partial[0]])), any(map(_grows, eqn.outvars, at_other_batch.outvars))
    if grows or any(_kind(states[i]) != kind for i in partial):
        return None
    group = next((g for g in summand_positions(eqn, kind) if g.issuperset(partial)), None)
    if group is None or kind != SUM:
        return None if group is None else frozenset()
    shared = any(isinstance(states[i], Invariant) and not _zero(states[i]) for i in group)
    # At the top a sum is completed before something is added to it, once; a body has no place for that.
    return None if shared and scope.top else group


def _kind(state: State) -> str | None:
    return state.kind if isinstance(state, Partial) else None


def _zero(state: State) -> bool:
    return isinstance(state, Invariant) and state.zero


def _grows(var: Any, twin: Any) -> bool:
    return bool(batch_axes(var.aval, twin.aval))


def _unfinished(analysis: AnalysisState, scope: Scope, eqn: jc.JaxprEqn, state: State) -> State:
    """Take a sum that a body needs per microbatch, or raise `Unfinished` to have the loop around complete it."""
    behind = analysis.origins(state.provenance)
    inside = [r for r in behind if r.place[: len(scope.place)] == scope.place]
    own = len(inside) == len(behind) and state.provenance.stateful
    if own and not analysis.exact:
        analysis.crossing.update(r.place for r in behind)
        return Local(provenance=state.provenance)
    names = describe_beside(eqn, (r.eqn for r in behind)) or "a sum"
    each = 'take it of each microbatch (batch_statistics="per_microbatch", an approximation), ' if own else ""
    raise Unfinished(
        f"{jc.describe(eqn)} needs {names} over the batch, which is complete only after the loop, condition or "
        f"rematerialised region around it. Compute it before or after, {each}or use num_microbatches=1."
    )


def _batched(
    analysis: AnalysisState,
    place: EquationPlace,
    eqn: jc.JaxprEqn,
    at_other_batch: jc.JaxprEqn,
    states: list[State],
    uses: list[str],
    verdict: Verdict,
) -> MicrobatchStep:
    provenance = provenances(states)
    if isinstance(verdict, Rows):
        results = [
            _rows_state(analysis, place, eqn, v, w, provenance) for v, w in zip(eqn.outvars, at_other_batch.outvars)
        ]
        return make_step(eqn, at_other_batch, SPLIT, states, results, uses, identity_column=verdict.identity_column)
    if place in analysis.local:
        # The result is multiplied by the number of microbatches, so a shared summand enters by its share.
        uses = [SHARE if use == FIRST else KEEP for use in uses]
        local = [Local(provenance=provenance)]
        return make_step(eqn, at_other_batch, SPLIT, states, local, uses, local=verdict.kind == SUM)
    rows = replace(provenance, sums=0, origins=analysis.reduction(place, eqn, provenance))
    before = provenances(states[i] for i in verdict.summands)
    return make_step(eqn, at_other_batch, SPLIT, states, [Partial(kind=verdict.kind, provenance=rows | before)], uses)


def _rows_state(
    analysis: AnalysisState, place: EquationPlace, eqn: jc.JaxprEqn, var: Any, twin: Any, provenance: Provenance
) -> State:
    axes = batch_axes(var.aval, twin.aval)
    if len(axes) != 1:
        refuse(eqn, "combines pairs of the batch's examples" if axes else "loses the batch axis")
    if not analysis.sizes.in_proportion(var.aval.shape[axes[0]], twin.aval.shape[axes[0]]):
        refuse(eqn, "makes an axis that is not proportional to the batch")
    return with_rows(analysis, place, Batched(axis=axes[0], provenance=provenance))


def with_rows(analysis: AnalysisState, place: EquationPlace, state: Batched) -> Batched:
    """A batched value that depends on the state is among the rows behind everything computed from it."""
    if not state.provenance.stateful:
        return state
    rows = replace(state.provenance, rows=state.provenance.rows | analysis.bit(place))
    return Batched(axis=state.axis, provenance=rows, gathered=state.gathered)


def _from_shared(
    analysis: AnalysisState,
    place: EquationPlace,
    eqn: jc.JaxprEqn,
    at_other_batch: jc.JaxprEqn,
    states: list[State],
    uses: list[str],
) -> MicrobatchStep:
    """Return the step of an equation that has no operand with a batch axis; its results may begin one."""
    provenance, local = provenances(states), any(isinstance(s, Local) for s in states)
    if analysis.draw_per_microbatch and eqn.primitive.name == "random_bits":
        provenance = replace(provenance, stateful=True)  # what is drawn is not what the whole batch would draw
    pairs = list(zip(eqn.outvars, at_other_batch.outvars))
    results = [sliced_state(analysis.sizes, v.aval, w.aval, provenance) for v, w in pairs]
    results = [with_rows(analysis, place, r) if isinstance(r, Batched) else r for r in results]
    if local and any(isinstance(r, Whole) for r in results):
        refuse(eqn, "makes an axis that is not proportional to the batch")
    if local:
        results = [Local(provenance=r.provenance) if isinstance(r, Invariant) else r for r in results]
    elif carries_zero(eqn, [_zero(s) for s in states]):
        results = [replace(r, zero=True) if isinstance(r, Invariant) else r for r in results]
    begins = any(isinstance(r, Batched | Whole) for r in results)
    mode = _mode_of_source(analysis, eqn, results) if begins else SPLIT
    return make_step(eqn, at_other_batch, mode, states, results, uses)


def _mode_of_source(analysis: AnalysisState, eqn: jc.JaxprEqn, results: Sequence[State]) -> str:
    if any(isinstance(r, Whole) for r in results):
        return SOURCE
    match eqn.primitive.name:
        case "broadcast_in_dim":
            return SPLIT
        case "iota" if isinstance(r := results[0], Batched) and (r.axis,) != jp.dimensions_of(eqn):
            return SPLIT
        case "random_bits" if analysis.draw_per_microbatch:
            return DRAW
        case _:
            return SOURCE


# Linear operands: a sum over microbatches can be taken after the equation


def summand_positions(eqn: jc.JaxprEqn, kind: str) -> list[frozenset[int]]:
    """Return the sets of operands in which the equation is jointly linear (or, for max and the like, structural)."""
    name = eqn.primitive.name
    positions = [frozenset(group) for group in linear_operands(eqn)]
    if name in REARRANGEMENTS | JOINS | {"gather", "select_n"}:
        return positions
    if kind != SUM:
        return [frozenset({0, 1})] if name == kind else [frozenset({0})] if name == f"reduce_{kind}" else []
    rounds = name in ("div", "convert_element_type") and not all(_is_inexact(v) for v in eqn.outvars[:1])
    return [] if rounds else positions


def carries_zero(eqn: jc.JaxprEqn, zeros: list[bool]) -> bool:
    """Return whether the result is all zeros, given which operands are."""
    if eqn.primitive.name in BILINEAR | {"div"}:
        return False  # zero times infinity is not zero
    return any(all(zeros[i] for i in group) for group in summand_positions(eqn, SUM))


def _is_inexact(atom: Any) -> bool:
    return bool(jnp.issubdtype(atom.aval.dtype, jnp.inexact))
