"""Lay the lifetimes of a program's arrays side by side, and find the moments when they need the most memory.

Loops and branches have programs of their own, whose arrays come on top of what is alive around them:

    scan     consts and carry are those outside; a slice of a stack is a copy if an op apart reads it; what is
             stacked is copied out as soon as it is made; the carry is written over if nobody reads it any more
    while    the same, without stacks
    others   operands are those outside; results only join them at the end

The place of an input that is read from a copy is free until the result that takes it: other arrays lie there meanwhile.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.memory.joined_collectives import JoinedCollectives, join_collectives
from autopar.compiler.memory.kernel_order import order_kernels
from autopar.compiler.memory.liveness import Key, Lifetime, Lifetimes, Op, lifetimes
from autopar.compiler.spmd.local_program import Action
from autopar.hardware.machine import Machine


@dataclass(frozen=True, kw_only=True)
class Border:
    """The inputs and outputs of a program (by number) that share memory with what is around it."""

    taken: Mapping[int, int] = field(default_factory=dict[int, int])
    """The input whose place each output takes, by output."""
    stacked: Collection[int] = ()
    """Outputs that are copied out at once."""
    sliced: Collection[int] = ()
    """Inputs that are slices of stacks."""
    own: Collection[int] = ()
    """Outputs that have memory of their own from the beginning, as the results of an executable."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryProgram:
    """The ops of a program with the bytes of their arrays; a value without a key is too small to count."""

    ops: Sequence[Op]
    inputs: Sequence[Key | None]
    outputs: Sequence[Key | None]
    nbytes: Mapping[Key, float]
    inner: Mapping[int, tuple[MemoryProgram, ...]]
    """The programs that each op runs."""
    border: Border
    actions: Sequence[Action]
    """The action that each op was listed from."""
    copied: Collection[Key] = ()
    """The inputs to whose places results are copied."""
    filled: Collection[Key] = ()
    """The inputs in whose places the copies of others stand."""

    def order_ops(self, machine: Machine) -> MemoryProgram:
        """Return the program in the order of the compiler for a machine."""
        inputs = [key for key in self.inputs if key is not None]
        outputs = [key for key in self.outputs if key is not None]
        joins = JoinedCollectives(
            scatters_sums=machine.scatters_sums,
            copies_joined=machine.copies_joined,
            most_bytes=machine.combined_bytes,
        )
        joined = join_collectives(self.ops, outputs, self.nbytes, joins)
        nbytes = {**self.nbytes, **joined.nbytes}
        taken = [*replaced(self.inputs, self.outputs, self.border)]
        found = order_kernels(joined.ops, inputs, outputs, nbytes, taken, machine)
        origins = [joined.origins[number] for number in found.order]
        places = {number: place for place, number in enumerate(origins)}
        inner = {places[number]: programs for number, programs in self.inner.items()}
        actions = [self.actions[number] for number in origins]
        return replace(self, ops=found.ops, inner=inner, actions=actions, nbytes=nbytes)

    @cached_property
    def lives(self) -> Lifetimes:
        """The lifetimes of all arrays, by the number of the op."""
        slices = Op("fused", (), tuple(k for n in self.border.sliced if (k := self.inputs[n]) is not None))
        inputs = [k for n, k in enumerate(self.inputs) if k is not None and n not in self.border.sliced]
        outputs = [k for n, k in enumerate(self.outputs) if k is not None and n not in self.border.stacked]
        lives = lifetimes([slices, *self.ops], inputs, outputs, self.nbytes)
        for number, source in self.border.taken.items():
            output = self.outputs[number]
            mine, old = lives.whole.get(lives.roots.get(output, output)), lives.whole.get(self.inputs[source])
            # The result is written over the input, unless that is read later.
            if mine is not None and old is not None and mine.start >= 0 and old.stop <= mine.start + 1:
                mine.stop = mine.start
        lives.moved(-1)
        for output in (self.outputs[number] for number in self.border.own):
            mine = lives.whole.get(lives.roots.get(output, output))
            if mine is not None and mine.allocated:
                mine.start, mine.empty_until = 0, mine.start
        return lives

    @cached_property
    def housed(self) -> dict[Key, Key]:
        """The arrays that lie in places of others, with these.

        Places are free of results that have one from the beginning, until these are made, and of inputs from when they
        are read last until the results that take their places are made: XLA gives these places to others as well
        (`BufferAssigner` of openxla/xla). The largest arrays come first, each to the smallest place where it fits.
        """
        free = [
            _Place(owner=key, nbytes=self.nbytes[key], start=life.start, stop=life.empty_until)
            for key, life in self.lives.whole.items()
            if life.empty_until is not None
        ]
        for output, old in replaced(self.inputs, self.outputs, self.border):
            mine, given = self.lives.whole.get(self.lives.roots.get(output, output)), self.lives.whole.get(old)
            if old not in self.filled and mine is not None and given is not None and mine.start > given.stop:
                free.append(_Place(owner=old, nbytes=self.nbytes[old], start=given.stop, stop=mine.start))
        free.sort(key=lambda place: place.nbytes)
        sizes = [place.nbytes for place in free]
        found: dict[Key, Key] = {}
        made = (
            (key, life)
            for key, life in self.lives.whole.items()
            if life.allocated and life.stop > life.start and life.empty_until is None
        )
        for key, life in sorted(made, key=lambda each: -self.nbytes[each[0]]) if free else ():
            large = free[bisect_left(sizes, self.nbytes[key]) :]
            if (place := next((place for place in large if place.take(life)), None)) is not None:
                found[key] = place.owner
        return found

    @cached_property
    def worst_inside(self) -> dict[int, Moment]:
        """The worst moment of the programs that each op runs."""
        return {
            number: max((worst_moments(each, 1)[0] for each in programs), key=lambda moment: moment.nbytes)
            for number, programs in self.inner.items()
        }

    @cached_property
    def levels(self) -> list[float]:
        """Bytes in memory at every time, inputs aside."""
        changes, housed = [0.0] * (len(self.ops) + 2), self.housed
        for key, life in self.lives.whole.items():
            if life.allocated and key not in housed:
                changes[max(life.start, 0)] += self.nbytes[key]
                changes[max(life.stop, 0)] -= self.nbytes[key]
        levels = list(itertools.accumulate(changes))
        for number, moment in self.worst_inside.items():
            levels[number] += moment.nbytes
        for number in range(len(self.ops)):
            levels[number] += self.workspace(number)
        return levels

    def workspace(self, time: int) -> float:
        """Return the bytes that an op needs only while it runs."""
        return self.ops[time].workspace if time < len(self.ops) else 0.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Place:
    """The place of an input or result, free for others from a time to another but while it is taken."""

    owner: Key
    nbytes: float
    start: int
    stop: int
    taken: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """The times from which and until which it is, in their order."""

    def take(self, life: Lifetime) -> bool:
        """Lay an array there if the place is free as long as that lives; return whether it is."""
        if life.start < self.start or life.stop > self.stop:
            return False
        number = bisect_left(self.taken, (life.start, life.stop))
        if number and self.taken[number - 1][1] > life.start:
            return False
        if number < len(self.taken) and self.taken[number][0] < life.stop:
            return False
        self.taken.insert(number, (life.start, life.stop))
        return True


