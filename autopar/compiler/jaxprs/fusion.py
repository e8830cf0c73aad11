"""Find which arrays of a jaxpr go through memory once XLA has fused what it can.

    jaxpr  ->  Traffic of every equation: how often each operand is read from memory, and each result written there

Products, collectives, loops and sorts stand apart: what they read and make is in memory. So is what a reduction makes.
All other equations are fused into their readers, and computed again in each, unless their result is read by something
apart, leaves the program, or is expensive (an exponential, say) and read by several kernels. One kernel reads an array
once, and hands what it makes to its own equations without memory.

A kernel is what has one number of elements to go through, the same reductions and products behind it, and arrays in
common: XLA fuses a producer with its consumer, and consumers of one array with each other, where shapes agree. Scalars
join nothing: an optimizer's updates, which share its counters, are a kernel for each parameter.

Where the compiler has product sums, a matrix product takes what is added to it, if nothing else reads its result: its
kernel reads that and writes the sum.

A loop over stacks begins with zeros for those that it makes. Each iteration writes its part of each in a kernel of its
own, which elementwise equations are fused into, and copies the parts that something apart reads out of their stacks.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.flops import aval_bytes, equation_flops
from autopar.compiler.jaxprs.primitives import DRAWS, MATRIX_PRODUCTS, NESTED

FusionKind = Literal["constant", "view", "fused", "reduction", "apart"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_VIEWS = _names(
    "reshape squeeze expand_dims transpose copy sharding_constraint layout_constraint stop_gradient name pvary"
)
_SUMS = ("add", "add_any")
_REDUCTIONS = _names("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin")
_APART = _names(
    "dot_general conv_general_dilated ragged_dot ragged_dot_general sort top_k cumsum cumprod cummax cummin "
    "cumlogsumexp reduce_window reduce_window_sum reduce_window_max select_and_scatter_add select_and_gather_add fft "
    "cholesky lu qr geqrf householder_product triangular_solve eigh svd custom_call pallas_call optimization_barrier "
    "dynamic_update_slice pure_callback io_callback declared_rule compress_gradient_in_blocks"
)
_CHEAP = _names(
    "abs add add_any and broadcast_in_dim ceil clamp compress_gradient concatenate convert_element_type dynamic_slice "
    "eq floor gather ge gt iota is_finite le lt max min mul ne neg not or pad rev round select_n sign slice split sub "
    "widen_gradient xor shift_right_logical shift_left bitcast_convert_type integer_pow square"
)


def kind_of(eqn: jc.JaxprEqn) -> FusionKind:
    """Return how XLA treats an equation."""
    name = eqn.primitive.name
    if name == "broadcast_in_dim" and not getattr(eqn.invars[0].aval, "shape", ()):
        return "constant"
    if name in _VIEWS:
        return "view"
    if name in _REDUCTIONS:
        return "reduction"
    apart = name in _APART or name in NESTED or name.startswith("scatter") or jc.moves_memory(eqn)
    return "apart" if apart else "fused"


def is_expensive(eqn: jc.JaxprEqn) -> bool:
    """Return whether XLA rather keeps the equation's result than computes it twice."""
    return eqn.primitive.name not in _CHEAP


class Traffic(NamedTuple):
    """An equation's part in the kernels that it is fused into."""

    reads: tuple[int, ...]
    """By operand, how often it is read from memory on the equation's behalf."""
    writes: tuple[int, ...]
    """By result, how often it is written to memory, or read there to be copied into a stack."""
    kernels: float
    """Kernels that start for its sake: a kernel of several results is shared among what makes them."""
    flops_per_byte: float
    """Operations of its kernels for every byte that these read or write."""


def alone(eqn: jc.JaxprEqn) -> Traffic:
    """Return the traffic of an equation that is a kernel by itself."""
    nbytes = sum(aval_bytes(atom.aval) for atom in (*eqn.invars, *eqn.outvars))
    return Traffic(
        reads=(1,) * len(eqn.invars),
        writes=(1,) * len(eqn.outvars),
        kernels=1.0,
        flops_per_byte=equation_flops(eqn) / nbytes if nbytes else 0.0,
    )


class Stacks(NamedTuple):
    """The inputs of a body that are slices of stacks, and the results that are written into some: from a number on."""

    inputs_from: int
    results_from: int


def stacks_of(within: jc.JaxprEqn | None) -> Stacks | None:
    """Return the stacks of the body of an equation; None for one that loops over none, and for a program."""
    if within is None or within.primitive.name != "scan":
        return None
    loop = jp.scan_of(within)
    return Stacks(loop.first_x, loop.num_carry)


_known: weakref.WeakKeyDictionary[jc.Jaxpr, dict[tuple[Stacks | None, bool], tuple[Traffic, ...]]]
_known = weakref.WeakKeyDictionary()


