"""Put the ops of a program into the order in which a compiler runs its kernels that hides collectives behind them.

    ops in the order of the program  ->  ops in the order of the compiler

The ops are fused into kernels first, and what the latency-hiding scheduler places are these:

    kernels            of ops that stand apart, and of fused ones whose results reach memory; with them, all that is
                       fused into them
    rows               what reductions of rows give, and what is computed of that alone, is computed in every kernel
                       that reads it: these are no kernels
    loops              kernels of loops of one size that read the same array, or of which one reads what the other
                       writes, are one; not losses of few numbers
    collectives        sums are joined up to a size, in the order of the results of the program; gathers are where
                       they stand behind as many others
    free               inputs; results of a collective with several; operands of products in which dimensions are
                       merged, once for all that read them so; the operands of a region that is computed again, before
                       which it reads nothing from outside

What a kernel takes is what its machine moves in memory, but for products; kernels that reduce rows take nothing, as XLA
does not estimate them. What a collective sends is kept until it is done, behind all that hides it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence, Set

from autopar.compiler.memory import liveness
from autopar.compiler.memory.latency_hiding import NO_ESTIMATE_S, Kernel, in_order, scheduled
from autopar.compiler.memory.liveness import Key, Op
from autopar.compiler.memory.ordering import JoinedCollectives, OpOrder, joined_sums, tail_of

_FEW_NUMBERS = 1024
"""Most numbers whose sum, as a loss, has a kernel of its own: of six GPTs compiled."""
_MOVES_NOTHING = ("view", "form", "constant")


def order_kernels(
    ops: Sequence[Op],
    inputs: Sequence[Key],
    outputs: Sequence[Key],
    nbytes: Mapping[Key, float],
    joins: JoinedCollectives,
    memory_bandwidth: float,
) -> OpOrder:
    """Return the ops as the compiler orders their kernels.

    `nbytes` are those of all arrays. `memory_bandwidth` in bytes/s: by it kernels take their time.
    """
    graph = _Graph(ops, inputs, outputs, nbytes, memory_bandwidth)
    tail = tail_of(ops, graph.before)
    sums = joined_sums(ops, graph.before, tail, outputs, nbytes, joins)
    graph.build(tail, [*sums, *graph.joined_gathers(tail, joins.most_bytes)])
    begins, ends = dict[int, float](), dict[int, float]()
    for place, (number, is_end) in enumerate(scheduled(graph.kernels)):
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
    """Return the ops in order; the last one before the end of a collective reads its operands, too."""
    found = [graph.ops[number] for number in order]
    placed = [times[number] for number in order]
    for number, end in ends.items():
        last = bisect_left(placed, end) - 1
        while last >= 0 and (order[last] not in graph.found or found[last].kind in _MOVES_NOTHING):
            last -= 1
        if last >= 0 and placed[last] > times[number]:
            reads = dict.fromkeys((*found[last].reads, *graph.ops[number].reads))
            found[last] = found[last]._replace(reads=tuple(reads))
    return found


class _Graph:
    """The kernels of a program, and what each of them needs."""

    def __init__(
        self,
        ops: Sequence[Op],
        inputs: Sequence[Key],
        outputs: Sequence[Key],
        nbytes: Mapping[Key, float],
        memory_bandwidth: float,
    ) -> None:
        self.ops, self.inputs, self.outputs, self.nbytes = ops, inputs, outputs, nbytes
        self.memory_bandwidth = memory_bandwidth
        self.found = liveness.kernels(ops, inputs, outputs, nbytes)
        self.maker = {key: number for number, op in enumerate(ops) for key in (*op.results, *op.small_results)}
        self.before = [{self.maker[key] for key in _read(op) if key in self.maker} for op in ops]
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
        self._needed: dict[Key, list[int]] = {}
        """The kernels that are needed for each array that is never in memory."""

    def joined_gathers(self, tail: Sequence[bool], most_bytes: float) -> Iterator[list[int]]:
        """Yield the gathers that are one collective: those behind as many others, which do not need each other.

        None of the `tail`, of what is updated, is one with others: these are behind sums, which are joined, too.
        """
        depths = [0] * len(self.ops)
        found: dict[Hashable, tuple[list[int], float]] = {}
        for number, op in enumerate(self.ops):
            depths[number] = max((depths[o] + bool(self.ops[o].collective) for o in self.before[number]), default=0)
            if op.collective != "all-gather" or number not in self.found or not op.results:
                continue
            axes = tuple(getattr(step, "axes", None) for step in op.steps) if isinstance(op.steps, tuple) else op.steps
            kind = (axes, depths[number], tail[number])
            size = sum(self.nbytes[key] for key in op.results)
            group, total = found.get(kind, ([], math.inf))
            if total + size > most_bytes:
                if group:
                    yield group
                group, total = [], 0.0
            group.append(number)
            found[kind] = group, total + size
        yield from (group for group, _ in found.values())

    def build(self, tail: Sequence[bool], groups: Sequence[Sequence[int]]) -> None:
        """Make the kernels; `groups` are the collectives that are one, and `tail` is what only results need."""
        leader = {number: group[-1] for group in groups for number in group}
        for key in dict.fromkeys(self.inputs):
            self._given[key] = self._add(Kernel(needs=[], is_free=True))
        ids: dict[int, int] = {}
        for number, op in enumerate(self.ops):
            if op.kind == "barrier":
                kernel = ids[number] = self._add(Kernel(needs=[], is_free=True))
                self._given.update(dict.fromkeys(op.small_results, kernel))
            elif number in self.found:
                first = leader.get(number, number)
                if first not in ids:
                    position = number if op.collective == "all-gather" else first
                    ids[first] = self._add(Kernel(needs=[], is_collective=bool(op.collective), position=position))
                self.members.setdefault(ids[first], []).append(number)
        for kernel, members in self.members.items():
            self._give(kernel, members)
        self._trace()
        for number, kernel in ids.items():
            op = self.ops[number]
            if op.kind == "barrier":
                self.kernels[kernel].needs = self._needs_of(_read(op))
            else:
                self._complete(kernel, self.members[kernel])
        self._join(self._siblings())
        self._join(self._readers())
        self._turn_round(tail)

    def _add(self, kernel: Kernel) -> int:
        self.kernels.append(kernel)
        return len(self.kernels) - 1

    def _give(self, kernel: int, members: Sequence[int]) -> None:
        """Note what a kernel makes; each result of several collectives that are one is taken out of what they make."""
        for number in members:
            op = self.ops[number]
            given = kernel
            if op.collective and len(members) > 1:
                given = self._add(Kernel(needs=[kernel], is_free=True))
            self._given.update(dict.fromkeys((*self.found[number].makes, *op.small_results), given))

    def _complete(self, kernel: int, members: Sequence[int]) -> None:
        """Set what a kernel needs, and what it takes."""
        needs: list[int] = []
        for number in members:
            op, inside = self.ops[number], self._fused(number)
            needs += self._formed_needs(op) if any(op.forms) else self._needs_of(self.found[number].reads)
            needs += self._needs_of([key for other in inside for key in self.ops[other].waits_for])
        found = self.kernels[kernel]
        found.needs = [need for need in dict.fromkeys(needs) if need != kernel]
        found.seconds = self._seconds(members)

    def _formed_needs(self, op: Op) -> list[int]:
        """Return the operands of a product in the forms in which it reads them."""
        needs: list[int] = []
        for key, form in zip(op.reads, op.forms, strict=True):
            place = self.roots.get(key, key)
            if form is None:
                needs += self._needs_of([place])
            else:
                if (place, form) not in self._formed:
                    self._formed[place, form] = self._add(Kernel(needs=self._needs_of([place]), is_free=True))
                needs.append(self._formed[place, form])
        return needs

    def _needs_of(self, keys: Sequence[Key]) -> list[int]:
        return list(dict.fromkeys(kernel for key in keys for kernel in self._kernels_of(key)))

    def _trace(self) -> None:
        """Find the kernels that make all that each array is computed from which is never in memory."""
        for op in self.ops:
            keys = [key for key in _made(op) if key not in self._given and key not in self.roots]
            if keys:
                self._needed.update(dict.fromkeys(keys, self._needs_of(_read(op))))

    def _kernels_of(self, key: Key) -> Sequence[int]:
        key = self.roots.get(key, key)
        return (self._given[key],) if key in self._given else self._needed.get(key, ())

    def _seconds(self, members: Sequence[int]) -> float:
        ops = [self.ops[number] for number in members]
        if ops[0].collective:
            if not any(op.results for op in ops):
                return NO_ESTIMATE_S
            seconds = [op.seconds or 0.0 for op in ops]
            return sum(seconds) - (len(seconds) - 1) * min(seconds)
        if ops[0].seconds is not None:
            return ops[0].seconds
        if any(self.ops[number].reduces_rows for member in members for number in self._fused(member)):
            return NO_ESTIMATE_S
        moved = {key for number in members for key in (*self.found[number].reads, *self.found[number].makes)}
        return math.fsum(self.nbytes[key] for key in moved) / self.memory_bandwidth

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
                apart.update(self.roots.get(key, key) for key in _read(op))
            for key in dict.fromkeys(key for other in self._fused(number) for key in _read(self.ops[other])):
                readers.setdefault(self.roots.get(key, key), []).append(number)
        rows = self._of_rows(apart)
        for number in sorted(rows, reverse=True):
            reading = (each for key in _made(self.ops[number]) for each in readers.get(key, ()) if each != number)
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
            if not apart.isdisjoint(_made(op)) or (among is not None and number not in among):
                continue
            small = (self.roots.get(key, key) for other in self._fused(number) for key in self.ops[other].waits_for)
            read = [key for key in (*kernel.reads, *small) if self.maker.get(key) in self.found]
            if op.reduces_rows:
                found[number] = op.extent
            elif op.kind == "fused" and read and all(key in extents for key in read):
                found[number] = max(extents[key] for key in read)
            if number in found:
                extents.update(dict.fromkeys(_made(op), found[number]))
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
        for kernel in sorted(joined):
            into = self.kernels[_last(joined, kernel)]
            self.members[_last(joined, kernel)] += self.members.pop(kernel)
            into.needs = list(dict.fromkeys((*into.needs, *self.kernels[kernel].needs)))
            into.position = max(into.position, self.kernels[kernel].position)
            self.kernels[kernel] = Kernel(needs=[_last(joined, kernel)], is_free=True)
            self._parts[kernel] = _last(joined, kernel)
        for kernel in {_last(joined, kernel) for kernel in joined}:
            self.kernels[kernel].needs = [
                need for need in self.kernels[kernel].needs if _last(self._parts, need) != kernel
            ]
            self.members[kernel].sort()
            self.kernels[kernel].seconds = self._seconds(self.members[kernel])

    def _turn_round(self, tail: Sequence[bool]) -> None:
        """Turn round the order of what is behind collectives that only results take.

        The scheduler is given a program that was ordered for memory: there sums of last results came first in three of
        three programs that were compiled, and their updates with them.
        """
        behind: set[int] = set()
        for number, before in enumerate(self.before):
            if tail[number] and any(
                other in behind or (tail[other] and self.ops[other].collective) for other in before
            ):
                behind.add(number)
        for kernel, members in self.members.items():
            if behind.issuperset(members):
                self.kernels[kernel].position = 2 * len(self.ops) - self.kernels[kernel].position

    def _levels(self) -> list[int]:
        """Return the most kernels that stand in front of each, what is free aside."""
        levels = [0] * len(self.kernels)
        for number in in_order(self.kernels):
            kernel = self.kernels[number]
            levels[number] = max((levels[need] for need in kernel.needs), default=0) + (not kernel.is_free)
        return levels

    def _reads_rows(self, number: int) -> bool:
        """Return true if a kernel goes over rows with what a reduction of them gives: another one does that for it."""
        makers = (self.maker.get(key) for other in self._fused(number) for key in _read(self.ops[other]))
        rows = (self.ops[maker] for maker in makers if maker is not None and self.ops[maker].reduces_rows)
        return any(each.extent <= self.ops[number].extent for each in rows)


def _read(op: Op) -> tuple[Key, ...]:
    return (*op.reads, *op.waits_for)


def _made(op: Op) -> tuple[Key, ...]:
    return (*op.results, *op.small_results)


def _last(joined: Mapping[int, int], kernel: int) -> int:
    """Return the kernel that one is joined into."""
    while kernel in joined:
        kernel = joined[kernel]
    return kernel
