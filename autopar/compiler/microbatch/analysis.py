"""Find out where the batch is in every value of a train step, and what each equation does for one microbatch.

An abstract interpretation of the program at the full batch, beside the same program at another batch: an
axis whose size differs is the batch axis. Every value gets a `State`, every equation a
`MicrobatchStep`:

    batch input    Batched       reduce over the batch    Partial, until a use that is not linear
    other input    Invariant     nonlinear use            accumulated: Invariant, one round later

The bodies of an equation are entered with the states of its operands:

    scan, while    the carry's state is the fixed point of `initial or result`; what decides the number of
                   rounds must be the same for every example, but for the loops of `row_loops`
    cond           all branches are entered, and their results joined
    remat2, jit    one body, entered as if its equations stood outside

A body cannot accumulate over the microbatches: its sums are completed by the equations after it.

A reduction that depends on the batch alone is taken of the whole batch before the microbatches, which makes
masked means exact. One that depends on the state and meets the same examples again (batch normalisation) is
completed first, and they go on in a further round; on request it is taken within each microbatch, without waiting.
What mixes the examples without parameters (the pairs of a contrastive loss) is evaluated once, on the rows of all
microbatches, and each goes on with its own rows of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.compiler.frontend.batch_dimensions import batch_axes
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs import primitives
from autopar.compiler.microbatch.equations import Scope, flat_step, make_step, sliced_state, with_rows
from autopar.compiler.microbatch.row_loops import row_loop_step
from autopar.compiler.microbatch.states import (
    CALLS,
    COMPLETE,
    KEEP,
    NESTED,
    SOURCE,
    SPLIT,
    WHOLE,
    AnalysisState,
    Batched,
    BatchSizes,
    EquationPlace,
    Invariant,
    Local,
    MicrobatchBlock,
    MicrobatchStep,
    Partial,
    Provenance,
    State,
    Unfinished,
    Whole,
    completed,
    describe_beside,
    joined,
    needed_whole,
    provenances,
    refuse,
    shape_of,
    use_as,
)
from autopar.errors import NotSplittable, Unsupported


def analyse(
    analysis: AnalysisState, full: jc.ClosedJaxpr, at_other_batch: jc.ClosedJaxpr, inputs: Sequence[State]
) -> MicrobatchBlock:
    """Return the steps of one microbatch for every equation of `full`, whose inputs are in the states given."""
    while True:
        block = _block(analysis, Scope(), full, at_other_batch, inputs)
        known = (analysis.local, analysis.apart)
        analysis.local = analysis.local | analysis.crossing
        analysis.apart = analysis.apart | _wanted_once(analysis, block)
        if (analysis.local, analysis.apart) == known:
            return block


def input_states(
    sizes: BatchSizes, full: jc.ClosedJaxpr, at_other_batch: jc.ClosedJaxpr, stateful: Mapping[int, bool]
) -> list[State]:
    """Return the states of a step's inputs."""
    pairs = zip(jc.open_jaxpr(full)[0].invars, jc.open_jaxpr(at_other_batch)[0].invars, strict=True)
    return [
        sliced_state(sizes, var.aval, twin.aval, Provenance(stateful=stateful[i]))
        for i, (var, twin) in enumerate(pairs)
    ]


def _wanted_once(analysis: AnalysisState, block: MicrobatchBlock) -> set[EquationPlace]:
    """Equations whose shared results leave the microbatches without an accumulation."""
    once = [*block.outputs, *(s for step in block.steps if step.mode == WHOLE for s in step.operands)]
    repeated = provenances(s for s in once if isinstance(s, Invariant)).repeated
    return {place for bit, place in analysis.repeating.items() if repeated & bit}


