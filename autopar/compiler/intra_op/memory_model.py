"""Estimate the memory that a device needs for a step, as XLA would allocate it: liveness over the local program.

    LocalBlock  ->  MemoryEstimate

    peak = arguments + max over time of (temporaries and results alive)

Donated arguments take the results of their shape. A loop needs, on top of what is alive around it, what its body
needs; the stacks that it reads and writes are alive throughout. A remat region is only alive while it runs.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from autopar.compiler import jax_compat as jc
from autopar.compiler.costs import aval_bytes
from autopar.compiler.intra_op.allocation import (
    Border,
    MemoryProgram,
    Moment,
    alive,
    border_of_body,
    joins_late,
    taken_places,
    worst_moments,
)
from autopar.compiler.intra_op.free_values import is_small
from autopar.compiler.intra_op.layout import LogicalMesh, describe_layout, num_shards
from autopar.compiler.intra_op.lifetimes import Work, is_dear, kind_of, writes_over
from autopar.compiler.intra_op.local_program import Action, Enter, Evaluate, LocalBlock, Reshard, Value, operands_of
from autopar.compiler.intra_op.resharding_steps import collective_kind

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


def peak_memory(block: LocalBlock, mesh: LogicalMesh, donated: Collection[int] = ()) -> MemoryEstimate:
    """The estimate for a whole step; `donated` are the numbers of the inputs that it may overwrite."""
    border = Border(taken=taken_places([*map(_type, block.inputs)], [*map(_type, block.outputs)], donated))
    program = _program(block, mesh, border)
    (moment,) = worst_moments(program, 1)
    makers = dict(_makers(block))
    arguments = {f"input {n}: {_described(v, mesh)}": _nbytes(v, mesh) for n, v in enumerate(block.inputs)}
    total = sum(arguments.values())
    listed = [*arguments.items(), *_in_memory(moment, makers, mesh)]
    return MemoryEstimate(
        peak_bytes=total + moment.nbytes,
        arguments_bytes=total,
        at=_time_of(moment, block),
        largest=tuple(sorted(listed, key=lambda each: -each[1])[:_NUM_LARGEST]),
    )


def _program(block: LocalBlock, mesh: LogicalMesh, border: Border) -> MemoryProgram:
    inner: dict[int, tuple[MemoryProgram, ...]] = {}
    for number, action in enumerate(block.actions):
        if isinstance(action, Enter):
            inner[number] = tuple(
                _program(body, mesh, border_of_body(action.eqn, place, len(body.inputs), len(body.outputs)))
                for place, body in enumerate(action.bodies)
            )
    values = [*block.inputs, *(v for action in block.actions for v in _results(action))]
    return MemoryProgram(
        works=[_work(action) for action in block.actions],
        inputs=[_key(v) for v in block.inputs],
        outputs=[_key(v) for v in block.outputs],
        nbytes={v: _nbytes(v, mesh) for v in values},
        inner=inner,
        border=border,
    )


def _work(action: Action) -> Work:
    reads = tuple(v for v in operands_of(action) if _key(v) is not None)
    results = tuple(v for v in _results(action) if _key(v) is not None)
    match action:
        case Reshard(operand=operand, steps=steps):
            moves = any(collective_kind(step) is not None for step in steps)
            return Work("apart" if moves else "fused", reads[:1] if isinstance(operand, Value) else (), results)
        case Evaluate(eqn=eqn):
            kind = kind_of(eqn)
            return Work(
                "fused" if kind == "view" and not reads else kind,
                reads,
                results,
                dear=is_dear(eqn),
                over=writes_over(eqn),
            )
        case Enter(eqn=eqn):
            return Work("apart", reads, results, over=writes_over(eqn), late=joins_late(eqn))


def _key(value: Any) -> Value | None:
    return value if isinstance(value, Value) and not is_small(value.variable.aval) else None


def _type(value: Any) -> Hashable:
    if not isinstance(value, Value):
        return None
    return value.variable.aval.shape, value.variable.aval.dtype, value.layout


def _results(action: Action) -> tuple[Value, ...]:
    return (action.result,) if isinstance(action, Reshard) else action.results


def _nbytes(value: Value, mesh: LogicalMesh) -> float:
    return aval_bytes(value.variable.aval) / num_shards(value.layout, mesh)


# --- words --------------------------------------------------------------------------------------------------


def _in_memory(moment: Moment, makers: dict[Value, Action], mesh: LogicalMesh) -> Iterator[tuple[str, float]]:
    for key in alive(moment):
        assert isinstance(key, Value)
        by = _named(makers[key]) if key in makers else "slice of a stack"
        yield f"{by}: {_described(key, mesh)}", moment.program.nbytes[key]
    if moment.inside is not None:
        yield from _in_memory(moment.inside, makers, mesh)


def _time_of(moment: Moment, block: LocalBlock) -> str:
    if moment.time >= len(block.actions):
        return "the end"
    action = block.actions[moment.time]
    if moment.inside is None or not isinstance(action, Enter):
        return _named(action)
    programs = moment.program.inner[moment.time]
    return _time_of(moment.inside, action.bodies[programs.index(moment.inside.program)])


def _makers(block: LocalBlock) -> Iterator[tuple[Value, Action]]:
    for action in block.actions:
        yield from ((value, action) for value in _results(action))
        if isinstance(action, Enter):
            for body in action.bodies:
                yield from _makers(body)


def _named(action: Action) -> str:
    if isinstance(action, Reshard):
        return f"reshard {action.result.variable.aval.str_short()}"
    scope = jc.scope_of(action.eqn)
    return f"{action.eqn.primitive.name} in {scope}" if scope else action.eqn.primitive.name


def _described(value: Value, mesh: LogicalMesh) -> str:
    return f"{value.variable.aval.str_short()} {describe_layout(value.layout, mesh)}"
