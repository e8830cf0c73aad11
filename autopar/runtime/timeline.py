"""The times of a step on every mesh, as a value that prints as a table and a chart, and is written for Perfetto.

mesh 0 |F0--F1--F2--F3--        B0======B1======B2======B3======U#|      F forward, B backward,
mesh 1 |    F0--B0======F1--B1======F2--B2======F3--B3======U#   |      U update, of a microbatch
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from autopar.ir.instructions import Memory
from autopar.ir.program import Instruction, Run, Task
from autopar.plain_text import as_text

WIDTH = 100  # columns of a printed timeline, whatever the terminal has
# What the columns of a task are filled with, and their colour. Zeros and concatenations look alike.
_FILLS: Mapping[str, tuple[str, str]] = {
    "F": ("-", "cyan"),
    "B": ("=", "green"),
    "W": ("~", "yellow"),
    "U": ("#", "magenta"),
    "P": ("#", "magenta"),
}
_OTHER = (".", "dim")
_MEASURED_FROM = 1000  # Perfetto orders lanes by their process number: predicted meshes come first


@dataclass(frozen=True, kw_only=True)
class Event:
    """A task on a mesh. Of its time, the last `collective_s` stand for all its collectives."""

    mesh: int
    start_s: float
    stop_s: float
    task: Task
    collective_s: float = 0.0

    @property
    def label(self) -> str:
        """The task as text: `F0.m3`."""
        return str(self.task)


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
class HostCopy:
    """Values on the links between the devices of a mesh and their hosts, to the one memory or the other."""

    mesh: int
    to: Memory
    start_s: float
    stop_s: float
    num_bytes: int
    label: str


@dataclass(frozen=True, kw_only=True)
class PeakMoment:
    """The values on one device of a mesh when it holds the most."""

    values: Mapping[str, int]
    executable: str = ""
    """The one that runs; empty if none does."""
    temporary_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The tasks and transfers of a step with their times, and the peak memory of every mesh."""

    name: str
    events: tuple[Event, ...]
    transfers: tuple[Transfer, ...]
    makespan_s: float
    # Per mesh, on each device: the most that inputs and values take at once, in the instructions' order, with what the
    # executable that runs needs beside them, as far as that was given.
    peak_bytes: tuple[int, ...]
    # Per mesh, what is there then.
    at_peak: tuple[PeakMoment, ...]
    # Per mesh, the seconds in which it waits for values that are already made, and on their way.
    exposed_s: tuple[float, ...]
    # Per mesh, seconds and the bytes on each device from then on; at a task's start with what it needs beside them.
    memory: tuple[tuple[tuple[float, int], ...], ...] = ()
    copies: tuple[HostCopy, ...] = ()
    # Per mesh, the most that values take in pinned memory of the host, for each device.
    host_bytes: tuple[int, ...] = ()

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """The seconds in which each mesh runs a task."""
        return self._sums({id(e): e.stop_s - e.start_s for e in self.events})

    @cached_property
    def collective_s(self) -> tuple[float, ...]:
        """The seconds of the collectives of each mesh's tasks."""
        return self._sums({id(e): e.collective_s for e in self.events})

    def _sums(self, seconds: Mapping[int, float]) -> tuple[float, ...]:
        sums = [0.0] * len(self.peak_bytes)
        for event in self.events:
            sums[event.mesh] += seconds[id(event)]
        return tuple(sums)

    @property
    def bubble_fraction(self) -> float:
        """The share of all meshes' time in which they run nothing."""
        total_s = self.makespan_s * len(self.peak_bytes)
        return 1.0 - sum(self.busy_s) / total_s if total_s else 0.0

    def to_chrome_trace(self) -> dict[str, Any]:
        """Chrome's trace events, which Perfetto shows: a process per mesh, a thread per outgoing link and to its hosts.

        A task with collectives holds two spans, its compute and then its collectives: in what order a device takes
        their parts is not predicted.
        """
        meshes = range(len(self.peak_bytes))
        names = [_metadata("process_name", mesh, 0, f"mesh {mesh} (predicted)") for mesh in meshes]
        names += [_metadata("thread_name", mesh, 0, "tasks") for mesh in meshes]
        links = sorted({(t.source, t.destination) for t in self.transfers})
        names += [_metadata("thread_name", source, 1 + to, f"to mesh {to}") for source, to in links]
        tasks = [span for event in self.events for span in _event_spans(event)]
        sends = [
            _span(t.label, t.source, 1 + t.destination, t.start_s, t.stop_s, {"bytes": t.num_bytes})
            for t in self.transfers
        ]
        lanes = {"device": -1, "host": -2}
        names += [_metadata("thread_name", c.mesh, lanes[c.to], f"to the {c.to}") for c in self.copies]
        copies = [_span(c.label, c.mesh, lanes[c.to], c.start_s, c.stop_s, {"bytes": c.num_bytes}) for c in self.copies]
        return {"traceEvents": names + tasks + sends + copies, "displayTimeUnit": "ms"}

    def write(self, path: str | Path) -> None:
        """Write the Chrome trace to a file for https://ui.perfetto.dev."""
        Path(path).write_text(json.dumps(self.to_chrome_trace()))

    def gantt(self, width: int = WIDTH) -> str:
        """A line per mesh, each column an equal part of the step: kind and microbatch of what runs, as far as it fits.

        A task that is narrower than a column shows where no other does.
        """
        return self.chart(width).plain

    def chart(self, width: int = WIDTH) -> Text:
        """The same in colours."""
        meshes = range(len(self.peak_bytes))
        heads = [f"mesh {mesh} |" for mesh in meshes]
        margin = max(map(len, heads), default=0)
        columns = max(width - margin - 1, 1)
        lanes: list[list[tuple[str, str]]] = [[(" ", "")] * columns for _ in meshes]
        scale = columns / self.makespan_s if self.makespan_s else 0.0
        for event in self.events:
            _draw(lanes[event.mesh], event, scale)
        lines = [Text.assemble(f"{head:>{margin}}", *lane, "|") for head, lane in zip(heads, lanes)]
        return Text("\n").join(lines)

    def __str__(self) -> str:
        table = Table(title=f"{self.name}: {self.makespan_s:.3g} s, bubble {self.bubble_fraction:.1%}")
        for column in ("mesh", "busy s", "busy", "peak GiB per device", "sent GiB"):
            table.add_column(column, justify="right")
        sent = [0] * len(self.peak_bytes)
        for transfer in self.transfers:
            sent[transfer.source] += transfer.num_bytes
        for mesh, (busy_s, peak) in enumerate(zip(self.busy_s, self.peak_bytes)):
            share = busy_s / self.makespan_s if self.makespan_s else 0.0
            row = (str(mesh), f"{busy_s:.3g}", f"{share:.1%}", f"{peak / 2**30:.3g}", f"{sent[mesh] / 2**30:.3g}")
            table.add_row(*row)
        return as_text(table, WIDTH)