def _block(
    analysis: AnalysisState, scope: Scope, full: Any, at_other_batch: Any, inputs: Sequence[State]
) -> MicrobatchBlock:
    jaxpr, consts = jc.open_jaxpr(full)
    other, _ = jc.open_jaxpr(at_other_batch)
    _check_same_structure(jaxpr, other)
    scope.states.update(zip(jaxpr.invars, inputs, strict=True))
    for var, twin in zip(jaxpr.constvars, other.constvars, strict=True):
        scope.states[var] = sliced_state(analysis.sizes, var.aval, twin.aval, Provenance())
    scope.constants.update(zip(jaxpr.constvars, consts))
    steps: list[MicrobatchStep] = []
    for number, (eqn, twin) in enumerate(zip(jaxpr.eqns, other.eqns, strict=True)):
        for step in _steps(analysis, scope, (*scope.place, number), eqn, twin):
            scope.states.update(zip(step.eqn.outvars, step.results, strict=True))
            scope.producers.update(dict.fromkeys(step.eqn.outvars, step.eqn))
            steps.append(step)
    return MicrobatchBlock(
        jaxpr=jaxpr,
        consts=consts,
        steps=tuple(steps),
        inputs=tuple(inputs),
        outputs=tuple(scope.read(v) for v in jaxpr.outvars),
        needed_whole=needed_whole(tuple(steps), scope.states, scope.top),
        constants={v: scope.states[v] for v in jaxpr.constvars},
    )


def _check_same_structure(jaxpr: jc.Jaxpr, other: jc.Jaxpr) -> None:
    for eqn, twin in zip(jaxpr.eqns, other.eqns):
        if eqn.primitive is not twin.primitive or _arity(eqn) != _arity(twin):
            other_is = describe_beside(eqn, [twin])
            difference = f"with the given batch there is {jc.describe(eqn)}, with another batch {other_is}"
            raise _structure_differs(difference)
    if len(jaxpr.eqns) != len(other.eqns):
        difference = f"{len(jaxpr.eqns)} equations with the given batch, {len(other.eqns)} with another batch"
        raise _structure_differs(difference)


def _arity(eqn: jc.JaxprEqn) -> tuple[int, int]:
    return len(eqn.invars), len(eqn.outvars)


def _structure_differs(difference: str) -> NotSplittable:
    return NotSplittable(
        f"The program's structure depends on the batch size: {difference}. A microbatch must run the same "
        "operations on fewer examples. Replace Python loops and conditions over the batch by array "
        "operations, or use num_microbatches=1."
    )


def _steps(
    analysis: AnalysisState, scope: Scope, place: EquationPlace, eqn: jc.JaxprEqn, at_other_batch: jc.JaxprEqn
) -> list[MicrobatchStep]:
    """Return the step of an equation, or several: a loop that sums a loss and counts tokens is taken apart.

    The count depends on the batch alone and so is taken of the whole batch, by a loop that does nothing else.
    """
    step = _step(analysis, scope, place, eqn, at_other_batch)
    if not scope.straight or step.mode == WHOLE:
        return [step]
    if not step.bodies:
        return [_repeating(analysis, scope, place, step)]
    counts = [isinstance(r, Partial) and not r.provenance.stateful for r in step.results]
    shared = [place in analysis.apart and isinstance(r, Invariant) for r in step.results]
    rest = [not a and not b for a, b in zip(counts, shared)]
    groups = [wanted for wanted in (counts, shared, rest) if any(wanted)]
    if len(groups) > 1:
        pairs = [(jc.only_results(eqn, wanted), jc.only_results(at_other_batch, wanted)) for wanted in groups]
        if all(len(a) == len(b) == 1 and len(a[0].outvars) < len(eqn.outvars) for a, b in pairs):
            return [
                step
                for number, ((a,), (b,)) in enumerate(pairs)
                for step in _steps(analysis, scope, (*place, "part", number), a, b)
            ]
    return [_repeating(analysis, scope, place, step)]


def _repeating(analysis: AnalysisState, scope: Scope, place: EquationPlace, step: MicrobatchStep) -> MicrobatchStep:
    """Mark the shared results of an equation that is evaluated for every microbatch."""
    if not scope.top or not any(isinstance(r, Invariant) for r in step.results):
        return step
    operands = [s for s, use in zip(step.operands, step.uses) if step.bodies and use != COMPLETE]
    if not any(map(_varies, (*operands, *step.results))):
        return step
    results = [
        _marked(analysis, place, r, v.aval) if isinstance(r, Invariant) else r
        for r, v in zip(step.results, step.eqn.outvars)
    ]
    return replace(step, results=tuple(results))


