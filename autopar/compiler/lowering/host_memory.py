"""Keep values in the memory of the hosts: copy each to the devices for the tasks that read it, and back.

    Program, leaves and values that may be on the host  ->  Program

    on the link to the devices  a |  b  |  c  |  d  |
    on the devices                | use a | use b | use c | ...
    on the link to the hosts              |  a  |  b  | ...

A value comes in while the task before its use runs, and leaves during the task after it. State comes for the tasks that
read it; activations leave between the forward and the backward task of a microbatch, sums of gradients between the
tasks that add to them. A value that is used again soon stays. Its buffer is freed when the copy to the host has
arrived, for which the task after the next one waits. A value that the host still holds is only freed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.compiler.pipeline.host_state import SOON
from autopar.ir.program import Copy, Free, Instruction, MeshProgram, Output, Program, Recv, Run, Send


def keep_on_host(
    program: Program, leaves: Mapping[int, int], donated: Collection[int], waiting: Collection[str]
) -> Program:
    """Return the program whose inputs `leaves` are on the host, and the results that replace them.

    `leaves` pairs leaves of the arguments with leaves of the results; `donated` ones are gone after the step. Values
    named in `waiting`, of all microbatches, are on the host while no task uses them; inputs and results are not.
    """
    results = set(leaves.values())
    coming = {(i.mesh, i.value): i.leaf in donated for i in program.inputs if i.leaf in leaves}
    leaving = {part for output in program.outputs if output.leaf in results for part in output.parts}
    fixed = {(i.mesh, i.value) for i in program.inputs} | {part for out in program.outputs for part in out.parts}
    return replace(
        program,
        meshes=tuple(
            _with_copies(
                mesh,
                coming={value: taken for (m, value), taken in coming.items() if m == number},
                leaving={value for m, value in leaving if m == number},
                waiting={
                    name for name in mesh.values if name.partition("@")[0] in waiting and (number, name) not in fixed
                },
                shown={v for out in program.outputs if out.leaf not in results for m, v in out.parts if m == number},
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


@dataclass(frozen=True, kw_only=True)
class _Use:
    """An instruction that reads or writes a value, and the task of the mesh that it belongs to."""

    task: int
    place: int
    writes: bool


@dataclass(frozen=True, kw_only=True)
class _Stay:
    """Uses of a value between which it stays on the devices, and how it comes there and leaves."""

    value: str
    uses: tuple[_Use, ...]
    comes: bool
    """True if it comes from the host; otherwise the first use makes it."""
    takes: bool
    """True if the host keeps no copy when it comes."""
    leaves: bool
    """True if it leaves to the host, from which it comes again, or where the step ends with it."""
    ends: bool
    """True if nothing else forgets it on the devices."""

    @property
    def written_at(self) -> int | None:
        """The place of the instruction that writes it last, if one does."""
        return max((use.place for use in self.uses if use.writes), default=None)


def _with_copies(
    mesh: MeshProgram,
    *,
    coming: Mapping[str, bool],
    leaving: Collection[str],
    waiting: Collection[str],
    shown: Collection[str],
) -> MeshProgram:
    task_at = _tasks_of(mesh.instructions)
    uses = _uses(mesh.instructions, task_at, {*coming, *leaving, *waiting})
    assert set(coming) <= uses.keys(), "a task reads all state that is kept on the host"
    stays = [
        stay
        for value, its_uses in uses.items()
        for stay in _stays(value, its_uses, taken=coming.get(value), result=value in leaving, shown=value in shown)
    ]
    instructions = _Instructions(stays)
    for place, instruction in enumerate(mesh.instructions):
        if place == 0:
            instructions.bring(0)
        if isinstance(instruction, Run):
            instructions.before(task_at[place])
        instructions.listed.append(instruction)
        instructions.behind(place)
    instructions.before(task_at[-1] + 1)
    instructions.before(task_at[-1] + 2)
    copied = sorted({stay.value for stay in stays if stay.comes or stay.leaves})
    on_hosts = {on_host(name): replace(mesh.values[name], memory="host") for name in copied}
    return replace(mesh, values={**mesh.values, **on_hosts}, instructions=tuple(instructions.listed))


def _tasks_of(instructions: Sequence[Instruction]) -> list[int]:
    """Number the Runs; receives belong to the next one, sends to the one that they stand behind."""
    tasks: list[int] = []
    runs = 0
    for instruction in instructions:
        before = isinstance(instruction, Send | Free)
        tasks.append(max(0, runs - 1) if before else runs)
        runs += isinstance(instruction, Run)
    return tasks


def _uses(
    instructions: Sequence[Instruction], task_at: Sequence[int], values: Collection[str]
) -> dict[str, list[_Use]]:
    uses: dict[str, list[_Use]] = {}
    for place, instruction in enumerate(instructions):
        written = _written(instruction)
        for name in dict.fromkeys((*_read(instruction), *written)):
            if name in values:
                uses.setdefault(name, []).append(_Use(task=task_at[place], place=place, writes=name in written))
    return uses


def _stays(value: str, uses: Sequence[_Use], *, taken: bool | None, result: bool, shown: bool) -> Iterator[_Stay]:
    """Yield the stays of a value; `taken` says for one that is on the host at first that the step may take it."""
    runs: list[list[_Use]] = []
    for use in uses:
        if runs and use.task - runs[-1][-1].task <= SOON:
            runs[-1].append(use)
        else:
            runs.append([use])
    for number, run in enumerate(runs):
        last = number == len(runs) - 1
        writes = any(use.writes for use in run)
        stale = writes or (last and not result)
        yield _Stay(
            value=value,
            uses=tuple(run),
            comes=number > 0 or taken is not None,
            takes=stale and taken is not False,
            leaves=writes and (result or not last),
            ends=(not last or result) and not (last and shown),
        )


class _Instructions:
    """The instructions of a mesh so far; values come, leave and are forgotten as their stays say."""

    def __init__(self, stays: Sequence[_Stay]) -> None:
        self.listed: list[Instruction] = []
        self._first: dict[int, list[_Stay]] = {}
        self._written: dict[int, list[_Stay]] = {}
        self._forgotten: dict[int, list[_Stay]] = {}
        self._left: dict[int, list[_Stay]] = {}
        for stay in stays:
            if stay.comes:
                self._first.setdefault(stay.uses[0].task, []).append(stay)
            if stay.leaves:
                assert stay.written_at is not None
                self._written.setdefault(stay.written_at, []).append(stay)
            if stay.ends and stay.leaves:
                self._left.setdefault(stay.uses[-1].task, []).append(stay)
            elif stay.ends:
                self._forgotten.setdefault(stay.uses[-1].place, []).append(stay)

    def before(self, task: int) -> None:
        """Free what left while the last task ran, and start to bring what the next one reads."""
        gone = tuple(stay.value for stay in self._left.get(task - 2, ()))
        if gone:
            self.listed.append(Free(values=gone, after=tuple(map(on_host, gone))))
        self.bring(task + 1)

    def bring(self, task: int) -> None:
        """Copy to the devices what a task is the first to read; what the host is to keep is not taken from it."""
        for takes in (True, False):
            values = tuple(stay.value for stay in self._first.get(task, ()) if stay.takes is takes)
            if values:
                self.listed.append(Copy(values=tuple(map(on_host, values)), results=values, to="device", takes=takes))

    def behind(self, place: int) -> None:
        """Start to copy to the host what an instruction has made, and forget what the host has."""
        made = tuple(stay.value for stay in self._written.get(place, ()))
        if made:
            self.listed.append(Copy(values=made, results=tuple(map(on_host, made)), to="host"))
        read = tuple(stay.value for stay in self._forgotten.get(place, ()))
        if read:
            self.listed.append(Free(values=read))


def _read(instruction: Instruction) -> tuple[str, ...]:
    match instruction:
        case Run():
            return instruction.inputs
        case Send():
            return instruction.values
        case _:
            return ()


def _written(instruction: Instruction) -> tuple[str, ...]:
    match instruction:
        case Run():
            return instruction.outputs
        case Recv():
            return instruction.values
        case _:
            return ()
