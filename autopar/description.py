"""Describe what a plan runs: where every input lies, what crosses between meshes, what devices send, time and memory.

    Plan, Program, SimulationReport  ->  PlanDescription  ->  text, HTML, JSON

All of it is read off the program that runs, and not off what was asked for, so that text, HTML and JSON say the same.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from autopar.ir.plan import Plan
from autopar.ir.plan_sharding import collectives_table
from autopar.ir.program import ArrayType, Program, Send
from autopar.plain_text import as_text
from autopar.simulation import SimulationReport

_SCHEMA = "autopar plan description 1"


@dataclass(frozen=True, kw_only=True)
class PlacedInput:
    """An input on one mesh: the type of what lies there, and its bytes on each device.

    `parts` counts the microbatches, or the layers of a stacked parameter, that lie there one by one: then `type` is
    that of one part, and the bytes those of all. `line` is the user's line that reads it first.
    """

    name: str
    mesh: int
    type: ArrayType
    parts: int
    bytes_per_device: int
    line: str


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """A value that one mesh sends to another, in the layouts that it has on either side.

    `times` counts its sends in one step, and `nbytes` the bytes of all of them, of the whole value.
    """

    value: str
    source: int
    destination: int
    sent: ArrayType
    received: ArrayType
    times: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class PlanDescription:
    """Everything that a plan decides about a step, as it runs. Prints as text, shows as HTML, and gives JSON."""

    step: str
    plan: Plan
    inputs: tuple[PlacedInput, ...]
    crossings: tuple[Crossing, ...]
    simulated: SimulationReport
    scopes: tuple[str, ...] = ()
    """Those of the model that the plan keeps, as the user wrote them."""

    def to_data(self) -> dict[str, Any]:
        """Return the description as JSON values: bytes, and seconds."""
        plan = self.plan
        return {
            "schema": _SCHEMA,
            "step": self.step,
            "summary": self.plan.summary(),
            "method": plan.method,
            "scopes": self.scopes,
            "fingerprint": plan.fingerprint,
            "num_microbatches": plan.num_microbatches,
            "schedule": plan.schedule,
            "stages": [asdict(stage) for stage in plan.stages],
            "meshes": [
                {"devices": mesh.devices, "shape": mesh.shape, "axis_names": mesh.axis_names} for mesh in plan.meshes
            ],
            "certificate": None if plan.certificate is None else asdict(plan.certificate),
            "recomputed": () if plan.sharding is None else plan.sharding.recomputed,
            "inputs": [
                {
                    "name": each.name,
                    "mesh": each.mesh,
                    **_type_data(each.type),
                    "parts": each.parts,
                    "bytes_per_device": each.bytes_per_device,
                    "line": each.line,
                }
                for each in self.inputs
            ],
            "crossings": [
                {
                    "value": each.value,
                    "source": each.source,
                    "destination": each.destination,
                    **_type_data(each.sent),
                    "received_spec": list(each.received.spec),
                    "times": each.times,
                    "bytes": each.nbytes,
                }
                for each in self.crossings
            ],
            "collectives": [{"mesh": mesh, **asdict(each)} for mesh, each in self.plan.collectives_by_mesh()],
            "simulated": self.simulated.to_data(),
        }

    def to_json(self) -> str:
        """Return the same as JSON."""
        return json.dumps(self.to_data(), indent=1) + "\n"

    def __str__(self) -> str:
        return as_text(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the plan, a row for each mesh, input, crossing value and collective; alike ones share a row."""
        yield Text(self.headline())
        for table in self.tables():
            if table.row_count:
                yield table

    def headline(self) -> str:
        """Return the plan's own summary, the scopes that it keeps, and a line with the modelled time of a step."""
        report = self.simulated
        step = f"{self.step} on {report.cluster}: {1e3 * report.step_time_s:.4g} ms per step, as modelled"
        kept = [f"keeps {', '.join(self.scopes)}"] if self.scopes else []
        return "\n".join([self.plan.summary(), *kept, step])

    def tables(self) -> tuple[Table, ...]:
        """Return the tables of stages, memory, inputs, crossing values and collectives."""
        collectives = collectives_table(self.plan.planned_collectives, title="collectives")
        return self._stages(), self._memory(), self._inputs(), self._crossings(), collectives

    def to_html(self) -> str:
        """Return the tables as HTML; names are escaped."""
        return "\n".join([f"<pre>{html.escape(self.headline())}</pre>", *map(html_table, self.tables())])

    def _repr_html_(self) -> str:
        return self.to_html()

    def _stages(self) -> Table:
        columns = (
            "stage",
            "layers",
            "mesh",
            "devices",
            "mesh shape",
            "remat",
            "compute ms",
            "collective ms",
            "peak GB",
        )
        table = _table("stages", columns)
        for number, (stage, words) in enumerate(zip(self.plan.stages, self.plan.stage_rows(), strict=True)):
            # The figures are those of the whole mesh, which the first of its stages has in its row.
            first = self.plan.stages_on(stage.mesh)[0] == number
            mesh = self.simulated.meshes[stage.mesh]
            figures = (f"{1e3 * mesh.compute_s:.4g}", f"{1e3 * mesh.collective_s:.4g}", f"{mesh.peak_bytes / 1e9:.3g}")
            _add_row(table, (*words, *(figures if first else ("", "", ""))))
        return table

    def _memory(self) -> Table:
        table = self.simulated.memory_table()
        table.title, table.title_justify = "memory", "left"
        return table

    def _inputs(self) -> Table:
        table = _table("inputs", ("name", "count", "type and layout", "parts", "mesh", "MB per device"))
        rows: dict[tuple[str, str, int], list[PlacedInput]] = {}
        for each in self.inputs:
            rows.setdefault((re.sub(r"\d+", "*", each.name), str(each.type), each.parts), []).append(each)
        for (_, words, parts), alike in rows.items():
            names = list(dict.fromkeys(each.name for each in alike))
            meshes = _listed(sorted({each.mesh for each in alike}))
            size = f"{alike[0].bytes_per_device / 1e6:.4g}"
            _add_row(table, (_joined(names), len(names), words, parts if parts > 1 else "", meshes, size))
        return table

    def _crossings(self) -> Table:
        table = _table(
            "values between meshes", ("from", "to", "value", "type and layout", "layout there", "times", "MB")
        )
        for each in self.crossings:
            there = _layout_words(each.received) if each.received.spec != each.sent.spec else ""
            size = f"{each.nbytes / 1e6:.4g}"
            _add_row(table, (each.source, each.destination, each.value, each.sent, there, each.times, size))
        return table


