"""Find what a program keeps in memory, and from when until when, once XLA has fused what it can.

    works (what is read, what is made, in order)  ->  a lifetime for every array that reaches memory

Products, collectives, loops, sorts stand apart: what they read and make is in memory. Elementwise equations are fused
into their readers, which then read what these are computed from, later. A fused array is in memory only if a work
apart reads it, if it is a result, or if it would be computed twice and is dear (an exponential, say).

Time is the number of a work; a lifetime [start, stop) contains the works that make and read the array. A fused work
may write over an operand of the same size that nobody reads any more: their lifetimes then only touch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from autopar.compiler import jax_compat as jc
from autopar.compiler.intra_op.free_values import NESTED

Key = Hashable
Kind = Literal["view", "fused", "reduction", "apart"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_VIEWS = _names(
    "reshape squeeze expand_dims transpose copy sharding_constraint layout_constraint stop_gradient name pvary"
)
_REDUCTIONS = _names("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin")
_APART = _names(
    "dot_general conv_general_dilated ragged_dot ragged_dot_general sort top_k cumsum cumprod cummax cummin "
    "cumlogsumexp reduce_window reduce_window_sum reduce_window_max select_and_scatter_add select_and_gather_add fft "
    "cholesky lu qr geqrf householder_product triangular_solve eigh svd custom_call pallas_call optimization_barrier "
    "dynamic_update_slice pure_callback io_callback"
)
_CHEAP = _names(
    "abs add add_any and broadcast_in_dim ceil clamp concatenate convert_element_type dynamic_slice eq floor gather ge "
    "gt iota is_finite le lt max min mul ne neg not or pad rev round select_n sign slice split sub xor "
    "shift_right_logical shift_left bitcast_convert_type integer_pow square"
)
# XLA fuses no more arrays than that into one kernel.
_MAX_SOURCES = 12


class Work(NamedTuple):
    """One step of a program: what it reads and makes; `kind` says how XLA treats it."""

    kind: Kind
    reads: tuple[Key, ...]
    results: tuple[Key, ...]
    dear: bool = False
    """Too costly to be computed twice."""
    late: bool = False
    """Its results are there only when it is done: until then they count among what it needs inside."""


@dataclass(kw_only=True)
class Lifetime:
    """When an array is in memory: [start, stop)."""

    start: int
    stop: int


def kind_of(eqn: jc.JaxprEqn) -> Kind:
    """How XLA treats an equation."""
    name = eqn.primitive.name
    if name in _VIEWS:
        return "view"
    if name in _REDUCTIONS:
        return "reduction"
    return "apart" if name in _APART or name in NESTED or name.startswith("scatter") else "fused"


def is_dear(eqn: jc.JaxprEqn) -> bool:
    """Whether XLA rather keeps the equation's result than computes it twice."""
    return eqn.primitive.name not in _CHEAP


def lifetimes(
    works: Sequence[Work], inputs: Iterable[Key], outputs: Iterable[Key], extent: Mapping[Key, Hashable]
) -> dict[Key, Lifetime]:
    """The lifetimes of inputs (from -1) and of all else that reaches memory; `extent` is equal for equal sizes."""
    program = _Program(works=works, extent=extent, outputs=tuple(outputs))
    return program.run(tuple(inputs))


@dataclass(kw_only=True)
class _Program:
    works: Sequence[Work]
    extent: Mapping[Key, Hashable]
    outputs: tuple[Key, ...]
    roots: dict[Key, Key] = field(default_factory=dict[Key, Key])
    readers: dict[Key, list[int]] = field(default_factory=dict[Key, list[int]])
    behind: dict[Key, tuple[Key, ...]] = field(default_factory=dict[Key, tuple[Key, ...]])
    """What a fused reader of an array reads in its place."""
    found: dict[Key, Lifetime] = field(default_factory=dict[Key, Lifetime])

    def run(self, inputs: tuple[Key, ...]) -> dict[Key, Lifetime]:
        self._note_readers()
        for key in inputs:
            self.found[key] = Lifetime(start=-1, stop=0)
        for time, work in enumerate(self.works):
            if work.kind != "view":
                self._add(time, work)
        for key in map(self._root, self.outputs):
            if key in self.found:
                self.found[key].stop = len(self.works) + 1
        self._hand_over()
        return self.found

    def _note_readers(self) -> None:
        for time, work in enumerate(self.works):
            if work.kind == "view":
                self.roots[work.results[0]] = self._root(work.reads[0])
            else:
                for key in dict.fromkeys(map(self._root, work.reads)):
                    self.readers.setdefault(key, []).append(time)
        for key in map(self._root, self.outputs):
            self.readers.setdefault(key, []).append(len(self.works))

    def _root(self, key: Key) -> Key:
        return self.roots.get(key, key)

    def _add(self, time: int, work: Work) -> None:
        sources = self._sources(work)
        kept = [key for key in work.results if self._settle(key, work, sources)]
        if kept or work.kind != "fused":
            for key in sources:
                self.found[key].stop = max(self.found[key].stop, time + 1)
        for key in kept:
            start = time + work.late
            if work.kind == "fused" and not sources:
                # What comes from nothing can wait until a work apart wants it.
                start = min((t for t in self.readers.get(key, ()) if self._is_apart(t)), default=time)
            self.found[key] = Lifetime(start=start, stop=start + 1)

    def _sources(self, work: Work) -> tuple[Key, ...]:
        """What a work reads from memory."""
        keys = dict.fromkeys(self._root(key) for key in work.reads)
        if work.kind != "apart":
            keys = dict.fromkeys(source for key in keys for source in self.behind.get(key, (key,)))
        return tuple(key for key in keys if key in self.found)

    def _settle(self, key: Key, work: Work, sources: tuple[Key, ...]) -> bool:
        """Whether a result reaches memory; notes what is behind it if fused readers do not need that."""
        readers = self.readers.get(key, ())
        if work.kind != "fused":
            return True
        fused = [not self._is_apart(time) for time in readers]
        again = len(readers) <= 1 or (not work.dear and (all(fused) or len(sources) <= 1))
        if again and len(sources) <= _MAX_SOURCES:
            self.behind[key] = sources
            return not all(fused)
        return True

    def _is_apart(self, time: int) -> bool:
        return time >= len(self.works) or self.works[time].kind == "apart"

    def _hand_over(self) -> None:
        """Let fused works and loops write over what they read last."""
        ends: dict[int, list[Key]] = {}
        starts: dict[int, list[Key]] = {}
        for key, life in self.found.items():
            if life.start >= 0:
                ends.setdefault(life.stop - 1, []).append(key)
                starts.setdefault(life.start, []).append(key)
        for time, made in starts.items():
            if time >= len(self.works) or self.works[time].kind != "fused":
                continue
            for key in made:
                dying = [k for k in ends.get(time, ()) if self.found[k].start < time]
                for old in dying:
                    if self.extent[old] == self.extent[key]:
                        self.found[old].stop = time
                        ends[time].remove(old)
                        break
