"""Compute a result where it is to lie: every mesh computes only its own parts.

    f(*args) -> (r_0, r_1, ...)      mesh m:   args -> (parts of r_i that lie on m), without dead code

A part is all of a result or some of its rows, in a given layout, by which XLA divides the work on it. No value moves
between meshes, so that no result is ever whole on a device that holds a part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
from jax.sharding import PartitionSpec

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.flops import jaxpr_bytes, jaxpr_flops
from autopar.compiler.jaxprs.normalize import normalize
from autopar.compiler.lowering.guard_callbacks import guard_callbacks
from autopar.ir.program import (
    ArrayType,
    Executable,
    Free,
    Input,
    Instruction,
    MeshProgram,
    Output,
    Program,
    Run,
    Task,
    Window,
)


class ResultPart(Protocol):
    """A part of a result that lies on a mesh."""

    @property
    def mesh(self) -> int:
        """The number of the mesh."""
        ...

    @property
    def kind(self) -> ArrayType:
        """Shape, dtype and layout of the part."""
        ...

    @property
    def window(self) -> Window | None:
        """The rows; None for all of the result."""
        ...


def placed_results(
    function: Any,
    avals: Sequence[Any],
    results: Sequence[Sequence[ResultPart]],
    meshes: Sequence[MeshProgram],
    *,
    name: str,
) -> Program:
    """The program of `function(*arguments) -> flat results`, each result in its parts; verified."""
    traced = jax.make_jaxpr(function)(*avals)  # under the mesh that the user has set, if any
    parts = [(leaf, number, part) for leaf, ps in enumerate(results) for number, part in enumerate(ps)]
    here = [[item for item in parts if item[2].mesh == mesh] for mesh in range(len(meshes))]
    executables: dict[str, Executable] = {}
    programs: list[MeshProgram] = []
    inputs: list[Input] = []
    for number, (mesh, items) in enumerate(zip(meshes, here, strict=True)):
        executable = _executable(traced, items, f"{name}_{number}", number)
        read = {f"argument{i}": kind for i, kind in enumerate(executable.inputs)} if items else {}
        made = {_value(leaf, piece): part.kind for leaf, piece, part in items}
        if items:
            executables[executable.name] = executable
            inputs += [Input(leaf=i, mesh=number, value=value) for i, value in enumerate(read)]
        programs.append(_mesh_program(mesh, executable.name, read, made))
    program = Program(
        name=name,
        meshes=tuple(programs),
        executables=executables,
        inputs=tuple(inputs),
        outputs=tuple(
            Output(leaf=leaf, parts=tuple((part.mesh, _value(leaf, number)) for number, part in enumerate(ps)))
            for leaf, ps in enumerate(results)
        ),
    )
    program.verify()
    return guard_callbacks(program) if sum(len(mesh.devices) for mesh in meshes) > 1 else program


def _value(leaf: int, piece: int) -> str:
    return f"result{leaf}.{piece}"


def _executable(
    traced: jc.ClosedJaxpr, items: Sequence[tuple[int, int, ResultPart]], name: str, mesh: int
) -> Executable:
    function = jc.jaxpr_as_fun(traced)

    def run(*arguments: Any) -> list[Any]:
        values = function(*arguments)
        return [_cut(values[leaf], part) for leaf, _, part in items]

    jaxpr = normalize(jc.trace(run, traced.in_avals))
    # Arguments are keys and numbers; each device takes all of them.
    inputs = tuple(ArrayType.of(a, PartitionSpec()) for a in traced.in_avals)
    return Executable(
        name=name,
        mesh=mesh,
        inputs=inputs,
        outputs=tuple(part.kind for _, _, part in items),
        flops=jaxpr_flops(jaxpr),
        bytes_accessed=jaxpr_bytes(jaxpr),
        jaxpr=jaxpr,
    )


def _cut(value: Any, part: ResultPart) -> Any:
    array = jax.numpy.asarray(value)
    if not jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        # Weak where the type of its place says so, and only there.
        array = jax.lax.convert_element_type(array, array.dtype)
    window = part.window
    if window is None:
        return array
    return jax.lax.slice_in_dim(array, window.start, window.stop, axis=window.axis)


def _mesh_program(
    mesh: MeshProgram, executable: str, read: Mapping[str, ArrayType], made: Mapping[str, ArrayType]
) -> MeshProgram:
    run = Run(task=Task(kind="P", stage=0), executable=executable, inputs=tuple(read), outputs=tuple(made))
    free = [Free(values=tuple(read))] if read else []
    instructions: list[Instruction] = [run, *free] if made else []
    return MeshProgram(
        devices=mesh.devices,
        shape=mesh.shape,
        axis_names=mesh.axis_names,
        values={**read, **made},
        instructions=tuple(instructions),
    )
