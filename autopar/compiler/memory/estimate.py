"""Write down the memory program of what every device does: its ops, in the order of the compiler.

    LocalBlock  ->  MemoryProgram over values

Remat regions stand in line with what is around them: only their operands are held back.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.equation_keys import literal_key
from autopar.compiler.jaxprs.flops import aval_bytes
from autopar.compiler.jaxprs.fusion import is_expensive, kind_of
from autopar.compiler.jaxprs.primitives import REMAT
from autopar.compiler.memory.allocation import (
    Border,
    Label,
    MemoryProgram,
    Moment,
    alive,
    border_of_body,
    joins_late,
    stacked_from,
    taken_places,
    worst_moments,
)
from autopar.compiler.memory.liveness import Op, workspace_bytes, writes_over
from autopar.compiler.resharding.steps import collective_of
from autopar.compiler.sharding.layout import LogicalMesh, describe_layout, num_shards
from autopar.compiler.sharding.replicated_values import below_split_size
from autopar.compiler.spmd.local_program import Action, Evaluate, LocalBlock, Reshard, RunBody, Value
from autopar.ir.memory_part import MemoryPart, joined_parts


def listed_program(
    block: LocalBlock, mesh: LogicalMesh, border: Border, product_workspace: float = 0.0
) -> MemoryProgram:
    """The memory program of a block, order_ops."""
    lister = _Lister(block=block, mesh=mesh, product_workspace=product_workspace)
    for value in block.inputs:
        lister.note(value)
    lister.run()
    return MemoryProgram(
        ops=lister.ops,
        inputs=[lister.key(v) for v in block.inputs],
        outputs=[lister.key(v) for v in block.outputs],
        nbytes=lister.nbytes,
        inner=lister.inner,
        border=border,
        labels=lister.labels,
    ).order_ops()


@dataclass(kw_only=True, eq=False)
class _Lister:
    block: LocalBlock
    mesh: LogicalMesh
    product_workspace: float
    ops: list[Op] = field(default_factory=list[Op])
    labels: list[Label] = field(default_factory=list[Label])
    inner: dict[int, tuple[MemoryProgram, ...]] = field(default_factory=dict[int, tuple[MemoryProgram, ...]])
    nbytes: dict[Hashable, float] = field(default_factory=dict[Hashable, float])
    place: str = ""
    """Of a region in line: which one it is."""
    names: dict[Value, Any] = field(default_factory=dict[Value, Any])
    """What inputs and results of regions are called."""

    def run(self) -> None:
        """List the ops of the block."""
        for action in self.block.actions:
            if isinstance(action, RunBody) and action.eqn.primitive.name in REMAT:
                self._run_in_line(action)
            else:
                self._add(action)

    def name(self, value: Any) -> Any:
        """A value as this program calls it; it may be a constant."""
        if not isinstance(value, Value):
            return ("constant", literal_key(value))
        return self.names.get(value, value._replace(form=value.form + self.place) if self.place else value)

    def key(self, value: Any) -> Value | None:
        """The same, if it is large enough to count."""
        found = self.name(value)
        return found if isinstance(found, Value) and not below_split_size(found.variable.aval) else None

    def note(self, value: Value) -> None:
        """Note the size of a value."""
        self.nbytes[self.name(value)] = _nbytes(value, self.mesh)

    def _run_in_line(self, action: RunBody) -> None:
        (body,) = action.bodies
        region = _Lister(
            block=body,
            mesh=self.mesh,
            product_workspace=self.product_workspace,
            ops=self.ops,
            labels=self.labels,
            inner=self.inner,
            nbytes=self.nbytes,
            place=f"{self.place} in region {len(self.ops)}",
            names={inside: self.name(value) for inside, value in zip(body.inputs, action.operands, strict=True)},
        )
        region.run()
        self.names.update(
            (value, region.name(inside)) for value, inside in zip(action.results, body.outputs, strict=True)
        )

    def _add(self, action: Action) -> None:
        if isinstance(action, RunBody):
            self.inner[len(self.ops)] = tuple(
                listed_program(
                    body,
                    self.mesh,
                    border_of_body(action.eqn, place, len(body.inputs), len(body.outputs)),
                    self.product_workspace,
                )
                for place, body in enumerate(action.bodies)
            )
        for value in _results(action):
            self.note(value)
        self.ops.append(self._op(action))
        self.labels.append(_named(action))

    def _op(self, action: Action) -> Op:
        results = tuple(key for v in _results(action) if (key := self.key(v)) is not None)
        match action:
            case Reshard(operand=operand, steps=steps):
                key, kind = self.key(operand), collective_of(steps)
                return Op("apart" if kind else "fused", () if key is None else (key,), results, collective=kind)
            case Evaluate(eqn=eqn, operands=operands):
                reads = tuple(key for v in operands if (key := self.key(v)) is not None)
                kind = kind_of(eqn)
                return Op(
                    "fused" if kind == "view" and not reads else kind,
                    reads,
                    results,
                    expensive=is_expensive(eqn),
                    over=writes_over(eqn),
                    workspace=workspace_bytes(eqn, self.product_workspace),
                )
            case RunBody(eqn=eqn, operands=operands):
                reads = tuple(key for v in operands if (key := self.key(v)) is not None)
                stacks = tuple(key for v in action.results[stacked_from(eqn) :] if (key := self.key(v)) is not None)
                return Op("apart", reads, results, over=writes_over(eqn), late=joins_late(eqn), stacks=stacks)


def _results(action: Action) -> tuple[Value, ...]:
    return (action.result,) if isinstance(action, Reshard) else action.results


def _named(action: Action) -> Label:
    if isinstance(action, Reshard):
        kind = collective_of(action.steps)
        text = f"reshard {action.result.variable.aval.str_short()}"
        return Label(text, "collective" if kind else None, kind or "")
    scope, name, phase = jc.scope_of(action.eqn), action.eqn.primitive.name, jc.ad_phase(action.eqn)
    if isinstance(action, RunBody):  # a loop over microbatches has no phase of its own
        inside = (eqn for body in action.bodies for eqn in body.jaxpr.eqns)
        phase = "backward" if any(jc.ad_phase(eqn) == "backward" for eqn in inside) else phase
    return Label(f"{name} in {scope}" if scope else name, phase, _layer_of(scope))


def _layer_of(scope: str) -> str:
    """Return the user's scopes up to the last numbered one, or the first one if none is numbered."""
    names = [name for name in _TRANSFORMS.sub("", scope).split("/") if name and name != "rematted_computation"]
    numbered = [place for place, name in enumerate(names) if _NUMBERED.search(name)]
    return "/".join(names[: numbered[-1] + 1 if numbered else 1])


