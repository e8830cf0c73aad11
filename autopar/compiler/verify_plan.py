"""Hold a plan against what a compiler made of it: the collectives of the compiled program are the planned ones.

Plan, Program, devices or GPU target  ->  CollectiveCheck
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from rich import box
from rich.table import Table
from rich.text import Text

from autopar.compiler.gpu_aot import gpu_devices
from autopar.compiler.intra_op.hlo_collectives import KINDS, CompiledCollective, compiled_collectives
from autopar.compiler.jaxprs import compat as jc
from autopar.errors import InvalidArgument
from autopar.ir.instructions import Executable
from autopar.ir.plan import MeshPlan, Plan
from autopar.ir.plan_sharding import PlannedCollective
from autopar.ir.program import Program, Run

_Collective = TypeVar("_Collective", PlannedCollective, CompiledCollective)

TOLERANCE = 0.005
"""Share of the bytes of a kind by which planned and compiled may differ."""


@dataclass(frozen=True, kw_only=True)
class KindCheck:
    """All collectives of one kind among as many devices. Bytes of one device and step; compilers combine arrays."""

    kind: str
    group_size: int
    """How many devices exchange with each other; 0 for permutations, which compilers cut into chains."""
    planned_count: float
    planned_bytes: float
    repeated_bytes: float
    """Of the planned ones those that a compiler without barriers, such as XLA's for CPUs, merges with earlier ones."""
    compiled_count: float
    compiled_bytes: float

    @property
    def holds(self) -> bool:
        """Whether the compiled bytes are the planned ones. What is repeated on purpose may have been merged."""
        most = self.planned_bytes * (1 + TOLERANCE)
        least = (self.planned_bytes - self.repeated_bytes) * (1 - TOLERANCE)
        return least <= self.compiled_bytes <= most


@dataclass(frozen=True, kw_only=True)
class CollectiveCheck:
    """Planned and compiled collectives by kind, and the compiled program's memory; true when all kinds hold."""

    compiler: str
    kinds: tuple[KindCheck, ...]
    planned_peak_bytes: float
    compiled_peak_bytes: float

    def __bool__(self) -> bool:
        return all(kind.holds for kind in self.kinds)

    def table(self) -> Table:
        """One row per kind and number of devices."""
        title = f"collectives of one device and step, planned and compiled for {self.compiler}"
        columns = ("kind", "devices", "planned", "compiled", "planned MB", "compiled MB", "")
        table = Table(*columns, title=title, box=box.SIMPLE_HEAD)
        for each in self.kinds:
            merged = each.holds and each.compiled_bytes < each.planned_bytes * (1 - TOLERANCE)
            verdict = "repeated ones merged" if merged else "equal" if each.holds else "DIFFERENT"
            counts = f"{each.planned_count:g}", f"{each.compiled_count:g}"
            megabytes = f"{each.planned_bytes / 1e6:.6g}", f"{each.compiled_bytes / 1e6:.6g}"
            among = str(each.group_size or "")
            table.add_row(*(Text(cell) for cell in (each.kind, among, *counts, *megabytes, verdict)))
        return table


def check_collectives(
    plan: Plan, program: Program, *, devices: Sequence[Any] | None, target: str | None
) -> CollectiveCheck:
    """Compile the program for these devices, or ahead of time for a GPU target, and compare.

    Raises `InvalidArgument` for a plan whose layouts XLA decides: it has no planned collectives.
    """
    if plan.sharding is None and any(mesh.sharding is None for mesh in plan.meshes):
        raise InvalidArgument(
            f"A plan of {plan.method} leaves the layouts inside of the step to XLA, so there are no planned "
            "collectives to compare with. Plan with Auto(), Zero(), TensorParallel() or ExpertParallel()."
        )
    if target is not None:
        devices = gpu_devices(target, 1 + max(max(mesh.devices) for mesh in plan.meshes))
    assert devices is not None
    options = {"xla_gpu_enable_triton_gemm": False} if target is not None else None
    runs = Counter(i.executable for mesh in program.meshes for i in mesh.instructions if isinstance(i, Run))
    found: list[CompiledCollective] = []
    peak_bytes = 0.0
    for executable in program.executables.values():
        compiled = _lowered(executable, _mesh(plan.meshes[executable.mesh], devices)).compile(options)
        peak_bytes = max(peak_bytes, _peak(compiled))
        found += [
            replace(each, count=each.count * runs[executable.name]) for each in compiled_collectives(compiled.as_text())
        ]
    on_cpu = target is None and devices[0].platform == "cpu"
    return CollectiveCheck(
        compiler=target or str(devices[0].device_kind),
        kinds=tuple(_compare(plan.planned_collectives, found, on_cpu=on_cpu)),
        planned_peak_bytes=0.0 if plan.sharding is None else plan.sharding.peak_bytes,
        compiled_peak_bytes=peak_bytes,
    )


