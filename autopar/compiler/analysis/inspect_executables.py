"""Show what the compiler makes of the executables of a program: StableHLO, HLO, and its own account of memory and work.

    Plan, Program, devices  ->  ExecutableReport, ...      one for each executable

Each is compiled by itself, for the devices here or ahead of time for GPUs or TPUs that need not be there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.compiler.analysis.compiled_collectives import (
    compile_for,
    executable_mesh,
    lowered_executable,
    target_devices,
)
from autopar.ir.plan import Plan
from autopar.ir.program import Program


@dataclass(frozen=True, kw_only=True)
class ExecutableReport:
    """An executable as XLA has it; the texts of a device, its memory in bytes, and FLOPs and bytes of one run."""

    name: str
    mesh: int
    stablehlo: str
    hlo: str
    memory: Mapping[str, int]
    """Bytes as in `memory_analysis` of JAX: arguments, results, what results replace, temporaries, also on the host."""
    cost: Mapping[str, float]
    """Costs as in `cost_analysis` of JAX, such as "flops" and "bytes accessed"."""

    def __repr__(self) -> str:
        """One line; `print` shows the StableHLO."""
        return f"<ExecutableReport {self.name}: {self.cost.get('flops', 0.0):.4g} FLOPs>"

    def __str__(self) -> str:
        return self.stablehlo


def inspect_executables(
    plan: Plan, program: Program, *, devices: Sequence[Any] | None, target: str | None
) -> tuple[ExecutableReport, ...]:
    """Compile every executable for these devices, or for those of a target, and return what comes of it."""
    if target is not None:
        devices = target_devices(plan, target)
    assert devices is not None
    reports: list[ExecutableReport] = []
    for executable in program.executables.values():
        lowered = lowered_executable(executable, executable_mesh(plan.meshes[executable.mesh], devices))
        compiled = compile_for(target, lowered, executable.name)
        memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
        reports.append(
            ExecutableReport(
                name=executable.name,
                mesh=executable.mesh,
                stablehlo=lowered.as_text(),
                hlo=compiled.as_text(),
                memory={name: int(getattr(memory, name)) for name in _MEMORY if hasattr(memory, name)},
                cost={str(name): float(value) for name, value in cost.items()},
            )
        )
    return tuple(reports)


_MEMORY = (
    "argument_size_in_bytes",
    "output_size_in_bytes",
    "alias_size_in_bytes",
    "temp_size_in_bytes",
    "generated_code_size_in_bytes",
    "peak_memory_in_bytes",
    "host_temp_size_in_bytes",
)
