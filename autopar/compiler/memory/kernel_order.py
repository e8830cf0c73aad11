"""Put the ops of a program into the order in which a compiler runs its kernels.

    ops in the order of the program  ->  ops in the order of the compiler

The ops are fused into kernels first, and what is ordered are these:

    kernels            of ops that stand apart, and of fused ones whose results reach memory; with them, all that is
                       fused into them
    rows               what reductions of rows give, and what is computed of that alone, is computed in every kernel
                       that reads it: these are no kernels
    loops              kernels of loops of one size that read the same array, or of which one reads what the other
                       writes, are one; not losses of few numbers
    free               inputs; results of a collective with several; operands of products in which dimensions are
                       merged, once for all that read them so; the operands of a region that is computed again, before
                       which it reads nothing from outside

They are scheduled for memory first, where a compiler does so, and then for latency. What a kernel takes is what its
machine moves in memory, but for products; kernels that reduce rows take nothing, as XLA does not estimate them. What a
collective sends is kept until it is done, behind all that hides it, unless it is written over.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from autopar.compiler.memory import liveness
from autopar.compiler.memory.joined_collectives import made_by, predecessors, read_by, tail_of
from autopar.compiler.memory.latency_hiding import NO_ESTIMATE_S, Kernel, in_order, scheduled
from autopar.compiler.memory.liveness import Key, Op
from autopar.compiler.memory.memory_scheduling import as_written, scheduled_for_memory
from autopar.hardware.machine import Machine

_FEW_NUMBERS = 1024
"""Most numbers whose sum, as a loss, has a kernel of its own: of six GPTs compiled."""
_MOVES_NOTHING = ("view", "form", "constant")


@dataclass(frozen=True, kw_only=True)
class OpOrder:
    """Operations in a new order."""

    ops: list[Op]
    order: list[int]
    """The number that each op had before."""


def order_kernels(
    ops: Sequence[Op],
    inputs: Sequence[Key],
    outputs: Sequence[Key],
    nbytes: Mapping[Key, float],
    taken: Sequence[tuple[Key, Key]],
    machine: Machine,
) -> OpOrder:
    """Return the ops as the compiler for a machine orders their kernels.

    `nbytes` are those of all arrays, `taken` the results that are written over inputs, with these.
    """
    graph = _Graph(ops, inputs, outputs, nbytes, machine.memory_bandwidth)
    kernels, roots = graph.kernels, graph.roots
    sums = [n for n, members in graph.members.items() if ops[members[0]].collective not in ("", "all-gather")]
    if machine.schedules_for_memory:
        results = [roots.get(key, key) for key in outputs]
        placed = scheduled_for_memory(kernels, nbytes, results, {roots.get(key, key) for key, _ in taken}, sums)
    else:
        placed = as_written(kernels, graph.tail(), graph.last_reads(taken), () if machine.scatters_sums else sums)
    if machine.schedules_for_latency and any(kernel.is_collective for kernel in kernels):
        for place, (number, is_end) in enumerate(placed):
            if is_end:
                kernels[number].end_position = place
            else:
                kernels[number].position = place
        placed = scheduled(kernels)
    begins, ends = dict[int, float](), dict[int, float]()
    for place, (number, is_end) in enumerate(placed):
        times = ends if is_end else begins
        times.update(dict.fromkeys(graph.members.get(number, ()), place))
    times = _as_late(graph.before, begins)
    order = sorted(range(len(ops)), key=lambda number: (times[number], number))
    return OpOrder(ops=_kept(graph, order, times, ends), order=order)


def _as_late(before: Sequence[set[int]], begins: Mapping[int, float]) -> list[float]:
    """Return the places of all ops: those that are no kernels stand before the first one that reads them.

    What nothing reads stands behind what it reads.
    """
    times = [begins.get(number, math.inf) for number in range(len(before))]
    for number in range(len(before) - 1, -1, -1):
        for other in before[number]:
            if other not in begins:
                times[other] = min(times[other], times[number])
    for number, time in enumerate(times):
        if time == math.inf:
            times[number] = max((times[other] for other in before[number]), default=0.0)
    return times


def _kept(graph: _Graph, order: Sequence[int], times: Sequence[float], ends: Mapping[int, float]) -> list[Op]:
    """Return the ops in order; the last one before the end of a collective reads what that keeps until then, too."""
    found = [graph.ops[number] for number in order]
    placed = [times[number] for number in order]
    for number, end in ends.items():
        if graph.ops[number].over:
            continue
        last = bisect_left(placed, end) - 1
        while last >= 0 and (order[last] not in graph.found or found[last].kind in _MOVES_NOTHING):
            last -= 1
        if last >= 0 and placed[last] > times[number]:
            reads = dict.fromkeys((*found[last].reads, *graph.ops[number].reads))
            found[last] = found[last]._replace(reads=tuple(reads))
    return found


class _Graph:
    """The kernels of a program, and what each of them needs, reads and makes."""

    def __init__(
        self,
        ops: Sequence[Op],
        inputs: Sequence[Key],
        outputs: Sequence[Key],
        nbytes: Mapping[Key, float],
        memory_bandwidth: float,
    ) -> None:
        self.ops, self.outputs, self.nbytes = ops, outputs, nbytes
        self.memory_bandwidth = memory_bandwidth
        self.found = liveness.kernels(ops, inputs, outputs, nbytes)
        self.maker = {key: number for number, op in enumerate(ops) for key in made_by(op)}
        self.before = predecessors(ops)
        self.roots: dict[Key, Key] = {}
        for op in ops:
            if op.kind in ("view", "form"):
                self.roots[op.results[0]] = self.roots.get(op.reads[0], op.reads[0])
        self._inside: dict[int, tuple[int, ...]] = {}
        self._take_out_rows()
        self.kernels: list[Kernel] = []
        self.members: dict[int, list[int]] = {}
        """The ops of each kernel, and of each collective."""
        self._parts: dict[int, int] = {}
        """The kernel that each is one with that stands for what it made of that."""
        self._given: dict[Key, int] = {}
        """The kernel that makes or is each array."""
        self._formed: dict[Hashable, int] = {}
        """The free kernel that is each array in a form in which products read it."""
        self._origins: dict[Key, tuple[Key, ...]] = {}
        """The arrays in memory that each is computed from which is never there."""
        self._build(inputs)

    def _build(self, inputs: Sequence[Key]) -> None:
        for key in dict.fromkeys(inputs):
            self._given[key] = self._add(Kernel(needs=[], is_free=True))
        ids: dict[int, int] = {}
        for number, op in enumerate(self.ops):
            if op.kind == "barrier":
                kernel = ids[number] = self._add(Kernel(needs=[], is_free=True))
                self._given.update(dict.fromkeys(op.small_results, kernel))
            elif number in self.found:
                ids[number] = self._add(
                    Kernel(
                        needs=[],
                        is_collective=bool(op.collective),
                        position=number,
                        is_in_place=op.over,
                        makes=[*self.found[number].makes, *op.small_results],
                    )
                )
                self.members[ids[number]] = [number]
                self._give(ids[number])
        for op in self.ops:
            keys = [key for key in made_by(op) if key not in self._given and key not in self.roots]
            if keys:
                self._origins.update(dict.fromkeys(keys, self._in_memory(read_by(op))))
        for number, kernel in ids.items():
            op = self.ops[number]
            if op.kind == "barrier":
                self.kernels[kernel].needs = self._makers(self._in_memory(read_by(op)))
            else:
                self._complete(kernel, number)
        self._join(self._siblings())
        self._join(self._readers())

    def tail(self) -> set[int]:
        """Return the kernels that lead to results only, with no product, loop or barrier in between."""
        tail = tail_of(self.ops, self.before)
        return {kernel for kernel, members in self.members.items() if all(tail[number] for number in members)}

    def last_reads(self, taken: Sequence[tuple[Key, Key]]) -> dict[int, list[int]]:
        """Return, by kernel that writes over an input, the others that read this."""
        readers: dict[Key, list[int]] = {}
        for number, kernel in enumerate(self.kernels):
            for key in kernel.reads:
                readers.setdefault(key, []).append(number)
        found: dict[int, list[int]] = {}
        for result, old in taken:
            if (given := self._given.get(self.roots.get(result, result))) is not None:
                maker = _last(self._parts, given)
                found.setdefault(maker, []).extend(each for each in readers.get(old, ()) if each != maker)
        return found

    def _add(self, kernel: Kernel) -> int:
        self.kernels.append(kernel)
        return len(self.kernels) - 1

    def _give(self, kernel: int) -> None:
        """Note what a kernel makes; each of several results of a collective is taken out of what it makes."""
        made = self.kernels[kernel]
        for key in made.makes:
            is_one = len(made.makes) == 1 or not made.is_collective
            self._given[key] = kernel if is_one else self._add(Kernel(needs=[kernel], is_free=True))

    def _complete(self, kernel: int, number: int) -> None:
        """Set what a kernel needs, reads and takes."""
        op, found = self.ops[number], self.kernels[kernel]
        waits_for = self._in_memory(key for other in self._fused(number) for key in self.ops[other].waits_for)
        reads = self._in_memory(self.found[number].reads)
        needs = self._formed_needs(op) if any(op.forms) else self._makers(reads)
        found.needs = [need for need in dict.fromkeys((*needs, *self._makers(waits_for))) if need != kernel]
        found.reads = [key for key in dict.fromkeys((*reads, *waits_for)) if key not in found.makes]
        found.seconds = self._seconds(kernel)

    def _formed_needs(self, op: Op) -> list[int]:
        """Return the operands of a product in the forms in which it reads them."""
        needs: list[int] = []
        for key, form in zip(op.reads, op.forms, strict=True):
            place = self.roots.get(key, key)
            if form is None:
                needs += self._makers(self._in_memory((place,)))
            else:
                if (place, form) not in self._formed:
                    makers = self._makers(self._in_memory((place,)))
                    self._formed[place, form] = self._add(Kernel(needs=makers, is_free=True))
                needs.append(self._formed[place, form])
        return needs

    def _in_memory(self, keys: Iterable[Key]) -> tuple[Key, ...]:
        """Return the arrays in memory that some are, or are computed from."""
        found = dict[Key, None]()
        for key in keys:
            root = self.roots.get(key, key)
            found.update(dict.fromkeys((root,) if root in self._given else self._origins.get(root, ())))
        return tuple(found)

    def _makers(self, keys: Iterable[Key]) -> list[int]:
        return list(dict.fromkeys(self._given[key] for key in keys))

    def _seconds(self, kernel: int) -> float:
        members = self.members[kernel]
        op, found = self.ops[members[0]], self.kernels[kernel]
        if op.collective:
            return (op.seconds or 0.0) if op.results else NO_ESTIMATE_S
        if op.seconds is not None:
            return op.seconds
        if any(self.ops[number].reduces_rows for member in members for number in self._fused(member)):
            return NO_ESTIMATE_S
        moved = (*found.makes, *found.makes) if op.slices else (*found.reads, *found.makes)
        return math.fsum(self.nbytes.get(key, 0.0) for key in moved) / self.memory_bandwidth

    def _fused(self, number: int) -> tuple[int, ...]:
        """Return the ops that are in the kernel of one, itself included."""
        if number not in self._inside:
            inside, left = dict[int, None](), [number]
            while left:
                other = left.pop()
                if other not in inside:
                    inside[other] = None
                    left += [each for each in self.before[other] if each not in self.found and self._fuses(each)]
            self._inside[number] = tuple(inside)
        return self._inside[number]

    def _fuses(self, number: int) -> bool:
        return self.ops[number].kind in ("fused", "view", "form", "reduction")

    def _take_out_rows(self) -> None:
        """Forget the kernels that reduce rows, and those of what is computed of their results alone.

        They stay where what reads them goes over fewer numbers than these rows have.
        """
        apart = {self.roots.get(key, key) for key in self.outputs}
        readers: dict[Key, list[int]] = {}
        for number in self.found:
            op = self.ops[number]
            if op.kind not in ("fused", "reduction") or op.behind_barrier:
                apart.update(self.roots.get(key, key) for key in read_by(op))
            for key in dict.fromkeys(key for other in self._fused(number) for key in read_by(self.ops[other])):
                readers.setdefault(self.roots.get(key, key), []).append(number)
        rows = self._of_rows(apart)
        for number in sorted(rows, reverse=True):
            reading = (each for key in made_by(self.ops[number]) for each in readers.get(key, ()) if each != number)
            if any(each not in rows and self.ops[each].extent < rows[number] for each in reading):
                del rows[number]
        for number in rows.keys() & self._of_rows(apart, rows).keys():
            del self.found[number]
        self._inside.clear()

    def _of_rows(self, apart: Set[Key], among: Collection[int] | None = None) -> dict[int, float]:
        """Return the kernels of rows `among` those given that no op `apart` reads, with the numbers in these rows."""
        extents: dict[Key, float] = {}
        found: dict[int, float] = {}
        for number, kernel in self.found.items():
            op = self.ops[number]
            if not apart.isdisjoint(made_by(op)) or (among is not None and number not in among):
                continue
            small = (self.roots.get(key, key) for other in self._fused(number) for key in self.ops[other].waits_for)
            read = [key for key in (*kernel.reads, *small) if self.maker.get(key) in self.found]
            if op.reduces_rows:
                found[number] = op.extent
            elif op.kind == "fused" and read and all(key in extents for key in read):
                found[number] = max(extents[key] for key in read)
            if number in found:
                extents.update(dict.fromkeys(made_by(op), found[number]))
        return found

    def _siblings(self) -> dict[int, int]:
        """Return the kernel that each is one with that reads the same array: at one level neither needs the other."""
        levels = self._levels()
        readers: dict[Hashable, list[int]] = {}
        for kernel in self.members:
            if (extent := self._loop(kernel)) > 0:
                for need in self.kernels[kernel].needs:
                    readers.setdefault((need, extent, levels[kernel]), []).append(kernel)
        joined: dict[int, int] = {}
        for siblings in readers.values():
            first, *others = dict.fromkeys(_last(joined, kernel) for kernel in siblings)
            for other in others:
                low, high = sorted((first, other))
                joined[low] = first = high
        return joined

    def _readers(self) -> dict[int, int]:
        """Return the kernel that each is one with of which it reads what that writes for others, too.

        All else that it needs is there before that.
        """
        levels = self._levels()
        joined: dict[int, int] = {}
        for kernel in sorted(self.members, key=levels.__getitem__):
            extent = self._loop(kernel)
            if extent <= 0:
                continue
            needs = {_last(joined, _last(self._parts, need)) for need in self.kernels[kernel].needs}
            for need in sorted(needs):
                there = all(levels[other] < levels[need] for other in needs if other != need)
                if there and self._loop(need) == extent and self._writes_for(need, kernel):
                    joined[kernel] = need
                    break
        return joined

    def _loop(self, kernel: int) -> float:
        """Return the numbers that the loop of a kernel goes over; 0 if it is none, or one of rows."""
        numbers = self.members.get(kernel, ())
        loops = (self.ops[number].kind in ("reduction", "fused") and not self._reads_rows(number) for number in numbers)
        if not numbers or not all(loops):
            return 0.0
        extent, kinds = self.ops[numbers[0]].extent, {self.ops[number].kind for number in numbers}
        return extent if extent > _FEW_NUMBERS or kinds == {"fused"} else 0.0

    def _writes_for(self, kernel: int, reader: int) -> bool:
        """Return true if what is read of a kernel is written as its loop goes on, and not when that is done."""
        read = {key for number in self.members[reader] for key in self.found[number].reads}
        made = [number for number in self.members[kernel] if not read.isdisjoint(self.found[number].makes)]
        return bool(made) and all(self.ops[number].kind == "fused" for number in made)

    def _join(self, joined: Mapping[int, int]) -> None:
        for number in sorted(joined):
            kernel, into = self.kernels[number], self.kernels[_last(joined, number)]
            self.members[_last(joined, number)] += self.members.pop(number)
            into.needs += kernel.needs
            into.reads += kernel.reads
            into.makes += kernel.makes
            into.position = max(into.position, kernel.position)
            self.kernels[number] = Kernel(needs=[_last(joined, number)], is_free=True)
            self._parts[number] = _last(joined, number)
        for number in {_last(joined, number) for number in joined}:
            kernel = self.kernels[number]
            kernel.needs = [need for need in dict.fromkeys(kernel.needs) if _last(self._parts, need) != number]
            kernel.reads = [key for key in dict.fromkeys(kernel.reads) if key not in kernel.makes]
            self.members[number].sort()
            kernel.seconds = self._seconds(number)

    def _levels(self) -> list[int]:
        """Return the most kernels that stand in front of each, what is free aside."""
        levels = [0] * len(self.kernels)
        for number in in_order(self.kernels):
            kernel = self.kernels[number]
            levels[number] = max((levels[need] for need in kernel.needs), default=0) + (not kernel.is_free)
        return levels

    def _reads_rows(self, number: int) -> bool:
        """Return true if a kernel goes over rows with what a reduction of them gives: another one does that for it."""
        makers = (self.maker.get(key) for other in self._fused(number) for key in read_by(self.ops[other]))
        rows = (self.ops[maker] for maker in makers if maker is not None and self.ops[maker].reduces_rows)
        return any(each.extent <= self.ops[number].extent for each in rows)


def _last(joined: Mapping[int, int], kernel: int) -> int:
    """Return the kernel that one is joined into."""
    while kernel in joined:
        kernel = joined[kernel]
    return kernel
