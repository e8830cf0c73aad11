"""List the collectives of a program: what each moves, for which equation, and how often.

LocalBlock, mesh  ->  PlannedCollective, PlannedCollective, ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from autopar.compiler.intra_op.local_program import Action, Enter, Evaluate, LocalBlock, Reshard, Value
from autopar.compiler.intra_op.repetitions import repeated_collectives
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.trip_counts import trip_count
from autopar.compiler.resharding.costs import Collective, step_collectives
from autopar.compiler.sharding.layout import LogicalMesh, describe_layout, num_shards, replicated


class PlannedCollective(NamedTuple):
    """A collective of the program: how many times a step runs it, for which equation, and in which phase."""

    collective: Collective
    times: float
    dtype: str
    what: str
    scope: str
    phase: str
    repeated: bool
    """The same was done before, and is done again to save memory."""


def planned_collectives(block: LocalBlock, mesh: LogicalMesh) -> Iterator[PlannedCollective]:
    """The collectives that a step runs, in program order."""
    return _of_block(block, mesh, repeated_collectives(block), 1.0)


def _of_block(
    block: LocalBlock, mesh: LogicalMesh, repeated: Mapping[Action, tuple[bool, ...]], times: float
) -> Iterator[PlannedCollective]:
    reader = _readers(block)
    for action in block.actions:
        match action:
            case Reshard(operand=operand, result=result, steps=steps):
                aval: Any = operand.aval if isinstance(operand, jc.Literal) else operand.variable.aval
                source = replicated(aval.ndim) if isinstance(operand, jc.Literal) else operand.layout
                what = f"{aval.str_short()} {describe_layout(source, mesh)} -> {describe_layout(result.layout, mesh)}"
                scope = jc.scope_of(reader[result]) if result in reader else ""
                moves = step_collectives(steps, source, tuple(aval.shape), aval.dtype.itemsize, mesh)
                for each, again in zip(moves, repeated[action], strict=True):
                    yield PlannedCollective(each, times, str(aval.dtype), what, scope, result.form, again)
            case Evaluate(eqn=eqn, results=results, strategy=strategy):
                for again in repeated[action]:
                    aval = eqn.outvars[0].aval
                    nbytes = aval.size * aval.dtype.itemsize / num_shards(results[0].layout, mesh)
                    combined = Collective(kind="all-reduce", axes=strategy.combined, nbytes=nbytes)
                    what = f"{eqn.primitive.name} {aval.str_short()}"
                    yield PlannedCollective(combined, times, str(aval.dtype), what, jc.scope_of(eqn), "", again)
            case Enter(eqn=eqn, bodies=bodies):
                for body in bodies:
                    yield from _of_block(body, mesh, repeated, times * trips(eqn))


def _readers(block: LocalBlock) -> dict[Value, jc.JaxprEqn]:
    """For every value the equation that reads it first."""
    readers: dict[Value, jc.JaxprEqn] = {}
    for action in reversed(block.actions):
        if isinstance(action, Evaluate | Enter):
            readers.update({v: action.eqn for v in action.operands if isinstance(v, Value)})
        elif isinstance(action.operand, Value) and action.result in readers:
            readers[action.operand] = readers[action.result]
    return readers


def trips(eqn: jc.JaxprEqn) -> float:
    """How many times an equation runs its bodies."""
    match eqn.primitive.name:
        case "scan":
            return jc.loop_of(eqn).length
        case "while":
            return trip_count(eqn)
        case _:
            return 1.0
