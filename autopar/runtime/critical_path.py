"""Find what a simulated step waits for: the tasks and transfers that follow each other from its start to its end.

    Timeline  ->  CriticalPath

From the task that ends last, each one before is what ended when it started: a task of the same mesh, a transfer that
reached it, or one that held the link before. Where nothing did, as where a host was late, the path goes on with what
the mesh ran before, and the time between is `waited_s`.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from autopar.runtime.timeline import Event, Timeline, Transfer

_SAME = 1e-9
"""Share of the step: times no further apart are one."""


@dataclass(frozen=True, kw_only=True)
class CriticalPath:
    """The tasks and transfers of a path, the last first, and seconds in which it has neither."""

    steps: tuple[Event | Transfer, ...]
    waited_s: float


def critical_path(timeline: Timeline) -> CriticalPath:
    """Return a longest path through a step; of several that are as long, any."""
    near_s = _SAME * timeline.makespan_s
    tasks = _InOrder((event.mesh, event) for event in timeline.events)
    arrivals = _InOrder((transfer.destination, transfer) for transfer in timeline.transfers)
    links = _InOrder(((transfer.source, transfer.destination), transfer) for transfer in timeline.transfers)
    now: Event | Transfer | None = max(timeline.events, key=lambda event: event.stop_s, default=None)
    steps: list[Event | Transfer] = []
    while now is not None:
        steps.append(now)
        until_s = now.start_s + near_s
        if isinstance(now, Event):
            before, beside = tasks.last(now.mesh, until_s, now), arrivals.last(now.mesh, until_s, now)
        else:
            before, beside = (
                tasks.last(now.source, until_s, now),
                links.last((now.source, now.destination), until_s, now),
            )
        now = before
        if beside is not None and beside.stop_s >= steps[-1].start_s - near_s:
            now = beside if before is None or before.stop_s < beside.stop_s - near_s else before
    took_s = sum(step.stop_s - step.start_s for step in steps)
    return CriticalPath(steps=tuple(steps), waited_s=max(timeline.makespan_s - took_s, 0.0))


class _InOrder:
    """Tasks or transfers of each mesh or link, by when they end."""

    def __init__(self, items: Iterable[tuple[Hashable, Event | Transfer]]) -> None:
        found: defaultdict[Hashable, list[Event | Transfer]] = defaultdict(list)
        for key, item in items:
            found[key].append(item)
        self._items = {key: sorted(each, key=lambda item: item.stop_s) for key, each in found.items()}
        self._stops = {key: [item.stop_s for item in each] for key, each in self._items.items()}

    def last(self, key: Hashable, until_s: float, before: Event | Transfer) -> Event | Transfer | None:
        """Return what ended last by then, and started before something else did."""
        items = self._items.get(key, [])
        place = bisect.bisect_right(self._stops.get(key, []), until_s)
        return next(
            (item for item in reversed(items[:place]) if item is not before and item.start_s < before.start_s), None
        )
