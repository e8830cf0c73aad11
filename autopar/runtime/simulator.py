"""Simulate a program: the same instruction lists, with durations in place of arrays.

    Program, Costs  ->  Timeline

Every mesh does its instructions in order. A Run takes the time that the costs say, and a Send and its Recv that of a
transfer on the link of the two meshes; hosts start both (`ir.clocks`). All devices of the two meshes share a transfer:
its bytes are the most that one device of either side sends or receives,

    max(bytes that a receiver holds,  bytes that a receiver holds · receivers / senders)

A Copy between the memories of a mesh takes the time of one device's bytes on its link to the host: all have one. A Run
waits for the copies that it reads, a Free for those that it names, and the step for all of them.
"""

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, assert_never

from autopar.ir.clocks import Clocks, Delivery, Hosts
from autopar.ir.instructions import Memory
from autopar.ir.program import Copy, Executable, Free, Instruction, Program, Recv, Run, Send, Task
from autopar.runtime.timeline import Event, HostCopy, PeakMoment, Timeline, Transfer

_NONE: Mapping[str, float] = MappingProxyType({})


class Costs(Protocol):
    """Durations of executables and transfers."""

    def run_time_s(self, executable: Executable, task: Task) -> float:
        """Seconds that the mesh of the executable is busy."""
        ...

    def transfer_time_s(self, num_bytes: int, source: int, destination: int) -> float:
        """Seconds that values occupy the link between two meshes, of which one device moves so many bytes at most."""
        ...

    def copy_time_s(self, num_bytes: int, mesh: int) -> float:
        """Seconds that so many bytes of each device occupy its link to the host, in one direction."""
        ...


@dataclass(frozen=True, kw_only=True)
class ConstantCosts:
    """One duration per kind of task and one kind of link, for questions about schedules."""

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    update_s: float = 0.0
    other_s: float = 0.0  # prologue, zeros, concatenation
    bytes_per_s: float = float("inf")
    latency_s: float = 0.0

    def run_time_s(self, executable: Executable, task: Task) -> float:
        """The duration of the task's kind."""
        kinds = {"F": self.forward_s, "B": self.backward_s, "W": self.weight_s, "U": self.update_s}
        return kinds.get(task.kind, self.other_s)

    def transfer_time_s(self, num_bytes: int, source: int, destination: int) -> float:
        """Latency and bytes over bandwidth."""
        return self.latency_s + num_bytes / self.bytes_per_s

    def copy_time_s(self, num_bytes: int, mesh: int) -> float:
        """The same on the link to the host."""
        return self.latency_s + num_bytes / self.bytes_per_s


def simulate(
    program: Program,
    costs: Costs,
    *,
    hosts: Hosts | None = None,
    collective_s: Mapping[str, float] = _NONE,
    temporary_bytes: Mapping[str, float] = _NONE,
) -> Timeline:
    """Return the timeline of one step; without `hosts`, nothing takes time to be started.

    By executable: `collective_s` is the part of its time that are collectives, `temporary_bytes` what it needs on a
    device beside its inputs.
    """
    times = _Times(clocks=Clocks(len(program.meshes), hosts))
    memory = [_Memories() for _ in program.meshes]
    sizes = _Sizes(program)
    for item in program.inputs:
        memory[item.mesh].add(item.value, sizes.on_device(item.mesh, item.value), sizes.memory(item.mesh, item.value))
        if item.leaf is not None and item.window is None:
            memory[item.mesh].lent.add(item.value)
    for each in memory:
        each.note()
    held = [[(0.0, each.device.now)] for each in memory]
    for mesh, instruction in program.linear_order():
        _advance(times, mesh, instruction, sizes, costs, collective_s)
        if isinstance(instruction, Run):
            needed = memory[mesh].device.now + math.ceil(temporary_bytes.get(instruction.executable, 0.0))
            held[mesh].append((times.events[-1].start_s, needed))
        _update_memory(memory[mesh], mesh, instruction, sizes, temporary_bytes)
        held[mesh].append((times.clocks.mesh_s[mesh], memory[mesh].device.now))
    return Timeline(
        name=program.name,
        events=tuple(times.events),
        transfers=tuple(times.transfers),
        makespan_s=max([*times.clocks.mesh_s, *(copy.stop_s for copy in times.copies)], default=0.0),
        peak_bytes=tuple(each.device.peak for each in memory),
        at_peak=tuple(each.device.at_peak for each in memory),
        exposed_s=tuple(times.clocks.exposed_s),
        memory=tuple(map(tuple, held)),
        copies=tuple(times.copies),
        host_bytes=tuple(each.host.peak for each in memory),
    )


