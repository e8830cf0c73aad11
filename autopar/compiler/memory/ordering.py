"""Put the ops of a program into the order in which XLA runs them where it schedules for memory.

    ops in the order of the program  ->  ops in the order of the compiler, with the number that each had

Most keep their order. What only results depend on, the update, is done as soon as its operands are there. Results of
its collectives wait for other work to end, but for sums that nothing runs beside. Sums of gradients are joined until
their results have 30 MiB, or what a machine says, in the order of the results of the program: they are one collective,
and whole gradients are kept until the last of them is there and summed. The result of a reduce-scatter is the part of
a device; where it is an all-reduce, of which every device takes its part, it is whole.

A product that leads to results only, as a gradient of weights, runs where it stands if it reads more than it makes, for
then it frees that; else it waits until everything else is done. Those that wait run one sum after the other, each with
its update. A slice of an array in memory comes as soon as nothing else reads that.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from autopar.compiler.memory.liveness import Key, Op

SUMS = ("reduce-scatter", "all-reduce")


@dataclass(frozen=True, kw_only=True)
class JoinedCollectives:
    """The collectives that a compiler makes one."""

    scatters_sums: bool
    """True if sums of which every device takes its part are reduce-scatters."""
    most_bytes: float
    """The most bytes of what one collective makes, or of what it sums."""


@dataclass(frozen=True, kw_only=True)
class OpOrder:
    """Operations in a new order."""

    ops: list[Op]
    order: list[int]
    """The number that each op had before."""


def order_ops(
    ops: Sequence[Op],
    outputs: Sequence[Key],
    nbytes: Mapping[Key, float],
    joins: JoinedCollectives,
    replaced: Sequence[tuple[Key, Key]] = (),
    *,
    for_memory: bool = True,
) -> OpOrder:
    """Return the ops as the compiler orders them; `replaced` are results with the inputs that they take.

    `nbytes` are those of all arrays. `for_memory`: large gradients wait for the end.
    """
    before = _predecessors(ops)
    tail = tail_of(ops, before)
    groups = joined_sums(ops, before, tail, outputs, nbytes, joins)
    last_read = _last_read(ops, tail, replaced)
    held = dict[int, float](last_read)
    deferred = _large(ops, before, nbytes, groups) if for_memory else dict[int, float]()
    slices = _slices(ops) if for_memory else frozenset[int]()
    beside = [bool(op.collective) and (joins.scatters_sums or op.collective not in SUMS) for op in ops]
    times = _times(ops, before, tail, beside, held, deferred, slices)
    held = {number: max(last, times[last]) for number, last in last_read.items()}
    for group in groups:
        # One collective stands where the last of what it joins is there.
        held.update(dict.fromkeys(group, max(times[number] for number in group)))
    times = _times(ops, before, tail, beside, held, deferred, slices)
    order = _sorted(before, times)
    return OpOrder(ops=_kept(ops, groups, order), order=order)


def joined_sums(
    ops: Sequence[Op],
    before: Sequence[set[int]],
    tail: Sequence[bool],
    outputs: Sequence[Key],
    nbytes: Mapping[Key, float],
    joins: JoinedCollectives,
) -> list[list[int]]:
    """Return the sums that only results take and that are one collective each: equal ones, none of another's result.

    A compiler finds them on a walk from the results of the program, in the order of these, and joins what it finds
    until that is too much (`CombineInstructionsByKey` of openxla/xla, xla/service/collective_combiner_utils.h).
    """
    groups: list[list[int]] = []
    open_groups: dict[Hashable, tuple[list[int], float]] = {}
    behind: set[int] = set()
    for number in _walk(ops, outputs):
        op = ops[number]
        if not tail[number]:
            continue
        if any(other in behind or ops[other].collective for other in before[number] if tail[other]):
            behind.add(number)
        elif op.collective in SUMS and (op.results or op.small_results):
            size = sum(nbytes[key] for key in (op.results if joins.scatters_sums else op.reads))
            group, total = open_groups.get(op.steps, ([], 0.0))
            if total + size > joins.most_bytes:
                group, total = [], 0.0
            if not group:
                groups.append(group)
            group.append(number)
            open_groups[op.steps] = group, total + size
    return [sorted(group) for group in groups]


def _walk(ops: Sequence[Op], outputs: Sequence[Key]) -> list[int]:
    """Return the ops, each behind all that it reads, in the order in which results lead to them; then all others."""
    makers = {key: number for number, op in enumerate(ops) for key in (*op.results, *op.small_results)}
    found = dict[int, None]()
    entered: set[int] = set()
    for key in outputs:
        left = [makers[key]] if key in makers else []
        while left:
            number = left[-1]
            if number in entered:
                found.setdefault(left.pop())
                continue
            entered.add(number)
            reads = reversed((*ops[number].reads, *ops[number].waits_for))
            left += [makers[read] for read in reads if makers.get(read, number) not in entered]
    return [*found, *(number for number in range(len(ops)) if number not in found)]


def _sorted(before: Sequence[set[int]], times: Sequence[float]) -> list[int]:
    """Return the ops by their times, each behind what it needs."""
    waiting = [len(each) for each in before]
    after: list[list[int]] = [[] for _ in before]
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
    return order


def _kept(ops: Sequence[Op], groups: Sequence[Sequence[int]], order: Sequence[int]) -> list[Op]:
    """Return the ops in order. Operands of collectives that are one are read until all of it is done."""
    whole, places = list(ops), {number: place for place, number in enumerate(order)}
    for group in groups:
        last = max(group, key=places.__getitem__)
        reads = dict.fromkeys(key for number in dict.fromkeys((*group, last)) for key in whole[number].reads)
        whole[last] = whole[last]._replace(reads=tuple(reads))
    return [whole[number] for number in order]


def _predecessors(ops: Sequence[Op]) -> list[set[int]]:
    makers: dict[Key, int] = {}
    before: list[set[int]] = []
    for number, op in enumerate(ops):
        before.append({makers[key] for key in op.reads if key in makers})
        makers.update(dict.fromkeys(op.results, number))
    return before


def _last_read(ops: Sequence[Op], tail: Sequence[bool], replaced: Sequence[tuple[Key, Key]]) -> dict[int, int]:
    """Return, by op that writes over an input, the number of the last op that reads the input, the update aside."""
    root = _roots(ops)
    last: dict[Key, int] = {}
    makers: dict[Key, int] = {}
    for number, op in enumerate(ops):
        makers.update(dict.fromkeys(op.results, number))
        if not tail[number]:
            last.update((root(key), max(number, last.get(root(key), 0))) for key in op.reads)
    pairs = [(makers.get(root(result)), last.get(old)) for result, old in replaced]
    return {maker: time for maker, time in pairs if maker is not None and time is not None}


def _roots(ops: Sequence[Op]) -> Callable[[Key], Key]:
    """Return what gives the array that a view or form is one of."""
    origins = {op.results[0]: op.reads[0] for op in ops if op.kind in ("view", "form")}

    def root(key: Key) -> Key:
        while key in origins:
            key = origins[key]
        return key

    return root


def _times(
    ops: Sequence[Op],
    before: Sequence[set[int]],
    tail: Sequence[bool],
    beside: Sequence[bool],
    held: Mapping[int, float],
    deferred: Mapping[int, float],
    slices: Collection[int],
) -> list[float]:
    """Return the time of each op: its number, or the time of the last op that it needs or waits for.

    `beside`: by op, true if it is a collective that runs beside other work.
    """
    times: list[float] = []
    late: set[int] = set()
    # What is done with one of those that wait stands before the next one.
    by_place = sorted(deferred, key=lambda number: (deferred[number], number))
    turns = {number: 0.25 + 0.25 * turn / len(deferred) for turn, number in enumerate(by_place)}
    for number in range(len(ops)):
        if tail[number]:
            # The results of collectives come while other work is going on, and wait for it.
            behind = any(other in late or (tail[other] and beside[other]) for other in before[number])
            if behind:
                late.add(number)
        if number in deferred:
            waits_for = max(deferred[number], held.get(number, 0.0))
            times.append(max((waits_for + turns[number], *(times[other] for other in before[number]))))
        elif tail[number] and number not in late:
            times.append(max((times[other] for other in before[number]), default=-1))
            if number in held:
                times[-1] = max(times[-1], held[number] + 0.5)
        else:
            times.append(max((number, *(times[other] for other in before[number]))))
    _hurry(ops, slices, times)
    for number, op in enumerate(ops):
        if op.kind in ("view", "form") and before[number]:
            times[number] = max(times[other] for other in before[number])
    return _as_late(before, times)


def _hurry(ops: Sequence[Op], early: Collection[int], times: list[float]) -> None:
    """Let slices come as soon as nothing else reads the array that they are of, unless a barrier holds that."""
    root = _roots(ops)
    last: dict[Key, float] = {}
    for number, op in enumerate(ops if early else ()):
        if number not in early:
            for key in map(root, (*op.reads, *op.results)):
                last[key] = max(times[number], last.get(key, times[number]))
    for number in early:
        if not ops[number].behind_barrier:
            read = max(last.get(root(key), 0.0) for key in ops[number].reads)
            times[number] = min(times[number], read + 0.5)


def _as_late(before: Sequence[set[int]], times: list[float]) -> list[float]:
    """Let ops that need arguments only stand before the first op that reads them."""
    first: dict[int, float] = {}
    for number in range(len(times) - 1, -1, -1):
        if times[number] < 0:
            times[number] = first.get(number, 0)
        for other in before[number]:
            first[other] = min(first.get(other, times[number]), times[number])
    return times


def _slices(ops: Sequence[Op]) -> frozenset[int]:
    """Return the ops that slice what is in memory."""
    slices = {number for number, op in enumerate(ops) if op.slices and op.reads}
    if not slices:
        return frozenset()
    root = _roots(ops)
    stored = {root(key) for op in ops if op.kind in ("apart", "barrier") for key in (*op.reads, *op.results)}
    return frozenset(number for number in slices if all(root(key) in stored for key in ops[number].reads))


def tail_of(ops: Sequence[Op], before: Sequence[set[int]]) -> list[bool]:
    """Return, by op, true if it leads to results only, with no product, loop or barrier in between."""
    tail = [True] * len(ops)
    for number in range(len(ops) - 1, -1, -1):
        if not tail[number] or _is_heavy(ops[number]) or ops[number].kind == "barrier":
            tail[number] = False
            for other in before[number]:
                tail[other] = False
    return tail


def _is_heavy(op: Op) -> bool:
    return op.kind in ("apart", "product") and not op.collective


def _large(
    ops: Sequence[Op], before: Sequence[set[int]], nbytes: Mapping[Key, float], groups: Sequence[Sequence[int]]
) -> dict[int, float]:
    """Return, by product that makes more than it reads and leads to results only, a time behind all ops.

    Products of one sum have the same, so that each sum and its update stand before the next products.
    """
    leads = [False] * len(ops)
    found: dict[int, float] = {}
    turns = {number: turn for turn, group in enumerate(groups) for number in group}
    sums: dict[int, int] = {}
    for number in range(len(ops) - 1, -1, -1):
        op = ops[number]
        turn = turns.get(number, sums.get(number))
        waits = not leads[number] and not op.early and not op.late
        if _is_heavy(op) and waits and (op.over or _made(op, nbytes) > 0):
            found[number] = len(ops) + (len(groups) + number if turn is None else turn)
        for other in before[number]:
            leads[other] = leads[other] or leads[number] or (_is_heavy(op) and number not in found)
            if turn is not None:
                sums[other] = min(turn, sums.get(other, turn))
    return found


def _made(op: Op, nbytes: Mapping[Key, float]) -> float:
    """Return how many bytes more an op makes than it reads."""
    return sum(nbytes.get(key, 0.0) for key in op.results) - sum(
        nbytes.get(key, 0.0) for key in dict.fromkeys(op.reads)
    )
