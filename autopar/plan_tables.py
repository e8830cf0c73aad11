"""Plans as tables: one row for each stage, and one for all specs that differ in the numbers of their names only."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from jax.sharding import PartitionSpec
from rich import box
from rich.table import Table
from rich.text import Text


class _Mesh(Protocol):
    @property
    def devices(self) -> tuple[int, ...]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def axis_names(self) -> tuple[str, ...]: ...


class _Stage(Protocol):
    @property
    def layers(self) -> tuple[int, int]: ...
    @property
    def mesh(self) -> int: ...
    @property
    def remat(self) -> bool: ...


def stage_table(stages: Sequence[_Stage], meshes: Sequence[_Mesh]) -> Table:
    """One row per stage."""
    table = Table("stage", "layers", "mesh", "devices", "mesh shape", "remat", box=box.SIMPLE_HEAD)
    for number, stage in enumerate(stages):
        mesh = meshes[stage.mesh]
        shape = ", ".join(f"{name}={size}" for name, size in zip(mesh.axis_names, mesh.shape, strict=True))
        layers = f"[{stage.layers[0]}, {stage.layers[1]})"
        cells = (number, layers, stage.mesh, _ranges(mesh.devices), shape, "yes" if stage.remat else "no")
        table.add_row(*(Text(str(cell)) for cell in cells))
    return table


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3,6` for 0, 1, 2, 3, 6, in the order given."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def spec_table(specs: Mapping[str, PartitionSpec]) -> Table:
    """One row per spec and name; names that differ in their numbers only share a row."""
    table = Table("name", "spec", "count", box=None, padding=(0, 2))
    rows: dict[tuple[str, PartitionSpec], list[str]] = {}
    for name, spec in specs.items():
        rows.setdefault((re.sub(r"\d+", "*", name), spec), []).append(name)
    for (pattern, spec), names in rows.items():
        table.add_row(Text(pattern if len(names) > 1 else names[0]), Text(str(spec)), Text(str(len(names))))
    return table
