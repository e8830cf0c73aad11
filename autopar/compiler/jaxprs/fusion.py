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
kernel reads that and writes the sum. Where it fuses products, each computes again what it reads, unless keeping that
moves less; their kernels do all elementwise equations on the way to what is read more than once, and the reductions of
that; and what products alone read of float32 is kept in bfloat16, in which they multiply.

Where the compiler holds rows, a reduction of the innermost dimensions in memory is computed in each kernel that reads
its operand, which goes on to what follows, up to one array; the columns of that are summed from memory. Exponentials
(unless kept for many) and quotients are computed again for every reader. Where it transposes operands, products read
copies (`strides`).

A loop over stacks begins with zeros for those that it makes. Each iteration writes its part of each in a kernel of its
own, which elementwise equations are fused into, and copies the parts that something apart reads out of their stacks.
"""

from __future__ import annotations

import heapq
import weakref
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.equation_keys import content_key
from autopar.compiler.jaxprs.flops import aval_bytes, equation_flops
from autopar.compiler.jaxprs.fusion_kinds import (
    COMPUTED_AGAIN,
    EXPONENTIALS,
    MANY_READERS,
    FusionKind,
    FusionRules,
    extent,
    is_expensive,
    kind_beside_products,
    kind_of,
)
from autopar.compiler.jaxprs.joined import Joined
from autopar.compiler.jaxprs.primitives import CUTS, DRAWS, MATRIX_PRODUCTS, NESTED, PRODUCTS
from autopar.compiler.jaxprs.reuse import NO_SPANS, Spans, Touch, spans_of
from autopar.compiler.jaxprs.strides import (
    Layouts,
    layouts_of,
    reads_transposed,
    transposed_operands,
    transposed_results,
    writings,
)

_SUMS = ("add", "add_any")
_PRICED_APART = DRAWS | PRODUCTS
LONGEST_ROW = 16_384
"""Elements that a kernel holds, as XLA of jaxlib 0.11.2 compiles a softmax for H100s; of 32,768 it does not."""
_KEPT_FROM = 1.5
"""Bytes of computing a value again, in multiples of those of keeping it, from which it is kept: an estimate. Of 1 to 4,
a Llama has bytes within 1 %, a Wide-ResNet 5."""
_ERROR_FUNCTIONS = ("erf", "erfc")


class Traffic(NamedTuple):
    """An equation's part in the kernels that it is fused into."""

    reads: tuple[float, ...]
    """Times that each operand is read from memory on the equation's behalf; half as many if it is kept in bfloat16."""
    writes: tuple[float, ...]
    """Times that each result is written to memory, or read there to be copied into a stack."""
    kernels: float
    """Kernels that start for its sake: a kernel of several results is shared among what makes them."""
    flops_per_byte: float
    """Operations of its kernels for every byte that these read or write."""
    kept: float = 1.0
    """Bytes that the kernel of a product writes, per byte of its result: they may be of another type."""
    reduces: bool = False
    """True if its kernel, or one of them, has a reduction."""
    wasted: float = 0.0
    """Further times that memory takes the bytes of its results, as they are written in pieces that are too short."""
    spans: Spans = NO_SPANS
    """How much of a memory on the chip each of these takes; empty where there is none."""


def alone(eqn: jc.JaxprEqn) -> Traffic:
    """Return the traffic of an equation that is a kernel by itself."""
    nbytes = sum(aval_bytes(atom.aval) for atom in (*eqn.invars, *eqn.outvars))
    return Traffic(
        reads=(1,) * len(eqn.invars),
        writes=(1,) * len(eqn.outvars),
        kernels=1.0,
        flops_per_byte=equation_flops(eqn) / nbytes if nbytes else 0.0,
        reduces=kind_of(eqn) == "reduction",
    )


