"""Estimate the memory that a device needs for a step, as XLA would allocate it: liveness over the local program.

    LocalBlock  ->  MemoryEstimate

    peak = arguments + max over time of (temporaries and results alive)

Donated arguments take the results of their shape. A loop needs, on top of what is alive around it, what its body
needs; the stacks that it reads and writes are alive throughout. A remat region is only alive while it runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from autopar.compiler import jax_compat as jc
from autopar.compiler.costs import aval_bytes
from autopar.compiler.intra_op.free_values import is_small
from autopar.compiler.intra_op.layout import LogicalMesh, describe_layout, num_shards, replicated
from autopar.compiler.intra_op.lifetimes import Key, Lifetime, Work, is_dear, kind_of, lifetimes
from autopar.compiler.intra_op.local_program import Action, Enter, Evaluate, LocalBlock, Reshard, Value, operands_of
from autopar.compiler.intra_op.resharding_steps import Step, after, collective_kind

_NUM_LARGEST = 10


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """What one device holds at the worst moment of a step."""

    peak_bytes: float
    arguments_bytes: float
    at: str
    """The equation that runs at that moment."""
    largest: tuple[tuple[str, float], ...]
    """What is in memory then, the largest first: descriptions and bytes."""


class _Alive(NamedTuple):
    description: str
    nbytes: float


class _Moment(NamedTuple):
    """What is in memory at one time, the inputs of the block aside."""

    nbytes: float
    at: str
    alive: tuple[_Alive, ...]


def peak_memory(block: LocalBlock, mesh: LogicalMesh, donated: Collection[int] = ()) -> MemoryEstimate:
    """The estimate for a whole step; `donated` are the numbers of the inputs that it may overwrite."""
    arguments = [
        _Alive(_made(value, None, mesh).replace("slice of a stack", f"input {number}"), _nbytes(value, mesh))
        for number, value in enumerate(block.inputs)
    ]
    moment = _worst(block, mesh, _pairs(block, donated))
    total = sum(each.nbytes for each in arguments)
    largest = sorted((*arguments, *moment.alive), key=lambda each: -each.nbytes)
    return MemoryEstimate(
        peak_bytes=total + moment.nbytes,
        arguments_bytes=total,
        at=moment.at,
        largest=tuple((each.description, each.nbytes) for each in largest[:_NUM_LARGEST]),
    )


def _pairs(block: LocalBlock, donated: Collection[int]) -> dict[int, int]:
    """By output, the donated input that it takes: as JAX does it, the first of the same shape, type and layout."""
    left: dict[Any, list[int]] = {}
    for number in sorted(donated):
        left.setdefault(_type(block.inputs[number]), []).append(number)
    found: dict[int, int] = {}
    for number, value in enumerate(block.outputs):
        if isinstance(value, Value) and left.get(_type(value)):
            found[number] = left[_type(value)].pop(0)
    return found


def _type(value: Value) -> Any:
    return value.variable.aval.shape, value.variable.aval.dtype, value.layout


def _worst(
    block: LocalBlock,
    mesh: LogicalMesh,
    pairs: dict[int, int],
    stacked: Collection[int] = (),
    sliced: Collection[int] = (),
) -> _Moment:
    """The moment of most memory.

    `pairs` are outputs that take an input's place, `stacked` those copied out at once, `sliced` inputs that are copies.
    """
    inner = [_inside(action, mesh) for action in block.actions]
    alive = _allocations(block, mesh, pairs, stacked, sliced)
    changes = [0.0] * (len(block.actions) + 2)
    for life, each in alive:
        changes[max(life.start, 0)] += each.nbytes
        changes[max(life.stop, 0)] -= each.nbytes
    levels = list(itertools.accumulate(changes))
    inside = [0.0 if moment is None else moment.nbytes for moment in inner]
    totals = [level + extra for level, extra in zip(levels, [*inside, 0.0, 0.0], strict=True)]
    time = max(range(len(totals)), key=totals.__getitem__)
    action = block.actions[time] if time < len(block.actions) else None
    moment = None if action is None else inner[time]
    return _Moment(
        totals[time],
        "the end" if action is None else moment.at if moment is not None else _named(action),
        (*(each for life, each in alive if life.start <= time < life.stop), *(moment.alive if moment else ())),
    )


def _allocations(
    block: LocalBlock, mesh: LogicalMesh, pairs: dict[int, int], stacked: Collection[int], sliced: Collection[int]
) -> list[tuple[Lifetime, _Alive]]:
    """What the block allocates, inputs aside, times counted from its first action."""
    slices = Work("fused", (), tuple(block.inputs[number] for number in sliced))
    works = [slices, *map(_work, block.actions)]
    inputs = [v for number, v in enumerate(block.inputs) if number not in sliced]
    outputs = [v for number, v in enumerate(block.outputs) if isinstance(v, Value) and number not in stacked]
    makers = {v: action for action in block.actions for v in _results(action)}
    extent: dict[Key, float] = {v: _nbytes(v, mesh) for v in (*block.inputs, *makers)}
    lives = lifetimes(works, inputs, outputs, extent)
    for number, source in pairs.items():
        mine, taken = lives.get(block.outputs[number]), lives.get(block.inputs[source])
        # The result is written over the input, unless that is read later.
        if mine is not None and taken is not None and mine.start >= 0 and taken.stop <= mine.start + 1:
            mine.stop = mine.start
    return [
        (Lifetime(start=life.start - 1, stop=life.stop - 1), _Alive(_made(v, makers.get(v), mesh), extent[v]))
        for v, life in lives.items()
        if life.start >= 0 and isinstance(v, Value)
    ]


def _work(action: Action) -> Work:
    reads = tuple(v for v in operands_of(action) if not is_small(v.variable.aval))
    results = tuple(v for v in _results(action) if not is_small(v.variable.aval))
    match action:
        case Reshard(operand=operand, steps=steps):
            moved = [step for step in steps if collective_kind(step) is not None]
            return Work("apart" if moved else "fused", reads[:1] if isinstance(operand, Value) else (), results)
        case Evaluate(eqn=eqn):
            kind = kind_of(eqn)
            return Work("fused" if kind == "view" and not reads else kind, reads, results, dear=is_dear(eqn))
        case Enter(eqn=eqn):
            return Work("apart", reads, results, late=eqn.primitive.name not in ("scan", "while"))


def _inside(action: Action, mesh: LogicalMesh) -> _Moment | None:
    """What an action needs while it runs, besides its operands and results."""
    match action:
        case Reshard(operand=operand, result=result, steps=steps):
            return _between(operand, result, steps, mesh)
        case Evaluate():
            return None
        case Enter(eqn=eqn, bodies=bodies):
            moments = [_body(eqn, number, body, mesh) for number, body in enumerate(bodies)]
            return max(moments, key=lambda moment: moment.nbytes)


def _between(operand: Value | jc.Literal, result: Value, steps: Sequence[Step], mesh: LogicalMesh) -> _Moment | None:
    """The largest form between two layouts."""
    if len(steps) < 2:
        return None
    aval: Any = result.variable.aval
    layout = operand.layout if isinstance(operand, Value) else replicated(aval.ndim)
    sizes: list[float] = []
    for step in steps[:-1]:
        layout = after(layout, step)
        sizes.append(aval_bytes(aval) / num_shards(layout, mesh))
    what = f"reshard {aval.str_short()}"
    return _Moment(max(sizes), what, (_Alive(f"{what}, on the way", max(sizes)),))


def _body(eqn: jc.JaxprEqn, number: int, body: LocalBlock, mesh: LogicalMesh) -> _Moment:
    match eqn.primitive.name:
        case "scan":
            loop = jc.loop_of(eqn)
            first = loop.num_consts + loop.num_carry
            pairs = {k: loop.num_consts + k for k in range(loop.num_carry)}
            sliced, stacked = range(first, len(body.inputs)), range(loop.num_carry, len(body.outputs))
            return _worst(body, mesh, pairs, stacked, sliced)
        case "while" if number == 1:
            consts = jc.while_of(eqn).body_consts
            return _worst(body, mesh, {k: consts + k for k in range(len(body.outputs))})
        case _:
            return _worst(body, mesh, {})


def _results(action: Action) -> tuple[Value, ...]:
    return (action.result,) if isinstance(action, Reshard) else action.results


def _nbytes(value: Value, mesh: LogicalMesh) -> float:
    return aval_bytes(value.variable.aval) / num_shards(value.layout, mesh)


def _named(action: Action) -> str:
    if isinstance(action, Reshard):
        return f"reshard {action.result.variable.aval.str_short()}"
    scope = jc.scope_of(action.eqn)
    return f"{action.eqn.primitive.name} in {scope}" if scope else action.eqn.primitive.name


def _made(value: Value, maker: Action | None, mesh: LogicalMesh) -> str:
    by = "slice of a stack" if maker is None else "reshard" if isinstance(maker, Reshard) else _named(maker)
    return f"{value.variable.aval.str_short()} {describe_layout(value.layout, mesh)} of {by}"
