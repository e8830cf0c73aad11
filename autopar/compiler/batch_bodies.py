"""Carry the states of a microbatch through loops, conditions and rematerialised regions.

    scan, while    the carry's state is the fixed point of `initial or result`; what decides the number of
                   rounds must be the same for every example
    cond           all branches are entered, and their results joined
    remat2, jit    one body, entered as if its equations stood outside

A body cannot accumulate over the microbatches: its sums are completed by the equations after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autopar.compiler.batch_sites import batch_axes, refuse
from autopar.compiler.batch_states import (
    Batched,
    Invariant,
    Local,
    State,
    Whole,
    joined,
    use_as,
)
from autopar.compiler.batch_steps import CALLS, KEEP, LOOPS, NESTED, REMATS, Block, Step
from autopar.compiler.jaxprs import compat as jc

Enter = Callable[[object, Any, Any, Sequence[State], Sequence[Any]], Block]
"""Analyse a body, given its role, the body, its twin at the doubled batch, its inputs' states and values."""


def has_bodies(eqn: jc.JaxprEqn) -> bool:
    """Whether the equation is one of those whose bodies are entered."""
    return eqn.primitive.name in ("cond", *LOOPS, *REMATS, *CALLS)


def body_avals_differ(eqn: jc.JaxprEqn, doubled: jc.JaxprEqn) -> bool:
    """Whether a value in the equation's bodies grows with the batch."""
    if any(batch_axes(v.aval, w.aval) for v, w in zip(eqn.outvars, doubled.outvars)):
        return True
    for body, twin in zip(jc.subjaxprs(eqn), jc.subjaxprs(doubled)):
        inner, other = jc.open_jaxpr(body)[0].eqns, jc.open_jaxpr(twin)[0].eqns
        if len(inner) != len(other) or any(map(body_avals_differ, inner, other)):
            return True
    return False


def nested_step(enter: Enter, eqn: jc.JaxprEqn, doubled: jc.JaxprEqn, states: list[State]) -> Step:
    """What one microbatch does for an equation with bodies."""
    match eqn.primitive.name:
        case "scan":
            return _scan(enter, eqn, doubled, states)
        case "while":
            return _while(enter, eqn, doubled, states)
        case "cond":
            return _cond(enter, eqn, doubled, states)
        case _:
            return _once(enter, eqn, doubled, states)


def _scan(enter: Enter, eqn: jc.JaxprEqn, doubled: jc.JaxprEqn, states: list[State]) -> Step:
    loop, twin = jc.loop_of(eqn), jc.loop_of(doubled)
    if loop.length != twin.length:
        refuse(eqn, "is a loop over the batch's examples")
    first_x = loop.num_consts + loop.num_carry
    consts, initial, xs = states[: loop.num_consts], states[loop.num_consts : first_x], states[first_x:]
    inner_xs = [_moved(x, -1) for x in xs]

    def run(carry: Sequence[State]) -> Block:
        atoms = [*eqn.invars[: loop.num_consts], *(None for _ in (*initial, *xs))]
        return enter("body", loop.body, twin.body, [*consts, *carry, *inner_xs], atoms)

    block, carry = _fixed_point(eqn, run, initial)
    ys = [_moved(y, 1) for y in block.outputs[loop.num_carry :]]
    uses = [*(KEEP for _ in consts), *map(use_as, initial, carry), *(KEEP for _ in xs)]
    body = replace(block, output_uses=(*map(use_as, block.outputs, carry), *(KEEP for _ in ys)))
    return _nested_step(eqn, doubled, states, [*carry, *ys], uses, (body,))


def _moved(state: State, by: int) -> State:
    """The state of one slice along the leading axis, or of the stacked slices."""
    return replace(state, axis=state.axis + by) if isinstance(state, Batched) else state


def _fixed_point(
    eqn: jc.JaxprEqn, run: Callable[[Sequence[State]], Block], initial: Sequence[State]
) -> tuple[Block, list[State]]:
    """The body under the weakest states that hold for its carry in every round."""
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


def _while(enter: Enter, eqn: jc.JaxprEqn, doubled: jc.JaxprEqn, states: list[State]) -> Step:
    p, q = eqn.params, doubled.params
    num_cond, first = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    cond_consts, body_consts, initial = states[:num_cond], states[num_cond:first], states[first:]

    def run(carry: Sequence[State]) -> Block:
        atoms = [*eqn.invars[num_cond:first], *(None for _ in initial)]
        return enter("body", p["body_jaxpr"], q["body_jaxpr"], [*body_consts, *carry], atoms)

    block, carry = _fixed_point(eqn, run, initial)
    atoms = [*eqn.invars[:num_cond], *(None for _ in initial)]
    test = enter("test", p["cond_jaxpr"], q["cond_jaxpr"], [*cond_consts, *carry], atoms)
    (decides,) = test.outputs
    if not isinstance(decides, Invariant | Local):
        refuse(
            eqn,
            "repeats until a condition on the batch's examples holds, so the number of rounds depends on all",
        )
    if isinstance(decides, Local):
        carry = [Local(trail=s.trail | decides.trail) if isinstance(s, Invariant) else s for s in carry]
    uses = [*(KEEP for _ in (*cond_consts, *body_consts)), *map(use_as, initial, carry)]
    body = replace(block, output_uses=tuple(map(use_as, block.outputs, carry)))
    carry = [replace(s, trail=s.trail | decides.trail) for s in carry]
    return _nested_step(eqn, doubled, states, carry, uses, (replace(test, output_uses=(KEEP,)), body))


def _cond(enter: Enter, eqn: jc.JaxprEqn, doubled: jc.JaxprEqn, states: list[State]) -> Step:
    decides, operands = states[0], states[1:]
    if not isinstance(decides, Invariant | Local):
        refuse(eqn, "chooses a branch by a condition on the batch's examples, so one microbatch cannot know it")
    branches = zip(eqn.params["branches"], doubled.params["branches"], strict=True)
    blocks = [enter(i, a, b, operands, eqn.invars[1:]) for i, (a, b) in enumerate(branches)]
    results = list(blocks[0].outputs)
    for block in blocks[1:]:
        results = [_join(eqn, a, b) for a, b in zip(results, block.outputs)]
    results = [replace(r, trail=r.trail | decides.trail) for r in results]
    if isinstance(decides, Local):
        results = [Local(trail=r.trail) if isinstance(r, Invariant) else r for r in results]
    bodies = [replace(b, output_uses=tuple(map(use_as, b.outputs, results))) for b in blocks]
    return _nested_step(eqn, doubled, states, results, [KEEP] * len(states), bodies)


def _once(enter: Enter, eqn: jc.JaxprEqn, doubled: jc.JaxprEqn, states: list[State]) -> Step:
    (inner,), (twin,) = jc.subjaxprs(eqn), jc.subjaxprs(doubled)
    block = enter("body", inner, twin, states, eqn.invars)
    body = replace(block, output_uses=(KEEP,) * len(block.outputs))
    return _nested_step(eqn, doubled, states, block.outputs, [KEEP] * len(states), (body,))


def _nested_step(
    eqn: jc.JaxprEqn,
    doubled: jc.JaxprEqn,
    states: Sequence[State],
    results: Sequence[State],
    uses: Sequence[str],
    bodies: Sequence[Block],
) -> Step:
    if any(isinstance(r, Whole) for r in results):
        refuse(eqn, "makes an axis that is not proportional to the batch")
    return Step(
        eqn=eqn,
        doubled=doubled,
        mode=NESTED,
        uses=tuple(uses),
        operands=tuple(states),
        results=tuple(results),
        bodies=tuple(bodies),
    )
