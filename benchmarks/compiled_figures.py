"""Bytes that a compiled step moves between devices and keeps in memory, and its time by a roofline of its operations.

    modelled time = the kernels by their rooflines (`hlo_roofline.py`) + the collectives, one after the other

Nothing here depends on who wrote the program, so that plans by hand and searched ones are held to the same figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding

from autopar.compiler.analysis.compiled_collectives import (
    compiled_collectives,
    wire_bytes_by_kind,
)
from autopar.hardware.machine import Machine
from autopar.ir.program import Program
from benchmarks.hlo_roofline import work_of


@dataclass(frozen=True, kw_only=True)
class CompiledFigures:
    """Figures of one device and step."""

    wire_bytes: dict[str, float]  # sent, by kind of collective
    num_collectives: float
    peak_bytes: float
    flops: float
    memory_bytes: float  # read and written
    written_bytes: float
    compute_s: float
    collectives_s: float

    @property
    def sent_bytes(self) -> float:
        return sum(self.wire_bytes.values())

    @property
    def modelled_s(self) -> float:
        return self.compute_s + self.collectives_s


def figures_of_compiled(compiled: jax.stages.Compiled, machine: Machine) -> CompiledFigures:
    """The figures of a compiled program on one fast domain of a machine."""
    text = compiled.as_text()
    collectives = compiled_collectives(text)
    work = work_of(text)
    return CompiledFigures(
        wire_bytes=wire_bytes_by_kind(collectives),
        num_collectives=sum(each.count for each in collectives),
        peak_bytes=peak_bytes(compiled),
        flops=work.flops,
        memory_bytes=work.memory_bytes,
        written_bytes=work.written_bytes,
        compute_s=work.seconds(machine),
        collectives_s=sum(
            each.count * machine.collective_s(each.kind, each.nbytes, each.group_size) for each in collectives
        ),
    )


def peak_bytes(compiled: jax.stages.Compiled) -> float:
    """Arguments, results and temporaries; what is donated counts once."""
    memory: Any = compiled.memory_analysis()
    whole = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    return float(whole - memory.alias_size_in_bytes)


def compile_program(program: Program, devices: Sequence[Any]) -> jax.stages.Compiled:
    """Compile a program of one mesh and one executable for these devices, which need not be here."""
    (executable,) = program.executables.values()
    plan = program.meshes[0]
    grid = np.array([devices[ordinal] for ordinal in plan.devices]).reshape(plan.shape)
    mesh = Mesh(grid, plan.axis_names, axis_types=(AxisType.Auto,) * len(plan.shape))
    arguments = [
        jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=NamedSharding(mesh, kind.spec))
        for kind in executable.inputs
    ]
    step = jax.jit(
        jaxpr_as_fun(executable.jaxpr),
        out_shardings=[NamedSharding(mesh, kind.spec) for kind in executable.outputs],
        donate_argnums=executable.donated,
        keep_unused=True,
    )
    return step.lower(*arguments).compile()
