"""Put the ops of a program into the order in which XLA runs them.

    ops in the order of the program  ->  ops in the order of the compiler, with the number that each had

Most keep their order. What only results depend on, the update, is done as soon as its operands are there. Results of
its collectives wait for other work to end, but for sums that nothing runs beside. Sums of gradients are combined until
their results have 30 MiB, or what a machine says: they are one collective, and whole gradients are kept until the last
of them is there and summed. The result of a reduce-scatter is the part of a device; where it is an all-reduce, of which
every device takes its part, it is whole.

Where the compiler schedules for latency, products and reductions that lead to results only, as gradients of weights,
run while collectives do, and their operands are kept until then: XLA's estimate of latencies has it do so on GPUs of
compute capability 9 and 10. It goes from the end of the program to its beginning, and puts behind a collective as many
of these, the last ones first, as take as long as that with the updates that they lead to. So other products stand just
before what reads them, and a loss of few numbers, in kernels of its own, at the end. The first collective hurries for
no other: all that are left stand behind it. Where only results take collectives there is nothing else to hide, and all
of them stand at the end. A sum of all gradients is hidden by none of them: then they take turns with the other
products, from the end on, and where a region is computed again last that has fewer products than there are such
gradients before it, these stand before it. What waits and leads to no sum, or to another one, stands behind that sum of
all gradients and hides it, and gradients of that sum hide collectives before it. What a collective sends is kept until
it is done, behind all that hides it: whole gradients, for a sum. A reduction that is one kernel with
another that more than results needs, as in the gradients of a batch norm, runs with that. A slice of an array in memory
stands before its reader, however late.

Elsewhere it schedules for memory: such a product runs where it stands if it reads more than it makes, for then it frees
that; else it waits until everything else is done. Those that wait run one sum after the other, each with its update. A
slice of an array in memory comes as soon as nothing else reads that.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from autopar.compiler.memory.liveness import Key, Op

_SUMS = ("reduce-scatter", "all-reduce")
_FEW_BYTES = 4096
"""Most bytes whose sum, a loss, has kernels of its own; a larger one has its gradient's: of six GPTs compiled."""
_AT_THE_END = 2.0**60
"""The place behind the collectives that only results take."""
_BEHIND_THE_SUM = math.inf
"""The place behind the one sum of all products that lead to sums, which stands at the end."""


@dataclass(frozen=True, kw_only=True)
class OpOrder:
    """Operations in a new order."""

    ops: list[Op]
    order: list[int]
    """The number that each op had before."""
    deferred: int | None
    """The place of the first op that is deferred until everything else is done."""


@dataclass(frozen=True, kw_only=True)
class _Moved:
    """The ops that stand elsewhere than as listed: slices of arrays in memory, and products."""

    late: Collection[int] = ()
    """The ops that move to before the first op that reads them."""
    early: Collection[int] = ()
    """The ops that move to behind the last other op that reads what they are of."""


def order_ops(
    ops: Sequence[Op],
    nbytes: Mapping[Key, float],
    replaced: Sequence[tuple[Key, Key]] = (),
    *,
    for_latency: bool,
    for_memory: bool = True,
    scatters_sums: bool,
    combined_bytes: float,
    memory_bandwidth: float = math.inf,
) -> OpOrder:
    """Return the ops as the compiler orders them; `replaced` are results with the inputs that they take.

    `nbytes` are those of all arrays. `for_latency`: it puts products behind the collectives that they can hide.
    `for_memory`: where not, large gradients wait for the end.
    `scatters_sums`: it has reduce-scatters. `combined_bytes`: sums are one collective up to that. `memory_bandwidth`
    in bytes/s: by it updates of the state take their time.
    """
    before = _predecessors(ops)
    tail = _tail(ops, before)
    update_s = _update_s(ops, before, tail, replaced, nbytes, memory_bandwidth) if for_latency else {}
    groups = _combined(ops, before, tail, nbytes, scatters_sums, combined_bytes)
    slices, last_read = _slices(ops), _last_read(ops, tail, replaced)
    held = dict[int, float](last_read)
    deferred, moved = dict[int, float](), _Moved()
    if for_latency:
        deferred = _deferred(ops, before, tail, groups, update_s, nbytes) | _small_losses(ops, tail, nbytes)
        moved = _Moved(late=slices | _waiting(ops, before))
    elif for_memory:
        deferred, moved = _large(ops, before, nbytes, groups), _Moved(early=slices)
    beside = [bool(op.collective) and (scatters_sums or op.collective not in _SUMS) for op in ops]
    times = _times(ops, before, tail, beside, held, deferred, moved)
    held = {number: max(last, times[last]) for number, last in last_read.items()}
    summed = max((times[number] for number, place in deferred.items() if place < _BEHIND_THE_SUM), default=0.0)
    held.update((number, summed + 0.5) for number, place in deferred.items() if place == _BEHIND_THE_SUM)
    for group in groups:
        # One collective stands where the last of what it joins is there.
        held.update(dict.fromkeys(group, max(times[number] for number in group)))
    times = _times(ops, before, tail, beside, held, deferred, moved)
    waiting = [len(each) for each in before]
    after: list[list[int]] = [[] for _ in ops]
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
    return OpOrder(
        ops=_kept(ops, groups, deferred, order),
        order=order,
        deferred=next((place for place, n in enumerate(order) if deferred.get(n) == _AT_THE_END), None),
    )