def describe_plan(
    step: str,
    plan: Plan,
    program: Program,
    leaf_names: Sequence[str],
    leaf_lines: Sequence[str],
    simulated: SimulationReport,
    scopes: tuple[str, ...] = (),
) -> PlanDescription:
    """Return the description of a plan by the program that it was lowered to.

    Its leaf `i` is `leaf_names[i]`, and read first on the line `leaf_lines[i]` of the model.
    """
    return PlanDescription(
        step=step,
        plan=plan,
        inputs=_placed_inputs(program, leaf_names, leaf_lines),
        crossings=_crossings(program),
        simulated=simulated,
        scopes=scopes,
    )


def _placed_inputs(program: Program, leaf_names: Sequence[str], leaf_lines: Sequence[str]) -> tuple[PlacedInput, ...]:
    parts: dict[tuple[int, int], list[ArrayType]] = {}
    for given in program.inputs:
        if given.leaf is not None:
            parts.setdefault((given.leaf, given.mesh), []).append(program.meshes[given.mesh].values[given.value])
    return tuple(
        PlacedInput(
            name=leaf_names[leaf],
            mesh=mesh,
            type=types[0],
            parts=len(types),
            bytes_per_device=sum(each.bytes_per_device(program.meshes[mesh]) for each in types),
            line=leaf_lines[leaf],
        )
        for (leaf, mesh), types in sorted(parts.items())
    )


def _crossings(program: Program) -> tuple[Crossing, ...]:
    sends: dict[tuple[int, int, str], list[str]] = {}
    for source, mesh in enumerate(program.meshes):
        for instruction in mesh.instructions:
            if isinstance(instruction, Send):
                for value in instruction.values:
                    sends.setdefault((source, instruction.to, _of_any_microbatch(value)), []).append(value)
    return tuple(
        Crossing(
            value=name,
            source=source,
            destination=destination,
            sent=program.meshes[source].values[values[0]],
            received=program.meshes[destination].values[values[0]],
            times=len(values),
            nbytes=sum(program.meshes[source].values[value].nbytes for value in values),
        )
        for (source, destination, name), values in sends.items()
    )


def _of_any_microbatch(value: str) -> str:
    return re.sub(r"@\d+$", "", value)


def _joined(names: Sequence[str]) -> str:
    """Return names that differ in numbers as one, with `*` where they differ."""
    pieces = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    return "".join(piece[0] if len(set(piece)) == 1 else "*" for piece in pieces)


def _type_data(array: ArrayType) -> Mapping[str, Any]:
    return {"shape": array.shape, "dtype": array.dtype, "spec": list(array.spec)}


def _layout_words(array: ArrayType) -> str:
    """Return the layout alone, as `(data, -)`; `replicated` if no axis splits it."""
    words = str(array).partition(" ")[2]
    return words or "replicated"


def _table(title: str, columns: Sequence[str]) -> Table:
    return Table(*columns, title=title, title_justify="left", box=box.SIMPLE_HEAD)


def _add_row(table: Table, cells: Iterable[object]) -> None:
    table.add_row(*(Text(str(cell)) for cell in cells))


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) if len(numbers) < 4 else f"{numbers[0]} to {numbers[-1]}"


def html_table(table: Table) -> str:
    """Return a table as HTML, its words escaped; nothing for one without rows."""
    head = "".join(f"<th>{html.escape(str(column.header))}</th>" for column in table.columns)
    cells = zip(*(column.cells for column in table.columns), strict=True)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in cells)
    caption = f"<caption>{html.escape(str(table.title))}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if body else ""
