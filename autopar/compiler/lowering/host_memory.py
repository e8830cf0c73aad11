"""Keep state in the memory of the hosts: bring each part of it to the devices for its update, and back.

Program, leaves on the host  ->  Program

    on the link to the devices   part 0, part 1 |  part 2  |  part 3  |
    on the devices                              | update 0 | update 1 | update 2 | ...
    on the link to the hosts                               |  part 0  |  part 1  | ...

A part comes in while the one before it is updated, and leaves while the one after it is: no more than three are on the
devices. A copy takes its memory when it is started, so that the next part waits until the last but two has left.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.ir.program import Copy, Free, Instruction, MeshProgram, Output, Program, Run


def keep_on_host(program: Program, leaves: Mapping[int, int], donated: Collection[int]) -> Program:
    """Return the program whose inputs `leaves` are on the host, and the results that replace them.

    `leaves` pairs leaves of the arguments with leaves of the results; `donated` ones are gone after the step.
    """
    results = set(leaves.values())
    coming = {(i.mesh, i.value): i.leaf in donated for i in program.inputs if i.leaf in leaves}
    leaving = {part for output in program.outputs if output.leaf in results for part in output.parts}
    shown = {part for output in program.outputs if output.leaf not in results for part in output.parts}
    return replace(
        program,
        meshes=tuple(
            _with_copies(
                mesh,
                coming={value: taken for (m, value), taken in coming.items() if m == number},
                leaving={value for m, value in leaving if m == number},
                shown={value for m, value in shown if m == number},
            )
            for number, mesh in enumerate(program.meshes)
        ),
        inputs=tuple(replace(i, value=on_host(i.value)) if i.leaf in leaves else i for i in program.inputs),
        outputs=tuple(_from_host(out) if out.leaf in results else out for out in program.outputs),
    )


def on_host(value: str) -> str:
    """Return the name of a value's copy on the host."""
    return f"{value}/host"


def _from_host(output: Output) -> Output:
    return replace(output, parts=tuple((mesh, on_host(value)) for mesh, value in output.parts), copied=False)


@dataclass(kw_only=True, eq=False)
class _Leaving:
    """Values on their way to the host, since a part's update was started."""

    part: int
    values: tuple[str, ...]


@dataclass(kw_only=True, eq=False)
class _Copies:
    """The instructions of a mesh so far, and what is on its way to the host."""

    instructions: list[Instruction] = field(default_factory=list[Instruction])
    leaving: list[_Leaving] = field(default_factory=list[_Leaving])

    def bring(self, part: Sequence[str], taken: Mapping[str, bool], after: tuple[str, ...]) -> None:
        """Copy a part to the devices; what the caller keeps is not taken from the host."""
        for takes in (True, False):
            mine = tuple(value for value in part if taken[value] is takes)
            if mine:
                self.instructions.append(
                    Copy(values=tuple(map(on_host, mine)), results=mine, to="device", takes=takes, after=after)
                )

    def free_since(self, part: int, still_read: Collection[str]) -> tuple[str, ...]:
        """Free on the devices what left with parts up to this one and is not read again; return its names there."""
        gone = [(each.part, value) for each in self.leaving if each.part <= part for value in each.values]
        self.leaving = [each for each in self.leaving if each.part > part]
        self.leaving += [_Leaving(part=n, values=(value,)) for n, value in gone if value in still_read]
        dead = tuple(value for _, value in gone if value not in still_read)
        if dead:
            self.instructions.append(Free(values=dead))
        return tuple(map(on_host, dead))


def _with_copies(
    mesh: MeshProgram, *, coming: Mapping[str, bool], leaving: Collection[str], shown: Collection[str]
) -> MeshProgram:
    parts = _parts(mesh.instructions, coming)
    last = {name: place for place, i in enumerate(mesh.instructions) for name in _touched(i)}
    order = list(parts)
    copies = _Copies()
    number = -1
    for place, instruction in enumerate(mesh.instructions):
        if place in parts:
            number += 1
            if number == 0:
                copies.bring(parts[place], coming, ())
            still_read = {*shown, *(name for name, until in last.items() if until >= place)}
            after = copies.free_since(number - 2, still_read)
            if number + 1 < len(order):
                copies.bring(parts[order[number + 1]], coming, after)
        copies.instructions.append(instruction)
        made = tuple(name for name in _made(instruction) if name in leaving)
        if made:
            copies.instructions.append(Copy(values=made, results=tuple(map(on_host, made)), to="host"))
            copies.leaving.append(_Leaving(part=number, values=made))
    copies.free_since(number, shown)
    on_hosts = {on_host(name): replace(mesh.values[name], memory="host") for name in sorted({*coming, *leaving})}
    return replace(mesh, values={**mesh.values, **on_hosts}, instructions=tuple(copies.instructions))


def _parts(instructions: Sequence[Instruction], coming: Collection[str]) -> dict[int, list[str]]:
    """By the place of an instruction, the values on the host that it is the first to read."""
    parts: dict[int, list[str]] = {}
    seen = set[str]()
    for place, instruction in enumerate(instructions):
        first = [name for name in _touched(instruction) if name in coming and name not in seen]
        if first and isinstance(instruction, Run):
            parts[place] = first
        seen.update(first)
    assert seen == set(coming), "an update reads all state that is kept on the host"
    return parts


def _made(instruction: Instruction) -> tuple[str, ...]:
    return instruction.outputs if isinstance(instruction, Run) else ()


def _touched(instruction: Instruction) -> tuple[str, ...]:
    match instruction:
        case Run():
            return (*instruction.inputs, *instruction.outputs)
        case Copy():
            return (*instruction.values, *instruction.results)
        case _:
            return instruction.values