def _kept(
    ops: Sequence[Op], groups: Sequence[Sequence[int]], deferred: Mapping[int, float], order: Sequence[int]
) -> list[Op]:
    """Return the ops in order. Operands of collectives are read until all of each is done, and what hides it."""
    whole, places = list(ops), {number: place for place, number in enumerate(order)}
    hiding: dict[float, list[int]] = {}
    for number, place in deferred.items():
        if _is_heavy(ops[number]):
            hiding.setdefault(place, []).append(number)
    collectives = [([*group], hiding.get(_BEHIND_THE_SUM, [])) for group in groups]
    collectives += [([n], hiding[n]) for n, op in enumerate(ops) if op.collective and n in hiding]
    for numbers, others in collectives:
        last = max((*numbers, *others), key=places.__getitem__)
        reads = dict.fromkeys(key for number in dict.fromkeys((*numbers, last)) for key in whole[number].reads)
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


def _combined(
    ops: Sequence[Op],
    before: Sequence[set[int]],
    tail: Sequence[bool],
    nbytes: Mapping[Key, float],
    scatters_sums: bool,
    combined_bytes: float,
) -> list[list[int]]:
    """Return the sums that only results take and that are one collective each: equal ones, none of another's result."""
    groups: list[list[int]] = []
    open_groups: dict[Hashable, tuple[list[int], float]] = {}
    behind: set[int] = set()
    for number, op in enumerate(ops):
        if not tail[number]:
            continue
        if any(other in behind or ops[other].collective for other in before[number] if tail[other]):
            behind.add(number)
        elif op.collective in _SUMS and op.results:
            size = sum(nbytes[key] for key in (op.results if scatters_sums else op.reads))
            group, total = open_groups.get(op.steps, ([], 0.0))
            if total + size > combined_bytes:
                group, total = [], 0.0
            if not group:
                groups.append(group)
            group.append(number)
            open_groups[op.steps] = group, total + size
    return groups


def _times(
    ops: Sequence[Op],
    before: Sequence[set[int]],
    tail: Sequence[bool],
    beside: Sequence[bool],
    held: Mapping[int, float],
    deferred: Mapping[int, float],
    moved: _Moved,
) -> list[float]:
    """Return the time of each op: its number, or the time of the last op that it needs or waits for.

    `beside`: by op, true if it is a collective that runs beside other work.
    """
    times: list[float] = []
    late: set[int] = set()
    end = max((n for n, op in enumerate(ops) if _is_heavy(op) and n not in deferred), default=0)
    end = max(end, *(time for time in deferred.values() if time < len(ops)), 0)
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
            waits_for = deferred[number] if deferred[number] < _AT_THE_END else end
            waits_for = max(waits_for, held.get(number, 0.0))
            times.append(max((waits_for + turns[number], *(times[other] for other in before[number]))))
        elif tail[number] and number not in late:
            times.append(max((times[other] for other in before[number]), default=-1))
            if number in held:
                times[-1] = max(times[-1], held[number] + 0.5)
        elif number in moved.late and ops[number].kind in ("view", "form"):
            times.append(max((times[other] for other in before[number]), default=-1))
        else:
            times.append(max((number, *(times[other] for other in before[number]))))
    _hurry(ops, moved.early, times)
    return _as_late(ops, before, times, moved.late)


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


def _slices(ops: Sequence[Op]) -> frozenset[int]:
    """Return the ops that slice what is in memory."""
    slices = {number for number, op in enumerate(ops) if op.slices and op.reads}
    if not slices:
        return frozenset()
    root = _roots(ops)
    stored = {root(key) for op in ops if op.kind in ("apart", "barrier") for key in (*op.reads, *op.results)}
    return frozenset(number for number in slices if all(root(key) in stored for key in ops[number].reads))


