"""Route the arguments of a step to where its program wants them, decided once per way that they lie.

    InPlace       the argument lies there already            no byte moves, and the program may overwrite it
    FromDriver    the driver holds it (a batch, at first)    every process gets the boxes of its own devices
    FromDevices   it lies elsewhere on the cluster           cut at the source, sent, put together at the target

All processes get the same routing, so that both ends of every transfer know of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jax.sharding import PartitionSpec

from autopar.ir.instructions import spec_parts
from autopar.ir.program import Program, Window
from autopar.runtime.distributed.pieces import Piece, Placed, program_layouts
from autopar.runtime.transfer.tiles import Box, DeviceLayout


@dataclass(frozen=True, kw_only=True)
class InPlace:
    """Input number `place` is piece `piece` of argument `leaf`."""

    place: int
    leaf: int
    piece: int


@dataclass(frozen=True, kw_only=True)
class FromDriver:
    """Input number `place` is a range of argument `leaf`, which the driver sends: `boxes` of the whole, by device."""

    place: int
    leaf: int
    layout: DeviceLayout
    shape: tuple[int, ...]
    dtype: str
    boxes: Mapping[int, Box]


@dataclass(frozen=True, kw_only=True)
class RoutedPart:
    """The range of one piece that an input needs: `cut` is in the piece's own rows, `source` the layout after it."""

    piece: int
    cut: Window | None
    source: DeviceLayout
    target: DeviceLayout
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class FromDevices:
    """Input number `place` comes from other devices, in parts that are stacked along `axis`."""

    place: int
    leaf: int
    dtype: str
    parts: tuple[RoutedPart, ...]
    target: DeviceLayout
    axis: int


@dataclass(frozen=True, kw_only=True)
class InputRouting:
    """All inputs of a program that are no constants, in the order of the program's inputs."""

    in_place: tuple[InPlace, ...]
    from_driver: tuple[FromDriver, ...]
    from_devices: tuple[FromDevices, ...]

    def sent_to(self, ordinals: frozenset[int]) -> tuple[tuple[int, Box], ...]:
        """Return what the driver sends to the process of these devices: (leaf, box), each once, in a fixed order."""
        needed = [(item.leaf, item.boxes[o]) for item in self.from_driver for o in sorted(item.boxes) if o in ordinals]
        return tuple(dict.fromkeys(needed))


def route_inputs(program: Program, placed: Sequence[Placed | None]) -> InputRouting:
    """Return the way of each input, for arguments that lie as `placed` says (None: the driver holds the argument)."""
    layouts = program_layouts(program)
    in_place: list[InPlace] = []
    from_driver: list[FromDriver] = []
    from_devices: list[FromDevices] = []
    for place, item in enumerate(program.inputs):
        if item.leaf is None:
            continue
        kind = program.meshes[item.mesh].values[item.value]
        wanted = Piece(layout=layouts[item.mesh, item.value], shape=kind.shape, window=item.window)
        there = placed[item.leaf]
        if there is None:
            from_driver.append(_from_driver(place, item.leaf, wanted, kind.dtype))
            continue
        same = next((i for i, piece in enumerate(there.pieces) if _lies(piece, wanted, there)), None)
        if same is not None:
            in_place.append(InPlace(place=place, leaf=item.leaf, piece=same))
        else:
            from_devices.append(_from_devices(place, item.leaf, wanted, there))
    return InputRouting(in_place=tuple(in_place), from_driver=tuple(from_driver), from_devices=tuple(from_devices))


def _from_driver(place: int, leaf: int, wanted: Piece, dtype: str) -> FromDriver:
    return FromDriver(
        place=place,
        leaf=leaf,
        layout=wanted.layout,
        shape=wanted.shape,
        dtype=dtype,
        boxes=wanted.device_boxes(),
    )


def _range(piece: Piece, axis: int, whole: Placed) -> tuple[int, int]:
    window = piece.window
    if window is not None and window.axis == axis:
        return window.start, window.stop
    return (0, whole.shape[axis]) if whole.shape else (0, 1)


def _lies(piece: Piece, wanted: Piece, whole: Placed) -> bool:
    axis = 0 if wanted.window is None else wanted.window.axis
    if piece.shape != wanted.shape or _range(piece, axis, whole) != _range(wanted, axis, whole):
        return False
    there, here = piece.layout, wanted.layout
    return there == here or (there.devices == here.devices and there.boxes(piece.shape) == here.boxes(piece.shape))


def _from_devices(place: int, leaf: int, wanted: Piece, whole: Placed) -> FromDevices:
    axis = (
        wanted.window.axis
        if wanted.window is not None
        else next((piece.window.axis for piece in whole.pieces if piece.window is not None), 0)
    )
    start, stop = _range(wanted, axis, whole)
    parts: list[RoutedPart] = []
    reached = start
    for number, piece in enumerate(whole.pieces):
        first, last = _range(piece, axis, whole)
        low, high = max(start, first), min(stop, last)
        if (low >= high and start < stop) or low < reached:  # it holds none of these rows, or is a copy
            continue
        reached = high
        cut = None if (low, high) == (first, last) else Window(axis=axis, start=low - first, stop=high - first)
        shape = piece.shape if cut is None else (*piece.shape[:axis], high - low, *piece.shape[axis + 1 :])
        parts.append(
            RoutedPart(
                piece=number,
                cut=cut,
                source=dividing(piece.layout, shape),
                target=dividing(wanted.layout, shape),
                shape=shape,
            )
        )
        if start == stop:
            break
    return FromDevices(place=place, leaf=leaf, dtype=whole.dtype, parts=tuple(parts), target=wanted.layout, axis=axis)


def dividing(layout: DeviceLayout, shape: tuple[int, ...]) -> DeviceLayout:
    """Return the layout without the entries of its spec that do not divide the dimensions of `shape`."""
    sizes = dict(zip(layout.axis_names, layout.mesh_shape, strict=True))
    parts = spec_parts(layout.spec, sizes)
    entries = [entry if dim % count == 0 else None for entry, count, dim in zip(layout.spec, parts, shape)]
    return replace(layout, spec=PartitionSpec(*entries))
