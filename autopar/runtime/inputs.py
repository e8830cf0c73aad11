"""Bring the arguments of a step to where the program wants them, without a copy where they are there already.

An argument serves any number of inputs: whole ones, one per mesh that reads it, and windows, which are
microbatches or the pieces of a stacked parameter. A whole input that has its layout is the argument itself,
and a piece whose shards lie on its mesh takes over those shards; so what an executable donates may be the
user's own buffer. That is right: a program donates inputs of donated arguments only. Several pieces of one mesh
are taken apart there. All that does have to move goes in one `device_put`.

`argument_types` says what the flat arguments of a program must be; every runtime takes them from there, and refuses
others alike. An argument is as large as the input that is all of it, or as its windows reach.

No program here runs on the devices of several meshes: it would wait for all of them inside of a collective, while
they wait for each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from autopar.errors import DonatedBuffer, InvalidArgument
from autopar.ir.program import Program, Run, Window
from autopar.runtime.executables import jax_dtype
from autopar.runtime.interfaces import Device

Moves = list[tuple[int, Any, NamedSharding]]  # (place among the inputs, array, layout)


@dataclass(frozen=True, kw_only=True)
class ArgumentType:
    """The type of one flat argument, and its name for error messages."""

    name: str
    shape: tuple[int, ...]
    dtype: Any


def places_of(program: Program) -> Mapping[int, Sequence[int]]:
    """For every argument that the program reads, in order: which of its inputs it serves."""
    places: dict[int, list[int]] = {}
    for place, item in enumerate(program.inputs):
        if item.leaf is not None:
            places.setdefault(item.leaf, []).append(place)
    return dict(sorted(places.items()))


@dataclass(frozen=True, kw_only=True)
class ArgumentTypes:
    """All arguments of a program."""

    program: str
    count: int
    """Number of arguments that are taken; those that the program does not read are among them."""
    exactly: bool
    """True if more are refused; not so where nobody named the arguments."""
    types: Mapping[int, ArgumentType]
    """The types of those that the program reads."""

    def check(self, arguments: Sequence[Any]) -> None:
        """Raise `InvalidArgument` for another number, shape or dtype, and `DonatedBuffer` for an array that is gone."""
        if len(arguments) < self.count or (self.exactly and len(arguments) > self.count):
            raise InvalidArgument(
                f"The step was given {len(arguments)} arrays; program '{self.program}' takes {self.count}. "
                "Call it with arguments of the structure that it was compiled for."
            )
        for leaf, wanted in self.types.items():
            _check(arguments[leaf], wanted)


def argument_types(program: Program, leaf_names: Sequence[str]) -> ArgumentTypes:
    """The types of all arguments; `leaf_names` are for error messages, and may be left out."""
    types = {leaf: _type(program, leaf, places, leaf_names) for leaf, places in places_of(program).items()}
    return ArgumentTypes(
        program=program.name,
        count=len(leaf_names) or max(types, default=-1) + 1,
        exactly=bool(leaf_names),
        types=types,
    )


def _type(program: Program, leaf: int, places: Sequence[int], leaf_names: Sequence[str]) -> ArgumentType:
    items = [program.inputs[place] for place in places]
    kinds = [program.meshes[item.mesh].values[item.value] for item in items]
    shape = list(kinds[0].shape)
    for item, kind in zip(items, kinds):
        if item.window is None:
            shape = list(kind.shape)
            break
        # The windows of an argument cover it.
        shape[item.window.axis] = max(shape[item.window.axis], item.window.stop)
    name = f"'{leaf_names[leaf]}'" if leaf < len(leaf_names) else str(leaf)
    return ArgumentType(name=name, shape=tuple(shape), dtype=jax_dtype(kinds[0].dtype))


def _check(argument: Any, wanted: ArgumentType) -> None:
    is_deleted = getattr(argument, "is_deleted", None)  # arrays on devices have it
    if is_deleted is not None and is_deleted():
        raise DonatedBuffer(
            f"Argument {wanted.name} was donated to an earlier call and is gone. "
            "Pass the array that the call returned in its place, or do not donate it."
        )
    # What JAX makes of it: int64 of numpy is int32 unless 64 bits are enabled.
    dtype = jax.dtypes.result_type(argument) if is_deleted is None else argument.dtype
    shape = tuple(argument.shape) if hasattr(argument, "shape") else np.shape(argument)
    if shape != wanted.shape or dtype != wanted.dtype:
        raise InvalidArgument(
            f"Argument {wanted.name} is {dtype}{list(shape)}; the program was compiled for "
            f"{wanted.dtype}{list(wanted.shape)}. Pass that, or compile for the new shape."
        )


@dataclass(frozen=True, kw_only=True)
class InputUse:
    """One input that an argument serves."""

    place: int
    sharding: NamedSharding
    shape: tuple[int, ...]
    window: Window | None


@dataclass(frozen=True, kw_only=True)
class JoinedWindows:
    """The windows of one mesh, if they follow each other: as one window, and how that is taken apart."""

    use: InputUse
    parts: tuple[InputUse, ...]
    split: Callable[[Any], list[Any]]


@dataclass(frozen=True, kw_only=True)
class ArgumentUses:
    """One argument: how large it is, and the inputs that it serves."""

    number: int
    shape: tuple[int, ...]
    whole: tuple[InputUse, ...]
    windows: tuple[InputUse, ...]
    split: Callable[[Any], list[Any]]
    # The same, and in the layouts wanted, for an argument that lies on the one mesh which reads it.
    reshard: Callable[[Any], list[Any]] | None
    mesh_devices: frozenset[Device]
    all_meshes: frozenset[frozenset[Device]]
    together: tuple[JoinedWindows, ...] | None
    # Per layout of the argument that was seen: the devices of every window, when all lie there already, and the same
    # for the windows of a mesh together.
    local: dict[Sharding, tuple[list[list[Device]] | None, list[list[Device]] | None]] = field(default_factory=dict)


def placement(
    program: Program, layouts: Sequence[NamedSharding], leaf_names: Sequence[str]
) -> Callable[[Sequence[Any]], list[Any]]:
    """A function from the flat arguments to one array per input of the program, in its layout."""
    types = argument_types(program, leaf_names)
    meshes = frozenset(frozenset(layout.device_set) for layout in layouts)
    leaves = [
        _argument_uses(number, types.types[number].shape, [_use(program, i, layouts[i]) for i in places], meshes)
        for number, places in places_of(program).items()
    ]
    constants = [
        (place, jax.device_put(np.int32(item.constant), layouts[place]))
        for place, item in enumerate(program.inputs)
        if item.constant is not None
    ]

    donated = donated_leaves(program)

    def place(arguments: Sequence[Any]) -> list[Any]:
        types.check(arguments)
        arguments = with_own_donated(arguments, donated)
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


def donated_leaves(program: Program) -> tuple[int, ...]:
    """The arguments that some executable overwrites."""
    leaf_of = {(item.mesh, item.value): item.leaf for item in program.inputs if item.leaf is not None}
    found: set[int] = set()
    for number, mesh in enumerate(program.meshes):
        for run in mesh.instructions:
            if isinstance(run, Run):
                names = [run.inputs[position] for position in program.executables[run.executable].donated]
                found |= {leaf_of[number, name] for name in names if (number, name) in leaf_of}
    return tuple(sorted(found))


def with_own_donated(leaves: Sequence[Any], donated: Sequence[int]) -> Sequence[Any]:
    """The arguments, with copies of donated arrays that are passed in other places as well.

    A buffer cannot be overwritten and read; on several devices such a call ends the process in jaxlib 0.10.
    """
    if not donated:
        return leaves
    times = Counter(map(id, leaves))
    shared = {i for i in donated if times[id(leaves[i])] > 1 and isinstance(leaves[i], jax.Array)}
    return [leaf.copy() if i in shared else leaf for i, leaf in enumerate(leaves)] if shared else leaves


def own_copy(leaf: Any, dtype: Any = None) -> np.ndarray[Any, Any]:
    """The leaf on the host, in memory that nobody writes to: `device_put` reads it after it has returned.

    On CPU devices it even takes it over, and a caller that fills one buffer again and again would change earlier calls.
    """
    return np.array(leaf, dtype=dtype, copy=None if isinstance(leaf, jax.Array) else True)


def _place(leaf: ArgumentUses, argument: Any, placed: list[Any], moves: Moves) -> None:
    is_array = isinstance(argument, jax.Array)
    if not is_array:
        argument = own_copy(argument)
    for use in leaf.whole:
        if is_array and lies(argument, use.sharding):
            placed[use.place] = argument
        else:
            moves.append((use.place, argument, use.sharding))
    if leaf.windows:
        _place_windows(leaf, argument, is_array, placed, moves)


def lies(array: jax.Array, sharding: NamedSharding) -> bool:
    """Return whether an array is committed to this layout."""
    there = array.sharding
    return (there == sharding or there.is_equivalent_to(sharding, array.ndim)) and array.committed


def _place_windows(leaf: ArgumentUses, argument: Any, is_array: bool, placed: list[Any], moves: Moves) -> None:
    if not is_array:
        moves.extend((use.place, argument[_index(use.window)], use.sharding) for use in leaf.windows)
        return
    there = argument.sharding
    if there not in leaf.local:
        wider = None if leaf.together is None else [each.use for each in leaf.together]
        leaf.local[there] = (
            _local_devices(leaf.windows, leaf.shape, there),
            None if wider is None else _local_devices(wider, leaf.shape, there),
        )
    local, local_together = leaf.local[there]
    if local is not None:
        for use, array in zip(leaf.windows, _taken_over(argument, leaf.windows, local)):
            placed[use.place] = array
    elif leaf.reshard is not None and there.device_set == leaf.mesh_devices:
        for use, piece in zip(leaf.windows, leaf.reshard(argument)):
            placed[use.place] = piece
    elif leaf.together is not None and local_together is not None:
        wider = _taken_over(argument, [each.use for each in leaf.together], local_together)
        for each, array in zip(leaf.together, wider):
            for use, piece in zip(each.parts, each.split(array)):
                placed[use.place] = piece
    elif any(there.device_set <= devices for devices in leaf.all_meshes) or len(there.device_set) == 1:
        moves.extend((use.place, piece, use.sharding) for use, piece in zip(leaf.windows, leaf.split(argument)))
    else:
        here = _on_host(argument)
        moves.extend((use.place, here[_index(use.window)], use.sharding) for use in leaf.windows)


def _taken_over(argument: Any, uses: Sequence[InputUse], devices: Sequence[Sequence[Device]]) -> list[jax.Array]:
    """The shards of an argument as the arrays that they are on these devices; no byte moves."""
    shards = {shard.device: shard.data for shard in argument.addressable_shards}
    return [
        jax.make_array_from_single_device_arrays(use.shape, use.sharding, [shards[device] for device in each])
        for use, each in zip(uses, devices)
    ]


def _on_host(argument: jax.Array) -> Any:
    if not jnp.issubdtype(argument.dtype, jax.dtypes.prng_key):
        return np.asarray(argument)
    words = jnp.asarray(np.asarray(jax.random.key_data(argument)))
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(argument))


def _index(window: Window | None) -> tuple[slice, ...]:
    assert window is not None
    return (*(slice(None),) * window.axis, slice(window.start, window.stop))


def _local_devices(uses: Sequence[InputUse], shape: tuple[int, ...], there: Sharding) -> list[list[Device]] | None:
    """The devices of each window's shards, if each holds just its shard of the window already."""
    held = there.devices_indices_map(shape)
    devices: list[list[Device]] = []
    for use in uses:
        assert use.window is not None
        wanted = use.sharding.devices_indices_map(use.shape)
        for device, index in wanted.items():
            shifted = _bounds(index, use.shape)
            start, stop = shifted[use.window.axis]
            shifted[use.window.axis] = (start + use.window.start, stop + use.window.start)
            if device not in held or _bounds(held[device], shape) != shifted:
                return None
        devices.append(list(wanted))
    return devices


