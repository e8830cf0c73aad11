"""Give back the results of a step; pieces of a stacked result become one array where their layouts allow it.

Pieces on meshes of one shape are the shards of an array over all these meshes, with a leading axis "stage":

    piece 0: P(a, ...) on mesh 0,  piece 1: P(a, ...) on mesh 1  ->  P(("stage", a), ...) on [mesh 0, mesh 1]

No byte moves, and the next step takes the same shards as its pieces. Other pieces are gathered on the first
one's mesh.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.ir.instructions import spec_axes
from autopar.ir.program import Output, Program
from autopar.ir.results import PlacedRows, result_parts
from autopar.runtime.executables import as_weak
from autopar.runtime.interpreter import Environment

ReadResult = Callable[[Environment], Any]
Layouts = Mapping[tuple[int, str], NamedSharding]  # of (mesh, value)


def collection(program: Program, slots: Mapping[tuple[int, str], int], layouts: Layouts) -> list[ReadResult]:
    """One function of the final environment per leaf of the result, in order."""
    given: set[int] = set()
    results: list[ReadResult] = []
    for output in sorted(program.outputs, key=lambda output: output.leaf):
        places = [slots[part] for part in output.parts]
        results.append(_result(output, places, program, layouts, again=len(places) == 1 and places[0] in given))
        given.update(places)
    return results


def _result(output: Output, places: list[int], program: Program, layouts: Layouts, *, again: bool) -> ReadResult:
    if not places:
        # A new array each time, because the caller may donate it. That of a Python number has the type of one.
        literal = output.literal if isinstance(output.literal, int | float | complex) else np.asarray(output.literal)
        return lambda env: jax.device_put(literal)
    if len(places) == 1:
        result: ReadResult = itemgetter(places[0])
    else:
        there = [layouts[part] for part in output.parts]
        result = _stacked(places, result_parts(program.meshes, output), there)
    if all(program.meshes[mesh].values[name].weak_type for mesh, name in output.parts):
        result = _weak(result)
    if again or output.copied:
        # As jit does: results never share a buffer with each other, nor with an argument that was not donated, or
        # donating one would destroy the other.
        return lambda env: result(env).copy()
    return result


def _weak(result: ReadResult) -> ReadResult:
    cast = jax.jit(as_weak)
    return lambda env: found if (found := result(env)).weak_type else cast(found)


def _stacked(places: list[int], parts: tuple[PlacedRows, ...], layouts: list[NamedSharding]) -> ReadResult:
    if len(parts) == 1:
        concatenate = _concatenate(layouts[0])
        return lambda env: concatenate(*[jax.device_put(env[place], layouts[0]) for place in places])
    firsts = [layouts[part.parts[0]] for part in parts]
    joins = [_concatenate(first) for first in firsts]
    sharding = over_all(firsts)
    assert sharding is not None
    devices = list(_grid(sharding).flat)
    total = (sum(part.type.shape[0] for part in parts), *parts[0].type.shape[1:])

    def assembled(env: Environment) -> jax.Array:
        pieces = [
            env[places[part.parts[0]]] if len(part.parts) == 1 else join(*[env[places[i]] for i in part.parts])
            for part, join in zip(parts, joins)
        ]
        shards = {shard.device: shard.data for piece in pieces for shard in piece.addressable_shards}
        return jax.make_array_from_single_device_arrays(total, sharding, [shards[device] for device in devices])

    return assembled


def _concatenate(sharding: NamedSharding) -> Callable[..., jax.Array]:
    def concatenate(*pieces: jax.Array) -> jax.Array:
        return jnp.concatenate(pieces)

    return jax.jit(concatenate, out_shardings=sharding)


def over_all(layouts: Sequence[NamedSharding]) -> NamedSharding | None:
    """The layout of all pieces as one array, if their meshes are alike, distinct, and laid out alike."""
    first = layouts[0]
    grids = [_grid(layout) for layout in layouts]
    names = ("stage", *first.mesh.axis_names)
    alike = len({(layout.mesh.axis_names, grid.shape) for layout, grid in zip(layouts, grids)}) == 1
    distinct = len({layout.mesh for layout in layouts}) == len(layouts) > 1
    if not alike or not distinct or names.count("stage") > 1:
        return None
    if any(layout.spec != first.spec for layout in layouts):
        return None
    mesh = Mesh(np.stack(grids), names, axis_types=(AxisType.Auto,) * len(names))
    entries = [*first.spec] or [None]
    return NamedSharding(mesh, PartitionSpec(("stage", *spec_axes(entries[0])), *entries[1:]))


def _grid(layout: NamedSharding) -> np.ndarray[Any, Any]:
    assert isinstance(layout.mesh, Mesh) and layout.mesh.devices is not None
    return layout.mesh.devices
