"""Bring the arguments of a step to where the program wants them, without a copy where they are there already.

An argument serves any number of inputs: whole ones, one per mesh that reads it, and windows, which are
microbatches or the pieces of a stacked parameter. A whole input that has its layout is the argument itself,
and a piece whose shards lie on its mesh takes over those shards; so what an executable donates may be the
user's own buffer. That is right: a program donates inputs of donated arguments only. All that does have to
move goes in one `device_put`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from autopar.errors import DonatedBuffer, InvalidArgument
from autopar.program import ArrayType, Program, Window
from autopar.runtime.base import Device
from autopar.runtime.executables import dtype_of

Moves = list[tuple[int, Any, NamedSharding]]  # (place among the inputs, array, layout)


@dataclass(frozen=True, kw_only=True)
class Use:
    """One input that an argument serves."""

    place: int
    sharding: NamedSharding
    shape: tuple[int, ...]
    window: Window | None


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One argument: what it must be, and the inputs that it serves."""

    number: int
    name: str
    shape: tuple[int, ...]
    dtype: Any
    whole: tuple[Use, ...]
    windows: tuple[Use, ...]
    split: Callable[[Any], list[Any]]
    # The same, and in the layouts wanted, for an argument that lies on the one mesh which reads it.
    reshard: Callable[[Any], list[Any]] | None
    mesh_devices: frozenset[Device]
    # Per layout of the argument that was seen: the devices of every window, when all lie there already.
    local: dict[Sharding, list[list[Device]] | None] = field(default_factory=dict)


def placement(
    program: Program, layouts: Sequence[NamedSharding], leaf_names: Sequence[str]
) -> Callable[[Sequence[Any]], list[Any]]:
    """A function from the flat arguments to one array per input of the program, in its layout."""
    leaves = _leaves(program, layouts, leaf_names)
    constants = [
        (place, jax.device_put(np.int32(item.constant), layouts[place]))
        for place, item in enumerate(program.inputs)
        if item.constant is not None
    ]
    required = len(leaf_names) or max((leaf.number + 1 for leaf in leaves), default=0)

    def place(arguments: Sequence[Any]) -> list[Any]:
        if len(arguments) < required or (leaf_names and len(arguments) > required):
            raise InvalidArgument(
                f"The step was given {len(arguments)} arrays; program '{program.name}' takes {required}. "
                "Call it with arguments of the structure that it was compiled for."
            )
        placed: list[Any] = [None] * len(program.inputs)
        moves: Moves = []
        for leaf in leaves:
            _place(leaf, arguments[leaf.number], placed, moves)
        if moves:
            arrays = jax.device_put([array for _, array, _ in moves], [sharding for _, _, sharding in moves])
            for (slot, _, _), array in zip(moves, arrays):
                placed[slot] = array
        for slot, constant in constants:
            placed[slot] = constant
        return placed

    return place


def _place(leaf: Leaf, argument: Any, placed: list[Any], moves: Moves) -> None:
    is_array = isinstance(argument, jax.Array)
    if not is_array:
        argument = np.asarray(argument)
    elif argument.is_deleted():
        raise DonatedBuffer(
            f"Argument {leaf.name} was donated to an earlier call and is gone. "
            "Pass the array that the call returned in its place, or do not donate it."
        )
    if argument.shape != leaf.shape or _dtype(argument, is_array) != leaf.dtype:
        found = f"{_dtype(argument, is_array)}{list(argument.shape)}"
        raise InvalidArgument(
            f"Argument {leaf.name} is {found}; the program was compiled for {leaf.dtype}{list(leaf.shape)}. "
            "Pass that, or compile for the new shape."
        )
    for use in leaf.whole:
        if is_array and _lies(argument, use.sharding):
            placed[use.place] = argument
        else:
            moves.append((use.place, argument, use.sharding))
    if leaf.windows:
        _place_windows(leaf, argument, is_array, placed, moves)


def _dtype(argument: Any, is_array: bool) -> Any:
    # What JAX makes of it: int64 of numpy is int32 unless 64 bits are enabled.
    return argument.dtype if is_array else jax.dtypes.result_type(argument)


