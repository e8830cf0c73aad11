"""Find the arrays that a program keeps in memory, and from when until when, once XLA has fused what it can.

    ops (what is read, what is made, in order)  ->  a lifetime for every array that reaches memory

Products, collectives, loops, sorts stand apart: what they read and make is in memory; a `product` whose kernel computes
what it reads only has its result there. Elementwise equations are fused into their readers, which then read what these
are computed from, later. A fused array is in memory only if an op apart reads it, if it is a result, or if it would be
computed twice and is expensive (an exponential, say). XLA fuses an array into all of its readers or into none: where an
op apart reads it, so do the others. A library that has arrays in another order of dimensions than programs makes its
results so, and what is computed of these alone is so, too. Of other arrays it reads a copy, as gathers do of its own,
and others go on to compute theirs.

A `constant` is one number all over: whoever reads it fills it in.

A `form` is what a reader may want in another layout, though it does not now: an array with a lifetime of its own
within that of the array that it is a form of.

A `barrier` holds its operands in memory as they are: behind it a recomputed region reads them, and nothing that they
are computed from.

Time is the number of an op; a lifetime [start, stop) contains the ops that make and read the array. A fused op
may write over an operand of the same size that nobody reads any more: their lifetimes then only touch. So it may not
where it reads rows for a reduction first, which it computes itself.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.fusion_kinds import MANY_READERS, FusionKind
from autopar.compiler.jaxprs.primitives import COMPRESSED_SUM

Key = Hashable
Kind = FusionKind | Literal["form", "barrier", "product"]


_APART = ("apart", "barrier")
# The first op of a program, behind the slices that it may be given.
_BEGIN = 1
# XLA fuses no more arrays than that into one kernel.
_MAX_SOURCES = 12
# What is computed of a smaller part of its size than one of so many is not computed of that.
_LARGE = 8


class Op(NamedTuple):
    """One step of a program: what it reads and makes; `kind` says how XLA treats it."""

    kind: Kind
    reads: tuple[Key, ...]
    results: tuple[Key, ...]
    expensive: bool = False
    """True if it is too costly to be computed twice."""
    growth: float = 1.0
    """Largest size, in multiples of all that it is computed from, at which a result of many readers is still kept."""
    widening: float = 1.0
    """Factor by which its result is kept wider than its type is."""
    over: bool = False
    """True if it writes its results over operands of the same size that nobody reads any more."""
    late: bool = False
    """True if its results are there only when it is done: until then they count among what it needs inside."""
    collective: str = ""
    """The kind of the collective that it is; "" if it is none."""
    early: tuple[Key, ...] = ()
    """The results that take memory as soon as the program begins, as what a loop writes piece by piece."""
    workspace: float = 0.0
    """Bytes that it needs while it runs, besides operands and results."""
    seconds: float | None = None
    """Seconds that it takes, as a compiler that schedules for latency has it; None for as long as it takes to read and
    write memory."""
    latency_s: float = 0.0
    """Those of them that do not depend on its size, of a collective: several that are one need them once."""
    slices: bool = False
    """True if it takes a part of an array."""
    behind_barrier: bool = False
    """True if a barrier in front of it holds what it reads in memory, though it is fused."""
    computes_narrower: bool = False
    """True for a product whose kernel computes what it reads, though it reads larger arrays for that."""
    gathers: bool = False
    """True if it picks what it makes out of an array, place by place: neither this nor what is computed of it is picked
    again for every reader."""
    reorders: bool = False
    """True if its library reads and writes arrays in another order of dimensions than programs have them."""
    keeps_order: bool = False
    """True if it reads arrays in any order of dimensions, and its results have that order."""
    reduces_rows: bool = False
    """True for a reduction of rows whose kernel goes on to what follows of them."""
    adds_gradients: bool = False
    """True if it adds up gradients, whose sum is kept unless computing it again for every reader moves less."""
    steps: Hashable = ()
    """The steps of a collective, equal for those that may be one."""
    forms: tuple[Hashable, ...] = ()
    """The form in which a product reads each array, dimensions merged or in another order; None for as it is."""
    extent: float = 0.0
    """Elements on one device that a reduction reads, or that another op makes."""
    waits_for: tuple[Key, ...] = ()
    """Values that must be there before it, without lifetimes: too small ones, and those that it only waits for."""
    small_results: tuple[Key, ...] = ()
    """The results that are too small to count."""

    @property
    def writes_over(self) -> bool:
        """True if a result may take the place of an operand."""
        return self.over or self.kind == "fused"


@dataclass(kw_only=True)
class Lifetime:
    """The time [start, stop) during which an array is in memory."""

    start: int
    stop: int
    empty_until: int | None = None
    """The time when it is made, where it has its place from `start` on: before, others may lie there."""

    @property
    def allocated(self) -> bool:
        """True if the program makes the array; inputs are there before it starts."""
        return self.start >= 0


@dataclass(frozen=True, kw_only=True)
class Lifetimes:
    """The lifetimes of arrays in memory, and of the forms in which they are read."""

    whole: dict[Key, Lifetime]
    """Lifetimes of arrays, all forms taken together."""
    parts: dict[Key, Lifetime]
    """Lifetimes of forms, and of arrays as far as they are read themselves."""
    roots: dict[Key, Key]
    """The array of each form or view."""
    places: dict[Key, Key]
    """The array, or the form of one, of which each view is one."""

    def moved(self, by: int) -> Lifetimes:
        """Move all times by so many ops."""
        for life in (*self.whole.values(), *self.parts.values()):
            if life.allocated:
                life.start, life.stop = life.start + by, life.stop + by
            else:
                life.stop += by
        return self


def writes_over(eqn: jc.JaxprEqn) -> bool:
    """Return true if an equation apart changes its operand in place."""
    name = eqn.primitive.name
    return name in ("dynamic_update_slice", "scan", "while") or name.startswith("scatter")


def workspace_bytes(eqn: jc.JaxprEqn, product_workspace: float, exchanged: Sequence[float] = ()) -> float:
    """Return the bytes that the kernel of an equation needs while it runs, besides operands and results.

    `product_workspace` is what the machine's kernels of matrix products need, `exchanged` what each of the equation's
    own collectives moves on one device.
    """
    if eqn.primitive.name == COMPRESSED_SUM:
        return 2 * max(exchanged, default=0.0)  # what is sent, and what is received
    return product_workspace if eqn.primitive.name == "dot_general" else 0.0


def lifetimes(
    ops: Sequence[Op], inputs: Iterable[Key], outputs: Iterable[Key], extent: Mapping[Key, float]
) -> Lifetimes:
    """Return the lifetimes of all that reaches memory, of inputs from -1; `extent` is equal for equal sizes."""
    reordering = any(op.reorders for op in ops)
    program = _Program(ops=ops, extent=extent, outputs=tuple(outputs), reordering=reordering)
    return program.run(tuple(inputs))


class KernelArrays(NamedTuple):
    """The arrays in memory that the kernel of an op reads and makes."""

    reads: tuple[Key, ...]
    makes: tuple[Key, ...]


def kernels(
    ops: Sequence[Op], inputs: Iterable[Key], outputs: Iterable[Key], extent: Mapping[Key, float]
) -> dict[int, KernelArrays]:
    """Return the kernels of a program once it is fused, by the number of the op that gives one its result."""
    reordering = any(op.reorders for op in ops)
    program = _Program(ops=ops, extent=extent, outputs=tuple(outputs), reordering=reordering)
    lives = program.run(tuple(inputs))
    return {
        number: KernelArrays(
            tuple(dict.fromkeys(lives.roots.get(place, place) for place in places)),
            tuple(key for key in ops[number].results if key in lives.whole),
        )
        for number, places in program.sources.items()
    }


@dataclass(kw_only=True)
class _Program:
    ops: Sequence[Op]
    extent: Mapping[Key, float]
    outputs: tuple[Key, ...]
    roots: dict[Key, Key] = field(default_factory=dict[Key, Key])
    places: dict[Key, Key] = field(default_factory=dict[Key, Key])
    readers: dict[Key, list[int]] = field(default_factory=dict[Key, list[int]])
    origins: dict[Key, Key] = field(default_factory=dict[Key, Key])
    """The form that each is made of."""
    behind: dict[Key, tuple[Key, ...]] = field(default_factory=dict[Key, tuple[Key, ...]])
    """The arrays that its fused readers read in place of each fused array."""
    sources: dict[int, tuple[Key, ...]] = field(default_factory=dict[int, tuple[Key, ...]])
    """The places in memory that each op reads which makes something there."""
    rows: dict[Key, tuple[Key, ...]] = field(default_factory=dict[Key, tuple[Key, ...]])
    """The places from which each reduction of rows reads them."""
    smaller: set[Key] = field(default_factory=set[Key])
    """The fused arrays that are smaller than one that they are computed from."""
    gathered: set[Key] = field(default_factory=set[Key])
    """The fused arrays that are picked out of others, and what is computed of these."""
    reordering: bool = False
    """True if an op is of a library that has arrays in an order of its own."""
    reordered: set[Key] = field(default_factory=set[Key])
    """The arrays that have that order."""
    constants: set[Key] = field(default_factory=set[Key])
    found: dict[Key, Lifetime] = field(default_factory=dict[Key, Lifetime])
    parts: dict[Key, Lifetime] = field(default_factory=dict[Key, Lifetime])

    def run(self, inputs: tuple[Key, ...]) -> Lifetimes:
        self._note_readers()
        if self.reordering:
            self._note_orders(inputs)
        for key in inputs:
            self._begin(key, -1)
        for time, op in enumerate(self.ops):
            self._add(time, op)
        for key in self.outputs:
            self._read(self._place(key), len(self.ops))
        self._hand_over()
        return Lifetimes(whole=self.found, parts=self.parts, roots=self.roots, places=self.places)

    def _note_readers(self) -> None:
        for time, op in enumerate(self.ops):
            if op.kind in ("view", "form"):
                (origin,), (result,) = op.reads, op.results
                self.roots[result] = self._root(origin)
                self.places[result] = self._place(origin) if op.kind == "view" else result
            else:
                for key in dict.fromkeys(map(self._root, op.reads)):
                    self.readers.setdefault(key, []).append(time)
        for key in map(self._root, self.outputs):
            self.readers.setdefault(key, []).append(len(self.ops))

    def _note_orders(self, inputs: tuple[Key, ...]) -> None:
        """Find what has the order of libraries: what they make, and what is computed of that alone."""
        made = set(inputs)
        for op in self.ops:
            for key in op.results if op.kind not in ("view", "form", "constant") else ():
                own = op.reorders
                if op.kind == "fused" or op.keeps_order:
                    reads = [k for k in map(self._root, op.reads) if k in made]
                    large = [k for k in reads if self.extent[k] * _LARGE >= self.extent[key]]
                    if not large:
                        continue
                    own = self.reordered.issuperset(large)
                made.add(key)
                if own:
                    self.reordered.add(key)

    def _root(self, key: Key) -> Key:
        return self.roots.get(key, key)

    def _place(self, key: Key) -> Key:
        return self.places.get(key, key)

    def _begin(self, key: Key, start: int) -> None:
        stop = max(start, 0)
        self.found[key], self.parts[key] = Lifetime(start=start, stop=stop), Lifetime(start=start, stop=stop)

    def _read(self, place: Key, time: int) -> None:
        """Note that a form is read, and so the one that it is made of when it is made."""
        root = self._root(place)
        if root not in self.found:
            return
        self.found[root].stop = max(self.found[root].stop, time + 1)
        form: Key | None = place
        while form is not None:
            self.parts[form].stop = max(self.parts[form].stop, time + 1)
            form, time = self.origins.get(form), self.parts[form].start

    def _add(self, time: int, op: Op) -> None:
        if op.kind == "constant" or self._is_constant(op):
            self.constants.update(op.results)
            return
        if op.kind == "view":
            return
        if op.kind == "form":
            self._add_form(time, op)
            return
        sources = self._sources(op)
        kept = [key for key in op.results if self._settle(key, op, sources)]
        if kept or op.kind != "fused":
            self.sources[time] = sources
            for place in sources:
                self._read(place, time)
        if op.reduces_rows:
            self.rows.update(dict.fromkeys(op.results, sources))
        for key in kept:
            # Zeros that a loop writes pieces over need nothing: the compiler makes them as soon as a program begins.
            start = min(time, _BEGIN) if key in op.early else time + op.late
            self._begin(key, start)
            self._read(key, start)

    def _is_constant(self, op: Op) -> bool:
        """Return true if an op gives a constant in another layout or shape."""
        return op.kind == "fused" and bool(op.reads) and all(self._root(k) in self.constants for k in op.reads)

    def _add_form(self, time: int, op: Op) -> None:
        if self._root(op.reads[0]) in self.found:
            self.origins[op.results[0]] = self._place(op.reads[0])
            self.parts[op.results[0]] = Lifetime(start=time, stop=time)

    def _sources(self, op: Op) -> tuple[Key, ...]:
        """Return the places that an op reads from memory."""
        places = dict.fromkeys(map(self._place, op.reads))
        if op.kind not in _APART and not op.behind_barrier:
            direct = self.smaller if self._reads_smaller(op) else set[Key]()
            computed = {place: self._root(place) for place in places if self._root(place) not in direct}
            behind = [self.behind.get(computed[place], (place,)) if place in computed else (place,) for place in places]
            places = dict.fromkeys(itertools.chain.from_iterable(behind))
        return tuple(place for place in places if self._root(place) in self.found)

    def _settle(self, key: Key, op: Op, sources: tuple[Key, ...]) -> bool:
        """Return true if a result reaches memory; note what its fused readers read instead if they do not need it."""
        if op.kind != "fused":
            return True
        readers = self.readers.get(key, ())
        if any(self.extent[self._root(place)] > self.extent[key] for place in sources):
            self.smaller.add(key)
        fused = [not self._wants(time, key) for time in readers]
        # What is larger than all that it is computed from would cost more to read than to compute again.
        allowed = op.growth if len(readers) >= MANY_READERS else 1.0
        grows = self.extent[key] / op.widening > allowed * sum(self.extent[self._root(place)] for place in sources)
        cheap = not op.expensive or (bool(sources) and grows)
        shared = self._is_shared(key, readers, sources) or (op.adds_gradients and self._pays(key, readers, sources))
        gathered = op.gathers or not self.gathered.isdisjoint(map(self._root, op.reads))
        again = len(readers) <= 1 or (cheap and not shared and not gathered)
        if again and len(sources) <= _MAX_SOURCES:
            self.behind[key] = sources
            self.gathered.update((key,) if gathered else ())
            return not all(fused)
        return True

    def _is_shared(self, key: Key, readers: Sequence[int], sources: Sequence[Key]) -> bool:
        """Return true if an op wants a fused array in memory, and then all read it there.

        Where only such ops want it as copy it in an order of their own, others compute it again, of one array. Of
        several arrays it is not computed in kernels of two orders.
        """
        apart = [time for time in readers if self._wants(time, key)]
        several = sum(self.extent[self._root(place)] * _LARGE >= self.extent[key] for place in sources) > 1
        if not several and all(self._reorders(time, key) for time in apart):
            return False
        return bool(apart) or (several and self._is_read_in_two_orders(readers))

    def _pays(self, key: Key, readers: Sequence[int], sources: Sequence[Key]) -> bool:
        """Return true if writing a result once moves no more than reading what it is computed of for each reader."""
        large = sum(self.extent[self._root(place)] == self.extent[key] for place in sources)
        return large * len(readers) >= large + 1 + len(readers)

    def _wants(self, time: int, key: Key) -> bool:
        """Return true if an op, or the program's end, reads a fused array from memory.

        The kernel of a product computes what it reads unless it would read larger arrays for that.
        """
        return self._is_apart(time) or (self._reads_smaller(self.ops[time]) and key in self.smaller)

    def _reads_smaller(self, op: Op) -> bool:
        return op.kind == "product" and not op.computes_narrower

    def _is_read_in_two_orders(self, readers: Sequence[int]) -> bool:
        """Return true if what is computed of an array is read by copies in another order, and else by fused ops."""
        if not self.reordering:
            return False
        made = [key for time in readers if time < len(self.ops) for key in self.ops[time].results]
        return any(self._is_copied_in_part(key) for key in made)

    def _is_copied_in_part(self, key: Key) -> bool:
        copied = {time: self._reorders(time, key) for time in self.readers.get(key, ())}
        return {*copied.values()} == {True, False} and not any(self._wants(t, key) for t, c in copied.items() if not c)

    def _reorders(self, time: int, key: Key) -> bool:
        """Return true if an op reads a copy of an array in another order of dimensions."""
        if not self.reordering or time >= len(self.ops):
            return False
        op, own = self.ops[time], key in self.reordered
        return (op.reorders and not own) or (bool(op.collective) and not op.keeps_order and own)

    def _is_summed(self, key: Key) -> bool:
        """Return true if a reduction sums an array, or what is computed of it alone for that."""
        return any(self._sums(time) for time in self.readers.get(key, ()))

    def _sums(self, time: int) -> bool:
        if time >= len(self.ops):
            return False
        op = self.ops[time]
        readers = [other for key in op.results for other in self.readers.get(key, ())] if op.kind == "fused" else []
        return op.kind == "reduction" or (bool(readers) and all(map(self._reduces, readers)))

    def _reduces(self, time: int) -> bool:
        return time < len(self.ops) and self.ops[time].kind == "reduction"

    def _is_apart(self, time: int) -> bool:
        return time >= len(self.ops) or self.ops[time].kind in _APART or self.ops[time].behind_barrier

    def _hand_over(self) -> None:
        """Let fused ops write over what they read last.

        A kernel that sums what it makes reads its operands for two results, and writes over none. One that reduces rows
        and goes on to what follows of them reads the rows twice, and does not write over them.
        """
        rows = self._held_rows()
        made: dict[tuple[int, float], list[Key]] = {}
        for time, op in enumerate(self.ops):
            for key in op.results:
                made_now = key in self.found and self.found[key].start == time
                if op.writes_over and made_now and not (op.kind == "fused" and self._is_summed(key)):
                    made.setdefault((time, self.extent[key]), []).append(key)
        for key, life in self.found.items():
            last = (life.stop - 1, self.extent[key])
            if life.allocated and made.get(last) and key not in made[last] and key not in rows.get(last[0], ()):
                made[last].pop()
                life.stop -= 1

    def _held_rows(self) -> dict[int, set[Key]]:
        """Return, by op, the arrays whose rows its kernel reduces, too, for itself alone."""
        read = {time: {self._root(place) for place in places} for time, places in self.sources.items()}
        num_reading = Counter(key for keys in read.values() for key in keys)
        found: dict[int, set[Key]] = {}
        for time, keys in read.items():
            alone = [key for key in keys if key in self.rows and num_reading[key] == 1]
            found[time] = {self._root(place) for key in alone for place in self.rows[key]}
        return found
