"""Find the places of a compiled step's arguments: which ranges of each, on which meshes, in which layouts.

    one part          an ordinary argument
    several parts     a stacked parameter, its layers on several meshes; or a batch, its microbatches
    copies            parts that further meshes want of the same argument

Everything that is put in place before a step is called - new state, batches, restored checkpoints - asks here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar.aot import Compiled
from autopar.api import Step
from autopar.compiler.frontend.leaf_names import leaf_name
from autopar.compiler.frontend.trace import Leaf
from autopar.errors import InvalidArgument
from autopar.ir.program import ArrayType, Input, MeshProgram, Program, Window
from autopar.runtime.distributed.pieces import Piece, Placed
from autopar.runtime.executables import jax_dtype, mesh_of, sharding_of
from autopar.runtime.inputs import places_of
from autopar.runtime.results import over_all
from autopar.runtime.transfer.tiles import DeviceLayout


@dataclass(frozen=True, kw_only=True)
class PlacedRange:
    """A range of an argument on one mesh; `window` of None: all of it."""

    mesh: int
    kind: ArrayType
    window: Window | None = None


@dataclass(frozen=True, kw_only=True)
class LeafPlacement:
    """An argument and its place: `parts` together are all of it, each range once; `copies` are on further meshes."""

    name: str
    kind: ArrayType
    parts: tuple[PlacedRange, ...]
    copies: tuple[PlacedRange, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ArgumentPlacement:
    """The places of some arguments, and the meshes that they name."""

    meshes: tuple[MeshProgram, ...]
    places: tuple[LeafPlacement, ...]

    def placed(self, place: LeafPlacement, *, with_copies: bool = False) -> Placed:
        """The place by ordinals of devices."""
        parts = (*place.parts, *place.copies) if with_copies else place.parts
        pieces = tuple(Piece(layout=self._layout(part), shape=part.kind.shape, window=part.window) for part in parts)
        return Placed(shape=place.kind.shape, dtype=place.kind.dtype, pieces=pieces)

    def _layout(self, part: PlacedRange) -> DeviceLayout:
        mesh = self.meshes[part.mesh]
        return DeviceLayout(
            devices=mesh.devices, mesh_shape=mesh.shape, axis_names=mesh.axis_names, spec=part.kind.spec
        )

    def sharding(self, place: LeafPlacement, devices: Sequence[Any]) -> NamedSharding:
        """The place on live devices as one array: parts that are alike are its stages, others lie on the first mesh."""
        groups = [list(parts) for _, parts in groupby(place.parts, key=lambda part: part.mesh)]
        firsts = [group[0] for group in groups]
        layouts = [sharding_of(p.kind, mesh_of(self.meshes[p.mesh], devices)) for p in firsts]
        if len(layouts) == 1:
            return layouts[0]
        rows = {sum(part.kind.shape[0] for part in group) for group in groups}
        whole = over_all(layouts) if len(rows) == 1 else None
        return layouts[0] if whole is None else whole


def argument_placement(compiled: Compiled, number: int) -> tuple[ArgumentPlacement, Any]:
    """Return the places of one argument of a step (0 is its state), and the structure of that argument.

    Raises `InvalidArgument` for an argument that is static or missing, or holds what is no array.
    """
    trace, program = compiled.trace, compiled.program
    numbers = [i for i, leaf in enumerate(trace.inputs) if leaf.argument == number]
    call, arguments = compiled.source.call, compiled.source.arguments
    positional, named, _ = call.unflatten(call.leaves)
    name = arguments.positional[number] if number < len(arguments.positional) else None
    given = {**positional, **named}
    where = number if number in given else name
    if where not in given:
        raise InvalidArgument(
            f"{trace.name} was compiled without arrays as argument {number}. Give the state as the step's "
            "argument 0, the batch as another one, and neither as static."
        )
    argument = given[where]
    if len(jax.tree.leaves(argument)) != len(numbers):
        raise InvalidArgument(
            f"Argument {number} of {trace.name} holds more than arrays: functions, words, numbers of a module, or NNX "
            "objects. Only arrays are placed ahead of a call; pass it to the step as it is, which places it."
        )
    uses = {leaf: [program.inputs[place] for place in places] for leaf, places in places_of(program).items()}
    returned = {i: o for o, i in trace.state_outputs.items()}
    outputs = {output.leaf: {mesh for mesh, _ in output.parts} for output in program.outputs}
    places = [
        _place(trace.inputs[i], uses.get(i, ()), program, outputs.get(returned.get(i, -1), set())) for i in numbers
    ]
    meshes = tuple(replace(mesh, values={}, instructions=()) for mesh in program.meshes)
    return ArgumentPlacement(meshes=meshes, places=tuple(places)), jax.tree.structure(argument)


def _place(leaf: Leaf, uses: Iterable[Input], program: Program, returned_on: set[int]) -> LeafPlacement:
    kind = ArrayType.of(leaf.aval, PartitionSpec())
    # Where the step leaves the state, there it finds it next time; then the first mesh.
    wanted = sorted(uses, key=lambda use: (use.mesh not in returned_on, use.mesh))
    parts = [_part(use, program) for use in wanted]
    chosen = _cover(parts, kind.shape)
    if chosen is None:  # Nobody reads it, or only windows of which none can be a result.
        mesh = parts[0].mesh if parts else 0
        chosen = [PlacedRange(mesh=mesh, kind=kind)]
    copies = tuple(part for part in parts if part not in chosen)
    return LeafPlacement(name=leaf.name, kind=kind, parts=tuple(chosen), copies=copies)


def _part(use: Input, program: Program) -> PlacedRange:
    return PlacedRange(mesh=use.mesh, kind=program.meshes[use.mesh].values[use.value], window=use.window)


def _cover(parts: Sequence[PlacedRange], shape: tuple[int, ...]) -> list[PlacedRange] | None:
    """One whole part, or windows of axis 0 that follow each other from the first row to the last; else None."""
    for part in parts:
        if part.kind.shape == shape:
            return [replace(part, window=None)]
    rows: dict[int, PlacedRange] = {}
    for part in parts:
        if part.window is not None and part.window.axis == 0:
            rows.setdefault(part.window.start, part)
    chosen: list[PlacedRange] = []
    reached = 0
    while reached in rows and rows[reached].window is not None:
        chosen.append(rows[reached])
        reached = rows[reached].window.stop  # type: ignore[union-attr]
    return chosen if chosen and reached == shape[0] else None


def compiled_like(like: Any, number: int, value: Any) -> Compiled:
    """The compiled step that takes `value` as this argument; the last compiled one if none does.

    Raises `InvalidArgument` for a step that has not been compiled in this session.
    """
    if isinstance(like, Compiled):
        return like
    if not isinstance(like, Step):
        raise InvalidArgument(
            f"like is a {type(like).__name__}; it must be a step that autopar.parallelize made, or a compiled one."
        )
    known = like.all_compiled()
    if not known:
        raise InvalidArgument(
            f"{like.arguments.name} has not been compiled yet, so where it wants its arguments is not decided. Compile "
            "it first: call it, or autopar.create_state(..., like=step, batch=batch) with arrays or "
            "jax.ShapeDtypeStructs."
        )
    return next((compiled for compiled in reversed(known) if _takes(compiled, number, value)), known[-1])


def _takes(compiled: Compiled, number: int, value: Any) -> bool:
    try:
        arrangement, tree = argument_placement(compiled, number)
        check_argument(value, arrangement, tree, "", "")
    except InvalidArgument:
        return False
    return True


def check_argument(value: Any, to: ArgumentPlacement, tree: Any, found: str, step: str) -> None:
    """Raise `InvalidArgument`, which names the first leaf that differs, unless `value` is what the step takes there.

    A leaf may be a function that loads it: its shape is seen later.
    """
    given = {leaf_name("", path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(value)}
    if jax.tree.structure(value) != tree:
        wanted = jax.tree.unflatten(
            tree, [jax.ShapeDtypeStruct(p.kind.shape, jax_dtype(p.kind.dtype)) for p in to.places]
        )
        paths = {leaf_name("", path) for path, _ in jax.tree_util.tree_leaves_with_path(wanted)}
        extra, missing = sorted(given.keys() - paths), sorted(paths - given.keys())
        containers = f"the containers differ, {jax.tree.structure(value)} and {tree}"
        difference = f"{extra[0]} is too much" if extra else f"{missing[0]} is missing" if missing else containers
        raise InvalidArgument(
            f"{found} {len(given)} arrays, {step} takes {len(to.places)} there: {difference}. Both must have one "
            "structure."
        )
    for (path, leaf), place in zip(given.items(), to.places, strict=True):
        if callable(leaf):
            continue
        shape = tuple(np.shape(leaf)) if not hasattr(leaf, "shape") else tuple(leaf.shape)
        dtype = str(jax.dtypes.result_type(leaf) if not hasattr(leaf, "aval") else leaf.dtype)
        if (shape, dtype) != (place.kind.shape, place.kind.dtype):
            raise InvalidArgument(
                f"{found} {dtype}{list(shape)} at {path or 'its root'}; {step} takes {place.kind} there (its input "
                f"{place.name}). Correct it, or compile the step for these shapes."
            )
