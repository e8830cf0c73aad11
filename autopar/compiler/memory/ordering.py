"""Put the works of a program into the order in which XLA runs them.

    works in the order of the program  ->  works in the order of the compiler, with the number that each had

Most keep their order. What only results depend on, the update, is done as soon as its operands are there. Results of
its collectives wait for other work to end, and products that lead to results only run while collectives do.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar.compiler.memory.liveness import Key, Work


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Works in a new order."""

    works: list[Work]
    order: list[int]
    """For each, its number before."""
    put_off: int | None
    """The place of the first work that is put off until everything else is done."""


def arranged(works: Sequence[Work], replaced: Sequence[tuple[Key, Key]] = ()) -> Arrangement:
    """The works as the compiler orders them; `replaced` are results with the inputs that they take."""
    before = _predecessors(works)
    tail = _tail(works, before)
    put_off = _put_off(works, before, tail)
    times = _times(works, before, tail, _held(works, tail, replaced), put_off)
    waiting = [len(each) for each in before]
    after: list[list[int]] = [[] for _ in works]
    for number, each in enumerate(before):
        for other in each:
            after[other].append(number)
    ready = [(times[n], n) for n, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        number = heapq.heappop(ready)[-1]
        order.append(number)
        for other in after[number]:
            waiting[other] -= 1
            if waiting[other] == 0:
                heapq.heappush(ready, (times[other], other))
    return Arrangement(
        works=[works[n] for n in order],
        order=order,
        put_off=next((place for place, n in enumerate(order) if n in put_off), None),
    )


def _predecessors(works: Sequence[Work]) -> list[set[int]]:
    makers: dict[Key, int] = {}
    before: list[set[int]] = []
    for number, work in enumerate(works):
        before.append({makers[key] for key in work.reads if key in makers})
        makers.update(dict.fromkeys(work.results, number))
    return before


def _held(works: Sequence[Work], tail: Sequence[bool], replaced: Sequence[tuple[Key, Key]]) -> dict[int, float]:
    """By work that writes over an input: the last number of what reads the input, the update aside."""
    origins = {work.results[0]: work.reads[0] for work in works if work.kind in ("view", "form")}

    def root(key: Key) -> Key:
        while key in origins:
            key = origins[key]
        return key

    last: dict[Key, int] = {}
    makers: dict[Key, int] = {}
    for number, work in enumerate(works):
        makers.update(dict.fromkeys(work.results, number))
        if not tail[number]:
            last.update((root(key), max(number, last.get(root(key), 0))) for key in work.reads)
    pairs = [(makers.get(root(result)), last.get(old)) for result, old in replaced]
    return {maker: time for maker, time in pairs if maker is not None and time is not None}


def _times(
    works: Sequence[Work],
    before: Sequence[set[int]],
    tail: Sequence[bool],
    held: Mapping[int, float],
    put_off: Collection[int],
) -> list[float]:
    """When each work would be done: by its number, or when the last of what it needs is done, or of what it awaits."""
    times: list[float] = []
    late: set[int] = set()
    end = max((n for n, work in enumerate(works) if _is_heavy(work) and n not in put_off), default=0)
    for number in range(len(works)):
        if tail[number]:
            # The results of collectives come while other work is going on, and wait for it.
            behind = any(other in late or (tail[other] and works[other].collective) for other in before[number])
            if behind:
                late.add(number)
        if number in put_off:
            times.append(end + 0.25)
        elif tail[number] and number not in late:
            times.append(max((times[other] for other in before[number]), default=-1))
            if number in held:
                times[-1] = max(times[-1], held[number] + 0.5)
        else:
            times.append(max((number, *(times[other] for other in before[number]))))
    return _as_late(works, before, times)


def _as_late(works: Sequence[Work], before: Sequence[set[int]], times: list[float]) -> list[float]:
    """What needs arguments only and is not wanted early waits for the first that reads it."""
    first: dict[int, float] = {}
    for number in range(len(works) - 1, -1, -1):
        if times[number] < 0:
            times[number] = first.get(number, 0)
        for other in before[number]:
            first[other] = min(first.get(other, times[number]), times[number])
    return times


def _tail(works: Sequence[Work], before: Sequence[set[int]]) -> list[bool]:
    """Which works lead to results only, with no product or loop in between."""
    tail = [True] * len(works)
    for number in range(len(works) - 1, -1, -1):
        if not tail[number] or _is_heavy(works[number]):
            tail[number] = False
            for other in before[number]:
                tail[other] = False
    return tail


def _is_heavy(work: Work) -> bool:
    return work.kind == "apart" and not work.collective


def _put_off(works: Sequence[Work], before: Sequence[set[int]], tail: Sequence[bool]) -> frozenset[int]:
    """Products that lead to results only, where some results take collectives: they run while those do."""
    if not any(tail[number] and work.collective for number, work in enumerate(works)):
        return frozenset()
    leads = [False] * len(works)
    for number in range(len(works) - 1, -1, -1):
        heavy = _is_heavy(works[number])
        for other in before[number]:
            leads[other] = leads[other] or heavy or leads[number]
    products = [n for n, work in enumerate(works) if _is_heavy(work) and not work.stacks and not work.late]
    return frozenset(n for n in products if not leads[n])
