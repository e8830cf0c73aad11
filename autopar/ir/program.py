"""A program: for every mesh the list of what it runs, sends, receives, copies and frees during one step.

Nothing in it is a live handle: it is printed, compared, verified and simulated without devices. The rules:

    inputs are on their mesh at the start        a donated input of a Run is gone after it
    Send never waits (it is buffered)           Recv waits for the matching Send of the same two meshes
    outputs are on their mesh at the end         whatever else was written has been freed by then
    a Copy goes between device and host memory  a Run, a Send and a Recv are about device memory

Meshes share no device, so what arrives on a mesh is never the sender's buffer, and may be donated.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.ir.callback_errors import CallbackErrors
from autopar.ir.instructions import (
    ArrayType,
    Copy,
    Executable,
    Free,
    Input,
    Instruction,
    MeshProgram,
    Output,
    Recv,
    Run,
    Send,
    Window,
    listed,
)
from autopar.ir.tasks import Task
from autopar.ir.verification import check_pieces, check_values, instructions_in_order
from autopar.plain_text import microbatches_in_words

__all__ = [
    "ArrayType",
    "Copy",
    "Executable",
    "Free",
    "Input",
    "Instruction",
    "MeshProgram",
    "Output",
    "Program",
    "Recv",
    "Run",
    "Send",
    "Task",
    "Window",
]


@dataclass(frozen=True, kw_only=True)
class Program:
    """All meshes of one step, what enters them and what leaves them."""

    name: str
    meshes: tuple[MeshProgram, ...]
    executables: Mapping[str, Executable]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    num_microbatches: int = 1

    def verify(self) -> None:
        """Raise InvalidProgram, which names the mesh and the instruction, unless every rule above holds."""
        check_pieces(self.meshes, self.executables, self.inputs, self.outputs)
        check_values(self.meshes, self.executables, self.inputs, self.outputs)

    def guarded(self) -> tuple["Program", CallbackErrors | None]:
        """Return the program whose callbacks never raise, and what a call has to run in, which does.

        The same program and None if it has no callbacks that are to be guarded.
        """
        guards = {name: e.guarded for name, e in self.executables.items() if e.guarded is not None}
        if not guards:
            return self, None
        errors = CallbackErrors()
        executables = {name: replace(self.executables[name], jaxpr=guard(errors)) for name, guard in guards.items()}
        return replace(self, executables={**self.executables, **executables}), errors

    def linear_order(self) -> tuple[tuple[int, Instruction], ...]:
        """(mesh, instruction) in one global order in which no Recv waits; one Run per mesh and round."""
        return tuple((step.mesh, step.instruction) for step in instructions_in_order(self.meshes))

    def fingerprint(self) -> str:
        """Equal in every process that made this program from the same step, plan and releases."""
        parts = [repr(self.meshes), repr(self.inputs), repr(self.outputs), repr(sorted(self.executables))]
        parts += [f"{executable!r} {executable.jaxpr}" for _, executable in sorted(self.executables.items())]
        # Addresses of callbacks differ between processes.
        text = re.sub(r"0x[0-9a-f]+", "0x", "\n".join(parts))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        counts = f"{len(self.meshes)} meshes, {len(self.executables)} executables"
        lines = [f"program {self.name}: {counts}, {microbatches_in_words(self.num_microbatches)}"]
        for number, mesh in enumerate(self.meshes):
            lines += [
                _heading(number, mesh),
                *(f"  in  {i}: {mesh.values[i.value]}" for i in self.inputs if i.mesh == number),
            ]
            width = len(str(len(mesh.instructions)))
            lines += [f"  {i:>{width}}  {instruction}" for i, instruction in enumerate(mesh.instructions)]
        lines += ["executables", *(f"  {executable}" for executable in self.executables.values())]
        return "\n".join([*lines, "results", *(f"  {output}" for output in self.outputs)])


def _heading(number: int, mesh: MeshProgram) -> str:
    axes = ", ".join(f"{name}={size}" for name, size in zip(mesh.axis_names, mesh.shape, strict=True))
    return f"mesh {number}: devices {listed(mesh.devices)} as ({axes})"
