"""Show a plan as a page: one HTML file that fetches nothing, for a browser, a notebook or an archive.

    PlanDescription  ->  page.html with the description as JSON in it

The page draws what the description says and computes nothing anew. Names of the model stand in it as data only: the
page writes them as text, and its content security policy forbids every request.
"""

from __future__ import annotations

import json
from importlib import resources

from autopar.description import PlanDescription
from autopar.runtime.timeline import Event, Timeline

_MOST_EVENTS = 20_000
"""Of a timeline: with more, those that no screen can tell apart are shown as one."""
_COLUMNS = 4_000
"""Parts of a step that a screen can tell apart."""


def plan_page(description: PlanDescription) -> str:
    """Return the page of a plan as HTML, complete in itself."""
    data = description.to_data() | {"timeline": {"events": shown_events(description.simulated.timeline)}}
    # `<` could end the element that holds the data, or begin a comment.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = resources.files(__name__).joinpath("page.html").read_text(encoding="utf-8")
    return page.replace("__DATA__", text)


def shown_events(timeline: Timeline) -> list[tuple[int, float, float, str, str, float]]:
    """Return mesh, start, stop, kind, label and collective seconds of what is drawn; kind X is of several tasks."""
    rows = [_row(event) for event in timeline.events]
    if len(rows) <= _MOST_EVENTS:
        return rows
    column_s = timeline.makespan_s / _COLUMNS
    merged: list[tuple[int, float, float, str, str, float]] = []
    for row in sorted(rows, key=lambda row: row[:2]):
        mesh, start, stop, kind, _, collective = row
        last = merged[-1] if merged else None
        if last is not None and last[0] == mesh and stop - last[1] < column_s and start - last[2] < column_s / 4:
            joined = kind if kind == last[3] else "X"
            merged[-1] = (mesh, last[1], stop, joined, "several tasks", last[5] + collective)
        else:
            merged.append(row)
    return merged


def _row(event: Event) -> tuple[int, float, float, str, str, float]:
    return event.mesh, event.start_s, event.stop_s, event.task.kind, event.label, event.collective_s