def _lies(array: jax.Array, sharding: NamedSharding) -> bool:
    there = array.sharding
    return (there == sharding or there.is_equivalent_to(sharding, array.ndim)) and array.committed


def _place_windows(leaf: Leaf, argument: Any, is_array: bool, placed: list[Any], moves: Moves) -> None:
    if not is_array:
        moves.extend((use.place, argument[_index(use.window)], use.sharding) for use in leaf.windows)
        return
    if argument.sharding not in leaf.local:
        leaf.local[argument.sharding] = _local_devices(leaf, argument.sharding)
    local = leaf.local[argument.sharding]
    if local is None and leaf.reshard is not None and argument.sharding.device_set == leaf.mesh_devices:
        for use, piece in zip(leaf.windows, leaf.reshard(argument)):
            placed[use.place] = piece
        return
    if local is None:
        pieces = leaf.split(argument)
        moves.extend((use.place, piece, use.sharding) for use, piece in zip(leaf.windows, pieces))
        return
    shards = {shard.device: shard.data for shard in argument.addressable_shards}
    for use, devices in zip(leaf.windows, local):
        own = [shards[device] for device in devices]
        placed[use.place] = jax.make_array_from_single_device_arrays(use.shape, use.sharding, own)


def _index(window: Window | None) -> tuple[slice, ...]:
    assert window is not None
    return (*(slice(None),) * window.axis, slice(window.start, window.stop))


def _local_devices(leaf: Leaf, there: Sharding) -> list[list[Device]] | None:
    """The devices of each window's shards, if each holds just its shard of the window already."""
    held = there.devices_indices_map(leaf.shape)
    devices: list[list[Device]] = []
    for use in leaf.windows:
        assert use.window is not None
        wanted = use.sharding.devices_indices_map(use.shape)
        for device, index in wanted.items():
            shifted = _bounds(index, use.shape)
            start, stop = shifted[use.window.axis]
            shifted[use.window.axis] = (start + use.window.start, stop + use.window.start)
            if device not in held or _bounds(held[device], leaf.shape) != shifted:
                return None
        devices.append(list(wanted))
    return devices


def _bounds(index: Any, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [part.indices(dim)[:2] for part, dim in zip(index, shape)]


def _leaves(program: Program, layouts: Sequence[NamedSharding], leaf_names: Sequence[str]) -> list[Leaf]:
    uses: dict[int, list[Use]] = {}
    types: dict[int, ArrayType] = {}
    for place, (item, sharding) in enumerate(zip(program.inputs, layouts)):
        if item.leaf is not None:
            kind = program.meshes[item.mesh].values[item.value]
            use = Use(place=place, sharding=sharding, shape=kind.shape, window=item.window)
            uses.setdefault(item.leaf, []).append(use)
            types[item.leaf] = kind
    return [_leaf(number, uses[number], types[number], leaf_names) for number in sorted(uses)]


def _leaf(number: int, uses: Sequence[Use], kind: ArrayType, leaf_names: Sequence[str]) -> Leaf:
    shape = list(kind.shape)
    for use in uses:  # The windows of an argument cover it.
        if use.window is not None:
            shape[use.window.axis] = max(shape[use.window.axis], use.window.stop)
    total = next((use.shape for use in uses if use.window is None), tuple(shape))
    # A window of everything would be a copy, and not the argument itself.
    whole = tuple(use for use in uses if use.window is None or use.shape == total)
    windows = tuple(use for use in uses if use not in whole)
    split = _splitter([use.window for use in windows])
    meshes = {use.sharding.mesh for use in windows}
    return Leaf(
        number=number,
        name=f"'{leaf_names[number]}'" if number < len(leaf_names) else str(number),
        shape=total,
        dtype=dtype_of(kind.dtype),
        whole=whole,
        windows=windows,
        split=jax.jit(split),
        reshard=jax.jit(split, out_shardings=[use.sharding for use in windows]) if len(meshes) == 1 else None,
        mesh_devices=frozenset(windows[0].sharding.device_set) if windows else frozenset(),
    )


def _splitter(windows: Sequence[Window | None]) -> Callable[[jax.Array], list[jax.Array]]:
    def split(argument: jax.Array) -> list[jax.Array]:
        return [argument[_index(window)] for window in windows]

    return split
