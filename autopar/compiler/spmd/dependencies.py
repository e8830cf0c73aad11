"""Order what needs others: each number behind all those that it needs.

by number, the numbers that it needs  ->  numbers in an order
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence


def readers_of(needs: Sequence[Iterable[int]]) -> list[list[int]]:
    """Return, by what may be needed, those that need it."""
    readers: list[list[int]] = [[] for _ in needs]
    for number, each in enumerate(needs):
        for need in dict.fromkeys(each):
            readers[need].append(number)
    return readers


def by_place(needs: Sequence[Collection[int]], places: Sequence[float]) -> list[int]:
    """Return those of which all that they need can stand before them: of what may come next the first by its place."""
    readers = readers_of(needs)
    left = [len(set(each)) for each in needs]
    ready = [(places[number], number) for number, count in enumerate(left) if not count]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        number = heapq.heappop(ready)[1]
        order.append(number)
        for reader in readers[number]:
            left[reader] -= 1
            if not left[reader]:
                heapq.heappush(ready, (places[reader], reader))
    return order


def walk(needs: Sequence[Sequence[int]], starts: Iterable[int]) -> Iterator[int]:
    """Yield one start after the other, each with all that it needs just before it."""
    found, entered = set[int](), set[int]()
    for start in starts:
        left = [start]
        while left:
            number = left[-1]
            if number in entered:
                left.pop()
                if number not in found:
                    found.add(number)
                    yield number
                continue
            entered.add(number)
            left += [need for need in reversed(needs[number]) if need not in entered]