@dataclass(frozen=True, kw_only=True)
class InstructionTime:
    """The times between which one instruction ran on one mesh in one process, in seconds of the host's clock."""

    process: int
    mesh: int
    name: str
    start_s: float
    stop_s: float
    is_task: bool
    """True if it computed, and did not send or receive."""


def instruction_name(instruction: Instruction) -> str:
    """Return the name of its span: a Run's task, `F0.m3`, or the instruction itself."""
    return str(instruction.task) if isinstance(instruction, Run) else str(instruction).strip()


def chrome_trace(times: Sequence[InstructionTime], predicted: Timeline | None) -> dict[str, Any]:
    """Return Chrome's trace events: a lane per mesh and process from the first instruction on, beside those predicted.

    A Run, Send or Recv is waited for, so that a span is its own work. Clocks of different hosts are compared as they
    are: keep them by NTP.
    """
    events = [] if predicted is None else list(predicted.to_chrome_trace()["traceEvents"])
    origin_s = min((t.start_s for t in times), default=0.0)
    for mesh, process in sorted({(t.mesh, t.process) for t in times}):
        number = _MEASURED_FROM + mesh
        events.append(_metadata("process_name", number, 0, f"mesh {mesh} (measured)"))
        events.append(_metadata("thread_name", number, process, f"process {process}"))
    events += [
        _span(t.name, _MEASURED_FROM + t.mesh, t.process, t.start_s - origin_s, t.stop_s - origin_s, {}) for t in times
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(path: str | Path, times: Sequence[InstructionTime], predicted: Timeline | None) -> None:
    """Write the Chrome trace to a file for https://ui.perfetto.dev."""
    Path(path).write_text(json.dumps(chrome_trace(times, predicted)), encoding="utf-8")


def _draw(lane: list[tuple[str, str]], event: Event, scale: float) -> None:
    """Fill the columns of an event with its text; neighbours share no column."""
    start, stop = round(event.start_s * scale), round(event.stop_s * scale)
    if start == stop and start < len(lane) and lane[start][0] == " ":
        stop = start + 1
    fill, colour = _FILLS.get(event.task.kind, _OTHER)
    microbatch = "" if event.task.microbatch is None else str(event.task.microbatch)
    text = f"{event.task.kind}{microbatch}"
    # A number that is cut off would be another number.
    text = text if len(text) <= stop - start else event.task.kind
    for column, letter in zip(range(start, stop), text.ljust(stop - start, fill)):
        lane[column] = (letter, colour)


def _event_spans(event: Event) -> list[dict[str, Any]]:
    whole = _span(event.label, event.mesh, 0, event.start_s, event.stop_s, {})
    if not event.collective_s:
        return [whole]
    middle_s = event.stop_s - event.collective_s
    compute = _span("compute", event.mesh, 0, event.start_s, middle_s, {})
    return [whole, compute, _span("collectives", event.mesh, 0, middle_s, event.stop_s, {})]


def _metadata(name: str, process: int, thread: int, text: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": {"name": text}}


def _span(name: str, process: int, thread: int, start_s: float, stop_s: float, args: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": start_s * 1e6, "dur": (stop_s - start_s) * 1e6}
    return {"name": name, "ph": "X", "pid": process, "tid": thread, "args": args, **times}
