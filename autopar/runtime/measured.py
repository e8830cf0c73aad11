"""When every process ran which instruction of a real step, beside what was predicted, for Perfetto.

    measured    one lane per mesh and process; Run, Send and Recv, each waited for, so that a span is its own work
    predicted   the lanes of the simulated step, if there is one

Clocks of different hosts are compared as they are: keep them by NTP.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.ir.program import Instruction, Run
from autopar.runtime.timeline import Timeline

MEASURED_FROM = 1000  # Perfetto orders lanes by their process number: predicted meshes come first


@dataclass(frozen=True, kw_only=True)
class InstructionTime:
    """When one instruction ran on one mesh in one process, in seconds of the host's clock."""

    process: int
    mesh: int
    name: str
    start_s: float
    stop_s: float


def instruction_name(instruction: Instruction) -> str:
    """What its span is called: a Run's task, `F0.m3`, or the instruction itself."""
    return str(instruction.task) if isinstance(instruction, Run) else str(instruction).strip()


def chrome_trace(times: Sequence[InstructionTime], predicted: Timeline | None) -> dict[str, Any]:
    """Chrome's trace events: what was measured from its first instruction on, and what was predicted."""
    events = [] if predicted is None else list(predicted.to_chrome_trace()["traceEvents"])
    origin_s = min((t.start_s for t in times), default=0.0)
    lanes = sorted({(t.mesh, t.process) for t in times})
    for mesh, process in lanes:
        number = MEASURED_FROM + mesh
        events.append(_named("process_name", number, 0, f"mesh {mesh} (measured)"))
        events.append(_named("thread_name", number, process, f"process {process}"))
    for t in times:
        span = {"ph": "X", "name": t.name, "pid": MEASURED_FROM + t.mesh, "tid": t.process, "args": {}}
        events.append({**span, "ts": (t.start_s - origin_s) * 1e6, "dur": (t.stop_s - t.start_s) * 1e6})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(path: str | Path, times: Sequence[InstructionTime], predicted: Timeline | None) -> None:
    """Write it for https://ui.perfetto.dev."""
    Path(path).write_text(json.dumps(chrome_trace(times, predicted)), encoding="utf-8")


def _named(what: str, process: int, thread: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": text}}
