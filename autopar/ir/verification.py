"""Check a program: every part fits its neighbours, every value read is there, and nobody waits forever.

The instruction lists are executed symbolically, round robin: in each round a mesh goes on until it has run
one task or has to wait. Sends are buffered and a Recv names its source, so the lists are a Kahn network: if
one order comes to its end, every order does, with the same values.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from autopar.errors import InvalidProgram
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
    spec_axes,
    spec_parts,
)

Channels = dict[tuple[int, int], deque[tuple[str, ...]]]  # (source, destination) -> what is on its way


@dataclass(frozen=True, kw_only=True)
class PlacedInstruction:
    """One instruction at its place."""

    mesh: int
    position: int
    instruction: Instruction

    def __str__(self) -> str:
        return f"Mesh {self.mesh}, instruction {self.position} ({str(self.instruction).strip()})"


def instructions_in_order(meshes: Sequence[MeshProgram]) -> Iterator[PlacedInstruction]:
    """Every instruction in an order in which no Recv waits; InvalidProgram when there is none."""
    channels: Channels = defaultdict(deque)
    positions = [0] * len(meshes)
    moved = True
    while moved:
        moved = False
        for number in range(len(meshes)):
            for step in _until_run(number, meshes[number], positions[number], channels):
                yield step
                positions[number] = step.position + 1
                moved = True
    _check_finished(meshes, positions, channels)


def _until_run(number: int, mesh: MeshProgram, start: int, channels: Channels) -> Iterator[PlacedInstruction]:
    for position in range(start, len(mesh.instructions)):
        instruction = mesh.instructions[position]
        step = PlacedInstruction(mesh=number, position=position, instruction=instruction)
        if isinstance(instruction, Recv) and not _arrived(step, instruction, channels):
            return
        if isinstance(instruction, Send):
            channels[number, instruction.to].append(instruction.values)
        yield step
        if isinstance(instruction, Run):
            return


def _arrived(step: PlacedInstruction, recv: Recv, channels: Channels) -> bool:
    on_the_way = channels[recv.source, step.mesh]
    if not on_the_way:
        return False
    sent = on_the_way.popleft()
    if sent != recv.values:
        raise InvalidProgram(
            f"{step} expects {_names(recv.values)}, but mesh {recv.source} sends {_names(sent)} next. "
            "Sends and receives of two meshes must match in order: reorder one of the two lists."
        )
    return True


def _check_finished(meshes: Sequence[MeshProgram], positions: Sequence[int], channels: Channels) -> None:
    waiting = [
        PlacedInstruction(mesh=number, position=position, instruction=mesh.instructions[position])
        for number, (mesh, position) in enumerate(zip(meshes, positions, strict=True))
        if position < len(mesh.instructions)
    ]
    if waiting:
        raise InvalidProgram(
            f"Deadlock: {'; '.join(f'{step} waits' for step in waiting)}. "
            "Each of them needs a send that comes earlier on the other mesh."
        )
    for (source, to), sent in channels.items():
        if sent:
            raise InvalidProgram(
                f"Mesh {source} sends {_names(sent[0])} to mesh {to}, which never receives it. "
                "Add the Recv, or drop the Send."
            )


def check_pieces(
    meshes: Sequence[MeshProgram],
    executables: Mapping[str, Executable],
    inputs: Sequence[Input],
    outputs: Sequence[Output],
) -> None:
    """Check what each part promises by itself: devices, specs, calls, windows and results."""
    owners: dict[int, int] = {}
    for executable in executables.values():
        _check_types(executable)
    for number, mesh in enumerate(meshes):
        _check_mesh(number, mesh, owners)
        for position, instruction in enumerate(mesh.instructions):
            step = PlacedInstruction(mesh=number, position=position, instruction=instruction)
            _check_declared(step, mesh)
            if isinstance(instruction, Run):
                _check_call(step, instruction, mesh, executables)
            elif isinstance(instruction, Recv):
                _check_transfer(step, instruction, meshes)
            elif isinstance(instruction, Copy):
                _check_copy(step, instruction, mesh)
            elif isinstance(instruction, Send) and (
                instruction.to == number or instruction.to not in range(len(meshes))
            ):
                raise InvalidProgram(
                    f"{step} sends to mesh {instruction.to}; it must be another of the {len(meshes)} meshes."
                )
    for item in inputs:
        _check_input(item, meshes)
    if sorted(output.leaf for output in outputs) != list(range(len(outputs))):
        leaves = [output.leaf for output in outputs]
        raise InvalidProgram(f"The results are leaves {leaves}; they must be 0 to {len(outputs) - 1}, each once.")
    for output in outputs:
        _check_output(output, meshes)


def _check_mesh(number: int, mesh: MeshProgram, owners: dict[int, int]) -> None:
    if math.prod(mesh.shape) != len(mesh.devices) or len(mesh.shape) != len(mesh.axis_names):
        raise InvalidProgram(
            f"Mesh {number} has {len(mesh.devices)} devices, shape {mesh.shape} and axes {mesh.axis_names}. "
            "The shape must have one entry per axis and multiply to the number of devices."
        )
    for device in mesh.devices:
        if owners.setdefault(device, number) != number:
            raise InvalidProgram(
                f"Device {device} is on mesh {owners[device]} and on mesh {number}. Meshes share no device: "
                "put the stages of one device on one mesh."
            )
    for name, kind in mesh.values.items():
        if not _fits(kind, mesh):
            raise InvalidProgram(
                f"Mesh {number}, value '{name}' of type {kind}: its spec must name axes of the mesh "
                f"{dict(zip(mesh.axis_names, mesh.shape))} that divide the dimension, one entry each."
            )


def _fits(kind: ArrayType, mesh: MeshProgram) -> bool:
    sizes = dict(zip(mesh.axis_names, mesh.shape))
    if len(kind.spec) > len(kind.shape) or any(a not in sizes for entry in kind.spec for a in spec_axes(entry)):
        return False
    return all(dim % parts == 0 for dim, parts in zip(kind.shape, spec_parts(kind.spec, sizes)))


def _check_types(executable: Executable) -> None:
    """Check that an executable computes what it declares; one without a jaxpr computes nothing yet."""
    if executable.jaxpr is None:
        return
    for what, declared, avals in (
        ("inputs", executable.inputs, executable.jaxpr.in_avals),
        ("outputs", executable.outputs, executable.jaxpr.out_avals),
    ):
        wanted = [(kind.shape, kind.dtype) for kind in declared]
        found = [(tuple(aval.shape), str(aval.dtype)) for aval in avals]
        if found != wanted:
            number = next((n for n, pair in enumerate(zip(found, wanted)) if pair[0] != pair[1]), None)
            differs = f"{len(found)} and {len(wanted)}" if number is None else f"{found[number]} and {wanted[number]}"
            raise InvalidProgram(
                f"Executable '{executable.name}' has other {what} than it declares: {differs}"
                f"{'' if number is None else f', the {what[:-1]} {number}'}. Declare shapes and dtypes as it has them."
            )


def _check_declared(step: PlacedInstruction, mesh: MeshProgram) -> None:
    for name in (*_reads(step.instruction), *_writes(step.instruction)):
        if name not in mesh.values:
            raise InvalidProgram(f"{step} names '{name}', which has no type there. Declare it in the mesh's values.")


def _check_call(step: PlacedInstruction, run: Run, mesh: MeshProgram, executables: Mapping[str, Executable]) -> None:
    executable = executables.get(run.executable)
    if executable is None or executable.mesh != step.mesh or executable.name != run.executable:
        known = ", ".join(name for name, e in executables.items() if e.mesh == step.mesh)
        raise InvalidProgram(f"{step} calls '{run.executable}'; the executables of mesh {step.mesh} are: {known}.")
    for what, names, types in (
        ("inputs", run.inputs, executable.inputs),
        ("outputs", run.outputs, executable.outputs),
    ):
        if len(names) != len(types):
            raise InvalidProgram(f"{step} has {len(names)} {what}; '{run.executable}' has {len(types)}.")
        for name, required in zip(names, types, strict=True):
            found = mesh.values[name]
            if not same_type(found, required, mesh):
                raise InvalidProgram(
                    f"{step}: '{name}' is {found}, but '{run.executable}' has {required} in its {what}. "
                    "Shape, dtype and layout must be equal."
                )
    if not set(executable.donated) <= set(range(len(executable.inputs))):
        raise InvalidProgram(
            f"Executable '{run.executable}' donates positions {executable.donated} of "
            f"{len(run.inputs)} inputs. Count from 0."
        )
    times = Counter(run.inputs)
    for position in executable.donated:
        if times[run.inputs[position]] > 1:
            raise InvalidProgram(
                f"{step} donates '{run.inputs[position]}' and reads it a second time. Pass it only once."
            )


def same_type(found: ArrayType, required: ArrayType, mesh: MeshProgram) -> bool:
    """Same memory, shape, dtype and layout; mesh axes of size 1 and trailing empty entries lay out nothing."""
    return found is required or (found.memory, found.shape, found.dtype, _layout(found, mesh)) == (
        required.memory,
        required.shape,
        required.dtype,
        _layout(required, mesh),
    )


def _layout(kind: ArrayType, mesh: MeshProgram) -> tuple[tuple[str, ...], ...]:
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    entries = [tuple(axis for axis in spec_axes(entry) if sizes.get(axis) != 1) for entry in kind.spec]
    return tuple(entries + [()] * (len(kind.shape) - len(entries)))


def _check_transfer(step: PlacedInstruction, recv: Recv, meshes: Sequence[MeshProgram]) -> None:
    if recv.source == step.mesh or recv.source not in range(len(meshes)):
        raise InvalidProgram(
            f"{step} receives from mesh {recv.source}; it must be another of the {len(meshes)} meshes."
        )
    for name in recv.values:
        here, there = meshes[step.mesh].values[name], meshes[recv.source].values.get(name)
        if there is None or (here.shape, here.dtype) != (there.shape, there.dtype):
            raise InvalidProgram(
                f"{step}: '{name}' is {here} here and {there or 'nothing'} on mesh {recv.source}. "
                "A transfer changes the layout, never shape or dtype: declare the same on both meshes."
            )
        if "host" in (here.memory, there.memory):
            raise InvalidProgram(
                f"{step}: '{name}' is {there} on mesh {recv.source}, and {here} here. Values go from device to device: "
                "copy it to the devices first."
            )


def _check_copy(step: PlacedInstruction, copy: Copy, mesh: MeshProgram) -> None:
    if len(copy.values) != len(copy.results):
        raise InvalidProgram(f"{step} copies {len(copy.values)} values to {len(copy.results)}. Name one for each.")
    for name, result in zip(copy.values, copy.results, strict=True):
        found, made = mesh.values[name], mesh.values[result]
        if found.memory == copy.to or not same_type(replace(found, memory=copy.to), made, mesh):
            raise InvalidProgram(
                f"{step}: '{name}' is {found}, and '{result}' is {made}. A copy to the {copy.to} is from the other "
                "memory, and changes neither shape, dtype nor layout: declare both so."
            )


def _check_input(item: Input, meshes: Sequence[MeshProgram]) -> None:
    kind = meshes[item.mesh].values.get(item.value) if item.mesh in range(len(meshes)) else None
    if kind is None:
        raise InvalidProgram(f"Input {item} goes to mesh {item.mesh}, which declares no such value.")
    if (item.leaf is None) == (item.constant is None):
        raise InvalidProgram(f"Input {item} on mesh {item.mesh} must come from a leaf or be a constant, and not both.")
    if item.constant is not None and (kind.shape, kind.dtype) != ((), "int32"):
        raise InvalidProgram(f"Input {item} on mesh {item.mesh} is {kind}; a constant is an int32 scalar.")
    window = item.window
    if window is not None and (
        window.axis not in range(len(kind.shape)) or kind.shape[window.axis] != window.stop - window.start
    ):
        raise InvalidProgram(f"Input {item} on mesh {item.mesh} is {kind}, which its window does not fit.")


def _check_output(output: Output, meshes: Sequence[MeshProgram]) -> None:
    if bool(output.parts) == (output.literal is not None):
        raise InvalidProgram(f"Result {output} must have parts or be a literal, and not both.")
    kinds: list[ArrayType] = []
    for mesh, value in output.parts:
        if mesh not in range(len(meshes)) or value not in meshes[mesh].values:
            raise InvalidProgram(f"Result {output} reads '{value}' on mesh {mesh}, which declares no such value.")
        kinds.append(meshes[mesh].values[value])
    if len(kinds) > 1 and (len({(k.shape[1:], k.dtype) for k in kinds}) > 1 or any(k.shape == () for k in kinds)):
        raise InvalidProgram(
            f"Result {output} stacks {', '.join(map(str, kinds))}. "
            "Parts need an axis 0, and may differ in nothing else."
        )


def check_values(
    meshes: Sequence[MeshProgram],
    executables: Mapping[str, Executable],
    inputs: Sequence[Input],
    outputs: Sequence[Output],
) -> None:
    """Execute symbolically: what is read is there, and nothing but results is left at the end."""
    live: list[set[str]] = [set() for _ in meshes]
    constants: list[set[str]] = [set() for _ in meshes]
    gone: list[dict[str, str]] = [{} for _ in meshes]
    sources: dict[tuple[int, int | None, int | None, Window | None], str] = {}
    for item in inputs:
        if item.value in live[item.mesh]:
            raise InvalidProgram(f"Mesh {item.mesh} has two inputs '{item.value}'. Give each its own name.")
        # Two placements of one array may share its buffer, so that donating one would destroy the other.
        placed = (item.mesh, item.leaf, item.constant, item.window)
        if placed in sources:
            raise InvalidProgram(f"Input {item} on mesh {item.mesh} is there already as '{sources[placed]}'. Use that.")
        sources[placed] = item.value
        if item.constant is not None:
            constants[item.mesh].add(item.value)
        live[item.mesh].add(item.value)
    for step in instructions_in_order(meshes):
        _check_constants(step, constants[step.mesh], executables)
        _apply(step, live[step.mesh], gone[step.mesh], executables)
    results = {(mesh, value) for output in outputs for mesh, value in output.parts}
    for mesh, value in sorted(results):
        if value not in live[mesh]:
            raise InvalidProgram(
                f"Result '{value}' is not on mesh {mesh} at the end: "
                f"it {gone[mesh].get(value, 'was never written')}. "
                "A result must be written and neither freed nor donated."
            )
    kept = results | {(item.mesh, item.value) for item in inputs}
    for number, values in enumerate(live):
        left = tuple(sorted(value for value in values if (number, value) not in kept))
        if left:
            raise InvalidProgram(
                f"Mesh {number} ends with {_names(left)}, which is no result. Free it after its last use."
            )


def _check_constants(step: PlacedInstruction, constants: set[str], executables: Mapping[str, Executable]) -> None:
    if not isinstance(step.instruction, Run):
        return
    for position in executables[step.instruction.executable].donated:
        name = step.instruction.inputs[position]
        if name in constants:
            raise InvalidProgram(
                f"{step} donates the constant '{name}', which the next call needs. "
                "Donate only what a step makes or is given."
            )


def _apply(
    step: PlacedInstruction, live: set[str], gone: dict[str, str], executables: Mapping[str, Executable]
) -> None:
    for name in _reads(step.instruction):
        if name not in live:
            raise InvalidProgram(
                f"{step} reads '{name}', which {gone.get(name, 'was never written')}. "
                "A value must be an input, written or received before, and not yet freed or donated."
            )
    if isinstance(step.instruction, Run):
        donated = executables[step.instruction.executable].donated
        leaving = [(step.instruction.inputs[position], "donated") for position in donated]
    elif isinstance(step.instruction, Copy):
        leaving = [(name, "taken over") for name in (step.instruction.values if step.instruction.takes else ())]
    else:
        leaving = [(name, "freed") for name in (step.instruction.values if isinstance(step.instruction, Free) else ())]
    for name, how in leaving:
        live.discard(name)
        gone[name] = f"was {how} by instruction {step.position}"
    for name in _writes(step.instruction):
        if name in live:
            raise InvalidProgram(f"{step} writes '{name}', which is there already. Free it first, or use another name.")
        live.add(name)


def _reads(instruction: Instruction) -> tuple[str, ...]:
    match instruction:
        case Run():
            return instruction.inputs
        case Send() | Copy():
            return instruction.values
        case Free():
            return (*instruction.values, *instruction.after)
        case Recv():
            return ()
        case _:
            assert_never(instruction)


def _writes(instruction: Instruction) -> tuple[str, ...]:
    match instruction:
        case Run():
            return instruction.outputs
        case Recv():
            return instruction.values
        case Copy():
            return instruction.results
        case Send() | Free():
            return ()
        case _:
            assert_never(instruction)


def _names(values: Sequence[str]) -> str:
    return ", ".join(f"'{value}'" for value in values)
