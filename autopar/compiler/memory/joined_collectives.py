"""Join the collectives that a compiler makes one.

    ops in the order of the program  ->  ops, of which some stand for several collectives

A compiler finds collectives of one kind on a walk from the results of the program, in the order of these, and joins
what it finds until that is too much, or needs what is joined (`CombineInstructionsByKey` of openxla/xla,
xla/service/collective_combiner_utils.h). What several all-reduces sum is copied into one array, which is summed where
it is, and cut into their results (`AllReduceContiguous`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.compiler.memory.liveness import Key, Op
from autopar.compiler.spmd.dependencies import by_place, walk

SUMS = ("reduce-scatter", "all-reduce")
_JOINED = ("all-gather", "all-reduce", "reduce-scatter")
"""The kinds of collectives that are joined, one after another."""


@dataclass(frozen=True, kw_only=True)
class JoinedCollectives:
    """The collectives that a compiler makes one."""

    scatters_sums: bool
    """True if sums of which every device takes its part are reduce-scatters."""
    copies_joined: bool
    """True if what several all-reduces sum is copied into one array."""
    most_bytes: float
    """The most bytes of what one collective makes, or of what it sums."""


class JoinedArray(NamedTuple):
    """The array into which is copied what several collectives sum; `summed` where it holds the sums."""

    parts: tuple[Key, ...]
    """Their results, but for those too small to count, if there are others."""
    summed: bool = False


class JoinedOps(NamedTuple):
    """Ops of which some stand for several collectives, each behind all that it needs."""

    ops: list[Op]
    origins: list[int]
    """The number of an op that each of them stands for."""
    nbytes: dict[Key, float]
    """The bytes of the arrays into which is copied what collectives sum."""


def join_collectives(
    ops: Sequence[Op], outputs: Sequence[Key], nbytes: Mapping[Key, float], joins: JoinedCollectives
) -> JoinedOps:
    """Return the ops with collectives that are one; `nbytes` are those of all arrays."""
    groups = _Groups(ops, predecessors(ops), nbytes, joins).find(outputs)
    found, places = JoinedOps([], [], {}), list[int]()
    joined = {number for group in groups for number in group}
    for group in groups:
        members = [ops[number] for number in group]
        is_summed = members[0].collective == "all-reduce" and joins.copies_joined
        for op in _summed_in_place(members, nbytes, found.nbytes) if is_summed else (_one(members),):
            found.ops.append(op)
            found.origins.append(group[-1])
            places.append(group[0] if members[0].collective == "all-gather" else group[-1])
    for number, op in enumerate(ops):
        if number not in joined:
            found.ops.append(op)
            found.origins.append(number)
            places.append(number)
    order = _in_order(found.ops, places) if groups else range(len(found.ops))
    return JoinedOps([found.ops[n] for n in order], [found.origins[n] for n in order], found.nbytes)


def read_by(op: Op) -> tuple[Key, ...]:
    """Return all that an op needs."""
    return (*op.reads, *op.waits_for)


def made_by(op: Op) -> tuple[Key, ...]:
    """Return all that an op makes, what is too small to count included."""
    return (*op.results, *op.small_results)


def predecessors(ops: Sequence[Op]) -> list[set[int]]:
    """Return, by op, the numbers of those that make what it needs."""
    makers = {key: number for number, op in enumerate(ops) for key in made_by(op)}
    return [{makers[key] for key in read_by(op) if key in makers} for op in ops]


def tail_of(ops: Sequence[Op], before: Sequence[Collection[int]]) -> list[bool]:
    """Return, by op, true if it leads to results only, with no product, loop or barrier in between."""
    tail = [True] * len(ops)
    for number in range(len(ops) - 1, -1, -1):
        op = ops[number]
        is_heavy = op.kind in ("product", "barrier") or (op.kind == "apart" and not (op.collective or op.slices))
        if is_heavy or not tail[number]:
            tail[number] = False
            for other in before[number]:
                tail[other] = False
    return tail


class _Groups:
    """The collectives of a program that are one."""

    def __init__(
        self, ops: Sequence[Op], before: Sequence[set[int]], nbytes: Mapping[Key, float], joins: JoinedCollectives
    ) -> None:
        self.ops, self.before, self.nbytes, self.joins = ops, before, nbytes, joins
        found = [number for number, op in enumerate(ops) if op.collective in _JOINED and made_by(op)]
        self.bits = {number: 1 << place for place, number in enumerate(found)}
        """The bit that stands for each collective."""
        self.needs: dict[int, int] = {}
        """The bits of those that each needs, by others or by what is one with others."""
        if len(found) > 1:
            self._find_needs()

    def _find_needs(self) -> None:
        needs = [0] * len(self.ops)
        for number, before in enumerate(self.before):
            for other in before:
                needs[number] |= needs[other] | self.bits.get(other, 0)
        self.needs = {number: needs[number] for number in self.bits}

    def find(self, outputs: Sequence[Key]) -> list[list[int]]:
        by_key: dict[Hashable, list[int]] = {}
        for number in self._found(outputs) if self.needs else ():
            by_key.setdefault(_key(self.ops[number]), []).append(number)
        groups: list[list[int]] = []
        for kind in _JOINED:
            for numbers in by_key.values():
                if len(numbers) > 1 and self.ops[numbers[0]].collective == kind:
                    groups += self._joined(numbers)
        return groups

    def _found(self, outputs: Sequence[Key]) -> Iterator[int]:
        """Yield the collectives in the order in which results lead to them; then all others."""
        makers = {key: number for number, op in enumerate(self.ops) for key in made_by(op)}
        reads = [[makers[key] for key in read_by(op) if key in makers] for op in self.ops]
        starts = (*(makers[key] for key in outputs if key in makers), *range(len(self.ops)))
        return (number for number in walk(reads, starts) if number in self.needs)

    def _joined(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Yield the groups of several collectives that are of one kind, and found in this order."""
        group, size = list[int](), 0.0
        there, needed = 0, 0
        for number in numbers:
            nbytes = self._size(self.ops[number])
            if nbytes > self.joins.most_bytes:
                continue
            depends = self.needs[number] & there or self.bits[number] & needed
            if group and (depends or size + nbytes > self.joins.most_bytes):
                yield from self._closed(group, there)
                group, size, there, needed = [], 0.0, 0, 0
            group.append(number)
            size += nbytes
            there |= self.bits[number]
            needed |= self.needs[number]
        yield from self._closed(group, there)

    def _closed(self, group: list[int], there: int) -> Iterator[list[int]]:
        """Yield a group of several; what needs one of them needs all that they do."""
        if len(group) < 2:
            return
        every = there
        for number in group:
            every |= self.needs[number]
        for number, needs in self.needs.items():
            if needs & there:
                self.needs[number] = needs | every
        self.needs.update(dict.fromkeys(group, every & ~there))
        yield sorted(group)

    def _size(self, op: Op) -> float:
        made = op.collective not in SUMS or self.joins.scatters_sums
        return sum(self.nbytes.get(key, 0.0) for key in (made_by(op) if made else read_by(op)))