@dataclass(kw_only=True, eq=False)
class _Times:
    """The clocks of a program, and the events and transfers that moved them; only `_advance` changes it."""

    clocks: Clocks
    deliveries: dict[tuple[int, int], deque[Delivery]] = field(default_factory=lambda: defaultdict(deque))
    events: list[Event] = field(default_factory=list[Event])
    transfers: list[Transfer] = field(default_factory=list[Transfer])
    copies: list[HostCopy] = field(default_factory=list[HostCopy])
    arriving: dict[tuple[int, str], Delivery] = field(default_factory=dict[tuple[int, str], Delivery])
    """Results of copies, by mesh and name: when they are there."""


def _advance(
    times: _Times,
    mesh: int,
    instruction: Instruction,
    sizes: "_Sizes",
    costs: Costs,
    collective_s: Mapping[str, float],
) -> None:
    match instruction:
        case Run():
            executable = sizes.program.executables[instruction.executable]
            for value in instruction.inputs:
                if (mesh, value) in times.arriving:
                    times.clocks.receive(mesh, times.arriving.pop((mesh, value)))
            start_s, stop_s = times.clocks.run(mesh, costs.run_time_s(executable, instruction.task))
            times.events.append(
                Event(
                    mesh=mesh,
                    start_s=start_s,
                    stop_s=stop_s,
                    task=instruction.task,
                    collective_s=collective_s.get(executable.name, 0.0),
                )
            )
        case Send():
            _send(times, mesh, instruction, sizes, costs)
        case Recv():
            times.clocks.receive(mesh, times.deliveries[instruction.source, mesh].popleft())
        case Copy():
            _copy(times, mesh, instruction, sizes, costs)
        case Free():
            for value in instruction.after:
                times.clocks.receive(mesh, times.arriving[mesh, value])
        case _:
            assert_never(instruction)


def _send(times: _Times, mesh: int, send: Send, sizes: "_Sizes", costs: Costs) -> None:
    moved = sum(sizes.on_link(mesh, send.to, value) for value in send.values)
    duration_s = costs.transfer_time_s(moved, mesh, send.to)
    delivery = times.clocks.send(mesh, send.to, duration_s, len(send.values))
    times.deliveries[mesh, send.to].append(delivery)
    times.transfers.append(
        Transfer(
            source=mesh,
            destination=send.to,
            start_s=delivery.start_s,
            stop_s=delivery.arrival_s,
            num_bytes=sum(sizes.whole(mesh, value) for value in send.values),
            label=", ".join(send.values),
        )
    )


def _copy(times: _Times, mesh: int, copy: Copy, sizes: "_Sizes", costs: Costs) -> None:
    moved = sum(sizes.on_device(mesh, value) for value in copy.values)
    delivery = times.clocks.copy(mesh, copy.to, costs.copy_time_s(moved, mesh), len(copy.values))
    times.arriving.update(((mesh, value), delivery) for value in copy.results)
    times.copies.append(
        HostCopy(
            mesh=mesh,
            to=copy.to,
            start_s=delivery.start_s,
            stop_s=delivery.arrival_s,
            num_bytes=sum(sizes.whole(mesh, value) for value in copy.values),
            label=", ".join(copy.results),
        )
    )


