"""Lower a stage graph and its plan to a program: for every mesh, what to run, send, receive and free, in order.

    StageGraph, Plan  ->  Program

Each mesh runs its tasks in the order of the schedule. A value is sent as soon as it is made, to every mesh that reads
it; a mesh receives what another one sent it in the order of sending, as late as its tasks allow; a value is freed, or
its buffer handed to the executable, at its last use.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.compiler.lowering.host_memory import keep_on_host
from autopar.compiler.lowering.stage_programs import ShardedMesh, mesh_on_one_device, sharded_mesh
from autopar.compiler.lowering.task_executables import (
    EmittedTask,
    emit_concatenation,
    emit_task,
    emit_zeros,
    executable_name,
    executable_of,
    instance,
    task_of,
)
from autopar.compiler.memory.host_bytes import host_bytes
from autopar.compiler.pipeline.host_state import replaced_on_host, waiting_values
from autopar.compiler.pipeline.stage_graph import GraphInput, StageGraph
from autopar.ir.plan import Plan
from autopar.ir.program import (
    ArrayType,
    Executable,
    Free,
    Input,
    Instruction,
    MeshProgram,
    Output,
    Program,
    Recv,
    Run,
    Send,
    Window,
)
from autopar.ir.schedules import schedule_tasks
from autopar.ir.task_order import TaskOrder, check_order
from autopar.ir.tasks import Task


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One Run to be: an emitted task, its microbatch, and the values it reads and writes."""

    emitted: EmittedTask
    microbatch: int | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def lower(
    graph: StageGraph,
    plan: Plan,
    *,
    num_rows: int,
    donated_leaves: Iterable[int],
    on_paper: bool = False,
) -> Program:
    """The program. `num_rows` are the examples of the batch; `donated_leaves` may be overwritten.

    What executables of several devices compute is left out `on_paper`.

    Raises `PlanMismatch` for a plan that keeps on the host what cannot be there.
    """
    given, host_leaves = set(donated_leaves), replaced_on_host(graph, plan)
    # What is brought to the devices is the step's own there.
    program = _lower(graph, plan, num_rows, given | set(host_leaves), on_paper)
    waiting = waiting_values(graph, plan.host_values)
    return keep_on_host(program, host_leaves, given, waiting) if host_leaves or waiting else program


def _lower(graph: StageGraph, plan: Plan, num_rows: int, donated_leaves: set[int], on_paper: bool) -> Program:
    meshes = [plan.stages[s].mesh for s in range(graph.num_stages)]
    calls = _ordered_calls(graph, plan, meshes)
    inputs = list(_program_inputs(graph, meshes, num_rows))
    overwritable = {(i.mesh, i.value) for i in inputs if i.leaf in donated_leaves and i.window is None}
    overwritable |= _pieces_overwritable(graph, inputs, donated_leaves)
    lent = {(i.mesh, i.value) for i in inputs} - overwritable
    outputs = [replace(out, copied=not lent.isdisjoint(out.parts)) for out in _program_outputs(graph, meshes)]
    sharded = [
        mesh_on_one_device(graph, plan, n) if m.sharding is None else sharded_mesh(graph, plan, n, on_paper=on_paper)
        for n, m in enumerate(plan.meshes)
    ]
    instructions = _with_transfers(calls, inputs)
    kept = {part for output in outputs for part in output.parts}
    executables: dict[str, Executable] = {}
    programs: list[MeshProgram] = []
    for number, mesh in enumerate(plan.meshes):
        here = {i.value for i in inputs if i.mesh == number}
        alive = {value for m, value in kept if m == number}
        frozen = alive | {v for m, v in lent if m == number}
        mine = sharded[number]
        donations = _donations(calls[number], instructions[number], frozen, here - frozen, mine.types)
        executables |= _executables(calls[number], number, mine, donations)
        listed = _with_frees(instructions[number], here, alive, executables)
        names = here | {n for i in listed for n in _touched(i)}
        programs.append(
            MeshProgram(
                devices=mesh.devices,
                shape=mesh.shape,
                axis_names=mesh.axis_names,
                values={n: mine.types[n.partition("@")[0]] for n in sorted(names)},
                instructions=tuple(listed),
            )
        )
    return Program(
        name=graph.name,
        meshes=tuple(programs),
        executables=executables,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        num_microbatches=graph.num_microbatches,
    )


