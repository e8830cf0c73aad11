"""Find out where the batch is in every value of a train step, and what each equation does for one microbatch.

An abstract interpretation of the program at the full batch, beside the same program at twice the batch: an axis whose size
differs is the batch axis. Every value gets a state (`batch_states`), every equation a step (`batch_steps`):

    batch input     Batched                      reduce over the batch    Partial, until a use that is not linear
    other input     Invariant                    nonlinear use            accumulated: Invariant, one round later

A reduction that depends on the batch alone is taken of the whole batch before the microbatches, which makes masked means
exact. One that depends on the state and meets the same examples again (batch normalisation) is refused, or, on request,
taken within each microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.compiler import jax_compat as jc
from autopar.compiler.batch_bodies import Enter, body_avals_differ, has_bodies, nested_step
from autopar.compiler.batch_ledger import Ledger, Place, Unfinished
from autopar.compiler.batch_rules import (
    Reduced,
    Rows,
    Site,
    Verdict,
    batch_axes,
    carries_zero,
    refuse,
    row_verdict,
    summand_positions,
)
from autopar.compiler.batch_states import (
    SUM,
    Batched,
    Invariant,
    Local,
    Partial,
    State,
    Trail,
    Whole,
    completed,
    trails,
)
from autopar.compiler.batch_steps import (
    COMPLETE,
    DRAW,
    FIRST,
    KEEP,
    SHARE,
    SOURCE,
    SPLIT,
    WHOLE,
    Block,
    Step,
    needed_whole,
)
from autopar.errors import NotSplittable, Unsupported


@dataclass(kw_only=True)
class _Scope:
    """The program or body under analysis."""

    place: Place = ()
    straight: bool = True
    """Runs exactly once per microbatch, so what it needs of the whole batch can be computed before it."""
    states: dict[jc.Var, State] = field(default_factory=dict)
    producers: dict[jc.Var, jc.JaxprEqn] = field(default_factory=dict)
    constants: dict[jc.Var, Any] = field(default_factory=dict)

    @property
    def top(self) -> bool:
        return not self.place

    def read(self, atom: Any) -> State:
        if isinstance(atom, jc.Literal):
            return Invariant(zero=_is_zero(atom))
        return self.states[atom]


def _is_zero(atom: jc.Literal) -> bool:
    return getattr(atom.aval, "shape", None) == () and bool(atom.val == 0)


def analyse(ledger: Ledger, full: jc.ClosedJaxpr, doubled: jc.ClosedJaxpr, inputs: Sequence[State]) -> Block:
    """The steps of one microbatch for every equation of `full`, whose inputs are in the states given."""
    while True:
        block = _block(ledger, _Scope(), full, doubled, inputs)
        if ledger.exact or ledger.found <= ledger.local:
            return block
        ledger.local = ledger.local | ledger.found


def _block(ledger: Ledger, scope: _Scope, full: Any, doubled: Any, inputs: Sequence[State]) -> Block:
    jaxpr, consts = jc.open_jaxpr(full)
    double, _ = jc.open_jaxpr(doubled)
    _check_same_structure(jaxpr, double)
    scope.states.update(zip(jaxpr.invars, inputs, strict=True))
    for var, twin in zip(jaxpr.constvars, double.constvars, strict=True):
        scope.states[var] = _sliced_state(var.aval, twin.aval, Trail())
    scope.constants.update(zip(jaxpr.constvars, consts))
    steps: list[Step] = []
    for number, (eqn, twin) in enumerate(zip(jaxpr.eqns, double.eqns, strict=True)):
        step = _step(ledger, scope, (*scope.place, number), eqn, twin)
        scope.states.update(zip(eqn.outvars, step.results, strict=True))
        scope.producers.update(dict.fromkeys(eqn.outvars, eqn))
        steps.append(step)
    return Block(
        jaxpr=jaxpr,
        consts=consts,
        steps=tuple(steps),
        inputs=tuple(inputs),
        outputs=tuple(scope.read(v) for v in jaxpr.outvars),
        needed_whole=needed_whole(jaxpr, tuple(steps), scope.states, scope.top),
        constants={v: scope.states[v] for v in jaxpr.constvars},
    )


def _check_same_structure(jaxpr: jc.Jaxpr, double: jc.Jaxpr) -> None:
    for eqn, twin in zip(jaxpr.eqns, double.eqns):
        if eqn.primitive is not twin.primitive or len(eqn.invars) != len(twin.invars):
            found = (
                f"with the given batch there is {jc.describe(eqn)}, with twice the batch {jc.describe(twin)}"
            )
            raise _structure_differs(found)
    if len(jaxpr.eqns) != len(double.eqns):
        found = f"{len(jaxpr.eqns)} equations with the given batch, {len(double.eqns)} with twice the batch"
        raise _structure_differs(found)


def _structure_differs(found: str) -> NotSplittable:
    return NotSplittable(
        f"The program's structure depends on the batch size: {found}. A microbatch must run the same operations on fewer "
        "examples. Replace Python loops and conditions over the batch by array operations, or use num_microbatches=1."
    )


def _step(ledger: Ledger, scope: _Scope, place: Place, eqn: jc.JaxprEqn, doubled: jc.JaxprEqn) -> Step:
    states = [scope.read(atom) for atom in eqn.invars]
    nested = has_bodies(eqn) and (any(map(_varies, states)) or body_avals_differ(eqn, doubled))
    try:
        if any(isinstance(s, Whole) for s in states):
            refuse(eqn, "mixes the batch's examples")
        step = (
            _nested(ledger, scope, place, eqn, doubled, states)
            if nested
            else _flat(ledger, scope, place, eqn, doubled, states)
        )
    except (NotSplittable, Unsupported):
        if _can_be_whole(scope, eqn, states):
            return _whole(eqn, doubled, states)
        raise
    if any(isinstance(r, Partial | Whole) for r in step.results) and _can_be_whole(scope, eqn, states):
        # What depends on the batch alone is exact, and the same for every microbatch, if taken of the whole batch.
        return _whole(eqn, doubled, states)
    return replace(step, operands=tuple(states))


def _varies(state: State) -> bool:
    return not isinstance(state, Invariant)


def _can_be_whole(scope: _Scope, eqn: jc.JaxprEqn, states: Sequence[State]) -> bool:
    """Whether the equation can be evaluated on the whole batch, before the microbatches: no parameter is involved."""
    apart = all(isinstance(s, Invariant | Batched | Whole) and not s.trail.stateful for s in states)
    return scope.straight and apart and not eqn.effects


def _whole(eqn: jc.JaxprEqn, doubled: jc.JaxprEqn, states: Sequence[State]) -> Step:
    trail = trails(states)
    results = [_sliced_state(v.aval, w.aval, trail) for v, w in zip(eqn.outvars, doubled.outvars)]
    return _make(eqn, doubled, WHOLE, states, results)


def _sliced_state(aval: Any, doubled: Any, trail: Trail) -> State:
    """The state of a value known at the full size: sliced if it has one axis that is proportional to the batch."""
    axes = batch_axes(aval, doubled)
    if not axes:
        return Invariant(trail=trail)
    if len(axes) == 1 and doubled.shape[axes[0]] == 2 * aval.shape[axes[0]]:
        return Batched(axis=axes[0], trail=trail)
    return Whole(trail=trail)


def _make(
    eqn: jc.JaxprEqn,
    doubled: jc.JaxprEqn,
    mode: str,
    operands: Sequence[State],
    results: Sequence[State],
    uses: Sequence[str] = (),
    **more: Any,
) -> Step:
    return Step(
        eqn=eqn,
        doubled=doubled,
        mode=mode,
        operands=tuple(operands),
        results=tuple(results),
        uses=tuple(uses) or (KEEP,) * len(eqn.invars),
        **more,
    )


def _flat(
    ledger: Ledger, scope: _Scope, place: Place, eqn: jc.JaxprEqn, doubled: jc.JaxprEqn, states: list[State]
) -> Step:
    if eqn.primitive.name in ("optimization_barrier", "debug_callback", "debug_print"):
        return _make(eqn, doubled, SPLIT, states, states[: len(eqn.outvars)])
    verdict = _verdict(scope, eqn, doubled, states)
    states, uses, verdict = _settled(ledger, scope, eqn, doubled, states, verdict)
    ledger.check_crossing(eqn, states)
    if verdict is not None:
        return _batched(ledger, place, eqn, doubled, states, uses, verdict)
    partial = next((s for s in states if isinstance(s, Partial)), None)
    if partial is not None:
        results = [Partial(kind=partial.kind, trail=trails(states))] * len(eqn.outvars)
        return _make(eqn, doubled, SPLIT, states, results, uses)
    return _from_shared(ledger, place, eqn, doubled, states, uses)


def _verdict(scope: _Scope, eqn: jc.JaxprEqn, doubled: jc.JaxprEqn, states: list[State]) -> Verdict | None:
    """What happens to rows, if an operand has any."""
    if not any(isinstance(s, Batched) for s in states):
        return None
    axes = tuple(s.axis if isinstance(s, Batched) else None for s in states)
    site = Site(eqn=eqn, doubled=doubled, axes=axes, producers=scope.producers, constants=scope.constants)
    return row_verdict(site)


def _settled(
    ledger: Ledger,
    scope: _Scope,
    eqn: jc.JaxprEqn,
    doubled: jc.JaxprEqn,
    states: list[State],
    verdict: Verdict | None,
) -> tuple[list[State], list[str], Verdict | None]:
    """Accumulate the operands that the equation needs complete; how each operand is used."""
    group = _summands(scope, eqn, doubled, states, verdict)
    if group is not None:
        return states, [_use(s, i in group) for i, s in enumerate(states)], verdict
    uses = [KEEP] * len(states)
    last = max(s.trail.round for s in states) if states else 0
    for i, state in enumerate(states):
        late = isinstance(state, Local) and verdict is None and scope.top and state.trail.round < last
        if not isinstance(state, Partial) and not late:
            continue
        if scope.top:
            states, uses[i] = [*states[:i], completed(state), *states[i + 1 :]], COMPLETE
        else:
            states = [*states[:i], _unfinished(ledger, scope, eqn, state), *states[i + 1 :]]
    return states, uses, verdict


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
    scope: _Scope, eqn: jc.JaxprEqn, doubled: jc.JaxprEqn, states: list[State], verdict: Verdict | None
) -> frozenset[int] | None:
    """The operands that are summed with the microbatches' contributions; None if the partial ones must be completed."""
    partial = [i for i, s in enumerate(states) if isinstance(s, Partial)]
    if isinstance(verdict, Reduced):
        fits = all(i in verdict.summands and _kind(states[i]) == verdict.kind for i in partial)
        masked = verdict.summands if verdict.kind == SUM else ()
        return frozenset(masked) if fits else None
    if not partial:
        return frozenset()
    if verdict is not None or (scope.top and jc.ad_phase(eqn) is None):
        return None
    kind, grows = _kind(states[partial[0]]), any(map(_grows, eqn.outvars, doubled.outvars))
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