def _unfused(eqn: jc.JaxprEqn) -> Traffic:
    """Return the traffic of an equation where none is joined with others: views and constants are no kernels."""
    if kind_of(eqn) not in ("view", "constant"):
        return alone(eqn)
    nothing = (0.0,) * len(eqn.invars), (0.0,) * len(eqn.outvars)
    return Traffic(reads=nothing[0], writes=nothing[1], kernels=0.0, flops_per_byte=0.0)


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


_known: weakref.WeakKeyDictionary[jc.Jaxpr, dict[tuple[Stacks | None, FusionRules], tuple[Traffic, ...]]]
_known = weakref.WeakKeyDictionary()
_alike: dict[Hashable, tuple[Traffic, ...]] = {}
"""The same by the content of a jaxpr: layers of a step are equal, and so are the programs cut from them."""
_MOST_ALIKE = 256
"""Contents that are remembered at a time."""


def fused_traffic(jaxpr: jc.Jaxpr, within: jc.JaxprEqn | None = None, *, rules: FusionRules) -> tuple[Traffic, ...]:
    """Return the traffic of every equation of a jaxpr, found once; `within` is the equation that it is a body of.

    That of a loop or a branch is in its body.
    """
    if not rules.fuses:
        return tuple(map(_unfused, jaxpr.eqns))
    known, stacks = _known.setdefault(jaxpr, {}), stacks_of(within)
    if (stacks, rules) not in known:
        known[stacks, rules] = _of_content(jaxpr, stacks, rules)
    return known[stacks, rules]


def _of_content(jaxpr: jc.Jaxpr, stacks: Stacks | None, rules: FusionRules) -> tuple[Traffic, ...]:
    key = (content_key(jaxpr), stacks)
    if (*key, rules) not in _alike:
        if len(_alike) >= _MOST_ALIKE:
            _alike.clear()
        layouts = layouts_of(jaxpr) if rules.holds_rows or rules.transposes_operands else Layouts()
        same = rules._replace(transposes_operands=rules.transposes_operands and any(layouts.transposed))
        if (*key, same) not in _alike:
            _alike[*key, same] = _Fusion(jaxpr=jaxpr, stacks=stacks, rules=same, layouts=layouts).run()
        _alike[*key, rules] = _alike[*key, same]
    return _alike[*key, rules]


_END = -1
"""The number of a reader of what leaves the program; the readers below it write into stacks."""
_Kernel = tuple[Hashable, ...]
_Readings = dict[tuple[Any, _Kernel], tuple[int, int]]
"""The first equation of a kernel that reads an array, and the operand that it is."""