# --- the order of calls -------------------------------------------------------------------------------------


def _ordered_calls(graph: StageGraph, plan: Plan, meshes: Sequence[int]) -> list[list[_Call]]:
    """List the calls of each mesh: updates before each round, then the round in the order of the schedule."""
    emitted = {(t.kind, t.stage, t.round, t.update_round): emit_task(graph, t) for t in graph.tasks}
    calls: list[list[_Call]] = [[] for _ in plan.meshes]
    for round_number in range(graph.num_rounds + 1):
        for e in emitted.values():
            if e.task.kind == "U" and e.task.round == round_number:
                calls[meshes[e.task.stage]].append(_call(e, None))
        micro = [e.task for e in emitted.values() if e.task.kind != "U" and e.task.round == round_number]
        if not micro:
            continue
        for task in micro:
            zeros = emit_zeros(graph, task)
            if zeros is not None:
                calls[meshes[task.stage]].append(_call(zeros, None))
        for number, tasks in enumerate(_scheduled(graph, plan, meshes)):
            for t in tasks:
                # A stage without parameters, or in front of all of them, has no backward task.
                if (e := emitted.get((t.kind, t.stage, round_number, 0))) is not None:
                    calls[number].append(_call(e, t.microbatch))
        for task in micro:
            joined = emit_concatenation(graph, task)
            if joined is not None:
                calls[meshes[task.stage]].append(_call(joined, None))
    return calls


def _scheduled(graph: StageGraph, plan: Plan, meshes: Sequence[int]) -> Iterable[Sequence[Task]]:
    """Return the tasks of every mesh in the order of the schedule; each lane is a pipeline of its own.

    Raises `InvalidProgram` for a schedule that forgets or repeats a task, or in which tasks wait for each other.
    """

    def tasks_of(stage_mesh: Sequence[int], num_microbatches: int) -> TaskOrder:
        order = schedule_tasks(plan.schedule, stage_mesh=stage_mesh, num_microbatches=num_microbatches)
        check_order(order, stage_mesh=stage_mesh, num_microbatches=num_microbatches)
        return order

    if not graph.microbatches:
        return tasks_of(meshes, graph.num_microbatches)
    orders: dict[int, Sequence[Task]] = {}
    for lane in plan.lanes:
        used = sorted({meshes[stage] for stage in lane})
        own = graph.microbatches_of(lane.start)
        order = tasks_of([used.index(meshes[stage]) for stage in lane], len(own))
        for mesh, tasks in zip(used, order, strict=True):
            orders[mesh] = [
                task._replace(stage=lane.start + task.stage, microbatch=own[task.microbatch or 0]) for task in tasks
            ]
    return [orders[mesh] for mesh in range(len(plan.meshes))]


def _call(emitted: EmittedTask, microbatch: int | None) -> _Call:
    def names(values: Sequence[str]) -> tuple[str, ...]:
        return tuple(instance(n, microbatch) if n in emitted.per_microbatch else n for n in values)

    return _Call(emitted=emitted, microbatch=microbatch, inputs=names(emitted.inputs), outputs=names(emitted.outputs))


# --- what comes in and what goes out ------------------------------------------------------------------------


def _program_inputs(graph: StageGraph, meshes: Sequence[int], num_rows: int) -> Iterable[Input]:
    for spec in graph.inputs:
        used = list(dict.fromkeys(meshes[s] for s in spec.stages))
        if spec.kind == "whole" and spec.owned:
            used = used[:1]  # other meshes receive a copy from the owner's
        for mesh in used:
            own = sorted({m for s in spec.stages if meshes[s] == mesh for m in graph.microbatches_of(s)})
            yield from _placed(spec, mesh, own, graph.num_microbatches, num_rows)


