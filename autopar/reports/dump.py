"""Write all that is known of a step into a folder, each value of the compiler's chain as a file to read or compare.

step.jaxpr.txt          the traced step                plan.json, plan.txt     every decision
program.txt             instructions per mesh          timeline.json           the modelled step, for Perfetto
NAME.stablehlo.mlir     of each executable             executables.json        memory and FLOPs by XLA's account
NAME.hlo.txt            as XLA compiled it
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from autopar.compiler.analysis.inspect_executables import ExecutableReport
from autopar.compiler.frontend.trace import Trace
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.runtime.timeline import Timeline


def write_dump(
    folder: Path,
    *,
    trace: Trace,
    plan: Plan,
    program: Program,
    timeline: Timeline | None,
    executables: Sequence[ExecutableReport],
) -> Path:
    """Write the files into a folder, which is made if it is missing, in place of those of the same names; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "step.jaxpr.txt": f"{trace}\n{trace.jaxpr}\n",
        "plan.json": plan.to_json(),
        "plan.txt": f"{plan}\n",
        "program.txt": f"{program}\n",
    }
    if timeline is not None:
        texts["timeline.json"] = json.dumps(timeline.to_chrome_trace())
    for each in executables:
        name = _file_name(each.name)
        texts |= {f"{name}.stablehlo.mlir": each.stablehlo, f"{name}.hlo.txt": each.hlo}
    if executables:
        figures = {each.name: {"mesh": each.mesh, "memory": each.memory, "cost": each.cost} for each in executables}
        texts["executables.json"] = json.dumps(figures, indent=1) + "\n"
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def dump_name(trace: Trace, plan: Plan) -> str:
    """Return the name of the folder of a step and a plan: those of other shapes or plans have another."""
    return _file_name(f"{trace.name}-{plan.fingerprint[:8]}-{plan.method}")


def _file_name(words: str) -> str:
    """Return words as the name of a file: a step may be called `<lambda>`."""
    return re.sub(r"[^\w.\-]+", "_", words)