def _marked(analysis: AnalysisState, place: EquationPlace, state: Invariant, aval: Any) -> State:
    if place in analysis.apart:
        # The largest of equal values is that value.
        return Partial(kind="or" if aval.dtype == bool else "max", provenance=state.provenance)
    return replace(state, provenance=replace(state.provenance, repeated=analysis.repeats(place)))


def _step(
    analysis: AnalysisState, scope: Scope, place: EquationPlace, eqn: jc.JaxprEqn, at_other_batch: jc.JaxprEqn
) -> MicrobatchStep:
    states = [scope.read(atom) for atom in eqn.invars]
    if scope.top and _stays_gathered(eqn, states):  # it began as rows of all, so that no further round waits for it
        return _gathered(analysis, place, eqn, at_other_batch, states)
    nested = has_bodies(eqn) and (any(map(_varies, states)) or body_avals_differ(eqn, at_other_batch))
    try:
        if any(isinstance(s, Whole) for s in states):
            refuse(eqn, "mixes the batch's examples")
        step = row_loop_step(analysis, place, eqn, at_other_batch, states, top=scope.top) if nested else None
        step = step or (
            _nested(analysis, scope, place, eqn, at_other_batch, states)
            if nested
            else flat_step(analysis, scope, place, eqn, at_other_batch, states)
        )
    except (NotSplittable, Unsupported) as error:
        if _can_be_whole(scope, eqn, states):
            return _whole(analysis, eqn, at_other_batch, states)
        if analysis.num_microbatches == 1:
            return _alone(eqn, at_other_batch, states)
        if isinstance(error, NotSplittable) and _can_be_gathered(eqn, states):
            if scope.top:
                return _gathered(analysis, place, eqn, at_other_batch, states)
            raise Unfinished(str(error)) from error
        raise
    shared = nested and any(map(_varies, states)) and any(isinstance(r, Invariant) for r in step.results)
    reduced = shared or any(isinstance(r, Partial | Whole) for r in step.results)
    if reduced and _can_be_whole(scope, eqn, states):
        # What depends on the batch alone is exact and shared if it is taken of the whole batch.
        return _whole(analysis, eqn, at_other_batch, states)
    operands = tuple(states)
    return step if step.operands == operands else replace(step, operands=operands)


def _varies(state: State) -> bool:
    return not isinstance(state, Invariant)


def _can_be_whole(scope: Scope, eqn: jc.JaxprEqn, states: Sequence[State]) -> bool:
    """Return whether the equation can be evaluated on the whole batch: no state is involved."""
    apart = all(isinstance(s, Invariant | Batched | Whole) and not s.provenance.stateful for s in states)
    return scope.straight and apart and not eqn.effects


def _whole(
    analysis: AnalysisState, eqn: jc.JaxprEqn, at_other_batch: jc.JaxprEqn, states: Sequence[State]
) -> MicrobatchStep:
    provenance = provenances(states)
    pairs = zip(eqn.outvars, at_other_batch.outvars)
    results = [sliced_state(analysis.sizes, v.aval, w.aval, provenance) for v, w in pairs]
    return make_step(eqn, at_other_batch, WHOLE, states, results)


def _can_be_gathered(eqn: jc.JaxprEqn, states: Sequence[State]) -> bool:
    """Return whether an equation may be evaluated on the rows of all microbatches.

    A product with a parameter is the work of a layer, which is to be split.
    """
    of_layer = eqn.primitive.name in primitives.PRODUCTS and _reads_parameter(eqn, states)
    local = any(isinstance(s, Local) for s in states)
    return not (of_layer or local or has_bodies(eqn) or eqn.effects)


def _stays_gathered(eqn: jc.JaxprEqn, states: Sequence[State]) -> bool:
    """Return whether all that an equation reads of the state is at hand for all microbatches."""
    stateful = [s for s in states if not isinstance(s, Invariant) and s.provenance.stateful]
    at_hand = all(isinstance(s, Whole) or (isinstance(s, Batched) and s.gathered) for s in stateful)
    return bool(stateful) and at_hand and not _reads_parameter(eqn, states) and _can_be_gathered(eqn, states)