def _leads(ops: Sequence[Op], before: Sequence[set[int]]) -> list[bool]:
    """Return, by op, true if it leads to a product, a loop or the like."""
    leads = [False] * len(ops)
    for number in range(len(ops) - 1, -1, -1):
        heavy = _is_heavy(ops[number])
        for other in before[number]:
            leads[other] = leads[other] or heavy or leads[number]
    return leads


def _waiting(ops: Sequence[Op], before: Sequence[set[int]]) -> frozenset[int]:
    """Return the products that lead to others, and views on the way: they wait for what reads them."""
    leads = _leads(ops, before)
    timed = (op.kind in ("view", "form") or (_is_heavy(op) and 0 < op.seconds < math.inf) for op in ops)
    return frozenset(number for number, waits in enumerate(timed) if waits and leads[number])


def _as_late(ops: Sequence[Op], before: Sequence[set[int]], times: list[float], late: Collection[int]) -> list[float]:
    """Let ops that need arguments only, and those that wait, stand before the first op that reads them."""
    first: dict[int, float] = {}
    for number in range(len(ops) - 1, -1, -1):
        if times[number] < 0:
            times[number] = first.get(number, 0)
        elif number in late:
            times[number] = max(times[number], first.get(number, 0))
        for other in before[number]:
            first[other] = min(first.get(other, times[number]), times[number])
    return times


def _tail(ops: Sequence[Op], before: Sequence[set[int]]) -> list[bool]:
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


def _update_s(
    ops: Sequence[Op],
    before: Sequence[set[int]],
    tail: Sequence[bool],
    replaced: Sequence[tuple[Key, Key]],
    nbytes: Mapping[Key, float],
    memory_bandwidth: float,
) -> dict[int, float]:
    """Return, by op, how long updates of the state take that nothing but its result holds up, and no collective."""
    makers = {key: number for number, op in enumerate(ops) for key in op.results}
    gradient: dict[int, int] = {}
    for number, op in enumerate(ops):
        if tail[number] and not op.collective:
            found = [gradient.get(other, other) for other in before[number] if not tail[other] or other in gradient]
            if found:
                gradient[number] = max(found)
    taken: dict[int, float] = {}
    for result, _ in replaced:
        number = gradient.get(makers.get(result, -1))
        if number is not None:
            # What was there is read, and what replaces it written.
            taken[number] = taken.get(number, 0.0) + 2 * nbytes[result]
    read = {number: sum(nbytes.get(key, 0.0) for key in ops[number].results) for number in taken}
    return {number: (size + read[number]) / memory_bandwidth for number, size in taken.items()}


def _deferred(
    ops: Sequence[Op],
    before: Sequence[set[int]],
    tail: Sequence[bool],
    groups: Sequence[Sequence[int]],
    update_s: Mapping[int, float],
    nbytes: Mapping[Key, float],
) -> dict[int, float]:
    """Return, by product that leads to results only, the number of the op behind which it stands."""
    leads = _leads(ops, before)
    waiting = [
        n
        for n, op in enumerate(ops)
        if (_is_heavy(op) or (op.kind == "reduction" and op.results)) and not op.early and not op.late and not leads[n]
    ]
    kinds = {_reduced(op, nbytes) for n, op in enumerate(ops) if op.kind == "reduction" and leads[n]}
    waiting = [n for n in waiting if ops[n].kind != "reduction" or _reduced(ops[n], nbytes) not in kinds]
    late = [number for number, op in enumerate(ops) if op.collective and tail[number]]
    early = [number for number, op in enumerate(ops) if op.collective and not tail[number]]
    summed = _one_sum(ops, before, groups, waiting) if late else set[int]()
    if summed and all(number < waiting[0] for number in early):
        found = _behind_nothing(ops, waiting)
    elif early:
        joined = {number for group in groups for number in group}
        sums = [*groups, *([number] for number in late if number not in joined)]
        inner = [(number, math.inf if number == early[0] else ops[number].seconds) for number in reversed(early)]
        if summed:
            found = _behind_one_sum(ops, before, waiting, summed, sums, inner, update_s)
        else:
            found = _behind_collectives(ops, waiting, [*_at_the_end(ops, sums), *inner], update_s)
    else:
        found = dict.fromkeys(waiting, _AT_THE_END) if late else {}
    chain = max((n for n, op in enumerate(ops) if _is_heavy(op) and n not in found), default=-1)
    if chain in _needed(before, summed):
        # Nothing of what other products need is left to hide the sum.
        behind = [n for n, place in found.items() if n not in summed and place == _AT_THE_END]
        found.update(dict.fromkeys(behind, _BEHIND_THE_SUM))
    return found