# --- Estimate the memory that a device needs for a step, as XLA would allocate it: liveness over the local program ---
# LocalBlock  ->  MemoryEstimate
#
#     peak = arguments + max over time of (temporaries and results alive)
#
# Donated arguments take the results of their shape. A loop needs, on top of what is alive around it, what its body
# needs; the stacks that it reads and writes are alive throughout. Recomputed regions stand in line with the rest.

_NUM_LARGEST = 10
_TRANSFORMS = re.compile(r"\b(?:jvp|transpose|vmap|checkpoint|remat)\(|\)")
_NUMBERED = re.compile(r"\d")
# Plans that were made to fit keep arrays split and gather them again, and what the compiler prefetches or merges of
# that is not modelled: this is what the worst plan measured needed more (benchmarks.memory_model).
HEADROOM = 0.21
"""Share of the modelled peak by which a compiled one may lie above it: what a budget leaves free."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """What one device holds at the worst moment of a step."""

    peak_bytes: float
    arguments_bytes: float
    at: str
    """The equation that runs at that moment."""
    largest: tuple[tuple[str, float], ...]
    """What is in memory then, the largest first: descriptions and bytes."""
    deferred_bytes: float
    """What the compiler keeps until the end of the program, and would keep behind whatever stood next in it: operands
    of products that it puts off."""
    moment: Moment = field(repr=False, compare=False)

    @cached_property
    def parts(self) -> tuple[MemoryPart, ...]:
        """Parts in memory then beside the arguments, by category and name, the largest first."""
        return joined_parts(_parts(self.moment))


def peak_memory(
    block: LocalBlock, mesh: LogicalMesh, donated: Collection[int] = (), *, product_workspace: float = 0.0
) -> MemoryEstimate:
    """The estimate for a whole step; `donated` are the numbers of the inputs that it may overwrite.

    `product_workspace` are the bytes that a matrix product needs on the machine while it runs.
    """
    border = Border(taken=taken_places([*map(_type, block.inputs)], [*map(_type, block.outputs)], donated))
    program = listed_program(block, mesh, border, product_workspace)
    (moment,) = worst_moments(program, 1)
    arguments = {f"input {n}: {_described(v, mesh)}": _nbytes(v, mesh) for n, v in enumerate(block.inputs)}
    total = sum(arguments.values())
    listed = [*arguments.items(), *_in_memory(moment, mesh)]
    return MemoryEstimate(
        peak_bytes=total + moment.nbytes,
        arguments_bytes=total,
        at=_time_of(moment),
        largest=tuple(sorted(listed, key=lambda each: -each[1])[:_NUM_LARGEST]),
        deferred_bytes=program.deferred_bytes,
        moment=moment,
    )


def bytes_with_headroom(peak_bytes: float) -> float:
    """The budget that a plan of a modelled peak asks for."""
    return peak_bytes * (1 + HEADROOM)


def _type(value: Any) -> Hashable:
    if not isinstance(value, Value):
        return None
    return value.variable.aval.shape, value.variable.aval.dtype, value.layout


def _nbytes(value: Value, mesh: LogicalMesh) -> float:
    aval: Any = value.variable.aval
    return aval_bytes(aval) / num_shards(aval.shape, value.layout, mesh)


# --- words --------------------------------------------------------------------------------------------------


def _in_memory(moment: Moment, mesh: LogicalMesh) -> Iterator[tuple[str, float]]:
    program = moment.program
    makers = {key: label.text for op, label in zip(program.ops, program.labels, strict=True) for key in op.results}
    for key in alive(moment):
        assert isinstance(key, Value)
        yield f"{makers.get(key, 'slice')}: {_described(key, mesh)}", program.nbytes[key]
    if moment.inside is not None:
        yield from _in_memory(moment.inside, mesh)


def _parts(moment: Moment) -> Iterator[MemoryPart]:
    """The categories of what is in memory at a moment: gradients are what a backward equation makes for the update."""
    program = moment.program
    labeled = list(zip(program.ops, program.labels, strict=True))
    makers = {key: label for op, label in labeled for key in op.results}
    roots = program.lives.roots
    late = {key for op, label in labeled if label.phase is None for key in op.reads}
    wanted = {roots.get(key, key) for key in (*late, *program.outputs)}
    for key in alive(moment):
        label = makers.get(key, Label("slices of stacks", None, ""))
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
    return moment.program.labels[moment.time].text if moment.time < len(moment.program.ops) else "the end"


def _described(value: Value, mesh: LogicalMesh) -> str:
    return f"{value.variable.aval.str_short()} {describe_layout(value.layout, mesh)}"