def _reads_parameter(eqn: jc.JaxprEqn, states: Sequence[State]) -> bool:
    return any(
        isinstance(s, Invariant) and s.provenance.stateful and s.provenance.round == 0 and shape_of(atom)
        for s, atom in zip(states, eqn.invars)
    )


def _gathered(
    analysis: AnalysisState,
    place: EquationPlace,
    eqn: jc.JaxprEqn,
    at_other_batch: jc.JaxprEqn,
    states: Sequence[State],
) -> MicrobatchStep:
    """Return the step that waits for the rows of all microbatches, runs on these, and gives each its own rows again."""
    uses = [COMPLETE if isinstance(s, Batched | Partial) else KEEP for s in states]
    provenance = provenances(completed(s) if isinstance(s, Batched | Partial) else s for s in states)
    pairs = zip(eqn.outvars, at_other_batch.outvars)
    results = [sliced_state(analysis.sizes, v.aval, w.aval, provenance) for v, w in pairs]
    results = [replace(with_rows(analysis, place, r), gathered=True) if isinstance(r, Batched) else r for r in results]
    return make_step(eqn, at_other_batch, SOURCE, states, results, uses)


def _alone(eqn: jc.JaxprEqn, at_other_batch: jc.JaxprEqn, states: Sequence[State]) -> MicrobatchStep:
    """Return the step of the only microbatch, which may mix its examples: they are all there are."""
    provenance = provenances(states)
    axes = [batch_axes(v.aval, w.aval) for v, w in zip(eqn.outvars, at_other_batch.outvars)]
    results = [Batched(axis=a[0], provenance=provenance) if a else Local(provenance=provenance) for a in axes]
    return make_step(eqn, at_other_batch, SPLIT, states, results)


def _nested(
    analysis: AnalysisState,
    scope: Scope,
    place: EquationPlace,
    eqn: jc.JaxprEqn,
    at_other_batch: jc.JaxprEqn,
    states: list[State],
) -> MicrobatchStep:
    """Enter the bodies of a loop, condition or rematerialised region."""

    def enter(role: object, body: Any, twin: Any, inputs: Sequence[State], atoms: Sequence[Any]) -> MicrobatchBlock:
        straight = scope.straight and eqn.primitive.name not in primitives.LOOPS
        inner = scope.inside((*place, role), straight, jc.open_jaxpr(body)[0].invars, atoms)
        return _block(analysis, inner, body, twin, inputs)

    partial = [i for i, s in enumerate(states) if isinstance(s, Partial)]
    finish = scope.top and bool(partial)
    if not (finish and jc.ad_phase(eqn) is None):
        try:
            return _enter(analysis, enter, eqn, at_other_batch, states, ())
        except (NotSplittable, Unsupported):
            if not finish:
                raise
    whole: list[State] = [completed(s) if isinstance(s, Partial) else s for s in states]
    return _enter(analysis, enter, eqn, at_other_batch, whole, partial)


def _enter(
    analysis: AnalysisState,
    enter: AnalyseBody,
    eqn: jc.JaxprEqn,
    at_other_batch: jc.JaxprEqn,
    states: list[State],
    complete: Sequence[int],
) -> MicrobatchStep:
    nested = nested_step(enter, eqn, at_other_batch, states)
    if eqn.primitive.name == "cond":
        analysis.note_crossing([states[0], Local(provenance=provenances(states[1:]))])
    uses = [COMPLETE if i in complete else use for i, use in enumerate(nested.uses)]
    return replace(nested, uses=tuple(uses))


# Equations with bodies

AnalyseBody = Callable[[object, Any, Any, Sequence[State], Sequence[Any]], MicrobatchBlock]
"""Analyse a body, given its role, the body, its twin at another batch, its inputs' states and values."""


def has_bodies(eqn: jc.JaxprEqn) -> bool:
    """Return whether the equation is one of those whose bodies are entered."""
    return eqn.primitive.name in primitives.NESTED.union(CALLS)


