"""The places of a value on a cluster: pieces on meshes, each a range of one axis, laid out over the mesh's devices.

one piece on one mesh       an ordinary value
pieces on several meshes    a stacked value, for example the layers of a scan over the stages
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autopar.ir.program import Output, Program, Window
from autopar.runtime.transfer.tiles import Box, DeviceLayout


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A range of a value on one mesh; `window` of None: all of it."""

    layout: DeviceLayout
    shape: tuple[int, ...]
    window: Window | None = None

    def device_boxes(self) -> dict[int, Box]:
        """Return the range of the whole value that each device holds, by ordinal."""
        boxes = dict(zip(self.layout.devices, self.layout.boxes(self.shape), strict=True))
        window = self.window
        return boxes if window is None else {ordinal: _shifted(box, window) for ordinal, box in boxes.items()}


def _shifted(box: Box, window: Window) -> Box:
    start, stop = box[window.axis]
    moved = (start + window.start, stop + window.start)
    return (*box[: window.axis], moved, *box[window.axis + 1 :])


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A whole value: its shape, its dtype as programs name it, and its pieces, which together are all of it."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]
    weak_type: bool = field(default=False, compare=False)
    """True if the dtype is that of a Python number, which gives way to others."""

    @cached_property
    def devices(self) -> frozenset[int]:
        """The ordinals of all devices that hold a part."""
        return frozenset(ordinal for piece in self.pieces for ordinal in piece.layout.devices)


def value_layout(program: Program, mesh: int, value: str) -> DeviceLayout:
    """The layout of one value of a program."""
    there = program.meshes[mesh]
    return DeviceLayout(
        devices=there.devices, mesh_shape=there.shape, axis_names=there.axis_names, spec=there.values[value].spec
    )


def program_layouts(program: Program) -> Mapping[tuple[int, str], DeviceLayout]:
    """The layout of every value of a program, by mesh and name."""
    return {
        (number, value): value_layout(program, number, value)
        for number, mesh in enumerate(program.meshes)
        for value in mesh.values
    }


def placed_output(program: Program, output: Output, layouts: Mapping[tuple[int, str], DeviceLayout]) -> Placed:
    """Return the pieces of a program's result; its parts are stacked along axis 0."""
    types = [program.meshes[mesh].values[value] for mesh, value in output.parts]
    if len(types) == 1:
        piece = Piece(layout=layouts[output.parts[0]], shape=types[0].shape)
        return Placed(shape=types[0].shape, dtype=types[0].dtype, pieces=(piece,), weak_type=types[0].weak_type)
    pieces: list[Piece] = []
    start = 0
    for part, kind in zip(output.parts, types, strict=True):
        window = Window(axis=0, start=start, stop=start + kind.shape[0])
        pieces.append(Piece(layout=layouts[part], shape=kind.shape, window=window))
        start = window.stop
    return Placed(shape=(start, *types[0].shape[1:]), dtype=types[0].dtype, pieces=tuple(pieces))
