"""A value of a cluster as one array, for those who know only one layout per value, such as checkpoints.

one piece                               its own layout
pieces alike, each on a mesh of its own the shards of an array over all these meshes, with an axis "stage"
other pieces                            moved to one layout first, on the mesh of the first piece
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import NamedSharding

from autopar.program import ArrayType, Input, MeshProgram, Output, Program
from autopar.runtime.base import Device
from autopar.runtime.distributed.arrivals import dividing
from autopar.runtime.distributed.host_inputs import sharding_of
from autopar.runtime.distributed.placed import Piece, Placed
from autopar.runtime.results import over_all
from autopar.runtime.tiles import Layout


def is_one_array(placed: Placed) -> bool:
    """Whether the pieces, as they lie, are the shards of one array."""
    pieces = placed.pieces
    if len(pieces) == 1:
        return True
    kinds = {(piece.layout.mesh_shape, piece.layout.axis_names, piece.layout.spec, piece.shape) for piece in pieces}
    devices = [ordinal for piece in pieces for ordinal in piece.layout.devices]
    return len(kinds) == 1 and len(set(devices)) == len(devices) and "stage" not in pieces[0].layout.axis_names


def in_one_piece(placed: Placed) -> Placed:
    """The same value where it is one array: as it lies if that is one, else on the mesh of its first piece."""
    if is_one_array(placed):
        return placed
    layout = dividing(placed.pieces[0].layout, placed.shape)
    return Placed(shape=placed.shape, dtype=placed.dtype, pieces=(Piece(layout=layout, shape=placed.shape),))


def whole_sharding(placed: Placed, devices: Sequence[Device]) -> NamedSharding:
    """The layout of the one array on live devices."""
    layouts = [sharding_of(piece.layout, devices) for piece in placed.pieces]
    whole = layouts[0] if len(layouts) == 1 else over_all(layouts)
    assert whole is not None
    return whole


@dataclass(frozen=True, kw_only=True)
class Gathering:
    """Makes the program that moves values to their new places: it runs nothing, its inputs are its results."""

    to: tuple[Placed, ...]

    def __call__(self) -> Program:
        """One mesh for each set of devices."""
        layouts = [placed.pieces[0].layout for placed in self.to]
        meshes = list(dict.fromkeys(map(_mesh_key, layouts)))
        names = [f"value{number}" for number in range(len(self.to))]
        places = [(meshes.index(_mesh_key(layout)), name) for layout, name in zip(layouts, names)]
        return Program(
            name="gather",
            meshes=tuple(self._mesh(number, key, places) for number, key in enumerate(meshes)),
            executables={},
            inputs=tuple(Input(leaf=i, mesh=mesh, value=name) for i, (mesh, name) in enumerate(places)),
            outputs=tuple(Output(leaf=i, parts=(place,)) for i, place in enumerate(places)),
        )

    def _mesh(self, number: int, key: Any, places: Sequence[tuple[int, str]]) -> MeshProgram:
        devices, shape, axis_names = key
        values = {
            name: ArrayType(shape=placed.shape, dtype=placed.dtype, spec=placed.pieces[0].layout.spec)
            for placed, (mesh, name) in zip(self.to, places)
            if mesh == number
        }
        return MeshProgram(devices=devices, shape=shape, axis_names=axis_names, values=values, instructions=())


def _mesh_key(layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]:
    return layout.devices, layout.mesh_shape, layout.axis_names
