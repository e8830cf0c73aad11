"""Estimate the memory that a device needs for a step, as XLA would allocate it: liveness over the local program.

    LocalBlock  ->  MemoryEstimate

    peak = arguments + max over time of (temporaries and results alive)

Donated arguments take the results of their shape. A loop needs, on top of what is alive around it, what its body
needs; the stacks that it reads and writes are alive throughout. Recomputed regions stand in line with the rest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from autopar.compiler.frontend.scopes import as_written
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.memory.allocation import MemoryProgram, Moment, alive, worst_moments
from autopar.compiler.memory.joined_collectives import JoinedArray
from autopar.compiler.memory.listing import BlockValue, listed_step
from autopar.compiler.memory.liveness import Op
from autopar.compiler.resharding.steps import collective_of
from autopar.compiler.sharding.layout import LogicalMesh, describe_layout
from autopar.compiler.spmd.local_program import Action, LocalBlock, Reshard, RunBody, Value, value_bytes
from autopar.hardware.machine import Machine
from autopar.ir.memory_part import MemoryPart, joined_parts

_NUM_LARGEST = 10
_TRANSFORMS = re.compile(r"\b(?:jvp|transpose|vmap|checkpoint|remat)\(|\)")
_NUMBERED = re.compile(r"\d")
# Of 73 plans that were made to fit, compiled for three GPUs, none needed more than 0.101 beyond what was modelled then,
# by rules of the order of kernels. By the order since, 4 of 144 plans need more than 0.12 (benchmarks.memory_model).
HEADROOM = 0.12
"""Share of the modelled peak by which a compiled one may lie above it: what a budget leaves free."""


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """The bytes of a device that a plan may use, and the share of the modelled peak that is kept free of them."""

    nbytes: float = math.inf
    headroom: float = HEADROOM

    @property
    def limit_bytes(self) -> float:
        """The bytes that the modelled peak must not exceed."""
        return self.nbytes / bytes_with_headroom(1.0, self.headroom)

    def needed_bytes(self, peak_bytes: float) -> float:
        """Return the bytes of a budget that a plan of a modelled peak needs."""
        return bytes_with_headroom(peak_bytes, self.headroom)


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """The bytes that one device holds at the worst moment of a step, and of which arrays."""

    peak_bytes: float
    arguments_bytes: float
    copied: tuple[Value, ...]
    """The results that the compiler makes elsewhere and copies to the places of the state that they replace."""
    moment: Moment = field(repr=False, compare=False)
    inputs: tuple[Value, ...] = field(repr=False, compare=False)
    mesh: LogicalMesh = field(repr=False, compare=False)

    @cached_property
    def at(self) -> str:
        """The equation that runs at that moment."""
        return _time_of(self.moment)

    def largest(self, input_names: Sequence[str]) -> tuple[tuple[str, float], ...]:
        """Return the arrays in memory then, the largest first: descriptions and bytes."""
        given = [
            (f"{name}: {_described(v, self.mesh)}", value_bytes(v, self.mesh))
            for name, v in zip(input_names, self.inputs, strict=True)
        ]
        listed = [*given, *_in_memory(self.moment, self.mesh)]
        return tuple(sorted(listed, key=lambda each: -each[1])[:_NUM_LARGEST])

    @cached_property
    def parts(self) -> tuple[MemoryPart, ...]:
        """The parts in memory then beside the arguments, by category and name, the largest first."""
        return joined_parts(_parts(self.moment))


def peak_memory(
    block: LocalBlock, mesh: LogicalMesh, donated: Collection[int] = (), *, machine: Machine
) -> MemoryEstimate:
    """Return the estimate for a whole step; `donated` are the numbers of the inputs that it may overwrite."""
    program = listed_step(block, mesh, donated, machine)
    (moment,) = worst_moments(program, 1)
    total = sum(value_bytes(value, mesh) for value in block.inputs)
    return MemoryEstimate(
        peak_bytes=total + moment.nbytes,
        arguments_bytes=total,
        copied=_copied(block, program) if machine.copies_state else (),
        moment=moment,
        inputs=block.inputs,
        mesh=mesh,
    )


def _copied(block: LocalBlock, program: MemoryProgram) -> tuple[Value, ...]:
    outputs = (block.outputs[n] for n, old in program.border.taken.items() if program.inputs[old] in program.copied)
    return tuple(value for value in outputs if isinstance(value, Value))


def bytes_with_headroom(peak_bytes: float, headroom: float = HEADROOM) -> float:
    """Return the budget that a plan of a modelled peak needs."""
    return peak_bytes * (1 + headroom)


# --- words --------------------------------------------------------------------------------------------------


def _in_memory(moment: Moment, mesh: LogicalMesh) -> Iterator[tuple[str, float]]:
    program = moment.program
    makers = {key: label.text for op, label in _labeled(program) for key in op.results}
    for key in alive(moment):
        if isinstance(key, JoinedArray):
            yield f"{len(key.parts)} sums in one array", program.nbytes[key]
        else:
            assert isinstance(key, BlockValue)
            yield f"{makers.get(key, 'slice')}: {_described(key.value, mesh)}", program.nbytes[key]
    if moment.inside is not None:
        yield from _in_memory(moment.inside, mesh)


def _parts(moment: Moment) -> Iterator[MemoryPart]:
    """Yield the arrays in memory at a moment by category: gradients are made by backward equations for the update."""
    program = moment.program
    labeled = list(_labeled(program))
    makers = {key: label for op, label in labeled for key in op.results}
    roots = program.lives.roots
    late = {key for op, label in labeled if label.phase is None for key in op.reads}
    wanted = {roots.get(key, key) for key in (*late, *program.outputs)}
    for key in alive(moment):
        label = makers.get(key, _Label("slices of stacks", None, ""))
        nbytes = program.nbytes[key]
        match label.phase:
            case "collective":
                yield MemoryPart("collective buffers", label.layer, nbytes)
            case "forward":
                yield MemoryPart("activations", label.layer, nbytes)
            case "backward" if key in wanted:
                yield MemoryPart("gradients", label.layer, nbytes)
            case _:
                yield MemoryPart("temporaries", label.layer, nbytes)
    if (workspace := program.workspace(moment.time)) > 0:
        yield MemoryPart("temporaries", "kernel workspace", workspace)
    if moment.inside is not None:
        yield from _parts(moment.inside)


def _time_of(moment: Moment) -> str:
    if moment.inside is not None:
        return _time_of(moment.inside)
    actions = moment.program.actions
    return _label(actions[moment.time]).text if moment.time < len(actions) else "the end"


def _described(value: Value, mesh: LogicalMesh) -> str:
    return f"{value.variable.aval.str_short()} {describe_layout(value.layout, mesh)}"


class _Label(NamedTuple):
    """The origin of an op, for the reader."""

    text: str
    phase: str | None
    """"forward", "backward" or "collective"; None outside of any differentiation."""
    layer: str
    """The scope of the layer that it belongs to; empty if there is none."""


def _labeled(program: MemoryProgram) -> Iterator[tuple[Op, _Label]]:
    return ((op, _label(action)) for op, action in zip(program.ops, program.actions, strict=True))


def _label(action: Action) -> _Label:
    if isinstance(action, Reshard):
        kind = collective_of(action.steps)
        text = f"reshard {action.result.variable.aval.str_short()}"
        return _Label(text, "collective" if kind else None, kind or "")
    scope, name, phase = jc.scope_of(action.eqn), action.eqn.primitive.name, jc.ad_phase(action.eqn)
    if isinstance(action, RunBody):  # a loop over microbatches has no phase of its own
        inside = (eqn for body in action.bodies for eqn in body.jaxpr.eqns)
        phase = "backward" if any(jc.ad_phase(eqn) == "backward" for eqn in inside) else phase
    return _Label(f"{name} in {as_written(scope)}" if scope else name, phase, _layer_of(scope))


def _layer_of(scope: str) -> str:
    """Return the user's scopes up to the last numbered one, or the first one if none is numbered."""
    names = [name for name in _TRANSFORMS.sub("", scope).split("/") if name and name != "rematted_computation"]
    numbered = [place for place, name in enumerate(names) if _NUMBERED.search(name)]
    return as_written("/".join(names[: numbered[-1] + 1 if numbered else 1]))