def _unfinished(ledger: Ledger, scope: _Scope, eqn: jc.JaxprEqn, state: State) -> State:
    """A body needs a sum over the batch: the loop around it completes it, or it is taken per microbatch."""
    behind = ledger.origins(state.trail)
    inside = [r for r in behind if r.place[: len(scope.place)] == scope.place]
    if len(inside) < len(behind) or not state.trail.stateful:
        raise Unfinished(
            f"{jc.describe(eqn)} needs a sum over the batch that is complete only after the loop or rematerialised region "
            "around it. Compute it before or after, or use num_microbatches=1."
        )
    ledger.crossed(eqn, behind)
    return Local(trail=state.trail)


def _batched(
    ledger: Ledger,
    place: Place,
    eqn: jc.JaxprEqn,
    doubled: jc.JaxprEqn,
    states: list[State],
    uses: list[str],
    verdict: Verdict,
) -> Step:
    trail = trails(states)
    if isinstance(verdict, Rows):
        results = [_rows_state(ledger, place, eqn, v, w, trail) for v, w in zip(eqn.outvars, doubled.outvars)]
        return _make(eqn, doubled, SPLIT, states, results, uses, own_column=verdict.own_column)
    if place in ledger.local:
        is_sum = verdict.kind == SUM
        return _make(eqn, doubled, SPLIT, states, [Local(trail=trail)], [KEEP] * len(uses), local=is_sum)
    rows = replace(trail, sums=0, origins=ledger.reduction(place, eqn, trail))
    before = trails(states[i] for i in verdict.summands)
    return _make(eqn, doubled, SPLIT, states, [Partial(kind=verdict.kind, trail=rows | before)], uses)


