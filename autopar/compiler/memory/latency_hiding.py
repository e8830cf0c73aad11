"""Schedule kernels so that they hide collectives, as XLA's latency-hiding scheduler does.

    kernels: what each needs, how long it takes; collectives: how long they take  ->  the kernels in order

It goes from the end of the program to its beginning. A collective is two nodes, its start and its end, so many seconds
apart; one runs at a time. Of the nodes of which all readers are placed, the next one before them is

    1. the end of a collective, if none runs
    2. one that the program need not wait for; of those that it has to wait for, the one for the shortest time
    3. the start of a collective, if the end of another one could be placed then
    4. one behind as many collectives as possible, counted from the beginning
    5. one that takes as long as is left of the collective that runs
    6. one that reads what a collective makes
    7. one that is the only reader left of as many nodes as possible
    8. the last one in the order of the program

in this order of importance (`ReadySetLt` of openxla/xla, xla/service/latency_hiding_scheduler.cc).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True, eq=False)
class _Node:
    number: int
    """The kernel's, whose start or end it may be."""
    seconds: float
    position: float
    begins: bool = False
    """True for the start of a collective."""
    ends: bool = False
    """True for the end of a collective."""
    needs: list[_Node] = field(default_factory=list["_Node"])
    readers: list[_Node] = field(default_factory=list["_Node"])
    left: int = 0
    """How many readers are not placed yet."""
    depth: int = 0
    """The collectives before it, on a path from the beginning."""
    ready_s: float = 0.0
    reads_collective: bool = False


def schedule(
    needs: Sequence[Sequence[int]], seconds: Sequence[float], collective: Sequence[bool], free: Sequence[bool], positions: Sequence[int]
) -> list[tuple[int, bool]]:
    """Return the numbers of kernels in the order of the compiler; True with those whose end it is.

    `needs` are the kernels that each needs, with lower numbers; `seconds` those that it takes, or that a `collective`
    takes beside others. What is `free`, as an input, has its place as soon as its readers have.
    """
    begins = [_Node(number=n, seconds=0.0 if c else seconds[n], position=positions[n], begins=c) for n, c in enumerate(collective)]
    ends = [
        _Node(number=n, seconds=0.0, position=positions[n] + 0.5, ends=True) if c else begins[n] for n, c in enumerate(collective)
    ]
    for number, each in enumerate(needs):
        node = begins[number]
        for other in dict.fromkeys(each):
            _join(ends[other], node)
        if collective[number]:
            _join(node, ends[number])
    for number in _topological(needs):
        each, node = needs[number], begins[number]
        node.depth = max((ends[other].depth for other in each), default=0)
        node.reads_collective = any(collective[other] for other in each)
        if collective[number]:
            ends[number].depth = node.depth + 1
    every = [node for n in range(len(needs)) for node in dict.fromkeys((begins[n], ends[n]))]
    return _placed(every, seconds, free)


def _topological(needs: Sequence[Sequence[int]]) -> list[int]:
    left = [len(set(each)) for each in needs]
    readers: list[list[int]] = [[] for _ in needs]
    for number, each in enumerate(needs):
        for other in set(each):
            readers[other].append(number)
    found = [number for number, count in enumerate(left) if not count]
    for number in found:
        for reader in readers[number]:
            left[reader] -= 1
            if not left[reader]:
                found.append(reader)
    assert len(found) == len(needs), "kernels that need each other"
    return found


def _join(node: _Node, reader: _Node) -> None:
    node.readers.append(reader)
    node.left += 1
    reader.needs.append(node)


def _placed(every: Sequence[_Node], seconds: Sequence[float], free: Sequence[bool]) -> list[tuple[int, bool]]:
    ready = [node for node in every if not node.left]
    nops = [node for node in ready if free[node.number]]
    ready = [node for node in ready if not free[node.number]]
    placed: list[tuple[int, bool]] = []
    waiting: list[tuple[float, int, _Node]] = []
    now, running, ends_wait = 0.0, False, sum(node.ends for node in ready)
    while ready or nops:
        if nops:
            node = nops.pop()
        else:
            hidden_s = waiting[0][0] - now if waiting else -1.0
            node = None
            for each in ready:
                if each.ends and running:
                    continue
                if node is None or _better(each, node, now, running and ends_wait > 0, hidden_s):
                    node = each
            assert node is not None
            ready.remove(node)
            ends_wait -= node.ends
        at = max((now, *(_after(node, reader, seconds) for reader in node.readers)))
        node.ready_s = at
        now = at + node.seconds
        running = node.ends or (running and not node.begins)
        placed.append((node.number, node.ends))
        while waiting and waiting[0][0] < now:
            heapq.heappop(waiting)
        for need in node.needs:
            need.left -= 1
            if need.left:
                continue
            need.ready_s = max((now, *(_after(need, reader, seconds) for reader in need.readers)))
            if free[need.number]:
                nops.append(need)
                continue
            ready.append(need)
            ends_wait += need.ends
            if need.ready_s > now:
                heapq.heappush(waiting, (need.ready_s, need.number, need))
    return placed[::-1]


def _after(node: _Node, reader: _Node, seconds: Sequence[float]) -> float:
    return reader.ready_s + (seconds[node.number] if node.begins and reader.ends else _EDGE_S)


_EDGE_S = 1e-6


def _better(a: _Node, b: _Node, now: float, constrained: bool, hidden_s: float) -> bool:
    """Return true if `a` is to be placed rather than `b`."""
    if a.ends != b.ends:
        return a.ends
    if a.ready_s != b.ready_s:
        one, other = max(a.ready_s - now, 0.0), max(b.ready_s - now, 0.0)
        if one != other:
            return one < other
    one, other = a.begins and not a.depth and not constrained, b.begins and not b.depth and not constrained
    if one != other:
        return other
    one, other = a.begins and constrained, b.begins and constrained
    if one != other:
        return one
    if a.depth != b.depth:
        return a.depth > b.depth
    if hidden_s >= 0:
        one, other = abs(hidden_s - a.seconds), abs(hidden_s - b.seconds)
        if one < other and not a.begins:
            return True
        if other < one and not b.begins:
            return False
    if a.reads_collective != b.reads_collective:
        return a.reads_collective
    one, other = sum(n.left == 1 for n in a.needs), sum(n.left == 1 for n in b.needs)
    if one != other:
        return one > other
    return a.position > b.position
