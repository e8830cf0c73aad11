"""A value of a cluster as one array, for those who know only one layout per value, such as checkpoints.

one piece                                  its own layout
pieces alike, each on a mesh of its own    the shards of an array over all these meshes, with an axis "stage"
other pieces                               moved to one layout first, on the mesh of the first piece
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import NamedSharding

from autopar.ir.program import ArrayType, Input, MeshProgram, Output, Program
from autopar.runtime.distributed.host_inputs import sharding_on
from autopar.runtime.distributed.input_routing import dividing
from autopar.runtime.distributed.pieces import Piece, Placed
from autopar.runtime.interfaces import Device
from autopar.runtime.results import over_all
from autopar.runtime.transfer.tiles import DeviceLayout


def is_one_array(placed: Placed) -> bool:
    """Return True if the pieces, as they lie, are the shards of one array."""
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
    layouts = [sharding_on(piece.layout, devices) for piece in placed.pieces]
    whole = layouts[0] if len(layouts) == 1 else over_all(layouts)
    assert whole is not None
    return whole


@dataclass(frozen=True, kw_only=True)
class Moving:
    """Makes the program that moves values to other places: it runs nothing, its inputs are its results."""

    to: tuple[Placed, ...]

    def __call__(self) -> Program:
        """One mesh for each set of devices."""
        pieces = [(leaf, n, piece) for leaf, placed in enumerate(self.to) for n, piece in enumerate(placed.pieces)]
        meshes = list(dict.fromkeys(_mesh_key(piece.layout) for _, _, piece in pieces))
        parts = {(leaf, n): (meshes.index(_mesh_key(piece.layout)), f"value{leaf}.{n}") for leaf, n, piece in pieces}
        return Program(
            name="move",
            meshes=tuple(self._mesh(number, key, parts) for number, key in enumerate(meshes)),
            executables={},
            inputs=tuple(
                Input(leaf=leaf, mesh=parts[leaf, n][0], value=parts[leaf, n][1], window=piece.window)
                for leaf, n, piece in pieces
            ),
            outputs=tuple(
                Output(leaf=leaf, parts=tuple(parts[leaf, n] for n in range(len(placed.pieces))))
                for leaf, placed in enumerate(self.to)
            ),
        )

    def _mesh(self, number: int, key: Any, parts: Mapping[tuple[int, int], tuple[int, str]]) -> MeshProgram:
        devices, shape, axis_names = key
        pieces = {name: self.to[leaf].pieces[n] for (leaf, n), (mesh, name) in parts.items() if mesh == number}
        kinds = {name: self.to[leaf].dtype for (leaf, _), (mesh, name) in parts.items() if mesh == number}
        values = {
            name: ArrayType(shape=piece.shape, dtype=kinds[name], spec=piece.layout.spec)
            for name, piece in pieces.items()
        }
        return MeshProgram(devices=devices, shape=shape, axis_names=axis_names, values=values, instructions=())


def _mesh_key(layout: DeviceLayout) -> tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]:
    return layout.devices, layout.mesh_shape, layout.axis_names