@dataclass(kw_only=True)
class _Memory:
    """The bytes of values in one memory: of each device of a mesh, or of the host for each device."""

    sizes: dict[str, int] = field(default_factory=dict[str, int])
    now: int = 0
    peak: int = 0
    at_peak: PeakMoment = field(default_factory=lambda: PeakMoment(values={}))

    def add(self, value: str, num_bytes: int) -> None:
        self.sizes[value] = num_bytes
        self.now += num_bytes

    def note(self, executable: str = "", temporary_bytes: int = 0) -> None:
        """Remember this moment if none before it had more in memory."""
        if self.now + temporary_bytes > self.peak:
            self.peak = self.now + temporary_bytes
            self.at_peak = PeakMoment(values=dict(self.sizes), executable=executable, temporary_bytes=temporary_bytes)

    def drop(self, value: str) -> None:
        self.now -= self.sizes.pop(value)


@dataclass(kw_only=True)
class _Memories:
    """The bytes of values on each device of a mesh, and on the host for each of them."""

    device: _Memory = field(default_factory=_Memory)
    host: _Memory = field(default_factory=_Memory)
    # Whole arguments, whose arrays the caller holds: only who is given one can put it to another use.
    lent: set[str] = field(default_factory=set[str])

    def add(self, value: str, num_bytes: int, memory: Memory) -> None:
        (self.host if memory == "host" else self.device).add(value, num_bytes)

    def drop(self, value: str) -> None:
        (self.host if value in self.host.sizes else self.device).drop(value)

    def note(self, executable: str = "", temporary_bytes: int = 0, host_bytes: int = 0) -> None:
        self.device.note(executable, temporary_bytes)
        self.host.note(executable, host_bytes)


def _update_memory(
    memory: _Memories, mesh: int, instruction: Instruction, sizes: "_Sizes", temporary_bytes: Mapping[str, float]
) -> None:
    match instruction:
        case Run():
            needed = math.ceil(temporary_bytes.get(instruction.executable, 0.0))
            own = sizes.program.executables[instruction.executable].host_bytes
            memory.note(instruction.executable, needed, own)
            # A donated input's memory becomes an output's.
            for position in sizes.program.executables[instruction.executable].donated:
                memory.drop(instruction.inputs[position])
            for value in instruction.outputs:
                memory.add(value, sizes.on_device(mesh, value), sizes.memory(mesh, value))
            memory.note()
        case Recv():
            for value in instruction.values:
                memory.add(value, sizes.on_device(mesh, value), "device")
            memory.note()
        case Copy():
            for value in instruction.results:
                memory.add(value, sizes.on_device(mesh, value), instruction.to)
            memory.note()
            for value in instruction.values if instruction.takes else ():
                memory.drop(value)
        case Free():
            for value in instruction.values:
                if value not in memory.lent:
                    memory.drop(value)
        case Send():
            pass
        case _:
            assert_never(instruction)


class _Sizes:
    """Bytes of a program's values. All microbatches share the few types that there are, so each is measured once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._known: dict[tuple[int, int], tuple[int, int]] = {}

    def whole(self, mesh: int, value: str) -> int:
        """Bytes of a value, counted once."""
        return self._measured(mesh, value)[0]

    def on_device(self, mesh: int, value: str) -> int:
        """Bytes of a value on each device of a mesh."""
        return self._measured(mesh, value)[1]

    def memory(self, mesh: int, value: str) -> Memory:
        """Return where a value lives."""
        return self.program.meshes[mesh].values[value].memory

    def on_link(self, source: int, to: int, value: str) -> int:
        """The most bytes of a value that one device of either mesh sends or receives."""
        received = self.on_device(to, value)
        senders, receivers = (len(self.program.meshes[mesh].devices) for mesh in (source, to))
        return max(received, -(-received * receivers // senders))

    def _measured(self, mesh: int, value: str) -> tuple[int, int]:
        planned = self.program.meshes[mesh]
        array = planned.values[value]
        key = (mesh, id(array))  # the program keeps the type alive; its hash would take longer than the rest
        if key not in self._known:
            self._known[key] = (array.nbytes, array.bytes_per_device(planned))
        return self._known[key]
