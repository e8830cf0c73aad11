"""Carry out a program on paper: the same instruction lists, with durations in place of arrays.

Every mesh does its instructions in order. A Run takes the time that the costs say; a Send costs the sender
nothing and occupies the link of its two meshes, one transfer at a time; a Recv waits for the arrival:

    Send:  link = arrival = max(clock of the source, link) + transfer time
    Recv:  clock = max(clock, arrival)
"""

import io
import json
from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, assert_never

from rich.console import Console
from rich.table import Table

from autopar.program import Executable, Free, Instruction, Program, Recv, Run, Send, Task

WIDTH = 100  # columns of a printed timeline, whatever the terminal has


class Costs(Protocol):
    """How long things take."""

    def run_time_s(self, executable: Executable, task: Task) -> float:
        """Seconds that the mesh of the executable is busy."""
        ...

    def transfer_time_s(self, num_bytes: int, source: int, destination: int) -> float:
        """Seconds that values of so many bytes in all occupy the link between two meshes."""
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


@dataclass(frozen=True, kw_only=True)
class Event:
    """A task on a mesh."""

    mesh: int
    start_s: float
    stop_s: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Values on the link of two meshes."""

    source: int
    destination: int
    start_s: float
    stop_s: float
    num_bytes: int
    label: str


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When every mesh did what, and how much it held."""

    name: str
    events: tuple[Event, ...]
    transfers: tuple[Transfer, ...]
    makespan_s: float
    # Per mesh, on each device: the most that inputs and values take at once, in the instructions' order.
    # What an executable needs while it runs comes on top.
    peak_bytes: tuple[int, ...]

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Per mesh the seconds in which it runs a task."""
        meshes = range(len(self.peak_bytes))
        return tuple(sum(e.stop_s - e.start_s for e in self.events if e.mesh == mesh) for mesh in meshes)

    @property
    def bubble_fraction(self) -> float:
        """The share of all meshes' time in which they run nothing."""
        total_s = self.makespan_s * len(self.peak_bytes)
        return 1.0 - sum(self.busy_s) / total_s if total_s else 0.0

    def to_chrome_trace(self) -> dict[str, Any]:
        """Chrome's trace events, which Perfetto shows: a process per mesh, a thread per outgoing link."""
        names = [_metadata("process_name", mesh, 0, f"mesh {mesh}") for mesh in range(len(self.peak_bytes))]
        names += [_metadata("thread_name", mesh, 0, "tasks") for mesh in range(len(self.peak_bytes))]
        links = sorted({(t.source, t.destination) for t in self.transfers})
        names += [_metadata("thread_name", source, 1 + to, f"to mesh {to}") for source, to in links]
        tasks = [_span(e.label, e.mesh, 0, e.start_s, e.stop_s, {}) for e in self.events]
        sends = [
            _span(t.label, t.source, 1 + t.destination, t.start_s, t.stop_s, {"bytes": t.num_bytes})
            for t in self.transfers
        ]
        return {"traceEvents": names + tasks + sends, "displayTimeUnit": "ms"}

    def write(self, path: str | Path) -> None:
        """Write the Chrome trace to a file for https://ui.perfetto.dev."""
        Path(path).write_text(json.dumps(self.to_chrome_trace()))

    def __str__(self) -> str:
        table = Table(title=f"{self.name}: {self.makespan_s:.3g} s, bubble {self.bubble_fraction:.1%}")
        for column in ("mesh", "busy s", "busy", "peak GiB per device", "sent GiB"):
            table.add_column(column, justify="right")
        for mesh, (busy_s, peak) in enumerate(zip(self.busy_s, self.peak_bytes)):
            share = busy_s / self.makespan_s if self.makespan_s else 0.0
            sent = sum(t.num_bytes for t in self.transfers if t.source == mesh)
            row = (str(mesh), f"{busy_s:.3g}", f"{share:.1%}", f"{peak / 2**30:.3g}", f"{sent / 2**30:.3g}")
            table.add_row(*row)
        console = Console(file=io.StringIO(), width=WIDTH, color_system=None, force_terminal=False)
        with console.capture() as captured:
            console.print(table)
        return "\n".join(line.rstrip() for line in captured.get().splitlines()).rstrip()


