"""Find where the results of a program lie, for a process that holds them as arrays: what several meshes made of one.

parts of meshes of one shape, alike   the shards of one array over all these meshes; no byte moves
other parts                           one array on the mesh of the first part
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from autopar.ir.instructions import ArrayType, MeshProgram, Output


@dataclass(frozen=True, kw_only=True)
class PlacedRows:
    """The rows of a result that lie on one mesh, as one array: from which of its parts, and of which type."""

    mesh: int
    parts: tuple[int, ...]
    """Positions in `Output.parts`."""
    type: ArrayType


def result_parts(meshes: Sequence[MeshProgram], output: Output) -> tuple[PlacedRows, ...]:
    """Return where a result lies, in the order of its rows; nothing for a constant."""
    types = [meshes[mesh].values[value] for mesh, value in output.parts]
    groups = [
        _joined(mesh, list(numbers), types)
        for mesh, numbers in groupby(range(len(types)), key=lambda number: output.parts[number][0])
    ]
    if len(groups) < 2 or _are_shards(meshes, groups):
        return tuple(groups)
    return (_joined(groups[0].mesh, range(len(types)), types),)


def _joined(mesh: int, numbers: Sequence[int], types: Sequence[ArrayType]) -> PlacedRows:
    first = types[numbers[0]]
    if len(numbers) > 1:
        first = replace(first, shape=(sum(types[number].shape[0] for number in numbers), *first.shape[1:]))
    return PlacedRows(mesh=mesh, parts=tuple(numbers), type=first)


def _are_shards(meshes: Sequence[MeshProgram], groups: Sequence[PlacedRows]) -> bool:
    """True if the parts are equally large and laid out alike, on different meshes of one shape."""
    kinds = {(meshes[each.mesh].shape, meshes[each.mesh].axis_names, each.type) for each in groups}
    is_named = "stage" in meshes[groups[0].mesh].axis_names  # the axis over the meshes would have its name
    return len(kinds) == 1 and len({each.mesh for each in groups}) == len(groups) and not is_named