def _placed(spec: GraphInput, mesh: int, own: Sequence[int], count: int, num_rows: int) -> Iterable[Input]:
    if spec.kind == "index":
        for m in own:
            yield Input(leaf=None, mesh=mesh, value=instance(spec.value, m), constant=m)
    elif spec.kind == "whole":
        window = None if spec.start is None or spec.stop is None else Window(axis=0, start=spec.start, stop=spec.stop)
        yield Input(leaf=spec.leaf, mesh=mesh, value=spec.value, window=window)
    else:
        size = num_rows // count
        for m in own:
            window = None if count == 1 else Window(axis=spec.axis, start=m * size, stop=(m + 1) * size)
            yield Input(leaf=spec.leaf, mesh=mesh, value=instance(spec.value, m), window=window)


def _program_outputs(graph: StageGraph, meshes: Sequence[int]) -> Iterable[Output]:
    leaves: dict[int, Output] = {}
    for out in graph.outputs:
        if out.value is None:
            leaves[out.leaf] = Output(leaf=out.leaf, parts=(), literal=out.literal)
        else:
            part = (meshes[out.stage], out.value)
            known = leaves.get(out.leaf, Output(leaf=out.leaf, parts=()))
            leaves[out.leaf] = replace(known, parts=(*known.parts, part))
    return [leaves[leaf] for leaf in sorted(leaves)]


def _pieces_overwritable(graph: StageGraph, inputs: Sequence[Input], donated: set[int]) -> set[tuple[int, str]]:
    """Pieces of donated stacked leaves may be overwritten too."""
    pieces = {i.value for i in graph.inputs if i.kind == "whole" and i.start is not None and i.leaf in donated}
    return {(i.mesh, i.value) for i in inputs if i.value in pieces}


# --- transfers ----------------------------------------------------------------------------------------------


def _with_transfers(calls: Sequence[Sequence[_Call]], inputs: Sequence[Input]) -> list[list[Instruction]]:
    """Runs with their sends behind them and their receives in front."""
    placed = {(i.mesh, i.value) for i in inputs}
    wanted = _wanted(calls, placed)
    queues: dict[tuple[int, int], deque[Send]] = {}
    sends: list[list[list[Send]]] = []
    for number, mine in enumerate(calls):
        start = list(_sends([i.value for i in inputs if i.mesh == number], number, wanted))
        completed_by = {value: position for position, call in enumerate(mine) for value in call.outputs}
        behind = [
            list(_sends([v for v in call.outputs if completed_by[v] == position], number, wanted))
            for position, call in enumerate(mine)
        ]
        sends.append([start, *behind])
        for group in sends[-1]:
            for send in group:
                queues.setdefault((number, send.to), deque()).append(send)
    result: list[list[Instruction]] = []
    for number, mine in enumerate(calls):
        here = {value for mesh, value in placed if mesh == number}
        instructions: list[Instruction] = [*sends[number][0]]
        for call, behind in zip(mine, sends[number][1:], strict=True):
            for value in call.inputs:
                if value not in here:
                    instructions += _receive(value, number, queues, here)
            instructions.append(_run(call))
            here.update(call.outputs)
            instructions += behind
        result.append(instructions)
    return result


def _wanted(calls: Sequence[Sequence[_Call]], placed: set[tuple[int, str]]) -> dict[str, list[int]]:
    """Return, for every value, the meshes that read it without having it."""
    made = [{n for call in mine for n in call.outputs} for mine in calls]
    wanted: dict[str, list[int]] = {}
    for number, mine in enumerate(calls):
        for value in dict.fromkeys(n for call in mine for n in call.inputs):
            if value not in made[number] and (number, value) not in placed:
                wanted.setdefault(value, []).append(number)
    return wanted


def _sends(values: Iterable[str], mesh: int, wanted: Mapping[str, Sequence[int]]) -> Iterable[Send]:
    by_mesh: dict[int, list[str]] = {}
    for value in values:
        for to in wanted.get(value, ()):
            if to != mesh:
                by_mesh.setdefault(to, []).append(value)
    return [Send(values=tuple(names), to=to) for to, names in sorted(by_mesh.items())]


