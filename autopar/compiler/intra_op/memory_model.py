"""Estimate the memory that a device needs for a step, as XLA would allocate it: liveness over the local program.

    LocalBlock  ->  MemoryEstimate

    peak = arguments + max over time of (temporaries and results alive)

Donated arguments take the results of their shape. A loop needs, on top of what is alive around it, what its body
needs; the stacks that it reads and writes are alive throughout. Recomputed regions stand in line with the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from autopar.compiler.costs.compilers import GPU, Compiler
from autopar.compiler.intra_op.allocation import (
    Border,
    Moment,
    alive,
    taken_places,
    worst_moments,
)
from autopar.compiler.intra_op.memory_listing import listed_program
from autopar.compiler.jaxprs.flops import aval_bytes
from autopar.compiler.sharding.layout import LogicalMesh, describe_layout, num_shards
from autopar.compiler.spmd.local_program import LocalBlock, Value

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
    put_off_bytes: float
    """What the compiler keeps until the end of the program, and would keep behind whatever stood next in it: operands
    of products that it puts off."""


def peak_memory(
    block: LocalBlock, mesh: LogicalMesh, donated: Collection[int] = (), *, compiler: Compiler = GPU
) -> MemoryEstimate:
    """The estimate for a whole step; `donated` are the numbers of the inputs that it may overwrite."""
    border = Border(taken=taken_places([*map(_type, block.inputs)], [*map(_type, block.outputs)], donated))
    program = listed_program(block, mesh, compiler, border)
    (moment,) = worst_moments(program, 1)
    arguments = {f"input {n}: {_described(v, mesh)}": _nbytes(v, mesh) for n, v in enumerate(block.inputs)}
    total = sum(arguments.values())
    listed = [*arguments.items(), *_in_memory(moment, mesh)]
    return MemoryEstimate(
        peak_bytes=total + moment.nbytes,
        arguments_bytes=total,
        at=_time_of(moment),
        largest=tuple(sorted(listed, key=lambda each: -each[1])[:_NUM_LARGEST]),
        put_off_bytes=program.put_off_bytes,
    )


def _type(value: Any) -> Hashable:
    if not isinstance(value, Value):
        return None
    return value.variable.aval.shape, value.variable.aval.dtype, value.layout


def _nbytes(value: Value, mesh: LogicalMesh) -> float:
    return aval_bytes(value.variable.aval) / num_shards(value.layout, mesh)


# --- words --------------------------------------------------------------------------------------------------


def _in_memory(moment: Moment, mesh: LogicalMesh) -> Iterator[tuple[str, float]]:
    program = moment.program
    makers = {key: label for work, label in zip(program.works, program.labels, strict=True) for key in work.results}
    for key in alive(moment):
        assert isinstance(key, Value)
        nbytes = program.share(key) * program.nbytes[key]
        yield f"{makers.get(key, 'slice or copy')}: {_described(key, mesh)}", nbytes
    if moment.inside is not None:
        yield from _in_memory(moment.inside, mesh)


def _time_of(moment: Moment) -> str:
    if moment.inside is not None:
        return _time_of(moment.inside)
    return moment.program.labels[moment.time] if moment.time < len(moment.program.works) else "the end"


def _described(value: Value, mesh: LogicalMesh) -> str:
    return f"{value.variable.aval.str_short()} {describe_layout(value.layout, mesh)}"
