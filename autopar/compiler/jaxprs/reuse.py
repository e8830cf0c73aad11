"""Find how much memory on the chip it takes to keep an array there from one kernel to the next that reads it.

    arrays that kernels read and write, in their order  ->  the span of each reading and writing, in bytes

The span of a reading is the array itself and all that kernels move between it and the last time that the array was read
or written: a chip with room for so much still has it, and reads nothing from the device's memory. That of a writing is
the longest span of the readings behind it: what all of them find on the chip is never written to memory. It is infinite
for what leaves the program and for what is read for the first time, and nothing stays on the chip beside a loop.

Several cores make a part each of what a product makes, and these meet in the device's memory: they are written there
and read from there, once by the next kernel and once more to be on the chip for all further ones.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from autopar.compiler.jaxprs import compat as jc

LOOP_BYTES = 2.0**50
"""Bytes that a loop is taken to move: more than any chip holds, split over whatever devices."""


class Touch(NamedTuple):
    """A kernel's reading or writing of an array in memory."""

    kernel: float
    """The number of its last equation; kernels run in this order."""
    array: Hashable
    nbytes: float
    number: int
    """The equation on whose behalf it is."""
    place: int
    """The operand that is read, or the result that is written."""
    written: bool = False


class Spans(NamedTuple):
    """The spans of an equation, in bytes of whole arrays: of each reading of its operands, and of its results."""

    reads: tuple[tuple[float, ...], ...]
    writes: tuple[tuple[float, ...], ...]


NO_SPANS = Spans((), ())
"""Those of an equation that moves nothing, or where no memory on the chip keeps anything."""


def spans_of(
    eqns: Sequence[jc.JaxprEqn],
    touches: Sequence[Touch],
    loops: Iterable[float],
    *,
    leaving: Collection[Hashable],
    parted: Collection[Hashable],
) -> dict[int, Spans]:
    """Return the spans of the equations that read or write anything in memory, by their numbers.

    `loops` are the numbers of equations with bodies, `leaving` the arrays that are in memory in any case, and `parted`
    those that meet there.
    """
    moved = dict.fromkeys(loops, LOOP_BYTES)
    histories = defaultdict[Hashable, list[Touch]](list)
    for touch in _in_order(touches):
        moved[touch.kernel] = moved.get(touch.kernel, 0.0) + touch.nbytes
        histories[touch.array].append(touch)
    kernels = sorted(moved)
    behind = dict(zip(kernels, accumulate(moved[kernel] for kernel in kernels), strict=True))
    found = defaultdict[tuple[int, int, bool], list[float]](list)
    for array, history in histories.items():
        history.sort(key=lambda touch: (not touch.written, touch.kernel))
        spans = _spans_of_readings(history, behind, moved, is_parted=array in parted)
        kept = array in leaving or array in parted
        longest = math.inf if kept else max(spans, default=0.0)
        for touch, span in zip(history, [*[longest] * (len(history) - len(spans)), *spans], strict=True):
            found[touch.number, touch.place, touch.written].append(span)
    return {
        number: Spans(
            *(
                tuple(tuple(found.get((number, place, written), ())) for place in range(len(atoms)))
                for atoms, written in ((eqns[number].invars, False), (eqns[number].outvars, True))
            )
        )
        for number in {number for number, _, _ in found}
    }


def _spans_of_readings(
    history: Sequence[Touch], behind: Mapping[float, float], moved: Mapping[float, float], *, is_parted: bool
) -> list[float]:
    """Return the spans of the readings in a history; `behind` is what is moved until each kernel has ended."""
    spans: list[float] = []
    last: float | None = None
    for touch in history:
        if touch.written:
            last = None if is_parted else touch.kernel
            continue
        between = math.inf if last is None else behind[touch.kernel] - moved[touch.kernel] - behind[last]
        spans.append(_rounded(touch.nbytes + max(between, 0.0)))
        # The first kernel behind the cores reads their parts from memory, before a copy of them is on the chip.
        last, is_parted = None if is_parted else max(touch.kernel, last or 0.0), False
    return spans


def _rounded(span: float) -> float:
    """Return a span rounded up to three binary digits: of many layers in a row, only some have one of their own."""
    digits, exponent = math.frexp(span)
    return math.ldexp(math.ceil(8 * digits) / 8, exponent) if span < math.inf else span


def _in_order(touches: Sequence[Touch]) -> Iterator[Touch]:
    """Yield what kernels read and write, with those that make results alone as soon as their operands are there.

    Such are the updates of parameters: no other kernel waits for them.
    """
    read = {touch.array for touch in touches if not touch.written}
    made = {touch.array: touch.kernel for touch in touches if touch.written}
    final = {*made.values()} - {touch.kernel for touch in touches if touch.written and touch.array in read}
    ready: dict[float, float] = {}
    for touch in touches:
        if not touch.written and touch.kernel in final and touch.array in made:
            ready[touch.kernel] = max(made[touch.array] + 0.5, ready.get(touch.kernel, 0.0))
    for touch in touches:
        yield touch._replace(kernel=ready.get(touch.kernel, touch.kernel))
