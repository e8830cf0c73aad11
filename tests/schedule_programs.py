"""Build a program of a schedule alone: one value per edge between tasks, with no computation in it."""

from collections import deque
from collections.abc import Sequence

from autopar.ir.program import (
    ArrayType,
    Executable,
    Free,
    Instruction,
    MeshProgram,
    Program,
    Recv,
    Run,
    Send,
    Task,
)
from autopar.ir.task_order import TaskOrder

EDGE = ArrayType(shape=(256,), dtype="float32")  # 1 KiB


def program_of(order: TaskOrder, stage_mesh: Sequence[int], num_microbatches: int) -> Program:
    """F hands h on and keeps r for its B; B hands g back, and keeps c for its W if it has one."""
    split = any(task.kind == "W" for tasks in order for task in tasks)
    last = len(stage_mesh) - 1
    # What each mesh sends to each other one, in order; it is received in this order too.
    sent = {
        (source, to): deque(_sent(order[source], source, to, stage_mesh, split))
        for source in range(len(order))
        for to in range(len(order))
    }
    meshes: list[MeshProgram] = []
    for number, tasks in enumerate(order):
        instructions: list[Instruction] = []
        here: set[str] = set()
        for task in tasks:
            inputs, outputs = _edges(task, last, split)
            source = task.stage + (1 if task.kind == "B" else -1)
            arriving = [v for v in inputs if v[0] in "hg" and stage_mesh[source] != number]
            queue = sent[stage_mesh[source], number] if arriving else deque[str]()
            while queue and arriving[0] not in here:
                here.add(queue[0])
                instructions.append(Recv(values=(queue.popleft(),), source=stage_mesh[source]))
            instructions.append(Run(task=task, executable=_name(task), inputs=inputs, outputs=outputs))
            if inputs:
                instructions.append(Free(values=inputs))
            target = task.stage + (1 if task.kind == "F" else -1)
            leaving = [v for v in outputs if v[0] in "hg" and stage_mesh[target] != number]
            if leaving:
                instructions.append(Send(values=tuple(leaving), to=stage_mesh[target]))
                instructions.append(Free(values=tuple(leaving)))
        names = {name for i in instructions for name in ((*i.inputs, *i.outputs) if isinstance(i, Run) else i.values)}
        meshes.append(
            MeshProgram(
                devices=(number,),
                shape=(1,),
                axis_names=("d",),
                values=dict.fromkeys(sorted(names), EDGE),
                instructions=tuple(instructions),
            )
        )
    executables = {
        _name(task): _executable(task, stage_mesh[task.stage], last, split) for tasks in order for task in tasks
    }
    return Program(
        name="schedule",
        meshes=tuple(meshes),
        executables=executables,
        inputs=(),
        outputs=(),
        num_microbatches=num_microbatches,
    )


def _sent(tasks: Sequence[Task], source: int, to: int, stage_mesh: Sequence[int], split: bool) -> list[str]:
    values: list[str] = []
    for task in tasks:
        target = task.stage + (1 if task.kind == "F" else -1)
        outputs = _edges(task, len(stage_mesh) - 1, split)[1]
        values += [v for v in outputs if v[0] in "hg" and stage_mesh[target] == to != source]
    return values


def _name(task: Task) -> str:
    return f"{task.kind}{task.stage}"


def _executable(task: Task, mesh: int, last: int, split: bool) -> Executable:
    inputs, outputs = _edges(task, last, split)
    return Executable(
        name=_name(task), mesh=mesh, inputs=(EDGE,) * len(inputs), outputs=(EDGE,) * len(outputs), flops=1e9
    )


def _edges(task: Task, last: int, split: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    stage, at = task.stage, f"@{task.microbatch}"
    if task.kind == "F":
        received = () if stage == 0 else (f"h_{stage - 1}{at}",)
        handed = () if stage == last else (f"h_{stage}{at}",)
        return received, (*handed, f"r_{stage}{at}")
    if task.kind == "B":
        received = () if stage == last else (f"g_{stage + 1}{at}",)
        handed = () if stage == 0 else (f"g_{stage}{at}",)
        return (*received, f"r_{stage}{at}"), (*handed, *((f"c_{stage}{at}",) if split else ()))
    return (f"c_{stage}{at}",), ()