def _metadata(name: str, process: int, thread: int, text: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": {"name": text}}


def _span(name: str, process: int, thread: int, start_s: float, stop_s: float, args: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": start_s * 1e6, "dur": (stop_s - start_s) * 1e6}
    return {"name": name, "ph": "X", "pid": process, "tid": thread, "args": args, **times}


def simulate(program: Program, costs: Costs) -> Timeline:
    """The timeline of one step."""
    clocks = _Clocks(times_s=[0.0] * len(program.meshes))
    memory = [_Memory() for _ in program.meshes]
    for item in program.inputs:
        memory[item.mesh].add(item.value, _device_bytes(program, item.mesh, item.value))
    for mesh, instruction in program.linear_order():
        _advance(clocks, mesh, instruction, program, costs)
        _hold(memory[mesh], mesh, instruction, program)
    return Timeline(
        name=program.name,
        events=tuple(clocks.events),
        transfers=tuple(clocks.transfers),
        makespan_s=max(clocks.times_s, default=0.0),
        peak_bytes=tuple(held.peak for held in memory),
    )


@dataclass(kw_only=True)
class _Clocks:
    """The state of a simulation, which only `_advance` changes."""

    times_s: list[float]
    link_free_s: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    arrivals_s: dict[tuple[int, int], deque[float]] = field(default_factory=lambda: defaultdict(deque))
    events: list[Event] = field(default_factory=list[Event])
    transfers: list[Transfer] = field(default_factory=list[Transfer])


def _advance(clocks: _Clocks, mesh: int, instruction: Instruction, program: Program, costs: Costs) -> None:
    now_s = clocks.times_s[mesh]
    match instruction:
        case Run():
            executable = program.executables[instruction.executable]
            stop_s = now_s + costs.run_time_s(executable, instruction.task)
            clocks.events.append(Event(mesh=mesh, start_s=now_s, stop_s=stop_s, label=str(instruction.task)))
            clocks.times_s[mesh] = stop_s
        case Send():
            link = (mesh, instruction.to)
            num_bytes = sum(program.meshes[mesh].values[value].nbytes for value in instruction.values)
            start_s = max(now_s, clocks.link_free_s[link])
            stop_s = start_s + costs.transfer_time_s(num_bytes, *link)
            clocks.transfers.append(
                Transfer(
                    source=mesh,
                    destination=instruction.to,
                    start_s=start_s,
                    stop_s=stop_s,
                    num_bytes=num_bytes,
                    label=", ".join(instruction.values),
                )
            )
            clocks.link_free_s[link] = stop_s
            clocks.arrivals_s[link].append(stop_s)
        case Recv():
            arrival_s = clocks.arrivals_s[instruction.source, mesh].popleft()
            clocks.times_s[mesh] = max(now_s, arrival_s)
        case Free():
            pass
        case _:
            assert_never(instruction)


@dataclass(kw_only=True)
class _Memory:
    """What each device of a mesh holds."""

    held: dict[str, int] = field(default_factory=dict[str, int])
    now: int = 0
    peak: int = 0

    def add(self, value: str, num_bytes: int) -> None:
        self.held[value] = num_bytes
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def drop(self, value: str) -> None:
        self.now -= self.held.pop(value)


def _hold(memory: _Memory, mesh: int, instruction: Instruction, program: Program) -> None:
    match instruction:
        case Run():
            # A donated input's memory becomes an output's.
            for position in program.executables[instruction.executable].donated:
                memory.drop(instruction.inputs[position])
            for value in instruction.outputs:
                memory.add(value, _device_bytes(program, mesh, value))
        case Recv():
            for value in instruction.values:
                memory.add(value, _device_bytes(program, mesh, value))
        case Free():
            for value in instruction.values:
                memory.drop(value)
        case Send():
            pass
        case _:
            assert_never(instruction)


def _device_bytes(program: Program, mesh: int, value: str) -> int:
    return program.meshes[mesh].values[value].bytes_per_device(program.meshes[mesh])