def _rows_state(ledger: Ledger, place: Place, eqn: jc.JaxprEqn, var: Any, twin: Any, trail: Trail) -> State:
    axes = batch_axes(var.aval, twin.aval)
    if len(axes) != 1:
        refuse(eqn, "combines pairs of the batch's examples" if axes else "loses the batch axis")
    if var.aval.shape[axes[0]] * 2 != twin.aval.shape[axes[0]]:
        refuse(eqn, "makes an axis that is not proportional to the batch")
    return _with_rows(ledger, place, Batched(axis=axes[0], trail=trail))


def _with_rows(ledger: Ledger, place: Place, state: Batched) -> Batched:
    """A batched value that depends on the state is among the rows behind everything computed from it."""
    if not state.trail.stateful:
        return state
    return replace(state, trail=replace(state.trail, rows=state.trail.rows | ledger.bit(place)))


def _from_shared(
    ledger: Ledger,
    place: Place,
    eqn: jc.JaxprEqn,
    doubled: jc.JaxprEqn,
    states: list[State],
    uses: list[str],
) -> Step:
    """No operand has a batch axis; the results may begin one."""
    trail, local = trails(states), any(isinstance(s, Local) for s in states)
    pairs = list(zip(eqn.outvars, doubled.outvars))
    results = [_sliced_state(v.aval, w.aval, trail) for v, w in pairs]
    results = [_with_rows(ledger, place, r) if isinstance(r, Batched) else r for r in results]
    if local and any(isinstance(r, Whole) for r in results):
        refuse(eqn, "makes an axis that is not proportional to the batch")
    if local:
        results = [Local(trail=r.trail) if isinstance(r, Invariant) else r for r in results]
    elif carries_zero(eqn, [_zero(s) for s in states]):
        results = [replace(r, zero=True) if isinstance(r, Invariant) else r for r in results]
    begins = any(isinstance(r, Batched | Whole) for r in results)
    mode = _mode_of_source(ledger, eqn, results) if begins else SPLIT
    return _make(eqn, doubled, mode, states, results, uses)


