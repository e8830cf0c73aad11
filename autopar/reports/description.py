"""Describe what a plan runs: where every input lies, what crosses between meshes, what devices send, time and memory.

    Plan, Program, SimulationReport  ->  PlanDescription  ->  text, HTML, JSON

All of it is read off the program that runs, and not off what was asked for, so that text, HTML and JSON say the same.
"""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from autopar.ir.plan import Plan
from autopar.ir.plan_sharding import collectives_table
from autopar.ir.program import ArrayType, Output, Program, Send
from autopar.ir.results import result_parts
from autopar.plain_text import as_text
from autopar.simulation import SimulationReport

_SCHEMA = "autopar plan description 1"


@dataclass(frozen=True, kw_only=True)
class PlacedInput:
    """An input on one mesh: the type of what lies there, and its bytes on each device.

    `parts` counts the microbatches, or the layers of a stacked parameter, that lie there one by one: then `type` is
    that of one part, and the bytes those of all. What lies there in microbatches and whole is two of these. `line` is
    the user's line that reads it first.
    """

    name: str
    mesh: int
    type: ArrayType
    parts: int
    bytes_per_device: int
    line: str


@dataclass(frozen=True, kw_only=True)
class PlacedResult:
    """A result on one mesh after the step: the type of what lies there, and its bytes on each device.

    One result is on several meshes if it has rows of each. In one process those of a mesh are one array; on a cluster
    they lie in `parts` pieces as the stages left them, and `type` is that of one. `replaces` names the input that is
    given this result at the next call, none if it is no state, and `as_input` tells that the result lies where that
    input does, in its type. Results that are constants are on no mesh, and not here.
    """

    name: str
    replaces: str
    as_input: bool
    mesh: int
    type: ArrayType
    parts: int
    bytes_per_device: int


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
    results: tuple[PlacedResult, ...]
    simulated: SimulationReport
    scopes: tuple[str, ...] = ()
    """The scopes of the model that the plan keeps, as the user wrote them."""

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
            "results": [
                {
                    "name": each.name,
                    "replaces": each.replaces,
                    "as_input": each.as_input,
                    "mesh": each.mesh,
                    **_type_data(each.type),
                    "parts": each.parts,
                    "bytes_per_device": each.bytes_per_device,
                }
                for each in self.results
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
        """Return the tables of stages, memory, inputs, crossing values, results and collectives."""
        collectives = collectives_table(self.plan.planned_collectives, title="collectives")
        return self._stages(), self._memory(), self._inputs(), self._crossings(), self._results(), collectives

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
        for words in _placed_rows([(each.name, each) for each in self.inputs]):
            _add_row(table, words)
        return table

    def _results(self) -> Table:
        title = "results (other state lies as its input does)"
        table = _table(title, ("name", "count", "type and layout", "parts", "mesh", "MB per device"))
        for words in _placed_rows([(each.replaces or each.name, each) for each in self.results if not each.as_input]):
            _add_row(table, words)
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
    result_names: Sequence[tuple[str, str]],
    simulated: SimulationReport,
    scopes: tuple[str, ...],
    in_one_process: bool,
) -> PlanDescription:
    """Return the description of a plan by the program that it was lowered to.

    Its leaf `i` is `leaf_names[i]`, and read first on the line `leaf_lines[i]` of the model. Its result `i` has the
    first name of `result_names[i]`, and replaces the input of the second one.
    """
    inputs = _placed_inputs(program, leaf_names, leaf_lines)
    return PlanDescription(
        step=step,
        plan=plan,
        inputs=inputs,
        crossings=_crossings(program),
        results=_placed_results(program, result_names, inputs, in_one_process),
        simulated=simulated,
        scopes=scopes,
    )


def _placed_inputs(program: Program, leaf_names: Sequence[str], leaf_lines: Sequence[str]) -> tuple[PlacedInput, ...]:
    parts: dict[tuple[int, int], dict[tuple[ArrayType, bool], int]] = {}
    for given in program.inputs:
        if given.leaf is not None:
            kind = program.meshes[given.mesh].values[given.value], given.window is None
            counts = parts.setdefault((given.leaf, given.mesh), {})
            counts[kind] = counts.get(kind, 0) + 1
    return tuple(
        PlacedInput(
            name=leaf_names[leaf],
            mesh=mesh,
            type=kind,
            parts=count,
            bytes_per_device=count * kind.bytes_per_device(program.meshes[mesh]),
            line=leaf_lines[leaf],
        )
        for (leaf, mesh), counts in sorted(parts.items(), key=itemgetter(0))
        for (kind, _), count in counts.items()
    )


def _placed_results(
    program: Program, names: Sequence[tuple[str, str]], inputs: Sequence[PlacedInput], in_one_process: bool
) -> tuple[PlacedResult, ...]:
    places: dict[str, set[tuple[int, ArrayType, int]]] = {}
    for each in inputs:
        places.setdefault(each.name, set()).add((each.mesh, each.type, each.parts))
    found: list[PlacedResult] = []
    for output in sorted(program.outputs, key=lambda output: output.leaf):
        name, replaces = names[output.leaf]
        here = _result_types(program, output, in_one_process)
        as_input = {(mesh, kind, count) for (mesh, kind), count in here.items()} == places.get(replaces)
        found += [
            PlacedResult(
                name=name,
                replaces=replaces,
                as_input=as_input,
                mesh=mesh,
                type=kind,
                parts=count,
                bytes_per_device=count * kind.bytes_per_device(program.meshes[mesh]),
            )
            for (mesh, kind), count in here.items()
        ]
    return tuple(found)


def _result_types(program: Program, output: Output, in_one_process: bool) -> Mapping[tuple[int, ArrayType], int]:
    """Return by mesh and type how many arrays a result is there."""
    if in_one_process:
        return {(part.mesh, part.type): 1 for part in result_parts(program.meshes, output)}
    return Counter((mesh, program.meshes[mesh].values[value]) for mesh, value in output.parts)


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


def _placed_rows(placed: Iterable[tuple[str, PlacedInput | PlacedResult]]) -> Iterator[tuple[object, ...]]:
    """Yield name, count, type, parts, meshes and MB per device; names that differ in numbers alone share a row."""
    rows: dict[tuple[str, str, int], list[tuple[str, PlacedInput | PlacedResult]]] = {}
    for name, each in placed:
        rows.setdefault((re.sub(r"\d+", "*", name), str(each.type), each.parts), []).append((name, each))
    for (_, words, parts), alike in rows.items():
        names = list(dict.fromkeys(name for name, _ in alike))
        meshes = _listed(sorted({each.mesh for _, each in alike}))
        size = f"{alike[0][1].bytes_per_device / 1e6:.4g}"
        yield _joined(names), len(names), words, parts if parts > 1 else "", meshes, size


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