def fused_traffic(jaxpr: jc.Jaxpr, within: jc.JaxprEqn | None = None, *, product_sums: bool) -> tuple[Traffic, ...]:
    """Return the traffic of every equation of a jaxpr, found once; `within` is the equation that it is a body of.

    That of a loop or a branch is in its body. `product_sums`: products write the sums of their results.
    """
    known, key = _known.setdefault(jaxpr, {}), (stacks_of(within), product_sums)
    if key not in known:
        known[key] = _Fusion(jaxpr=jaxpr, stacks=key[0], product_sums=product_sums).run()
    return known[key]


_END = -1
"""Reads what leaves the program; the readers below it write into stacks."""
_Kernel = tuple[Hashable, ...]


@dataclass(kw_only=True, eq=False)
class _Fusion:
    jaxpr: jc.Jaxpr
    stacks: Stacks | None
    product_sums: bool
    roots: dict[Any, Any] = field(default_factory=dict[Any, Any])
    """By view, what it is a view of."""
    makers: dict[Any, int] = field(default_factory=dict[Any, int])
    readers: defaultdict[Any, list[int]] = field(default_factory=lambda: defaultdict[Any, list[int]](list))
    kinds: list[FusionKind] = field(default_factory=list[FusionKind])
    levels: list[int] = field(default_factory=list[int])
    """The most products and reductions on a path to an equation."""
    kernels: dict[int, frozenset[_Kernel]] = field(default_factory=dict[int, frozenset[_Kernel]])
    """By equation, what it is computed in."""
    sums: dict[int, Any] = field(default_factory=dict[int, Any])
    """By equation that the kernel of a product does, the product's result."""
    stored: set[int] = field(default_factory=set[int])
    """The equations whose results are in memory."""

    def run(self) -> tuple[Traffic, ...]:
        for number, eqn in enumerate(self.jaxpr.eqns):
            self._note(number, eqn)
        for place, atom in enumerate(self.jaxpr.outvars):
            reader = _END
            if self.stacks is not None and place >= self.stacks.results_from:
                reader -= 1 + place
                self.kernels[reader] = frozenset([("stack", place)])
            self.readers[self._root(atom)].append(reader)
        for number in range(len(self.jaxpr.eqns)) if self.product_sums else ():
            self._end_product(number)
        for number in reversed(range(len(self.jaxpr.eqns))):
            self._place(number)
        return self._traffic()

    def _end_product(self, number: int) -> None:
        """Find the product whose kernel adds what an equation adds."""
        eqn = self.jaxpr.eqns[number]
        for v in reversed(self._operands(number)) if eqn.primitive.name in _SUMS else ():
            maker = self.makers.get(v)
            if maker is None or self.readers[v] != [number] or _extent(eqn.outvars) != v.aval.size:
                continue
            if maker in self.sums or self.jaxpr.eqns[maker].primitive.name in MATRIX_PRODUCTS:
                self.sums[number] = v
                return

    def _root(self, atom: Any) -> Any:
        return None if isinstance(atom, jc.Literal) else self.roots.get(atom, atom)

    def _operands(self, number: int) -> list[Any]:
        return [self._root(atom) for atom in self.jaxpr.eqns[number].invars]

    def _note(self, number: int, eqn: jc.JaxprEqn) -> None:
        """Note an equation's kind, level and operands."""
        operands = self._operands(number)
        makers = [self.makers[v] for v in operands if v in self.makers]
        kind = kind_of(eqn)
        if kind == "fused" and operands and all(v is None for v in operands):
            kind = "constant"
        self.kinds.append(kind)
        self.levels.append(max((self.levels[i] + (self.kinds[i] in ("apart", "reduction")) for i in makers), default=0))
        if kind == "view":
            self.roots[eqn.outvars[0]] = operands[0]
            return
        self.makers.update((v, number) for v in eqn.outvars)
        for v in dict.fromkeys(operands):
            if v is not None:
                self.readers[v].append(number)

    def _place(self, number: int) -> None:
        """Find the kernels of an equation, those of its readers being known."""
        eqn, kind = self.jaxpr.eqns[number], self.kinds[number]
        if kind == "view":
            return
        own: _Kernel = (self.levels[number], _extent(eqn.outvars))
        readers = [reader for v in eqn.outvars for reader in self.readers[v]]
        if kind == "apart" or number in self.sums:
            own = ("apart", number)
        elif kind == "reduction":
            own = (self.levels[number], _extent(eqn.invars))
        else:
            inside = frozenset[_Kernel]().union(*(self.kernels[reader] for reader in readers if reader != _END))
            grows = sum(_bytes(eqn.outvars)) > sum(_bytes(eqn.invars))
            wanted = any(self._wants(reader, grows) for reader in readers)
            if not wanted and (len(inside) <= 1 or not is_expensive(eqn) or grows):
                self.kernels[number] = inside
                return
        self.stored.add(number)
        self.kernels[number] = frozenset((own,))

    def _wants(self, reader: int, grows: bool) -> bool:
        """Return true if a reader wants what it reads in memory; `grows` says that it is larger than what makes it."""
        apart = reader >= 0 and (self.kinds[reader] == "apart" or (reader in self.sums and not grows))
        return apart or reader == _END

    def _traffic(self) -> tuple[Traffic, ...]:
        """Count reads and writes: a kernel reads an array once, for the first equation that wants it."""
        groups = _Groups()
        eqns = self.jaxpr.eqns
        reads = [[0] * len(eqn.invars) for eqn in eqns]
        seen: set[tuple[Any, _Kernel]] = set()
        parts: dict[tuple[int, _Kernel], float] = {}
        for number, kernels in sorted(self.kernels.items()):
            if number < 0 or (self.kinds[number] == "constant" and number not in self.stored):
                continue
            for kernel in sorted(kernels, key=str):
                moved = float(sum(_bytes(eqns[number].outvars))) if number in self.stored else 0.0
                for place, v in enumerate(self._operands(number)):
                    if v is None or v == self.sums.get(number):
                        continue
                    maker = self.makers.get(v)
                    handed = maker is not None and self.kinds[maker] in ("fused", "constant")
                    # A scalar in common is no reason to be computed in one kernel.
                    joins = v.aval.size > 1 and (maker is None or self.kinds[maker] != "constant")
                    if handed and (maker not in self.stored or kernel in self.kernels[maker]):
                        if joins and maker is not None and kernel in self.kernels[maker]:
                            groups.join((number, kernel), (maker, kernel))
                        continue
                    if joins:
                        groups.join((number, kernel), (v, kernel))
                    if (v, kernel) not in seen:
                        seen.add((v, kernel))
                        reads[number][place] += 1
                        moved += aval_bytes(eqns[number].invars[place].aval)
                parts[number, kernel] = moved
        work: defaultdict[Any, float] = defaultdict(float)
        nbytes: defaultdict[Any, float] = defaultdict(float)
        results: Counter[Any] = Counter()
        for (number, kernel), moved in parts.items():
            group = groups.of((number, kernel))
            # Random bits are priced by themselves.
            work[group] += 0.0 if eqns[number].primitive.name in DRAWS else equation_flops(eqns[number])
            nbytes[group] += moved
            results[group] += number in self.stored
        # A product has its sum written where its result was.
        alone = self.stored - self.sums.keys()
        written = [[int(number in alone)] * len(eqn.outvars) for number, eqn in enumerate(eqns)]
        more = self._count_stacks(reads, written)
        found: list[Traffic] = []
        for number in range(len(eqns)):
            mine = [groups.of((number, kernel)) for kernel in self.kernels.get(number, ()) if (number, kernel) in parts]
            found.append(
                Traffic(
                    reads=tuple(reads[number]),
                    writes=tuple(written[number]),
                    kernels=more[number] + (sum(1 / results[group] for group in mine) if number in alone else 0.0),
                    flops_per_byte=max((work[group] / nbytes[group] for group in mine if nbytes[group]), default=0.0),
                )
            )
        return tuple(found)

    def _count_stacks(self, reads: list[list[int]], written: list[list[int]]) -> list[int]:
        """Add what is read and written for the sake of stacks; return how many kernels of each equation do that."""
        kernels = [0] * len(self.jaxpr.eqns)
        if self.stacks is None:
            return kernels
        for v in dict.fromkeys(self.jaxpr.invars[self.stacks.inputs_from :]):
            number = next((n for n in self.readers[v] if n >= 0 and self.kinds[n] == "apart"), None)
            if number is not None:
                reads[number][self._operands(number).index(v)] += 2
                kernels[number] += 1
        for v in (self._root(atom) for atom in self.jaxpr.outvars[self.stacks.results_from :]):
            number = self.makers.get(v)
            if number is None:
                self._copy_input(v, reads, kernels)
            elif self.kinds[number] != "constant":
                # The zeros that a part is written over, and the part; what is in memory already is read there.
                written[number][self.jaxpr.eqns[number].outvars.index(v)] += 2 + (number in self.stored)
                kernels[number] += 1
        return kernels

    def _copy_input(self, v: Any, reads: list[list[int]], kernels: list[int]) -> None:
        """Count what a stack of an input of the body takes with the first equation that reads it."""
        number = next((n for n in self.readers[v] if n >= 0), None)
        if number is not None:
            reads[number][self._operands(number).index(v)] += 3
            kernels[number] += 1


class _Groups:
    """Disjoint sets of what is joined."""

    def __init__(self) -> None:
        self._parents: dict[Any, Any] = {}

    def of(self, item: Any) -> Any:
        while (parent := self._parents.get(item, item)) != item:
            self._parents[item] = item = self._parents.get(parent, parent)
        return item

    def join(self, one: Any, other: Any) -> None:
        self._parents[self.of(one)] = self.of(other)


def _bytes(atoms: Any) -> list[int]:
    return [aval_bytes(atom.aval) for atom in atoms]


def _extent(atoms: Any) -> int:
    """The most elements of an array."""
    return max((math.prod(getattr(atom.aval, "shape", ())) for atom in atoms), default=0)