def _mode_of_source(ledger: Ledger, eqn: jc.JaxprEqn, results: Sequence[State]) -> str:
    if any(isinstance(r, Whole) for r in results):
        return SOURCE
    match eqn.primitive.name:
        case "broadcast_in_dim":
            return SPLIT
        case "iota" if isinstance(r := results[0], Batched) and r.axis != eqn.params["dimension"]:
            return SPLIT
        case "random_bits" if ledger.draw_per_microbatch:
            return DRAW
        case _:
            return SOURCE


def _nested(
    ledger: Ledger, scope: _Scope, place: Place, eqn: jc.JaxprEqn, doubled: jc.JaxprEqn, states: list[State]
) -> Step:
    """Enter the bodies of a loop, condition or rematerialised region."""

    def enter(role: object, body: Any, twin: Any, inputs: Sequence[State], straight: bool) -> Block:
        inner = _Scope(place=(*place, role), straight=straight and scope.straight)
        return _block(ledger, inner, body, twin, inputs)

    partial = [i for i, s in enumerate(states) if isinstance(s, Partial)]
    finish = scope.top and bool(partial)
    if not (finish and jc.ad_phase(eqn) is None):
        try:
            return _enter(enter, eqn, doubled, states, ())
        except (NotSplittable, Unsupported):
            if not finish:
                raise
    whole = [completed(s) if isinstance(s, Partial) else s for s in states]
    return _enter(enter, eqn, doubled, whole, partial)


def _enter(
    enter: Enter, eqn: jc.JaxprEqn, doubled: jc.JaxprEqn, states: list[State], complete: Sequence[int]
) -> Step:
    nested = nested_step(enter, eqn, doubled, states)
    uses = [COMPLETE if i in complete else use for i, use in enumerate(nested.uses)]
    return replace(nested, uses=tuple(uses))


def input_states(full: jc.ClosedJaxpr, doubled: jc.ClosedJaxpr, stateful: Mapping[int, bool]) -> list[State]:
    """The states of a step's inputs."""
    pairs = zip(jc.open_jaxpr(full)[0].invars, jc.open_jaxpr(doubled)[0].invars, strict=True)
    return [
        _sliced_state(var.aval, twin.aval, Trail(stateful=stateful[i])) for i, (var, twin) in enumerate(pairs)
    ]