def _key(op: Op) -> Hashable:
    """Return what is equal for collectives that may be one: sums that are equal, gathers along the same axes."""
    if op.collective in SUMS or not isinstance(op.steps, tuple):
        return op.collective, op.steps
    return op.collective, tuple(getattr(step, "axes", None) for step in op.steps)


def _one(members: Sequence[Op]) -> Op:
    """Return the op that is several collectives."""
    return members[-1]._replace(
        reads=tuple(dict.fromkeys(key for op in members for key in op.reads)),
        waits_for=tuple(dict.fromkeys(key for op in members for key in op.waits_for)),
        results=tuple(key for op in members for key in op.results),
        small_results=tuple(key for op in members for key in op.small_results),
        seconds=math.fsum((op.seconds or 0.0) - op.latency_s for op in members) + max(op.latency_s for op in members),
    )


def _summed_in_place(members: Sequence[Op], nbytes: Mapping[Key, float], sizes: dict[Key, float]) -> Iterator[Op]:
    """Yield the ops that are several sums: copying, summing in place, and cutting; add the `sizes` of their arrays."""
    one = _one(members)
    terms = JoinedArray(one.results or one.small_results)
    summed = terms._replace(summed=True)
    read, made = (sum(nbytes[key] for key in keys) for keys in (one.reads, one.results))
    sizes[terms] = sizes[summed] = max(read, made)
    yield Op("apart", one.reads, (terms,), waits_for=one.waits_for)
    yield one._replace(reads=(terms,), waits_for=(), results=(summed,), small_results=(), over=True)
    for op in members:
        yield Op("apart", (summed,), op.results, small_results=op.small_results, slices=True)


def _in_order(ops: Sequence[Op], places: list[int]) -> list[int]:
    """Return the numbers of ops in the order of their places, each behind all that it needs."""
    before = predecessors(ops)
    for number, op in enumerate(ops):
        if op.collective == "all-gather":
            _bring(number, before, places)
    order = by_place(before, places)
    assert len(order) == len(ops), "collectives that are one do not need each other"
    return order


def _bring(number: int, before: Sequence[Collection[int]], places: list[int]) -> None:
    """Let all that an op needs stand in front of it: what is gathered for the first reader is made for that."""
    left = [number]
    while left:
        place = places[number]
        for other in before[left.pop()]:
            if places[other] > place:
                places[other] = place
                left.append(other)