def _needed(before: Sequence[set[int]], numbers: Collection[int]) -> set[int]:
    """Return the ops that some depend on, these included."""
    found, left = set[int](), [*numbers]
    while left:
        number = left.pop()
        if number not in found:
            found.add(number)
            left += before[number]
    return found


def _behind_collectives(
    ops: Sequence[Op], waiting: Sequence[int], hidden: Sequence[tuple[float, float]], update_s: Mapping[int, float]
) -> dict[int, float]:
    """Return the op behind which each of those that wait stands; `hidden` are places and the seconds to hide there."""
    left, found = [*waiting], dict[int, float]()
    for place, left_s in hidden:
        while left and left[-1] > place:
            left.pop()
        while left and left_s > 0:
            number = left.pop()
            found[number] = place
            left_s -= ops[number].seconds + update_s.get(number, 0.0)
    return found


def _behind_one_sum(
    ops: Sequence[Op],
    before: Sequence[set[int]],
    waiting: Sequence[int],
    summed: Collection[int],
    sums: Sequence[Sequence[int]],
    inner: Sequence[tuple[float, float]],
    update_s: Mapping[int, float],
) -> dict[int, float]:
    """Return the same where one sum takes products that are `summed`: others hide that, and they the `inner` ones.

    Sums of other than products, as of gradients of biases, are there early: what they take stands where it is listed.
    """
    leading = [(each, _operands(ops, before, each)) for each in sums]
    products = {number for number in waiting if _is_heavy(ops[number])}
    listed = {n for _, operands in leading if products.isdisjoint(operands) for n in operands}
    large = [each for each, operands in leading if not products.isdisjoint(operands)]
    waiting = [number for number in waiting if number not in listed]
    behind = _behind_collectives(ops, [n for n in waiting if n not in summed], _at_the_end(ops, large), update_s)
    found = _behind_collectives(ops, [n for n in waiting if n not in behind], inner, update_s)
    return found | dict.fromkeys(behind, _BEHIND_THE_SUM)


def _at_the_end(ops: Sequence[Op], sums: Sequence[Sequence[int]]) -> list[tuple[float, float]]:
    """Return the places and seconds of collectives that only results take."""
    return [(_AT_THE_END, sum(ops[number].seconds for number in group)) for group in sums]


def _operands(ops: Sequence[Op], before: Sequence[set[int]], group: Sequence[int]) -> set[int]:
    """Return the ops that lead to a collective, up to the products among them."""
    seen, behind = set[int](), [*group]
    while behind:
        number = behind.pop()
        if number not in seen:
            seen.add(number)
            behind += () if _is_heavy(ops[number]) else before[number]
    return seen


def _small_losses(ops: Sequence[Op], tail: Sequence[bool], nbytes: Mapping[Key, float]) -> dict[int, float]:
    """Return the sums of few numbers that are results, each with a time behind all ops."""
    sums = (n for n, op in enumerate(ops) if tail[n] and op.kind == "reduction" and op.reads and not op.results)
    few = [number for number in sums if sum(nbytes.get(key, math.inf) for key in ops[number].reads) <= _FEW_BYTES]
    return dict.fromkeys(few, len(ops)) if any(op.collective for op in ops) else {}


def _reduced(op: Op, nbytes: Mapping[Key, float]) -> tuple[float, ...]:
    """Return the bytes of what a reduction reads and makes, and if of rows: those of equal ones are one kernel."""
    return (op.reduces_rows, *(nbytes.get(key, 0.0) for key in op.reads), *(nbytes.get(key, 0.0) for key in op.results))


def _one_sum(
    ops: Sequence[Op], before: Sequence[set[int]], groups: Sequence[Sequence[int]], waiting: Sequence[int]
) -> set[int]:
    """Return the ops that lead to the one collective that takes all products that wait for a sum, up to these.

    None of these products can hide it. Nothing where there are several such collectives.
    """
    products = {number for number in waiting if _is_heavy(ops[number])}
    leading = (_operands(ops, before, group) for group in groups)
    taking = [operands for operands in leading if not products.isdisjoint(operands)]
    return taking[0] if len(taking) == 1 else set()


def _behind_nothing(ops: Sequence[Op], waiting: Sequence[int]) -> dict[int, float]:
    """Return the op behind which each of those that wait stands where they hide nothing: see the module."""
    again = max((number for number, op in enumerate(ops) if op.kind == "barrier"), default=-1)
    others = set(waiting)
    chain = sum(_is_heavy(op) and number not in others for number, op in enumerate(ops) if number > again)
    fill = sum(_is_heavy(ops[number]) for number in waiting if number < again) > chain
    return {number: again - 1 if fill and number < again else _AT_THE_END for number in waiting}