def compiled_peak_bytes(plan: Plan, program: Program, devices: Sequence[Any]) -> float:
    """The most that an executable of a plan needs on a device, as XLA compiles it for these devices."""
    return max(
        _peak(_lowered(executable, _mesh(plan.meshes[executable.mesh], devices)).compile())
        for executable in program.executables.values()
    )


def _mesh(plan: MeshPlan, devices: Sequence[Any]) -> Mesh:
    grid = np.array([devices[ordinal] for ordinal in plan.devices]).reshape(plan.shape)
    return Mesh(grid, plan.axis_names, axis_types=(AxisType.Auto,) * len(plan.axis_names))


def _lowered(executable: Executable, mesh: Mesh) -> Any:
    avals: list[Any] = [v.aval for v in jc.open_jaxpr(executable.jaxpr)[0].invars]
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=NamedSharding(mesh, kind.spec))
        for aval, kind in zip(avals, executable.inputs, strict=True)
    ]
    run = jax.jit(
        jc.jaxpr_as_fun(executable.jaxpr),
        out_shardings=[NamedSharding(mesh, kind.spec) for kind in executable.outputs],
        donate_argnums=executable.donated,
        keep_unused=True,
    )
    return run.lower(*arguments)


def _compare(
    planned: Sequence[PlannedCollective], compiled: Sequence[CompiledCollective], *, on_cpu: bool
) -> list[KindCheck]:
    planned_by, compiled_by = _by_kind(planned), _by_kind(compiled)
    checks: list[KindCheck] = []
    for kind, group_size in sorted({**planned_by, **compiled_by}, key=lambda each: (KINDS.index(each[0]), each[1])):
        mine, theirs = planned_by.get((kind, group_size), []), compiled_by.get((kind, group_size), [])
        # GPUs' compiler keeps apart what is done again, as planned: nothing may lack there.
        repeated = [each for each in mine if each.repeated and on_cpu]
        checks.append(
            KindCheck(
                kind=kind,
                group_size=group_size,
                planned_count=sum(each.times for each in mine),
                planned_bytes=sum(_bytes(each, on_cpu) for each in mine),
                repeated_bytes=sum(_bytes(each, on_cpu) for each in repeated),
                compiled_count=sum(each.count * len(each.operands) for each in theirs),
                compiled_bytes=sum(each.count * each.nbytes for each in theirs),
            )
        )
    return checks


def _by_kind(collectives: Sequence[_Collective]) -> dict[tuple[str, int], list[_Collective]]:
    found = defaultdict[tuple[str, int], list[_Collective]](list)
    for each in collectives:
        found[each.kind, 0 if each.kind == "collective-permute" else each.group_size].append(each)
    return dict(found)


def _bytes(each: PlannedCollective, on_cpu: bool) -> float:
    """XLA's CPU compiler runs collectives of bfloat16 in float32."""
    return each.nbytes * each.times * (2 if on_cpu and each.dtype == "bfloat16" else 1)


def _peak(compiled: Any) -> float:
    memory = compiled.memory_analysis()
    whole = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    return float(whole - memory.alias_size_in_bytes)
