"""How the arguments of a step come to be where its program wants them, decided once per way that they lie.

    Taken   the argument lies there already            no byte moves, and the program may overwrite it
    Given   the driver holds it (a batch, at first)    every process gets the boxes of its own devices
    Moved   it lies elsewhere on the cluster           cut at the source, sent, put together at the target

All processes get the same arrivals, so that both ends of every transfer know of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jax.sharding import PartitionSpec

from autopar.ir.instructions import spec_parts
from autopar.ir.program import Program, Window
from autopar.runtime.distributed.pieces import Piece, Placed, layouts_of
from autopar.runtime.transfer.tiles import Box, Layout


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Input number `place` is piece `piece` of argument `leaf`."""

    place: int
    leaf: int
    piece: int


@dataclass(frozen=True, kw_only=True)
class Given:
    """Input number `place` is a range of argument `leaf`, which the driver sends: `boxes` of the whole, by device."""

    place: int
    leaf: int
    layout: Layout
    shape: tuple[int, ...]
    dtype: str
    boxes: Mapping[int, Box]


@dataclass(frozen=True, kw_only=True)
class Part:
    """What of one piece a moved input needs: `cut` is in the piece's own rows, `source` the layout after it."""

    piece: int
    cut: Window | None
    source: Layout
    target: Layout
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Input number `place` comes from other devices, in parts that are stacked along `axis`."""

    place: int
    leaf: int
    dtype: str
    parts: tuple[Part, ...]
    target: Layout
    axis: int


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """All inputs of a program that are no constants, in the order of the program's inputs."""

    taken: tuple[Taken, ...]
    given: tuple[Given, ...]
    moved: tuple[Moved, ...]

    def sent_to(self, ordinals: frozenset[int]) -> tuple[tuple[int, Box], ...]:
        """What the driver sends to the process of these devices: (leaf, box), each once, in a fixed order."""
        needed = [(item.leaf, item.boxes[o]) for item in self.given for o in sorted(item.boxes) if o in ordinals]
        return tuple(dict.fromkeys(needed))


def arrive(program: Program, placed: Sequence[Placed | None]) -> Arrival:
    """How each input arrives, for arguments that lie as `placed` says (None: the driver holds the argument)."""
    layouts = layouts_of(program)
    taken: list[Taken] = []
    given: list[Given] = []
    moved: list[Moved] = []
    for place, item in enumerate(program.inputs):
        if item.leaf is None:
            continue
        kind = program.meshes[item.mesh].values[item.value]
        wanted = Piece(layout=layouts[item.mesh, item.value], shape=kind.shape, window=item.window)
        there = placed[item.leaf]
        if there is None:
            given.append(_given(place, item.leaf, wanted, kind.dtype))
            continue
        same = next((i for i, piece in enumerate(there.pieces) if _lies(piece, wanted, there)), None)
        if same is not None:
            taken.append(Taken(place=place, leaf=item.leaf, piece=same))
        else:
            moved.append(_moved(place, item.leaf, wanted, there))
    return Arrival(taken=tuple(taken), given=tuple(given), moved=tuple(moved))


def _given(place: int, leaf: int, wanted: Piece, dtype: str) -> Given:
    return Given(
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


def _moved(place: int, leaf: int, wanted: Piece, whole: Placed) -> Moved:
    axis = (
        wanted.window.axis
        if wanted.window is not None
        else next((piece.window.axis for piece in whole.pieces if piece.window is not None), 0)
    )
    start, stop = _range(wanted, axis, whole)
    parts: list[Part] = []
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
            Part(
                piece=number,
                cut=cut,
                source=dividing(piece.layout, shape),
                target=dividing(wanted.layout, shape),
                shape=shape,
            )
        )
        if start == stop:
            break
    return Moved(place=place, leaf=leaf, dtype=whole.dtype, parts=tuple(parts), target=wanted.layout, axis=axis)


def dividing(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """The layout without the entries of its spec that do not divide the dimensions of `shape`."""
    sizes = dict(zip(layout.axis_names, layout.mesh_shape, strict=True))
    parts = spec_parts(layout.spec, sizes)
    entries = [entry if dim % count == 0 else None for entry, count, dim in zip(layout.spec, parts, shape)]
    return replace(layout, spec=PartitionSpec(*entries))