def body_avals_differ(eqn: jc.JaxprEqn, at_other_batch: jc.JaxprEqn) -> bool:
    """Return whether a value in the equation's bodies grows with the batch."""
    if any(batch_axes(v.aval, w.aval) for v, w in zip(eqn.outvars, at_other_batch.outvars)):
        return True
    for body, twin in zip(jc.subjaxprs(eqn), jc.subjaxprs(at_other_batch)):
        inner, other = jc.open_jaxpr(body)[0].eqns, jc.open_jaxpr(twin)[0].eqns
        if len(inner) != len(other) or any(map(body_avals_differ, inner, other)):
            return True
    return False


def nested_step(
    enter: AnalyseBody, eqn: jc.JaxprEqn, at_other_batch: jc.JaxprEqn, states: list[State]
) -> MicrobatchStep:
    """Return the step of one microbatch for an equation with bodies."""
    match eqn.primitive.name:
        case "scan":
            return _scan(enter, eqn, at_other_batch, states)
        case "while":
            return _while(enter, eqn, at_other_batch, states)
        case "cond":
            return _cond(enter, eqn, at_other_batch, states)
        case _:
            return _once(enter, eqn, at_other_batch, states)


def _scan(enter: AnalyseBody, eqn: jc.JaxprEqn, at_other_batch: jc.JaxprEqn, states: list[State]) -> MicrobatchStep:
    loop, twin = jp.scan_of(eqn), jp.scan_of(at_other_batch)
    if loop.length != twin.length:
        refuse(eqn, "is a loop over the batch's examples", instead="Compute all of them at once (jax.vmap)")
    first_x = loop.first_x
    consts, initial, xs = states[: loop.num_consts], states[loop.num_consts : first_x], states[first_x:]
    inner_xs = [_moved(x, -1) for x in xs]

    def run(carry: Sequence[State]) -> MicrobatchBlock:
        atoms = [*eqn.invars[: loop.num_consts], *(None for _ in (*initial, *xs))]
        return enter("body", loop.body, twin.body, [*consts, *carry, *inner_xs], atoms)

    block, carry = _fixed_point(eqn, run, initial)
    ys = [_moved(y, 1) for y in block.outputs[loop.num_carry :]]
    uses = [*(KEEP for _ in consts), *map(use_as, initial, carry), *(KEEP for _ in xs)]
    body = replace(block, output_uses=(*map(use_as, block.outputs, carry), *(KEEP for _ in ys)))
    return _nested_step(eqn, at_other_batch, states, [*carry, *ys], uses, (body,))


def _moved(state: State, by: int) -> State:
    """Return the state with its batch axis moved, as from slices along the leading axis to their stack."""
    return replace(state, axis=state.axis + by) if isinstance(state, Batched) else state


def _fixed_point(
    eqn: jc.JaxprEqn, run: Callable[[Sequence[State]], MicrobatchBlock], initial: Sequence[State]
) -> tuple[MicrobatchBlock, list[State]]:
    """Analyse the body of a loop until the states of its carry hold for every round; return it and these states."""
    carry = list(initial)
    while True:
        block = run(carry)
        after = [_join(eqn, a, b) for a, b in zip(carry, block.outputs)]
        if after == carry:
            return block, carry
        carry = after


def _join(eqn: jc.JaxprEqn, a: State, b: State) -> State:
    state = joined(a, b)
    if state is None or isinstance(state, Whole):
        refuse(eqn, "gives values that mix or reduce the batch's examples in different ways")
    return state


