"""Choose the values that a backward task recomputes from others that it is given, instead of having them kept.

    equations of a forward task, those of later tasks  ->  values to keep

Differentiation saves every operand of every elementwise product: of a GELU six arrays of one size, all but two of which
take a few additions and multiplications of the others. Inside one executable XLA fuses these into their readers;
between two executables it cannot. So a value is given up where cheap equations make it from values that are kept
anyway, or from fewer bytes (Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174, section 3).
Results of products, reductions, exponentials and divisions are kept; so is what a product reads, which may have been
brought into another layout for it.

Bytes are counted per element, and those of a value that is broadcast to a larger size count nothing. So the choice is
the same for any number of examples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import primitives

_CHEAP = (
    primitives.ADDITIONS
    | primitives.RESHAPES
    | primitives.COPIES
    | primitives.names(
        """
        abs and broadcast_in_dim ceil clamp convert_element_type copysign eq floor ge gt integer_pow is_finite le lt max
        min mul ne neg not or reduce_precision round select_n sign square sub xor
        """
    )
)

_MOST_EQUATIONS = 64
"""Most equations by which a value is made again: an accelerator does some tens of operations while it reads a byte."""
_LAID_OUT = primitives.PRODUCTS | primitives.ATTENTION | primitives.FOREIGN


def values_to_keep(
    producers: Mapping[jc.Var, jc.JaxprEqn], readers: Sequence[jc.JaxprEqn], is_free: Callable[[jc.Var], bool]
) -> Set[jc.Var]:
    """Return the values of an earlier task to keep for later equations, but for free ones.

    `producers` are the equations of that task, by what they make, in program order.
    """
    made = {v for eqn in readers for v in eqn.outvars}
    kept = {v for eqn in readers for v in jc.operands(eqn) if v not in made and not is_free(v)}
    fixed = {v for eqn in readers if eqn.primitive.name in _LAID_OUT for v in jc.operands(eqn)}
    fixed |= {v for v, eqn in producers.items() if not _is_cheap(eqn) or _size(v) == 1}
    task = _EarlierTask(producers=producers, fixed=fixed, is_free=is_free)
    before: set[jc.Var] = set()
    while kept != before:
        before = kept
        kept = _give_up_together(task, _give_up_one_by_one(task, kept))
    return kept


def _is_cheap(eqn: jc.JaxprEqn) -> bool:
    """Return whether to compute an equation again takes hardly longer than to read its result."""
    return eqn.primitive.name in _CHEAP and not eqn.effects


def _give_up_one_by_one(task: _EarlierTask, kept: set[jc.Var]) -> set[jc.Var]:
    """Give up each value that can be made from fewer bytes, in program order: so some of a long chain are kept."""
    kept = set(kept)
    for v in task.order:
        if v in kept and v not in task.fixed:
            others = task.sources(v, kept)
            if sum(others.values()) < _bytes_of_element(v):
                kept.remove(v)
                kept |= others.keys()
    return kept


def _give_up_together(task: _EarlierTask, kept: set[jc.Var]) -> set[jc.Var]:
    """Give up values that are made from the same sources, where these have fewer bytes than the values together."""
    alike: dict[frozenset[jc.Var], list[jc.Var]] = {}
    prices: dict[frozenset[jc.Var], int] = {}
    for v in task.order:
        if v in kept and v not in task.fixed:
            others = task.sources(v, kept, at_any_price=True)
            alike.setdefault(frozenset(others), []).append(v)
            prices[frozenset(others)] = max(sum(others.values()), prices.get(frozenset(others), 0))
    for others, values in alike.items():
        if prices[others] < sum(map(_bytes_of_element, values)):
            kept = (kept - set(values)) | others
    return kept


@dataclass(frozen=True, kw_only=True, eq=False)
class _EarlierTask:
    """The task whose values are kept or not, and what else has to be kept to make one of them again."""

    producers: Mapping[jc.Var, jc.JaxprEqn]
    fixed: Collection[jc.Var]
    """Values that are kept in any case, if they are needed."""
    is_free: Callable[[jc.Var], bool]

    @cached_property
    def order(self) -> dict[jc.Var, int]:
        """The values with their places in program order."""
        return {v: place for place, v in enumerate(self.producers)}

    def sources(self, v: jc.Var, kept: Collection[jc.Var], *, at_any_price: bool = False) -> dict[jc.Var, int]:
        """Return the values beside `kept` that a value can be made from, with their bytes per element.

        They are the nearest of fewest bytes; `at_any_price` the farthest.
        """
        known: dict[tuple[jc.Var, bool], dict[jc.Var, int]] = {}

        def of_operands(u: jc.Var, spread: bool) -> dict[jc.Var, int]:
            found: dict[jc.Var, int] = {}
            for w in jc.operands(self.producers[u]):
                if w not in kept and not self.is_free(w):
                    to_more = spread or _size(w) < _size(u)
                    for source, nbytes in known.get((w, to_more), {w: 0 if to_more else _bytes_of_element(w)}).items():
                        found[source] = max(nbytes, found.get(source, 0))
            return found

        for u in self._made_on_the_way(v, kept):
            for spread in (False, True):
                found, others = {u: 0 if spread else _bytes_of_element(u)}, of_operands(u, spread)
                known[u, spread] = others if at_any_price or sum(others.values()) < found[u] or not others else found
        return of_operands(v, False)

    def _made_on_the_way(self, v: jc.Var, kept: Collection[jc.Var]) -> list[jc.Var]:
        """Return, in program order, the nearest ancestors of a value that cheap equations make."""
        found: set[jc.Var] = set()
        nearest = deque([v])
        while nearest and len(found) < _MOST_EQUATIONS:
            for w in jc.operands(self.producers[nearest.popleft()]):
                producer = None if w in kept or w in found or self.is_free(w) else self.producers.get(w)
                if producer is not None and _is_cheap(producer):
                    found.add(w)
                    nearest.append(w)
        return sorted(found, key=self.order.__getitem__)


def _size(v: jc.Var) -> int:
    aval: Any = v.aval
    return aval.size


def _bytes_of_element(v: jc.Var) -> int:
    aval: Any = v.aval
    return aval.dtype.itemsize
