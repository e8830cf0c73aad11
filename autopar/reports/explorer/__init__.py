"""Show a plan as a page: one HTML file that fetches nothing, for a browser, a notebook or an archive.

    PlanDescription  ->  page.html with the description as JSON in it

The page draws what the description says, down to the single values of the forward pass, and computes nothing anew.
Names of the model stand in it as data only: the page writes them as text, and its content security policy forbids every
request.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from autopar.compiler.analysis.explain import CollectiveCauses, Explanation
from autopar.compiler.analysis.planned_values import PlannedValue
from autopar.reports.description import PlanDescription
from autopar.reports.plan_difference import PlanDifference, plan_difference
from autopar.runtime.timeline import Event, InstructionTime, Timeline

Answer = PlanDifference | Explanation | CollectiveCauses
"""An answer to a question about a plan, as `what_if`, `diff` and `explain` return it."""

_MOST_EVENTS = 20_000
"""Most events of a timeline: with more, those that no screen can tell apart are shown as one."""
_MOST_POINTS = 2_000
"""Most points of the memory of one mesh over time."""
_MOST_CAUSES = 40
"""Most collectives of one answer, those that take longest."""
_COLUMNS = 4_000
"""Parts of a step that a screen can tell apart."""
_Row = tuple[int, float, float, str, str, float]
"""A row that is drawn: mesh, start, stop, kind, label and collective seconds."""


def plan_page(
    description: PlanDescription,
    *,
    values: Sequence[PlannedValue] = (),
    beside: PlanDescription | None = None,
    answers: Sequence[Answer] = (),
    measured: Sequence[InstructionTime] = (),
) -> str:
    """Return the page of a plan as HTML, complete in itself, with another plan beside it and answers about it.

    `values` are those of the forward pass, which the page shows by their scopes; `measured` are the times of a step
    that ran.
    """
    timeline = description.simulated.timeline
    described = description.to_data()
    data = described | {
        # Other results lie as the inputs that they replace, which the page has.
        "results": [each for each in described["results"] if not each["as_input"]],
        "timeline": {"events": shown_events(timeline), "memory": [shown_memory(points) for points in timeline.memory]},
        "values": _values(values),
        "answers": [_answer(each) for each in answers],
        "beside": None if beside is None else _beside(description, beside),
        "measured": _measured(measured),
    }
    # `<` could end the element that holds the data, or begin a comment.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = resources.files(__name__).joinpath("page.html").read_text(encoding="utf-8")
    return page.replace("__DATA__", text)


def shown_events(timeline: Timeline) -> list[_Row]:
    """Return mesh, start, stop, kind, label and collective seconds of what is drawn.

    Kind X is of several tasks, and S of a step that is one program.
    """
    rows = [_row(event) for event in timeline.events]
    if len(rows) == len(timeline.peak_bytes) == 1:  # forward and backward passes are in it, too
        rows = [(*rows[0][:3], "S", "the whole step", rows[0][5])]
    return _few(rows, timeline.makespan_s)


def _few(rows: list[_Row], makespan_s: float) -> list[_Row]:
    if len(rows) <= _MOST_EVENTS:
        return rows
    column_s = makespan_s / _COLUMNS
    merged: list[_Row] = []
    for row in sorted(rows, key=lambda row: row[:2]):
        mesh, start, stop, kind, _, collective = row
        last = merged[-1] if merged else None
        if last is not None and last[0] == mesh and stop - last[1] < column_s and start - last[2] < column_s / 4:
            joined = kind if kind == last[3] else "X"
            merged[-1] = (mesh, last[1], stop, joined, "several tasks", last[5] + collective)
        else:
            merged.append(row)
    return merged


def shown_memory(points: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return the bytes in memory over time as few points: of those that no screen can tell apart the largest."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    column_s = max(points[-1][0], 1e-30) / (_MOST_POINTS // 2)
    shown: list[tuple[float, int]] = []
    for _, group in itertools.groupby(points, key=lambda point: int(point[0] / column_s)):
        same = list(group)
        peak = max(same, key=lambda point: point[1])
        shown += [peak] if peak is same[-1] else [peak, same[-1]]
    return shown


def _measured(times: Sequence[InstructionTime]) -> dict[str, Any] | None:
    """Return when each instruction ran, from the first one on: a task by its kind, T for what moves values."""
    if not times:
        return None
    start_s, stop_s = min(each.start_s for each in times), max(each.stop_s for each in times)
    rows: list[_Row] = [
        (
            each.mesh,
            each.start_s - start_s,
            each.stop_s - start_s,
            each.name[0] if each.is_task else "T",
            each.name,
            0.0,
        )
        for each in times
    ]
    return {"events": _few(rows, stop_s - start_s), "step_time_s": stop_s - start_s}


def _beside(here: PlanDescription, other: PlanDescription) -> dict[str, Any]:
    return {
        "difference": plan_difference(here, other).to_data(),
        "summary": other.headline(),
        "step_time_s": other.simulated.step_time_s,
        "meshes": len(other.plan.meshes),
        "events": shown_events(other.simulated.timeline),
    }


def _values(values: Sequence[PlannedValue]) -> dict[str, Any]:
    """Return a row for each value, of its mesh and the places of its words in a table: layers repeat them."""
    texts: dict[str, int] = {}
    rows = [
        [
            each.mesh,
            *(
                texts.setdefault(text, len(texts))
                for text in (each.scope, each.primitive, _type_words(each), each.layout_words(), each.line)
            ),
        ]
        for each in values
    ]
    return {"texts": list(texts), "rows": rows}


def _type_words(value: PlannedValue) -> str:
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def _answer(answer: Answer) -> dict[str, Any]:
    match answer:
        case PlanDifference():
            rows = [[each.subject, each.before, each.after, each.by] for each in answer.changes]
            return _table("What if", answer.headline(), ["what", "before", "after", "change"], rows)
        case Explanation():
            rows = [
                [
                    each.choice,
                    "" if each.price is None else f"{1e3 * each.price.step_time_s:.4g} ms",
                    "" if each.price is None else f"{each.price.peak_bytes / 1e6:.4g} MB",
                    ", ".join(["as planned"] * (each is answer.chosen) + each.remarks()),
                ]
                for each in answer.alternatives
            ]
            words = f"{answer.subject}: {answer.chosen.choice}. {answer.why()}".rstrip()
            return _table("Why", words, ["choice", "step", "peak", ""], rows)
        case CollectiveCauses():
            rows = [
                [each.line, each.kind, each.what, str(mesh), f"{each.times:g}", f"{1e3 * each.seconds:.3g} ms"]
                for mesh, each in sorted(answer.collectives, key=lambda found: -found[1].seconds)[:_MOST_CAUSES]
            ]
            columns = ["line", "kind", "value", "mesh", "times", "in all"]
            return _table("Why it communicates", f"{answer.question}: {1e3 * answer.seconds:.4g} ms", columns, rows)


def _table(title: str, words: str, columns: list[str], rows: list[list[str]]) -> dict[str, Any]:
    return {"title": title, "words": words, "columns": columns, "rows": rows}


def _row(event: Event) -> _Row:
    return event.mesh, event.start_s, event.stop_s, event.task.kind, event.label, event.collective_s