def _while(enter: AnalyseBody, eqn: jc.JaxprEqn, at_other_batch: jc.JaxprEqn, states: list[State]) -> MicrobatchStep:
    loop, twin = jp.while_of(eqn), jp.while_of(at_other_batch)
    num_cond, first = loop.cond_consts, loop.first_carry
    cond_consts, body_consts, initial = states[:num_cond], states[num_cond:first], states[first:]

    def run(carry: Sequence[State]) -> MicrobatchBlock:
        atoms = [*eqn.invars[num_cond:first], *(None for _ in initial)]
        return enter("body", loop.body, twin.body, [*body_consts, *carry], atoms)

    block, carry = _fixed_point(eqn, run, initial)
    atoms = [*eqn.invars[:num_cond], *(None for _ in initial)]
    test = enter("test", loop.cond, twin.cond, [*cond_consts, *carry], atoms)
    (decides,) = test.outputs
    if not isinstance(decides, Invariant | Local):
        refuse(
            eqn,
            "repeats until a condition on the batch's examples holds, so the number of rounds depends on all",
        )
    if isinstance(decides, Local):
        carry = [Local(provenance=s.provenance | decides.provenance) if isinstance(s, Invariant) else s for s in carry]
    uses = [*(KEEP for _ in (*cond_consts, *body_consts)), *map(use_as, initial, carry)]
    body = replace(block, output_uses=tuple(map(use_as, block.outputs, carry)))
    carry = [replace(s, provenance=s.provenance | decides.provenance) for s in carry]
    return _nested_step(eqn, at_other_batch, states, carry, uses, (replace(test, output_uses=(KEEP,)), body))


def _cond(enter: AnalyseBody, eqn: jc.JaxprEqn, at_other_batch: jc.JaxprEqn, states: list[State]) -> MicrobatchStep:
    decides, operands = states[0], states[1:]
    if not isinstance(decides, Invariant | Local):
        refuse(eqn, "chooses a branch by a condition on the batch's examples, so one microbatch cannot know it")
    branches = zip(jp.branches_of(eqn), jp.branches_of(at_other_batch), strict=True)
    blocks = [enter(i, a, b, operands, eqn.invars[1:]) for i, (a, b) in enumerate(branches)]
    results = list(blocks[0].outputs)
    for block in blocks[1:]:
        results = [_join_branches(eqn, v, a, b) for v, a, b in zip(eqn.outvars, results, block.outputs)]
    results = [replace(r, provenance=r.provenance | decides.provenance) for r in results]
    if isinstance(decides, Local):
        results = [Local(provenance=r.provenance) if isinstance(r, Invariant) else r for r in results]
    bodies = [replace(b, output_uses=tuple(map(use_as, b.outputs, results))) for b in blocks]
    return _nested_step(eqn, at_other_batch, states, results, [KEEP] * len(states), bodies)


def _join_branches(eqn: jc.JaxprEqn, result: jc.Var, a: State, b: State) -> State:
    rows = next((shape_of(result)[s.axis] for s in (a, b) if isinstance(s, Batched)), 0)
    if joined(a, b) is None and shape_of(result).count(rows) > 1:
        # JAX gives what branches leave for the gradient one place where types are equal (_merge_branch_residuals).
        raise NotSplittable(
            f"{jc.describe(eqn)} has {result.aval.str_short()} among its results, which grows with the batch in one "
            f"branch and not in another. The batch has {rows} rows and another dimension is {rows} wide, so that JAX "
            "may have given one place to two values that the branches keep for the gradient. Use another number of "
            "rows, or num_microbatches=1."
        )
    return _join(eqn, a, b)


def _once(enter: AnalyseBody, eqn: jc.JaxprEqn, at_other_batch: jc.JaxprEqn, states: list[State]) -> MicrobatchStep:
    (inner,), (twin,) = jc.subjaxprs(eqn), jc.subjaxprs(at_other_batch)
    block = enter("body", inner, twin, states, eqn.invars)
    body = replace(block, output_uses=(KEEP,) * len(block.outputs))
    return _nested_step(eqn, at_other_batch, states, block.outputs, [KEEP] * len(states), (body,))


def _nested_step(
    eqn: jc.JaxprEqn,
    at_other_batch: jc.JaxprEqn,
    states: Sequence[State],
    results: Sequence[State],
    uses: Sequence[str],
    bodies: Sequence[MicrobatchBlock],
) -> MicrobatchStep:
    if any(isinstance(r, Whole) for r in results):
        refuse(eqn, "makes an axis that is not proportional to the batch")
    return MicrobatchStep(
        eqn=eqn,
        at_other_batch=at_other_batch,
        mode=NESTED,
        uses=tuple(uses),
        operands=tuple(states),
        results=tuple(results),
        bodies=tuple(bodies),
    )
