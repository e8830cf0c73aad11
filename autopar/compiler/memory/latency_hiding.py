"""Schedule kernels so that they hide collectives, as XLA's latency-hiding scheduler does.

    kernels: what each needs, how long it takes; collectives: how long they take  ->  the kernels in order

It goes from the end of the program to its beginning. A collective is two nodes, its start and its end, so many seconds
apart; one runs at a time. Of the nodes whose readers are all placed, the next one before them is

    1. the end of a collective, if none runs
    2. one that the program need not wait for; else the one for which it waits the shortest time
    3. no start of a first collective, one behind no other, unless another one's end waits for it
    4. the start of a collective for which another one's end waits
    5. one behind collectives that take as long as possible, one behind another from the beginning
    6. one that takes as long as is left until something that is waited for is ready, or about that
    7. one that reads what a collective makes
    8. one that is the only reader left of as many nodes as possible
    9. the last one in the order of the program: that in which few bytes are in memory

in this order of importance (`ReadySetLt` of openxla/xla, xla/service/latency_hiding_scheduler.cc).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.compiler.memory.liveness import Key
from autopar.compiler.spmd.dependencies import readers_of

NO_ESTIMATE_S = 1e-8
"""Seconds that XLA gives to kernels of which it estimates nothing (`SolLatencyEstimator::NodeCost` of openxla/xla)."""
_EDGE_S = 1e-6
"""Seconds from what is no collective to its readers (`ApproximateLatencyEstimator`)."""


@dataclass(kw_only=True, slots=True, eq=False)
class Kernel:
    """A kernel, a collective, or something that takes no time."""

    needs: list[int]
    """The kernels that must be done before."""
    seconds: float = 0.0
    """How long it takes; a collective, beside others."""
    is_collective: bool = False
    is_free: bool = False
    """True for what no kernel is run for, as an input: it has its place as soon as its readers have."""
    is_in_place: bool = False
    """True for a collective that writes over what it sends, and does not keep it until its end."""
    position: int = -1
    """Its place in the order of the program; of a collective, that of its start."""
    end_position: int = -1
    """The place of its end there, if it is a collective."""
    reads: list[Key] = field(default_factory=list[Key])
    """The arrays that it reads from memory."""
    makes: list[Key] = field(default_factory=list[Key])
    """The arrays that it writes there."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Node:
    """A kernel, or the start or the end of a collective."""

    number: int
    seconds: float
    position: float
    is_free: bool = False
    starts: float = -1.0
    """How long the collective takes that it is the start of; -1 if it is none."""
    ends: bool = False
    needs: list[_Node] = field(default_factory=list["_Node"])
    readers: list[_Node] = field(default_factory=list["_Node"])
    left: int = 0
    """How many readers are not placed yet."""
    depth: float = 0.0
    """The most seconds that collectives take which stand in front of it, one behind another."""
    ready_s: float = 0.0
    """When it may have its place, counted from the end of the program."""
    reads_collective: bool = False


def scheduled(kernels: Sequence[Kernel]) -> list[tuple[int, bool]]:
    """Return the numbers of kernels in their new order; True with those whose end it is.

    Raise ValueError if kernels need each other.
    """
    placed: list[tuple[int, bool]] = []
    state = _State(_nodes(kernels))
    while (node := state.take()) is not None:
        placed.append((node.number, node.ends))
    if len(placed) < len(kernels):
        raise ValueError(f"{len(kernels)} kernels cannot be ordered: some of them need each other.")
    return placed[::-1]


def in_order(kernels: Sequence[Kernel]) -> list[int]:
    """Return the numbers of kernels, each behind those that it needs."""
    left = [len(set(kernel.needs)) for kernel in kernels]
    readers = readers_of([kernel.needs for kernel in kernels])
    found = [number for number, count in enumerate(left) if not count]
    for number in found:
        for reader in readers[number]:
            left[reader] -= 1
            if not left[reader]:
                found.append(reader)
    return found


