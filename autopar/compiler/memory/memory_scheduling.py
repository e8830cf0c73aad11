"""Schedule kernels so that few bytes are in memory, as XLA's memory schedulers do, or as a program has them.

    kernels: what each needs, reads and makes  ->  the kernels in order

Of two orders the one is taken in which fewer bytes are in memory at once (`DefaultMemoryScheduler` of openxla/xla,
xla/hlo/transforms/simplifiers/hlo_memory_scheduler.cc):

    a list        Of the kernels of which all that they need is placed, the next one frees the most bytes, less those
                  that it makes; is needed by the most kernels; is the last that could be placed: in this order of
                  importance. Inputs free nothing, and nobody frees results of the program
    a walk        each result of the program, one after the other, with all that it needs just before it

A collective is two kernels, its start and its end. The end reads what the start does, and so frees it, unless that is
written over. Afterwards the starts of sums come as early as they can, and their ends as late (`PostProcessSchedule`,
xla/service/gpu/gpu_hlo_schedule.cc).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.compiler.memory.latency_hiding import Kernel, in_order
from autopar.compiler.memory.liveness import Key
from autopar.compiler.spmd.dependencies import by_place, readers_of, walk

Placed = tuple[int, bool]
"""The number of a kernel, and true if it is its end that stands there."""


def scheduled_for_memory(
    kernels: Sequence[Kernel],
    nbytes: Mapping[Key, float],
    outputs: Sequence[Key],
    taken: Collection[Key],
    early: Collection[int],
) -> list[Placed]:
    """Return the kernels in their new order; raise ValueError if some of them need each other.

    `nbytes` are those of arrays, `outputs` the results of the program, `taken` those of them that are written over
    inputs, `early` the collectives that start as early as they can, and end as late.
    """
    graph = _Graph(kernels, nbytes, outputs)
    orders: list[list[int]] = []
    for order in (graph.listed(), graph.walked()):
        if len(order) < len(graph.nodes):
            raise ValueError(f"{len(kernels)} kernels cannot be ordered: some of them need each other.")
        orders.append(graph.moved(order, early))
    best = min(orders, key=lambda order: graph.peak(order, taken))
    return [(graph.nodes[number].kernel, graph.nodes[number].is_end) for number in best]


def as_written(
    kernels: Sequence[Kernel],
    tail: Collection[int],
    last_reads: Mapping[int, Sequence[int]],
    at_once: Collection[int],
) -> list[Placed]:
    """Return the kernels as a program has them, but for those of the `tail`, which lead to results only.

    These come as soon as all is there that they need, behind the `last_reads` of what they write over, but not where
    they stand behind a collective beside which others run: one that is not `at_once`.
    """
    times, late = [-1.0] * len(kernels), set[int]()
    for number in in_order(kernels):
        kernel = kernels[number]
        there = max((times[need] for need in kernel.needs), default=-1.0)
        if number in tail:
            if any(n in late or (n in tail and kernels[n].is_collective and n not in at_once) for n in kernel.needs):
                late.add(number)
            else:
                read = (times[other] + 0.5 for other in last_reads.get(number, ()) if other not in tail)
                times[number] = max((there, *read))
                continue
        times[number] = max(there, kernel.position)
    placed: list[Placed] = []
    for number in by_place([kernel.needs for kernel in kernels], times):
        placed += [(number, False), (number, True)] if kernels[number].is_collective else [(number, False)]
    return placed


@dataclass(kw_only=True, slots=True, eq=False)
class _Node:
    """A kernel, or the start or the end of a collective."""

    kernel: int
    is_end: bool = False
    reads: tuple[Key, ...]
    """The arrays that it reads in memory, inputs aside."""
    made: float
    """The bytes that it makes there."""
    needs: list[int] = field(default_factory=list[int])
    users: list[int] = field(default_factory=list[int])


class _Graph:
    def __init__(self, kernels: Sequence[Kernel], nbytes: Mapping[Key, float], outputs: Sequence[Key]) -> None:
        self.kernels, self.outputs = kernels, set(outputs)
        makers = {key: number for number, kernel in enumerate(kernels) for key in kernel.makes}
        self.nbytes = {key: nbytes.get(key, 1.0) for key in makers}
        self.nodes: list[_Node] = []
        first, last = list[int](), list[int]()
        for number, kernel in enumerate(kernels):
            reads = tuple(key for key in kernel.reads if key in makers)
            sent = () if kernel.is_in_place or not kernel.is_collective else reads
            first.append(self._add(_Node(kernel=number, reads=reads, made=self._sum((*kernel.makes, *sent)))))
            if kernel.is_collective:
                end = _Node(kernel=number, is_end=True, reads=(*sent, *kernel.makes), made=0.0, needs=[first[-1]])
                last.append(self._add(end))
            else:
                last.append(first[-1])
        for number, kernel in enumerate(kernels):
            self.nodes[first[number]].needs += [last[need] for need in dict.fromkeys(kernel.needs)]
        for node, users in zip(self.nodes, readers_of([node.needs for node in self.nodes]), strict=True):
            node.users = users
        self.results = dict.fromkeys(last[makers[key]] for key in outputs if key in makers)
        self.readers: dict[Key, list[int]] = {}
        for number, node in enumerate(self.nodes):
            for key in node.reads:
                self.readers.setdefault(key, []).append(number)

    def _add(self, node: _Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _sum(self, keys: Iterable[Key]) -> float:
        return sum(self.nbytes[key] for key in keys if key in self.nbytes)

    def listed(self) -> list[int]:
        """Return the nodes as the list scheduler orders them."""
        uses = {key: len(readers) + (key in self.outputs) for key, readers in self.readers.items()}
        left = [len(node.needs) for node in self.nodes]
        ready: list[tuple[float, int, int, int]] = []
        entries: dict[int, tuple[float, int, int, int]] = {}
        turns = itertools.count()

        def enter(number: int) -> None:
            node = self.nodes[number]
            grows = node.made - sum(self.nbytes[key] for key in node.reads if uses[key] == 1)
            if number not in entries or entries[number][0] != grows:
                entries[number] = (grows, -len(node.users), -next(turns), number)
                heapq.heappush(ready, entries[number])

        order: list[int] = []
        for number, count in enumerate(left):
            if not count:
                enter(number)
        while ready:
            entry = heapq.heappop(ready)
            number = entry[-1]
            if entries.get(number) != entry:
                continue
            del entries[number]
            order.append(number)
            node = self.nodes[number]
            for key in node.reads:
                uses[key] -= 1
            for user in node.users:
                left[user] -= 1
                if not left[user]:
                    enter(user)
            for reader in (reader for key in node.reads if uses[key] == 1 for reader in self.readers[key]):
                if reader in entries:
                    enter(reader)
        return order

    def walked(self) -> list[int]:
        """Return the nodes on a walk from the results, each behind all that it needs, and then all others."""
        ends = (number for number, node in enumerate(self.nodes) if not node.users)
        return list(walk([node.needs for node in self.nodes], (*self.results, *ends)))

    def moved(self, order: Sequence[int], early: Collection[int]) -> list[int]:
        """Return nodes in order but for the collectives that start as early as they can, and end as late."""
        found: dict[int, None] = {}
        for number in order:
            if number not in found:
                found[number] = None
                for user in self.nodes[number].users:
                    node = self.nodes[user]
                    if node.kernel in early and not node.is_end and all(need in found for need in node.needs):
                        found.setdefault(user)
        late: dict[int, None] = {}
        for number in reversed(found):
            if number not in late:
                late[number] = None
                for need in self.nodes[number].needs:
                    node = self.nodes[need]
                    if node.kernel in early and node.is_end and all(user in late for user in node.users):
                        late.setdefault(need)
        return [*reversed(late)]

    def peak(self, order: Sequence[int], taken: Collection[Key]) -> float:
        """Return the most bytes in memory at once, inputs and what is written over them aside."""
        last = {key: number for number in order for key in self.nodes[number].reads if key not in self.outputs}
        level = peak = 0.0
        for number in order:
            node = self.nodes[number]
            if not node.is_end:
                level += self._sum(key for key in self.kernels[node.kernel].makes if key not in taken)
            peak = max(peak, level)
            level -= self._sum(key for key in node.reads if last.get(key) == number)
        return peak