def _bounds(index: Any, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [part.indices(dim)[:2] for part, dim in zip(index, shape)]


def _use(program: Program, place: int, sharding: NamedSharding) -> InputUse:
    item = program.inputs[place]
    shape = program.meshes[item.mesh].values[item.value].shape
    return InputUse(place=place, sharding=sharding, shape=shape, window=item.window)


def _argument_uses(
    number: int, shape: tuple[int, ...], uses: Sequence[InputUse], all_meshes: frozenset[frozenset[Device]]
) -> ArgumentUses:
    # A window of everything would be a copy, and not the argument itself.
    whole = tuple(use for use in uses if use.window is None or use.shape == shape)
    windows = tuple(use for use in uses if use not in whole)
    split = _splitter([use.window for use in windows])
    meshes = {use.sharding.mesh for use in windows}
    return ArgumentUses(
        number=number,
        shape=shape,
        whole=whole,
        windows=windows,
        split=jax.jit(split),
        reshard=jax.jit(split, out_shardings=[use.sharding for use in windows]) if len(meshes) == 1 else None,
        mesh_devices=frozenset(windows[0].sharding.device_set) if windows else frozenset(),
        all_meshes=all_meshes,
        together=_together(windows),
    )


def _together(windows: Sequence[InputUse]) -> tuple[JoinedWindows, ...] | None:
    """The windows by their meshes; None if those of a mesh do not follow each other, or differ in their layouts."""
    by_mesh: dict[Any, list[InputUse]] = {}
    for use in windows:
        by_mesh.setdefault(use.sharding.mesh, []).append(use)
    found: list[JoinedWindows] = []
    for parts in by_mesh.values():
        spans = [(use.window.start, use.window.stop) for use in parts if use.window is not None]
        axis = parts[0].window.axis if parts[0].window is not None else 0
        whole = len({use.sharding for use in parts}) == 1 and all(
            use.window is not None and use.window.axis == axis for use in parts
        )
        if not whole or any(a[1] != b[0] for a, b in pairwise(spans)):
            return None
        start, stop = spans[0][0], spans[-1][1]
        shape = parts[0].shape
        use = replace(
            parts[0],
            shape=(*shape[:axis], stop - start, *shape[axis + 1 :]),
            window=Window(axis=axis, start=start, stop=stop),
        )
        split = _splitter([Window(axis=axis, start=a - start, stop=b - start) for a, b in spans])
        layouts = [use.sharding for use in parts]
        found.append(JoinedWindows(use=use, parts=tuple(parts), split=jax.jit(split, out_shardings=layouts)))
    return tuple(found)


def _splitter(windows: Sequence[Window | None]) -> Callable[[jax.Array], list[jax.Array]]:
    def split(argument: jax.Array) -> list[jax.Array]:
        return [argument[_index(window)] for window in windows]

    return split
