"""Split loops over the examples of a batch, whose rounds do not wait for each other.

    sums, ys = scan(body, sums, rows)   ->   the same of the microbatch's rows, in as many rounds as it has

Such are `jax.lax.map`, in whatever batches, and its backward pass: a round reads its own rows and what is the same for
all, and hands on nothing but sums, to each of which it adds. A loop that does more with what it carries is not split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.linearity import carried_sums
from autopar.compiler.microbatch.equations import make_step, with_rows
from autopar.compiler.microbatch.states import (
    COMPLETE,
    KEEP,
    SPLIT,
    SUM,
    AnalysisState,
    Batched,
    EquationPlace,
    Invariant,
    MicrobatchStep,
    Partial,
    Provenance,
    State,
    completed,
    provenances,
    shape_of,
    use_as,
)


def row_loop_step(
    analysis: AnalysisState,
    place: EquationPlace,
    eqn: jc.JaxprEqn,
    at_other_batch: jc.JaxprEqn,
    states: Sequence[State],
    *,
    top: bool,
) -> MicrobatchStep | None:
    """Return the step of a loop over the batch's examples whose rounds are independent; None for any other."""
    if eqn.primitive.name != "scan" or eqn.effects:
        return None
    loop, twin = jp.scan_of(eqn), jp.scan_of(at_other_batch)
    if loop.length == twin.length or not analysis.sizes.in_proportion(loop.length, twin.length):
        return None
    uses = [COMPLETE if top and isinstance(s, Partial) else KEEP for s in states[: loop.num_consts]]
    consts = [completed(s) if use == COMPLETE else s for s, use in zip(states, uses)]
    initial, rows = states[loop.num_consts : loop.first_x], states[loop.first_x :]
    adds = carried_sums(loop)
    independent = (
        all(isinstance(s, Invariant) for s in consts)
        and all(isinstance(s, Batched) and s.axis == 0 for s in rows)
        and all(_is_carried(s, is_sum) for s, is_sum in zip(initial, adds, strict=True))
        and _same_rounds(loop, twin)
    )
    if not independent:
        return None
    settled = [*consts, *initial, *rows]
    analysis.note_crossing(settled)
    behind = provenances(settled)
    total = Partial(kind=SUM, provenance=_of_sum(analysis, place, eqn, behind) if any(adds) else behind)
    carry = [total if is_sum else s for s, is_sum in zip(initial, adds, strict=True)]
    made = with_rows(analysis, place, Batched(axis=0, provenance=behind))
    results = [*carry, *(made for _ in eqn.outvars[loop.num_carry :])]
    uses += [*map(use_as, initial, carry), *(KEEP for _ in rows)]
    return make_step(eqn, at_other_batch, SPLIT, settled, results, uses)


def _of_sum(analysis: AnalysisState, place: EquationPlace, eqn: jc.JaxprEqn, behind: Provenance) -> Provenance:
    return replace(behind, sums=0, origins=behind.origins | analysis.reduction(place, eqn, behind))


def _is_carried(state: State, is_sum: bool) -> bool:
    return isinstance(state, Invariant) or (is_sum and isinstance(state, Partial) and state.kind == SUM)


def _same_rounds(loop: jp.Scan, twin: jp.Scan) -> bool:
    """Return whether a round is the same program at another batch, and hands on what else it carries as it is."""
    body, _ = jc.open_jaxpr(loop.body)
    carried = body.invars[loop.num_consts : loop.first_x]
    kept = zip(carried, body.outvars, carried_sums(loop))
    shapes, others = (
        [(eqn.primitive, *map(shape_of, eqn.outvars)) for eqn in jc.all_equations(each)]
        for each in (loop.body, twin.body)
    )
    return all(is_sum or v is after for v, after, is_sum in kept) and shapes == others
