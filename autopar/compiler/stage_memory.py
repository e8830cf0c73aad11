"""Account for what a device of a stage holds at the worst moment of a step: as the simulator does, without a program.

state          what stays from step to step and from microbatch to microbatch, and the examples of all microbatches
activation     what the backward task reads of a microbatch                for every microbatch in flight
temporary      what else a task is given, makes, and needs in between      while it runs
put off        the part of it that the compiler keeps until the task ends, so that layers in one task add theirs up
update         the same as temporary, of the update: then no microbatch is in flight

peak = state + max(temporary + in flight · activation, update)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.compiler.costs.compilers import Compiler
from autopar.compiler.intra_op.plan_tasks import GroupTask
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.flops import aval_bytes
from autopar.compiler.layer_classes import LayerClass
from autopar.compiler.memory.estimate import peak_memory
from autopar.compiler.sharding.layout import Layout, LogicalMesh, num_shards
from autopar.compiler.spmd.local_program import LocalBlock


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes of one device."""

    state_bytes: float
    activation_bytes: float
    temporary_bytes: float
    put_off_bytes: float
    update_bytes: float


def stage_memory(
    layer: LayerClass,
    layouts: Mapping[str, Layout | None],
    blocks: Mapping[str, LocalBlock],
    mesh: LogicalMesh,
    compiler: Compiler,
) -> StageMemory:
    """The account of a layer or a stage, by the layouts of its values and the local programs of its tasks."""
    types = value_types(layer)
    counted = layer.state | layer.kept | layer.fed

    def held(names: Iterable[str]) -> float:
        return sum(device_bytes(types[name], layouts.get(name), mesh) for name in names if name in types)

    temporary = put_off = update = 0.0
    for task in layer.tasks:
        memory = peak_memory(blocks[task.name], mesh, task.donated, compiler=compiler)
        extra = memory.peak_bytes - held(_counted(task, counted))
        if task.phase == "update":
            update = max(update, extra)
        else:
            temporary, put_off = max(temporary, extra), max(put_off, memory.put_off_bytes)
    num_microbatches = max((task.times for task in layer.tasks), default=1.0)
    return StageMemory(
        state_bytes=held(layer.state) + num_microbatches * held(layer.fed),
        activation_bytes=held(layer.kept),
        temporary_bytes=temporary,
        put_off_bytes=put_off,
        update_bytes=update,
    )


def _counted(task: GroupTask, names: frozenset[str]) -> frozenset[str]:
    """What a task is given or makes that is counted apart from it. What the update makes is new: the old is counted."""
    made = () if task.phase == "update" else task.outputs
    return names.intersection((*task.inputs, *made))


def value_types(layer: LayerClass) -> Mapping[str, Any]:
    """The types of all values between the tasks."""
    types: dict[str, Any] = {}
    for task in layer.tasks:
        jaxpr = jc.open_jaxpr(task.jaxpr)[0]
        types |= {name: v.aval for name, v in zip(task.inputs, jaxpr.invars, strict=True)}
        types |= {name: v.aval for name, v in zip(task.outputs, jaxpr.outvars, strict=True)}
    return types


def device_bytes(aval: Any, layout: Layout | None, mesh: LogicalMesh) -> float:
    """Bytes of a value on one device."""
    return aval_bytes(aval) / (1 if layout is None else num_shards(layout, mesh))