@dataclass(kw_only=True, eq=False)
class _Fusion:
    jaxpr: jc.Jaxpr
    stacks: Stacks | None
    rules: FusionRules
    layouts: Layouts
    roots: dict[Any, Any] = field(default_factory=dict[Any, Any])
    """The array of which each view is one."""
    makers: dict[Any, int] = field(default_factory=dict[Any, int])
    readers: defaultdict[Any, list[int]] = field(default_factory=lambda: defaultdict[Any, list[int]](list))
    operands: list[list[Any]] = field(default_factory=list[list[Any]])
    """The arrays that each equation reads, those of views; None for a literal."""
    made: list[int] = field(default_factory=list[int])
    """The bytes of the results of each equation."""
    extents: list[int] = field(default_factory=list[int])
    """The most elements of one of them."""
    kinds: list[FusionKind] = field(default_factory=list[FusionKind])
    levels: list[int] = field(default_factory=list[int])
    """The most products and reductions on a path to an equation."""
    behind: list[frozenset[int]] = field(default_factory=list[frozenset[int]])
    """The last product or reduction on each of these paths."""
    kernels: dict[int, frozenset[_Kernel]] = field(default_factory=dict[int, frozenset[_Kernel]])
    """The kernels in which each equation is computed."""
    ends: dict[int, int] = field(default_factory=dict[int, int])
    """The product of each equation that the kernel of a product does behind it."""
    last: dict[int, int] = field(default_factory=dict[int, int])
    """The last of these equations, by product."""
    holds: list[bool] = field(default_factory=list[bool])
    """True for equations with a reduction of rows on a path to them from the last product or other reduction."""
    largest: list[int] = field(default_factory=list[int])
    """The bytes of the largest array in memory that an equation is computed from, its own if that is in memory."""
    shared: set[int] = field(default_factory=set[int])
    """The equations whose results several kernels read, and that take more bytes to compute in each than to keep."""
    stored: set[int] = field(default_factory=set[int])
    """The equations whose results are in memory."""
    writers: dict[int, _Kernel] = field(default_factory=dict[int, _Kernel])
    """The kernel that writes the result of an equation which others compute for themselves."""

    def run(self) -> tuple[Traffic, ...]:
        for number, eqn in enumerate(self.jaxpr.eqns):
            self._note(number, eqn)
        for place, atom in enumerate(self.jaxpr.outvars):
            reader = _END
            if self.stacks is not None and place >= self.stacks.results_from:
                reader -= 1 + place
                self.kernels[reader] = frozenset([("stack", place)])
            self.readers[self._root(atom)].append(reader)
        if self.rules.product_sums or self.rules.fuses_products:
            for number in reversed(range(len(self.jaxpr.eqns))):
                if self._is_product(number):
                    self._extend(number)
        self._find_largest()
        self._place_all()
        if self._find_shared():
            self._place_all()
        return tuple(self._traffic())

    def _place_all(self) -> None:
        """Find the kernels of all equations, from the last on."""
        self.kernels = {number: kernels for number, kernels in self.kernels.items() if number < 0}
        self.stored.clear()
        self.writers.clear()
        for number in reversed(range(len(self.jaxpr.eqns))):
            self._place(number)

    def _find_shared(self) -> bool:
        """Note what takes more bytes to compute again in each kernel than to keep; return whether anything does.

        Of s bytes in memory n kernels would make r bytes each: n s beside s + r + n r. Else a sum that all layers add
        to, and their norms read, would be computed from all of its summands in each of them: the 12 layers of a GPT
        would read as many bytes as 22.
        """
        sources: dict[int, frozenset[Any]] = {}
        for number, eqn in enumerate(self.jaxpr.eqns):
            operands = [v for v in self.operands[number] if v is not None]
            computed = self.kinds[number] == "fused" and number not in self.stored and number not in self.ends
            if computed:
                read = [sources[self.makers[v]] if v in self.makers else frozenset((v,)) for v in operands]
                sources[number] = _union(read)
                again, made = len(self.kernels.get(number, ())) - 1, self.made[number]
                if again > 0 and self._num_readers(number) > 1:
                    taken = sum([aval_bytes(v.aval) for v in sources[number]])
                    if again * taken > _KEPT_FROM * (again + 2) * made:
                        self.shared.add(number)
            if not computed or number in self.shared:
                sources[number] = frozenset(() if self.kinds[number] == "constant" else eqn.outvars)
        return bool(self.shared)

    def _num_readers(self, number: int) -> int:
        return len({reader for v in self.jaxpr.eqns[number].outvars for reader in self.readers[v]})

    def _extend(self, product: int) -> None:
        """Find what the kernel of a product does behind it: all that follows up to one result that others read.

        They are met in their order; wherever nobody but the last of them is still to be met, the kernel may end.
        """
        made = self._follow([], product)
        met: list[int] = []
        while made and self._follows(number := heapq.heappop(made), product):
            if met and number == met[-1]:
                continue
            met.append(number)
            ends = all(reader == number for reader in made) and not self._widens(number)
            made = self._follow(made, number)
            if ends:
                self.ends.update((each, product) for each in met)
                self.last[product] = number

    def _widens(self, number: int) -> bool:
        """Return true for a conversion that makes more bytes than it reads, which is left to the readers."""
        return self.jaxpr.eqns[number].primitive.name == "convert_element_type" and self._grows(number)

    def _follow(self, made: list[int], number: int) -> list[int]:
        """Add the readers of an equation's result to a heap; what leaves the program is read last."""
        for reader in self.readers[self.jaxpr.eqns[number].outvars[0]]:
            heapq.heappush(made, reader if reader >= 0 else len(self.jaxpr.eqns))
        return made

    def _follows(self, number: int, product: int) -> bool:
        """Return true if the kernel of a product can do an equation behind it."""
        if number == len(self.jaxpr.eqns) or number in self.ends:
            return False
        eqn = self.jaxpr.eqns[number]
        takes = self.kinds[number] == "fused" if self.rules.fuses_products else eqn.primitive.name in _SUMS
        return takes and self.extents[number] == self.extents[product]

    def _is_product(self, number: int) -> bool:
        """Return true for a product whose kernel does more than the product."""
        name = self.jaxpr.eqns[number].primitive.name
        return name in (PRODUCTS if self.rules.fuses_products else MATRIX_PRODUCTS)

    def _kernel_with(self, number: int) -> _Kernel:
        """Return the kernel of a reduction: of the product whose result it reduces, or one of its own."""
        elements, behind = extent(self.jaxpr.eqns[number].invars), self.behind[number]
        if self.rules.fuses_products and len(behind) == 1:
            (product,) = behind
            if self._is_product(product) and self.extents[product] == elements:
                return self._kernel_of(product)
        return (self.levels[number], elements)

    def _holds(self, number: int, eqn: jc.JaxprEqn) -> bool:
        """Return true for a reduction that each kernel computes which reads the rows that it reduces."""
        if not (self.rules.holds_rows and self.layouts.rows[number]):
            return False
        return extent(eqn.invars[:1]) <= LONGEST_ROW * extent(eqn.outvars)

    def _kernel_of(self, product: int) -> _Kernel:
        """Return the kernel of what is done behind a product."""
        return ("apart", self.last.get(product, product))

    def _root(self, atom: Any) -> Any:
        return None if isinstance(atom, jc.Literal) else self.roots.get(atom, atom)

    def _note(self, number: int, eqn: jc.JaxprEqn) -> None:
        """Note an equation's kind, level and operands."""
        operands = [self._root(atom) for atom in eqn.invars]
        self.operands.append(operands)
        self.made.append(sum(_bytes(eqn.outvars)))
        self.extents.append(extent(eqn.outvars))
        makers = [self.makers[v] for v in operands if v in self.makers]
        kind = kind_beside_products(eqn) if self.rules.fuses_products else kind_of(eqn)
        if kind == "fused" and operands and all(v is None for v in operands):
            kind = "constant"
        holds = self._holds(number, eqn)
        copies = self.rules.transposes_operands and kind == "view" and bool(self.layouts.transposed[number])
        kind = "fused" if holds or copies else kind
        self.kinds.append(kind)
        self._find_level(makers, holds)
        if kind == "view":
            self.roots[eqn.outvars[0]] = operands[0]
            return
        self.makers.update((v, number) for v in eqn.outvars)
        for v in dict.fromkeys(operands):
            if v is not None:
                self.readers[v].append(number)

    def _find_level(self, makers: Sequence[int], holds: bool) -> None:
        """Note the level of the next equation, and what is behind it, of what makes its operands."""
        highest, held, behind = 0, holds, list[frozenset[int]]()
        for i in dict.fromkeys(makers):
            ends = self.kinds[i] in ("apart", "reduction")
            if (level := self.levels[i] + ends) > highest:
                highest, held, behind = level, holds, []
            if level == highest:
                held = held or (self.holds[i] and not ends)
                behind.append(frozenset((i,)) if ends else self.behind[i])
        self.levels.append(highest)
        self.holds.append(held)
        self.behind.append(_union(behind))

    def _place(self, number: int) -> None:
        """Find the kernels of an equation, those of its readers being known."""
        eqn, kind = self.jaxpr.eqns[number], self.kinds[number]
        if kind == "view":
            return
        own: _Kernel = (self.levels[number], self.extents[number])
        readers = [reader for v in eqn.outvars for reader in self.readers[v]]
        if kind == "apart" or number in self.ends:
            own = self._kernel_of(self.ends[number]) if number in self.ends else ("apart", number)
            self.kernels[number] = frozenset((own,))
            if readers and all(self.kernels.get(reader) == self.kernels[number] for reader in readers):
                return
        elif kind == "reduction":
            own = self._kernel_with(number)
        else:
            wanting = {reader for reader in readers if self._wants(reader, number)}
            transposing = {r for r in readers if self._is_transposed(eqn.outvars[0], r)} - wanting
            if len(_union([self.kernels[reader] for reader in transposing])) > 1:
                wanting |= transposing
                own = (*own, number)
            inside = _union([self.kernels[reader] for reader in readers if reader not in wanting])
            computed = not wanting and number not in self.shared
            if computed and (len(inside) <= 1 or not self._is_kept(eqn, len(inside)) or self._grows(number)):
                self.kernels[number] = inside
                return
            if self.rules.fuses_products and number not in self.shared and not self._is_kept(eqn, len(inside)):
                self.stored.add(number)
                self.kernels[number] = inside | {own}
                self.writers[number] = own
                return
            if self.holds[number]:
                own = (*own[:2], number)
        self.stored.add(number)
        self.kernels[number] = frozenset((own,))

    def _wants(self, reader: int, number: int) -> bool:
        """Return true if a reader wants what an equation makes in memory.

        The kernel of a product computes what it reads unless it would read larger arrays for that.
        """
        if reader < 0:
            return reader == _END
        if not self.rules.fuses_products:
            if self.kinds[reader] == "reduction" and self.holds[reader] and self.holds[number]:
                return True
            return self.kinds[reader] == "apart" or (reader in self.ends and not self._grows(number))
        if self._is_product(reader):
            return self.largest[number] > max(_bytes(self.jaxpr.eqns[number].outvars))
        return self.kinds[reader] == "apart"

    def _is_transposed(self, v: Any, reader: int) -> bool:
        """Return true if what reads an array needs it in another layout."""
        if reader < 0 or not self.rules.transposes_operands:
            return False
        operands = self.operands[reader]
        return any(operands[place] is v for place in self.layouts.transposed[reader])

    def _grows(self, number: int) -> bool:
        """Return true if what an equation makes is larger than what it reads."""
        eqn = self.jaxpr.eqns[number]
        return self.made[number] > sum(_bytes(eqn.invars))

    def _find_largest(self) -> None:
        """Note the bytes of the largest array in memory that each equation is computed from."""
        written = set(self.last.values())
        for number, eqn in enumerate(self.jaxpr.eqns):
            if self.kinds[number] != "fused" or number in written:
                self.largest.append(0 if self.kinds[number] == "constant" else max(_bytes(eqn.outvars), default=0))
                continue
            operands = {v for v in self.operands[number] if v is not None}
            made = [self.largest[self.makers[v]] if v in self.makers else aval_bytes(v.aval) for v in operands]
            self.largest.append(max(made, default=0))

    def _is_kept(self, eqn: jc.JaxprEqn, num_readers: int) -> bool:
        """Return true if a result is rather kept than computed again in each of the kernels that read it."""
        name, rules = eqn.primitive.name, self.rules
        if rules.holds_rows and name in COMPUTED_AGAIN:
            return rules.keeps_exponentials and name in EXPONENTIALS and num_readers >= MANY_READERS
        return name in DRAWS if rules.fuses_products else is_expensive(eqn)

    def _traffic(self) -> Iterator[Traffic]:
        """Count reads and writes: a kernel reads an array once, for the first equation that wants it."""
        groups, eqns = Joined(), self.jaxpr.eqns
        reads = [[0.0] * len(eqn.invars) for eqn in eqns]
        seen: _Readings = {}
        parts: dict[tuple[int, _Kernel], float] = {}
        for number, kernels in sorted(self.kernels.items()):
            if number < 0 or (self.kinds[number] == "constant" and number not in self.stored):
                continue
            for kernel in sorted(kernels, key=str) if len(kernels) > 1 else kernels:
                moved = float(self.made[number]) if self._stores(number, kernel) else 0.0
                for place, v in enumerate(self.operands[number]):
                    maker = self.makers.get(v)
                    if v is None:
                        continue
                    if maker is not None and self._is_handed(maker, kernel):
                        groups.join((number, kernel), (maker, kernel))
                        continue
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
                        seen[v, kernel] = number, place
                        reads[number][place] += self._kept_share(v)
                        moved += aval_bytes(eqns[number].invars[place].aval)
                parts[number, kernel] = moved
        work, nbytes = defaultdict[Any, float](float), defaultdict[Any, float](float)
        storing, reducing = {part for part in parts if self._stores(*part)}, set[Any]()
        group_of = {part: groups.find(part) for part in parts}
        results = Counter(group_of[part] for part in storing)
        for part, group in group_of.items():
            work[group] += self._flops(eqns[part[0]])
            nbytes[group] += parts[part]
            reducing.update([group] if kind_of(eqns[part[0]]) == "reduction" else [])
        # A product has what its kernel ends with written where its result was.
        alone = self.stored - self.ends.keys()
        kept = [self._kept_of(number) for number in range(len(eqns))]
        written = [[kept[n] if self._is_written(n) else 0.0] * len(eqn.outvars) for n, eqn in enumerate(eqns)]
        more = self._count_stacks(reads, written)
        wasted = self._count_transposed(reads, more)
        spans = self._spans(seen, parts, groups)
        for number in range(len(eqns)):
            among = [part for each in self.kernels.get(number, ()) if (part := (number, each)) in parts]
            mine = [group_of[part] for part in among]
            stores = [group_of[part] for part in among if part in storing] if number in alone else []
            yield Traffic(
                reads=tuple(reads[number]),
                writes=tuple(written[number]),
                kernels=more[number] + sum([1 / results[group] for group in stores], 0.0),
                flops_per_byte=max([work[group] / nbytes[group] for group in mine if nbytes[group]], default=0.0),
                kept=kept[number],
                reduces=not reducing.isdisjoint(mine),
                wasted=wasted[number],
                spans=spans.get(number, NO_SPANS),
            )

    def _spans(self, read: _Readings, parts: Iterable[tuple[int, _Kernel]], groups: Joined) -> dict[int, Spans]:
        """Return the spans of equations, of arrays that are `read` and those that `parts` of kernels write."""
        if not self.rules.chip_bytes:
            return {}
        eqns, last = self.jaxpr.eqns, {groups.find(part): part[0] for part in parts}
        loops = {number for number, eqn in enumerate(eqns) if eqn.primitive.name in NESTED}
        touches: list[Touch] = []
        for (v, kernel), (number, place) in read.items():
            if number in loops:
                continue
            nbytes = self._kept_share(v) * aval_bytes(v.aval)
            if eqns[number].primitive.name in CUTS:
                nbytes = min(nbytes, self.made[number])
            touches.append(Touch(last[groups.find((number, kernel))], v, nbytes, number, place))
        for number, kernel in parts:
            payer = self.ends.get(number, number)
            if self._stores(number, kernel) and self.last.get(payer, payer) == number:
                for place, v in enumerate(eqns[number].outvars):
                    nbytes = self._kept_share(v) * aval_bytes(v.aval)
                    touches.append(Touch(last[groups.find((number, kernel))], v, nbytes, payer, place, written=True))
        leaving = {v for v, readers in self.readers.items() if any(r < 0 or r in loops for r in readers)}
        of_cores = {n for n in range(len(eqns)) if self._is_product(n)} if self.rules.cores > 1 else set[int]()
        parted = {touch.array for touch in touches if touch.written and touch.number in loops | of_cores}
        return spans_of(eqns, touches, loops, leaving=leaving, parted=parted)

    def _stores(self, number: int, kernel: _Kernel) -> bool:
        """Return true for the kernel that writes the result of an equation to memory."""
        return number in self.stored and self.writers.get(number, kernel) == kernel

    def _flops(self, eqn: jc.JaxprEqn) -> float:
        """Return the FLOPs of an equation in a kernel; random bits and products are priced by themselves."""
        name = eqn.primitive.name
        if name in _PRICED_APART:
            return 0.0
        return equation_flops(eqn) * (self.rules.erf_flops if name in _ERROR_FUNCTIONS else 1.0)

    def _is_handed(self, maker: int, kernel: _Kernel) -> bool:
        """Return true if a product hands its result to a kernel, which does what is behind it."""
        return self.kinds[maker] == "apart" and self._is_product(maker) and self._kernel_of(maker) == kernel

    def _is_written(self, number: int) -> bool:
        """Return true if the results of an equation, or what the kernel of a product has instead, are in memory."""
        return number not in self.ends and self.last.get(number, number) in self.stored

    def _kept_of(self, number: int) -> float:
        """Return how many of the bytes of its results an equation, or the kernel of a product, writes."""
        if not self.rules.fuses_products or not self._is_product(number):
            return 1.0
        (result,), (made,) = (self.jaxpr.eqns[n].outvars for n in (self.last.get(number, number), number))
        return aval_bytes(result.aval) / aval_bytes(made.aval) * self._kept_share(result)

    def _kept_share(self, v: Any) -> float:
        """Return the share of an array's bytes that are in memory."""
        maker = self.makers.get(v)
        if not self.rules.fuses_products or maker is None or v.aval.dtype.name != "float32":
            return 1.0
        outside = [r for r in self.readers[v] if r < 0 or self.kernels.get(r) != self.kernels[maker]]
        narrow = self._is_product(self.ends.get(maker, maker)) and all(r >= 0 and self._is_product(r) for r in outside)
        return 0.5 if narrow else 1.0

    def _count_stacks(self, reads: list[list[float]], written: list[list[float]]) -> list[int]:
        """Add what is read and written for the sake of stacks; return how many kernels of each equation do that."""
        kernels = [0] * len(self.jaxpr.eqns)
        if self.stacks is None:
            return kernels
        for v in dict.fromkeys(self.jaxpr.invars[self.stacks.inputs_from :]):
            number = next((n for n in self.readers[v] if n >= 0 and self.kinds[n] == "apart"), None)
            if number is not None:
                reads[number][self.operands[number].index(v)] += 2
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

    def _count_kernels(self, reads: list[list[float]], kernels: list[int]) -> None:
        """Add what copies of convolutions' kernels read and write, with the first convolution that reads each.

        What makes a kernel element by element, as from another type, writes it so that none is needed.
        """
        if not self.rules.transposes_kernels:
            return
        copied: set[Any] = set()
        for number, eqn in enumerate(self.jaxpr.eqns):
            v = self.operands[number][1] if reads_transposed(eqn) else None
            maker = self.makers.get(v)
            if v is not None and v not in copied and (maker is None or self.kinds[maker] != "fused"):
                copied.add(v)
                reads[number][1] += 2
                kernels[number] += 1

    def _count_updates(self, reads: list[list[float]]) -> None:
        """Add what is copied of inputs that a kernel reads beside a convolution's gradient, with what reads each first.

        It transposes the gradient, so that it cannot write over them. Results of each further type have a kernel of
        their own, which reads all of it again. What convolutions read a copy of is read there. No kernel is counted for
        this: stages that have gradients from elsewhere do none of it, and bounds of their time have all kernels.
        """
        if not self.rules.transposes_kernels:
            return
        eqns = self.jaxpr.eqns
        gradients = [v for eqn in eqns for v in transposed_results(eqn)]
        read = [v for eqn in eqns for v in transposed_operands(eqn)] if gradients else []
        inputs = set(self.jaxpr.invars) - {self._root(v) for v in read}
        for gradient in gradients:
            updating = self._updating(gradient)
            made: list[Any] = [v for number in updating for v in eqns[number].outvars]
            again = len({v.aval.dtype for v in made if _END in self.readers[v]}) - 1
            seen: set[Any] = set()
            for number in updating if again >= 0 else ():
                for place, v in enumerate(self.operands[number]):
                    copied = v in inputs and extent([v]) == extent([gradient])
                    if v not in seen and (v is gradient or copied):
                        seen.add(v)
                        reads[number][place] += again + 2 * copied

    def _updating(self, gradient: Any) -> list[int]:
        """Return what is fused with all that reads an array, and what that computes of others, in order."""
        after, left = set[int](), list(self.readers[gradient])
        while left:
            if (number := left.pop()) >= 0 and number not in after and self.kinds[number] == "fused":
                after.add(number)
                left += [r for v in self.jaxpr.eqns[number].outvars for r in self.readers[v]]
        found, left = set[int](), list(after)
        while left:
            if (number := left.pop()) not in found:
                found.add(number)
                makers = {self.makers.get(v, _END) for v in self.operands[number]} - self.stored
                left += [maker for maker in makers if maker >= 0 and self.kinds[maker] == "fused"]
        return sorted(found)

    def _count_transposed(self, reads: list[list[float]], kernels: list[int]) -> list[float]:
        """Add what copies of arrays in other layouts read and write, with the first equation that reads each.

        Returns what is wasted on each equation's behalf.
        """
        self._count_kernels(reads, kernels)
        self._count_updates(reads)
        wasted = [0.0] * len(self.jaxpr.eqns)
        if not self.rules.transposes_operands:
            return wasted
        seen: defaultdict[Any, set[Hashable]] = defaultdict(set[Hashable])
        for number, transposed in enumerate(self.layouts.transposed):
            for place, layout in transposed.items():
                v = self.operands[number][place]
                if self.kinds[number] == "view" or layout in seen[v] or not self._is_copied(v, number):
                    continue
                payer, maker = number, self.makers.get(v)
                if maker is not None and not seen[v] and self._is_made_transposed(v, maker):
                    payer = maker
                else:
                    reads[number][place] += 2
                    kernels[number] += 1
                seen[v].add(layout)
                wasted[payer] += writings(layout, v.aval.dtype.itemsize, self.rules.piece_bytes) - 1
        return wasted

    def _is_made_transposed(self, v: Any, maker: int) -> bool:
        """Return true if what makes an array writes it in another layout than its own, since all readers need one."""
        if self.kinds[maker] != "fused" or maker in self.ends:
            return False
        return all(self._is_transposed(v, reader) for reader in self.readers[v])

    def _is_copied(self, v: Any, number: int) -> bool:
        """Return true if an equation reads a copy of what it has transposed: several kernels do, or one that is apart.

        One kernel of equations element by element reads the array as it lies.
        """
        maker = self.makers.get(v)
        if v is None or (maker is not None and not (self._is_written(maker) or maker in self.stored)):
            return False
        if self.kinds[number] == "apart":
            return True
        readers = [r for r in self.readers[v] if self._is_transposed(v, r) and self.kinds[r] != "apart"]
        return len(_union([self.kernels[reader] for reader in readers])) > 1

    def _copy_input(self, v: Any, reads: list[list[float]], kernels: list[int]) -> None:
        """Count what a stack of an input of the body takes with the first equation that reads it."""
        number = next((n for n in self.readers[v] if n >= 0), None)
        if number is not None:
            reads[number][self.operands[number].index(v)] += 3
            kernels[number] += 1


def _union(sets: list[frozenset[Any]]) -> frozenset[Any]:
    return sets[0] if len(sets) == 1 else frozenset[Any]().union(*sets)


def _bytes(atoms: Any) -> list[int]:
    return [aval_bytes(atom.aval) for atom in atoms]
