"""The solver's decisions about one program, as plain data: the layouts of every equation's operands and results.

    BlockPlan  <->  JSON

A layout is written by the names of mesh axes: `data,-` splits the first of two dimensions, `data*model` one dimension
by two axes, `-,-|model` is a sum over "model" still to be made, `.` a scalar; operands, then `->`, then results.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.sharding.layout import Layout, LogicalMesh, num_parts
from autopar.compiler.sharding.strategies import Strategy
from autopar.errors import PlanMismatch


@dataclass(frozen=True, kw_only=True)
class EquationPlan:
    """The layouts of an equation's operands and results; with bodies, None for what is free."""

    operands: tuple[Layout | None, ...]
    results: tuple[Layout | None, ...]
    combined: tuple[int, ...] = ()
    bodies: tuple[BlockPlan, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """The plan of one jaxpr. Values go by number: its inputs, then the results of its equations in order."""

    arguments: tuple[Layout | None, ...]
    equations: tuple[EquationPlan | None, ...]
    results: tuple[Layout | None, ...]
    forms: Mapping[tuple[int, str], Layout] = field(default_factory=dict[tuple[int, str], Layout])
    """The layout in which a value is kept ("stored"), or read by a phase ("forward", ...), by value and form."""
    waits_for_sums: bool = False
    """True if what is computed again waits for the sums that began long before."""


def value_numbers(jaxpr: jc.Jaxpr) -> dict[jc.Var, int]:
    """Numbers of a jaxpr's variables: inputs first, then results in program order."""
    numbers: dict[jc.Var, int] = {}
    for v in (*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)):
        numbers.setdefault(v, len(numbers))
    return numbers


def strategy_of(eqn: jc.JaxprEqn, plan: EquationPlan, mesh: LogicalMesh) -> Strategy:
    """The strategy of an equation without bodies."""
    operands = tuple([layout for layout in plan.operands if layout is not None])
    results = tuple([layout for layout in plan.results if layout is not None])
    shapes = tuple([getattr(atom.aval, "shape", ()) for atom in (*eqn.invars, *eqn.outvars)])
    return Strategy(operands, results, plan.combined, _devices(shapes, (*plan.operands, *plan.results), mesh))


@functools.lru_cache(maxsize=16_384)
def _devices(shapes: tuple[tuple[int, ...], ...], layouts: tuple[Layout | None, ...], mesh: LogicalMesh) -> float:
    """Return among how many devices arrays of these shapes and layouts divide the work."""
    splits = {
        (axes, size if size % mesh.size(axes) else 0)
        for shape, layout in zip(shapes, layouts, strict=True)
        if layout is not None
        for size, axes in zip(shape, layout.dims, strict=True)
    }
    padded = [(axes, size) for axes, size in splits if size]
    even = {axis for axes, size in splits if not size for axis in axes}
    return mesh.size(even) * math.prod(num_parts(size, [mesh.shape[a] for a in axes]) for axes, size in padded)


# --- JSON ---------------------------------------------------------------------------------------------------


def to_data(plan: BlockPlan, mesh: LogicalMesh) -> dict[str, Any]:
    """The plan as JSON data; equal equations share one entry of "lines"."""
    lines: dict[str, int] = {}
    known: dict[Hashable, str] = {}

    def entry(equation: EquationPlan | None) -> Any:
        if equation is None:
            return None
        key = equation.operands, equation.results, equation.combined
        line = known[key] = known.get(key) or _line(equation, mesh)
        if not equation.bodies:
            return lines.setdefault(line, len(lines))
        return {"line": line, "bodies": [to_data(body, mesh) for body in equation.bodies]}

    entries = [entry(equation) for equation in plan.equations]
    return {
        "arguments": [layout_text(layout, mesh) for layout in plan.arguments],
        "equations": entries,
        "forms": {
            f"{number} {form}": layout_text(layout, mesh) for (number, form), layout in sorted(plan.forms.items())
        },
        "lines": list(lines),
        **({"waits_for_sums": True} if plan.waits_for_sums else {}),
        "results": [layout_text(layout, mesh) for layout in plan.results],
    }


def from_data(data: Any, mesh: LogicalMesh) -> BlockPlan:
    """The plan that `to_data` wrote; `PlanMismatch` if it cannot be read."""
    try:
        return _read_block(data, mesh)
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise PlanMismatch(
            f"The shardings of the plan cannot be read: {type(error).__name__}: {error}. They must be as Plan.save "
            f"wrote them, over the axes {mesh.axis_names}: make the plan again, or correct the file."
        ) from None


def _read_block(data: Mapping[str, Any], mesh: LogicalMesh) -> BlockPlan:
    lines = [_read_line(line, mesh, ()) for line in data["lines"]]

    def equation(entry: Any) -> EquationPlan | None:
        if isinstance(entry, Mapping):
            nested = cast(Mapping[str, Any], entry)
            return _read_line(nested["line"], mesh, tuple(_read_block(body, mesh) for body in nested["bodies"]))
        return None if entry is None else lines[entry]

    forms: dict[tuple[int, str], Layout] = {}
    for key, text in data["forms"].items():
        number, form = key.split(" ")
        layout = layout_from_text(text, mesh)
        assert layout is not None
        forms[int(number), form] = layout
    return BlockPlan(
        arguments=tuple(layout_from_text(text, mesh) for text in data["arguments"]),
        equations=tuple(equation(entry) for entry in data["equations"]),
        results=tuple(layout_from_text(text, mesh) for text in data["results"]),
        forms=forms,
        waits_for_sums=data.get("waits_for_sums", False),
    )


def _line(plan: EquationPlan, mesh: LogicalMesh) -> str:
    operands = " ".join(layout_text(layout, mesh) for layout in plan.operands)
    results = " ".join(layout_text(layout, mesh) for layout in plan.results)
    combined = f" over {'*'.join(mesh.names(plan.combined))}" if plan.combined else ""
    return f"{operands} -> {results}{combined}"


def _read_line(line: str, mesh: LogicalMesh, bodies: tuple[BlockPlan, ...]) -> EquationPlan:
    line, _, combined = line.partition(" over ")
    operands, _, results = line.partition("->")
    return EquationPlan(
        operands=tuple(layout_from_text(text, mesh) for text in operands.split()),
        results=tuple(layout_from_text(text, mesh) for text in results.split()),
        combined=_axes(combined, mesh) if combined else (),
        bodies=bodies,
    )


def layout_text(layout: Layout | None, mesh: LogicalMesh) -> str:
    """A layout by the names of the mesh axes; None is "free"."""
    if layout is None:
        return "free"
    dims = ",".join("*".join(mesh.names(axes)) or "-" for axes in layout.dims) or "."
    return dims + (f"|{'*'.join(mesh.names(layout.partial))}" if layout.partial else "")


def layout_from_text(text: str, mesh: LogicalMesh) -> Layout | None:
    """The layout that `layout_text` wrote; `PlanMismatch` if it is none of this mesh."""
    if text == "free":
        return None
    try:
        dims, _, partial = text.partition("|")
        return Layout(
            () if dims == "." else tuple(_axes(entry, mesh) for entry in dims.split(",")),
            _axes(partial, mesh) if partial else (),
        )
    except (AttributeError, ValueError):
        raise PlanMismatch(
            f"The plan has the layout {text!r}, which is none over the mesh axes {', '.join(mesh.axis_names)}. It must "
            "be as Plan.save wrote it: make the plan again, or correct the file."
        ) from None


def _axes(text: str, mesh: LogicalMesh) -> tuple[int, ...]:
    return () if text == "-" else tuple(mesh.axis_names.index(name) for name in text.split("*"))
