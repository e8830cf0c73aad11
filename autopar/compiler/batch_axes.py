"""Find out where the batch is in every value of a train step, and what each equation does for one microbatch.

An abstract interpretation of the program at the full batch, beside the same program at twice the batch: an
axis whose size differs is the batch axis. Every value gets a state (`batch_states`), every equation a step
(`batch_steps`):

    batch input    Batched       reduce over the batch    Partial, until a use that is not linear
    other input    Invariant     nonlinear use            accumulated: Invariant, one round later

A reduction that depends on the batch alone is taken of the whole batch before the microbatches, which makes
masked means exact. One that depends on the state and meets the same examples again (batch normalisation) is
refused, or, on request, taken within each microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.compiler.batch_bodies import Enter, body_avals_differ, has_bodies, nested_step
from autopar.compiler.batch_equation import Scope, flat_step, make_step, sliced_state
from autopar.compiler.batch_ledger import Ledger, Place
from autopar.compiler.batch_sites import batch_axes, refuse
from autopar.compiler.batch_states import (
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
from autopar.compiler.batch_steps import COMPLETE, LOOPS, SPLIT, WHOLE, Block, Step, needed_whole
from autopar.compiler.jaxprs import compat as jc
from autopar.errors import NotSplittable, Unsupported


def analyse(ledger: Ledger, full: jc.ClosedJaxpr, doubled: jc.ClosedJaxpr, inputs: Sequence[State]) -> Block:
    """The steps of one microbatch for every equation of `full`, whose inputs are in the states given."""
    while True:
        block = _block(ledger, Scope(), full, doubled, inputs)
        known = (ledger.local, ledger.apart)
        ledger.local = ledger.local | ledger.found
        ledger.apart = ledger.apart | _wanted_once(ledger, block)
        if (ledger.local, ledger.apart) == known:
            return block


def _wanted_once(ledger: Ledger, block: Block) -> set[Place]:
    """Equations whose shared results leave the microbatches without an accumulation."""
    once = [*block.outputs, *(s for step in block.steps if step.mode == WHOLE for s in step.operands)]
    repeated = trails(s for s in once if isinstance(s, Invariant)).repeated
    return {place for bit, place in ledger.repeating.items() if repeated & bit}


def _block(ledger: Ledger, scope: Scope, full: Any, doubled: Any, inputs: Sequence[State]) -> Block:
    jaxpr, consts = jc.open_jaxpr(full)
    double, _ = jc.open_jaxpr(doubled)
    _check_same_structure(jaxpr, double)
    scope.states.update(zip(jaxpr.invars, inputs, strict=True))
    for var, twin in zip(jaxpr.constvars, double.constvars, strict=True):
        scope.states[var] = sliced_state(var.aval, twin.aval, Trail())
    scope.constants.update(zip(jaxpr.constvars, consts))
    steps: list[Step] = []
    for number, (eqn, twin) in enumerate(zip(jaxpr.eqns, double.eqns, strict=True)):
        for step in _steps(ledger, scope, (*scope.place, number), eqn, twin):
            scope.states.update(zip(step.eqn.outvars, step.results, strict=True))
            scope.producers.update(dict.fromkeys(step.eqn.outvars, step.eqn))
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
        if eqn.primitive is not twin.primitive or _arity(eqn) != _arity(twin):
            found = f"with the given batch there is {jc.describe(eqn)}, with twice the batch {jc.describe(twin)}"
            raise _structure_differs(found)
    if len(jaxpr.eqns) != len(double.eqns):
        found = f"{len(jaxpr.eqns)} equations with the given batch, {len(double.eqns)} with twice the batch"
        raise _structure_differs(found)


def _arity(eqn: jc.JaxprEqn) -> tuple[int, int]:
    return len(eqn.invars), len(eqn.outvars)


def _structure_differs(found: str) -> NotSplittable:
    return NotSplittable(
        f"The program's structure depends on the batch size: {found}. A microbatch must run the same "
        "operations on fewer examples. Replace Python loops and conditions over the batch by array "
        "operations, or use num_microbatches=1."
    )


def _steps(ledger: Ledger, scope: Scope, place: Place, eqn: jc.JaxprEqn, doubled: jc.JaxprEqn) -> list[Step]:
    """The step of an equation, or of several: a loop that sums a loss and counts tokens is taken apart.

    The count depends on the batch alone and so is taken of the whole batch, by a loop that does nothing else.
    """
    step = _step(ledger, scope, place, eqn, doubled)
    if not scope.straight or step.mode == WHOLE:
        return [step]
    counts = [isinstance(r, Partial) and not r.trail.stateful for r in step.results]
    shared = [place in ledger.apart and isinstance(r, Invariant) for r in step.results]
    rest = [not a and not b for a, b in zip(counts, shared)]
    groups = [wanted for wanted in (counts, shared, rest) if any(wanted)]
    if step.bodies and len(groups) > 1:
        pairs = [(jc.only_results(eqn, wanted), jc.only_results(doubled, wanted)) for wanted in groups]
        if all(len(a) == len(b) == 1 and len(a[0].outvars) < len(eqn.outvars) for a, b in pairs):
            return [
                step
                for number, ((a,), (b,)) in enumerate(pairs)
                for step in _steps(ledger, scope, (*place, "part", number), a, b)
            ]
    return [_repeating(ledger, scope, place, step)]


def _repeating(ledger: Ledger, scope: Scope, place: Place, step: Step) -> Step:
    """Mark the shared results of an equation that is evaluated for every microbatch."""
    operands = [s for s, use in zip(step.operands, step.uses) if step.bodies and use != COMPLETE]
    varies = any(map(_varies, (*operands, *step.results)))
    if not scope.top or not varies or not any(isinstance(r, Invariant) for r in step.results):
        return step
    results = [
        _marked(ledger, place, r, v.aval) if isinstance(r, Invariant) else r
        for r, v in zip(step.results, step.eqn.outvars)
    ]
    return replace(step, results=tuple(results))


def _marked(ledger: Ledger, place: Place, state: Invariant, aval: Any) -> State:
    if place in ledger.apart:
        # The largest of equal values is that value.
        return Partial(kind="or" if aval.dtype == bool else "max", trail=state.trail)
    return replace(state, trail=replace(state.trail, repeated=ledger.repeats(place)))


def _step(ledger: Ledger, scope: Scope, place: Place, eqn: jc.JaxprEqn, doubled: jc.JaxprEqn) -> Step:
    states = [scope.read(atom) for atom in eqn.invars]
    nested = has_bodies(eqn) and (any(map(_varies, states)) or body_avals_differ(eqn, doubled))
    try:
        if any(isinstance(s, Whole) for s in states):
            refuse(eqn, "mixes the batch's examples")
        step = (
            _nested(ledger, scope, place, eqn, doubled, states)
            if nested
            else flat_step(ledger, scope, place, eqn, doubled, states)
        )
    except (NotSplittable, Unsupported):
        if _can_be_whole(scope, eqn, states):
            return _whole(eqn, doubled, states)
        if ledger.num_microbatches == 1:
            return _alone(eqn, doubled, states)
        raise
    shared = nested and any(map(_varies, states)) and any(isinstance(r, Invariant) for r in step.results)
    reduced = shared or any(isinstance(r, Partial | Whole) for r in step.results)
    if reduced and _can_be_whole(scope, eqn, states):
        # What depends on the batch alone is exact and shared if it is taken of the whole batch.
        return _whole(eqn, doubled, states)
    return replace(step, operands=tuple(states))


def _varies(state: State) -> bool:
    return not isinstance(state, Invariant)


def _can_be_whole(scope: Scope, eqn: jc.JaxprEqn, states: Sequence[State]) -> bool:
    """Whether the equation can be evaluated on the whole batch: no state is involved."""
    apart = all(isinstance(s, Invariant | Batched | Whole) and not s.trail.stateful for s in states)
    return scope.straight and apart and not eqn.effects


def _whole(eqn: jc.JaxprEqn, doubled: jc.JaxprEqn, states: Sequence[State]) -> Step:
    trail = trails(states)
    results = [sliced_state(v.aval, w.aval, trail) for v, w in zip(eqn.outvars, doubled.outvars)]
    return make_step(eqn, doubled, WHOLE, states, results)


def _alone(eqn: jc.JaxprEqn, doubled: jc.JaxprEqn, states: Sequence[State]) -> Step:
    """The only microbatch may mix its examples: they are all there are."""
    trail = trails(states)
    axes = [batch_axes(v.aval, w.aval) for v, w in zip(eqn.outvars, doubled.outvars)]
    results = [Batched(axis=a[0], trail=trail) if a else Local(trail=trail) for a in axes]
    return make_step(eqn, doubled, SPLIT, states, results)


def _nested(
    ledger: Ledger, scope: Scope, place: Place, eqn: jc.JaxprEqn, doubled: jc.JaxprEqn, states: list[State]
) -> Step:
    """Enter the bodies of a loop, condition or rematerialised region."""

    def enter(role: object, body: Any, twin: Any, inputs: Sequence[State], atoms: Sequence[Any]) -> Block:
        straight = scope.straight and eqn.primitive.name not in LOOPS
        inner = scope.inside((*place, role), straight, jc.open_jaxpr(body)[0].invars, atoms)
        return _block(ledger, inner, body, twin, inputs)

    partial = [i for i, s in enumerate(states) if isinstance(s, Partial)]
    finish = scope.top and bool(partial)
    if not (finish and jc.ad_phase(eqn) is None):
        try:
            return _enter(ledger, enter, eqn, doubled, states, ())
        except (NotSplittable, Unsupported):
            if not finish:
                raise
    whole: list[State] = [completed(s) if isinstance(s, Partial) else s for s in states]
    return _enter(ledger, enter, eqn, doubled, whole, partial)


def _enter(
    ledger: Ledger,
    enter: Enter,
    eqn: jc.JaxprEqn,
    doubled: jc.JaxprEqn,
    states: list[State],
    complete: Sequence[int],
) -> Step:
    nested = nested_step(enter, eqn, doubled, states)
    if eqn.primitive.name == "cond":
        merged = Local(trail=trails(states[1:]))
        ledger.check_crossing(eqn, [states[0], merged])
    uses = [COMPLETE if i in complete else use for i, use in enumerate(nested.uses)]
    return replace(nested, uses=tuple(uses))


def input_states(full: jc.ClosedJaxpr, doubled: jc.ClosedJaxpr, stateful: Mapping[int, bool]) -> list[State]:
    """The states of a step's inputs."""
    pairs = zip(jc.open_jaxpr(full)[0].invars, jc.open_jaxpr(doubled)[0].invars, strict=True)
    return [sliced_state(var.aval, twin.aval, Trail(stateful=stateful[i])) for i, (var, twin) in enumerate(pairs)]