def _receive(value: str, mesh: int, queues: Mapping[tuple[int, int], deque[Send]], here: set[str]) -> list[Instruction]:
    """Return the receives of all that the sender of `value` sent before it, and of the value."""
    sources = [s for (s, to), queue in queues.items() if to == mesh and any(value in send.values for send in queue)]
    assert sources, f"mesh {mesh} reads {value}, which no mesh makes"
    source = sources[0]
    queue = queues[source, mesh]
    received: list[Instruction] = []
    while value not in here:
        send = queue.popleft()
        here.update(send.values)
        received.append(Recv(values=send.values, source=source))
    return received


def _run(call: _Call) -> Run:
    return Run(
        task=task_of(call.emitted, call.microbatch),
        executable=executable_name(call.emitted),
        inputs=call.inputs,
        outputs=call.outputs,
    )


# --- memory -------------------------------------------------------------------------------------------------


def _touched(instruction: Instruction) -> tuple[str, ...]:
    if isinstance(instruction, Run):
        return (*instruction.inputs, *instruction.outputs)
    return instruction.values


def _last_uses(instructions: Sequence[Instruction]) -> dict[str, int]:
    return {name: position for position, i in enumerate(instructions) for name in _touched(i)}


def _donations(
    calls: Sequence[_Call],
    instructions: Sequence[Instruction],
    frozen: set[str],
    donated: set[str],
    types: Mapping[str, ArrayType],
) -> dict[str, tuple[int, ...]]:
    """Return, for each executable, the inputs that die in every run of it and whose buffers an output can take.

    The caller's `donated` buffers come before what the step made itself: that is freed here in any case, theirs only
    by taking them.
    """
    last = _last_uses(instructions)
    dying: dict[str, set[int]] = {}
    for position, i in enumerate(instructions):
        if isinstance(i, Run):
            times, outputs = Counter(i.inputs), set(i.outputs)
            dying[i.executable] = {
                p
                for p in dying.get(i.executable, range(len(i.inputs)))
                for name in [i.inputs[p]]
                if times[name] == 1 and (name in outputs or (name not in frozen and last[name] == position))
            }
    donations: dict[str, tuple[int, ...]] = {}
    for emitted in {executable_name(c.emitted): c.emitted for c in calls}.values():
        room = [types[n] for n in emitted.outputs]
        given: list[int] = []
        # Accumulators first: they are written again under their name, so they must be given up.
        inputs, written = emitted.inputs, set(emitted.outputs)
        dead = dying[executable_name(emitted)]
        for p in sorted(dead, key=lambda p: (inputs[p] not in written, inputs[p] not in donated, p)):
            if types[emitted.inputs[p].partition("@")[0]] in room:
                room.remove(types[emitted.inputs[p].partition("@")[0]])
                given.append(p)
        donations[executable_name(emitted)] = tuple(sorted(given))
    return donations


def _executables(
    calls: Sequence[_Call], mesh: int, planned: ShardedMesh, donations: Mapping[str, Sequence[int]]
) -> dict[str, Executable]:
    """Return the executables of a mesh."""
    tasks = {executable_name(c.emitted): c.emitted for c in calls}
    by_name = {n: planned.types[n.partition("@")[0]] for e in tasks.values() for n in (*e.inputs, *e.outputs)}
    return {
        name: replace(
            executable_of(e, mesh, by_name, donations[name]),
            jaxpr=planned.jaxprs.get(name),
            host_bytes=host_bytes(planned.jaxprs[name]) if name in planned.jaxprs else 0,
        )
        for name, e in tasks.items()
    }


def _with_frees(
    instructions: Sequence[Instruction], here: set[str], alive: set[str], executables: Mapping[str, Executable]
) -> list[Instruction]:
    """Add a Free behind the last use of every value that is neither a result nor donated to an executable."""
    last = _last_uses(instructions)
    result: list[Instruction] = []
    for position, i in enumerate(instructions):
        result.append(i)
        given = set[str]()
        if isinstance(i, Run):
            given = {i.inputs[p] for p in executables[i.executable].donated} - set(i.outputs)
        dead = [n for n in dict.fromkeys(_touched(i)) if last[n] == position and n not in alive | given]
        if dead:
            result.append(Free(values=tuple(dead)))
    unread = sorted(here - set(last) - alive)
    return [Free(values=tuple(unread)), *result] if unread else result
