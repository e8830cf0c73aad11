"""Put the works of a program into the order in which a compiler runs them, and merge those that it merges.

    works in the order of the program  ->  works in the order of the compiler, with the number that each had

Most keep their order. What only results depend on, the update, is done as soon as its operands are there; so are copies
for products in another order. All-reduces of the update may become one, when the last of its operands is there.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar.compiler.costs.compilers import Compiler
from autopar.compiler.memory.liveness import Key, Work


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Works in a new order."""

    works: list[Work]
    order: list[int]
    """For each, its number before; of merged ones, that of the last."""
    put_off: int | None
    """The place of the first work that is put off until everything else is done."""


def arranged(works: Sequence[Work], compiler: Compiler, replaced: Sequence[tuple[Key, Key]] = ()) -> Arrangement:
    """The works as the compiler orders and merges them; `replaced` are results with the inputs that they take."""
    works = _with_library_reductions(works) if compiler.reduces_by_library else works
    works, numbers = _merged(works, compiler)
    before = _predecessors(works)
    tail = _tail(works, before)
    held = {} if compiler.saves_donated else _held(works, numbers, tail, replaced)
    put_off = frozenset[int]() if compiler.updates_after_collectives else _put_off(works, before, tail)
    times = _times(works, numbers, before, compiler, held, put_off)
    waiting = [len(each) for each in before]
    after: list[list[int]] = [[] for _ in works]
    for number, each in enumerate(before):
        for other in each:
            after[other].append(number)
    ready = [(times[n], numbers[n], n) for n, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        number = heapq.heappop(ready)[-1]
        order.append(number)
        for other in after[number]:
            waiting[other] -= 1
            if waiting[other] == 0:
                heapq.heappush(ready, (times[other], numbers[other], other))
    return Arrangement(
        works=[works[n] for n in order],
        order=[numbers[n] for n in order],
        put_off=next((place for place, n in enumerate(order) if n in put_off), None),
    )


def _with_library_reductions(works: Sequence[Work]) -> list[Work]:
    """Reductions that stand apart: they read from memory what the one operation before them reads, and no further."""
    makers = {key: work for work in works if work.kind != "form" for key in work.results}
    origins = {work.results[0]: work.reads[0] for work in works if work.kind == "form"}

    def root(key: Key) -> Key:
        while key in origins:
            key = origins[key]
        return key

    readers = Counter(root(key) for work in works if work.kind != "form" for key in work.reads)

    def sources(key: Key) -> tuple[Key, ...]:
        maker = makers.get(root(key))
        taken = maker is not None and maker.kind == "fused" and not maker.dear and readers[root(key)] == 1
        return maker.reads if taken and maker is not None else (key,)

    def changed(work: Work) -> Work:
        if work.kind != "reduction" or work.early:
            return work
        return work._replace(reads=tuple(dict.fromkeys(s for key in work.reads for s in sources(key))), library=True)

    return list(map(changed, works))


def _predecessors(works: Sequence[Work]) -> list[set[int]]:
    makers: dict[Key, int] = {}
    before: list[set[int]] = []
    for number, work in enumerate(works):
        before.append({makers[key] for key in work.reads if key in makers})
        makers.update(dict.fromkeys(work.results, number))
    return before


def _held(
    works: Sequence[Work], numbers: Sequence[int], tail: Sequence[bool], replaced: Sequence[tuple[Key, Key]]
) -> dict[int, float]:
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
            last.update((root(key), max(numbers[number], last.get(root(key), 0))) for key in work.reads)
    pairs = [(makers.get(root(result)), last.get(old)) for result, old in replaced]
    return {maker: time for maker, time in pairs if maker is not None and time is not None}


def _times(
    works: Sequence[Work],
    numbers: Sequence[int],
    before: Sequence[set[int]],
    compiler: Compiler,
    held: Mapping[int, float],
    put_off: Collection[int],
) -> list[float]:
    """When each work would be done: by its number, or when the last of what it needs is done, or of what it awaits."""
    tail = _tail(works, before)
    times: list[float] = []
    late: set[int] = set()
    end = max((n for n, work in enumerate(works) if _is_heavy(work) and n not in put_off), default=0)
    for number, work in enumerate(works):
        if tail[number] and not compiler.updates_after_collectives:
            # The results of collectives come while other work is going on, and wait for it.
            behind = any(other in late or (tail[other] and works[other].collective) for other in before[number])
            if behind:
                late.add(number)
        if number in put_off:
            times.append(numbers[end] + 0.25)
        elif work.early or (tail[number] and number not in late):
            times.append(max((times[other] for other in before[number]), default=-1))
            if number in held:
                times[-1] = max(times[-1], held[number] + 0.5)
        else:
            times.append(max((numbers[number], *(times[other] for other in before[number]))))
    return _as_late(works, before, times)


def _as_late(works: Sequence[Work], before: Sequence[set[int]], times: list[float]) -> list[float]:
    """What needs arguments only and is not wanted early waits for the first that reads it."""
    first: dict[int, float] = {}
    for number in range(len(works) - 1, -1, -1):
        if times[number] < 0 and not works[number].early:
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


def _merged(works: Sequence[Work], compiler: Compiler) -> tuple[list[Work], list[int]]:
    """All-reduces of the update that do not depend on each other become one, in the place of the last."""
    numbers = list(range(len(works)))
    if not compiler.combines_all_reduces:
        return list(works), numbers
    before = _predecessors(works)
    tail = _tail(works, before)
    behind = [False] * len(works)
    group: list[int] = []
    for number, work in enumerate(works):
        behind[number] = any(behind[other] for other in before[number])
        if work.collective == "all-reduce" and tail[number] and not behind[number]:
            group.append(number)
            behind[number] = True
    if len(group) < 2:
        return list(works), numbers
    members = set(group)
    one = works[group[-1]]._replace(
        reads=tuple(dict.fromkeys(key for n in group for key in works[n].reads)),
        results=tuple(key for n in group for key in works[n].results),
    )
    # What reads a result of an earlier member must stand behind the last.
    first = [n for n in numbers if n not in members and not behind[n] and n < group[-1]]
    last = [n for n in numbers if n not in members and (behind[n] or n > group[-1])]
    order = [*first, group[-1], *last]
    return [one if n == group[-1] else works[n] for n in order], order


def ancestors(works: Sequence[Work]) -> list[int]:
    """For every work the works that it depends on, as bits."""
    found: list[int] = []
    for before in _predecessors(works):
        bits = 0
        for other in before:
            bits |= found[other] | 1 << other
        found.append(bits)
    return found