@dataclass(frozen=True, kw_only=True, eq=False)
class Moment:
    """A time in a program, and in the program that it runs then."""

    program: MemoryProgram
    time: int
    nbytes: float
    """Bytes in memory then, without the inputs."""
    inside: Moment | None


def worst_moments(program: MemoryProgram, count: int) -> list[Moment]:
    """Return the moments of most memory, the worst first, not close to each other."""
    levels = program.levels
    apart = len(levels) // 8
    found: list[int] = []
    for time in sorted(range(len(levels)), key=lambda time: -levels[time]):
        if all(abs(time - other) > apart for other in found):
            found.append(time)
        if len(found) == count:
            break
    return [Moment(program=program, time=t, nbytes=levels[t], inside=program.worst_inside.get(t)) for t in found]


def alive(moment: Moment) -> list[Key]:
    """Return the arrays in memory at a moment, without inputs, what lies in their places, and what is inside."""
    return [key for key in _there(moment) if key not in moment.program.housed]


def alive_in_places(moment: Moment) -> list[tuple[Key, Key]]:
    """Return the arrays that lie in places of others at a moment, with these."""
    housed = moment.program.housed
    return [(key, housed[key]) for key in _there(moment) if key in housed]


def _there(moment: Moment) -> list[Key]:
    lives = moment.program.lives.whole
    return [key for key, life in lives.items() if life.allocated and life.start <= moment.time < life.stop]


def replaced(inputs: Sequence[Key | None], outputs: Sequence[Key | None], border: Border) -> Iterator[tuple[Key, Key]]:
    """Yield the results that take the places of inputs, with these."""
    for number, source in border.taken.items():
        output, old = outputs[number], inputs[source]
        if output is not None and old is not None:
            yield output, old


def border_of_body(eqn: jc.JaxprEqn, number: int, num_inputs: int, num_outputs: int) -> Border:
    """Return the border of the body with this number of an equation with bodies."""
    match eqn.primitive.name:
        case "scan":
            loop = jp.scan_of(eqn)
            return Border(
                taken={k: loop.num_consts + k for k in range(loop.num_carry)},
                sliced=range(loop.num_consts + loop.num_carry, num_inputs),
                stacked=range(loop.num_carry, num_outputs),
            )
        case "while" if number == 1:
            consts = jp.while_of(eqn).body_consts
            return Border(taken={k: consts + k for k in range(num_outputs)})
        case _:
            return Border()


def joins_late(eqn: jc.JaxprEqn) -> bool:
    """Return true if the results of an equation with bodies are only there when it is done."""
    return eqn.primitive.name not in ("scan", "while")


def stacked_from(eqn: jc.JaxprEqn) -> int:
    """Return the number of the first result that an equation with bodies writes piece by piece."""
    return jp.scan_of(eqn).num_carry if eqn.primitive.name == "scan" else len(eqn.outvars)


def taken_places(
    inputs: Sequence[Hashable], outputs: Sequence[Hashable | None], donated: Collection[int]
) -> dict[int, int]:
    """Return, by output, the donated input that it takes: as in JAX, the first of its type (shape, dtype, layout)."""
    left: dict[Hashable, list[int]] = {}
    for number in sorted(donated):
        left.setdefault(inputs[number], []).append(number)
    return {number: left[kind].pop(0) for number, kind in enumerate(outputs) if kind is not None and left.get(kind)}