def _nodes(kernels: Sequence[Kernel]) -> list[_Node]:
    """Return the nodes of kernels, their readers and depths set."""
    first, last = list[_Node](), list[_Node]()
    for number, kernel in enumerate(kernels):
        if kernel.is_collective:
            first.append(_Node(number=number, seconds=0.0, position=kernel.position, starts=kernel.seconds))
            last.append(_Node(number=number, seconds=0.0, position=kernel.end_position, ends=True))
            _join(first[-1], last[-1])
        else:
            node = _Node(number=number, seconds=kernel.seconds, position=kernel.position, is_free=kernel.is_free)
            first.append(node)
            last.append(node)
    for number, kernel in enumerate(kernels):
        for other in dict.fromkeys(kernel.needs):
            _join(last[other], first[number])
    for number in in_order(kernels):
        node, needs = first[number], kernels[number].needs
        node.depth = max((last[other].depth for other in needs), default=0.0)
        node.reads_collective = any(kernels[other].is_collective for other in needs)
        last[number].depth = node.depth + (kernels[number].seconds if kernels[number].is_collective else 0.0)
    return [node for pair in zip(first, last, strict=True) for node in dict.fromkeys(pair)]


def _join(node: _Node, reader: _Node) -> None:
    node.readers.append(reader)
    node.left += 1
    reader.needs.append(node)


class _State:
    """Nodes of which all readers are placed, and the time since the end of the program."""

    def __init__(self, nodes: Sequence[_Node]) -> None:
        ready = [node for node in nodes if not node.left]
        self.free = [node for node in ready if node.is_free]
        self.ready = [node for node in ready if not node.is_free]
        self.waiting: list[tuple[float, int, _Node]] = []
        self.now, self.runs = 0.0, False

    def take(self) -> _Node | None:
        """Return the node that is placed next, in front of all before it."""
        if self.free:
            node = self.free.pop()
        elif self.ready:
            node = self._best()
            self.ready.remove(node)
        else:
            return None
        node.ready_s = _ready_s(node, self.now)
        self.now = node.ready_s + node.seconds
        self.runs = node.ends or (self.runs and node.starts < 0)
        while self.waiting and self.waiting[0][0] < self.now:
            heapq.heappop(self.waiting)
        for need in node.needs:
            need.left -= 1
            if not need.left:
                self._add(need)
        return node

    def _add(self, node: _Node) -> None:
        node.ready_s = _ready_s(node, self.now)
        if node.is_free:
            self.free.append(node)
            return
        self.ready.append(node)
        if node.ready_s > self.now:
            heapq.heappush(self.waiting, (node.ready_s, node.number, node))

    def _best(self) -> _Node:
        hidden_s = self.waiting[0][0] - self.now if self.waiting else None
        blocked = self.runs and any(node.ends for node in self.ready)
        best: _Node | None = None
        for node in self.ready:
            if not (node.ends and self.runs) and (best is None or self._is_better(node, best, blocked, hidden_s)):
                best = node
        assert best is not None, "a collective that runs has a start"
        return best

    def _is_better(self, a: _Node, b: _Node, blocked: bool, hidden_s: float | None) -> bool:
        """Return true if `a` is to be placed rather than `b`: see the module.

        `blocked`: the end of a collective waits for the start of another one. `hidden_s` are left until something is
        ready; None if nothing is waited for.
        """
        if a.ends != b.ends:
            return a.ends
        if a.ready_s != b.ready_s:
            one, other = max(a.ready_s - self.now, 0.0), max(b.ready_s - self.now, 0.0)
            if one != other:
                return one < other
        if a.starts >= 0 or b.starts >= 0:
            first = [node.starts >= 0 and not node.depth and not blocked for node in (a, b)]
            if first[0] != first[1]:
                return first[1]
            if blocked and (a.starts >= 0) != (b.starts >= 0):
                return a.starts >= 0
        if a.depth != b.depth:
            return a.depth > b.depth
        if hidden_s is not None:
            one, other = abs(hidden_s - a.seconds), abs(hidden_s - b.seconds)
            if one < other and a.starts < 0:
                return True
            if other < one and b.starts < 0:
                return False
        if a.reads_collective != b.reads_collective:
            return a.reads_collective
        unlocked = [sum(need.left == 1 for need in node.needs) for node in (a, b)]
        return (unlocked[0], a.position) > (unlocked[1], b.position)


def _ready_s(node: _Node, now: float) -> float:
    """Return the time at which all that reads a node lets it be, but not before now."""
    for reader in node.readers:
        after_s = node.starts if node.starts >= 0 and reader.ends else _EDGE_S
        now = max(now, reader.ready_s + after_s)
    return now
