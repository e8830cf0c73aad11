"""Put what a layer computes again, and the backward equations that read it, into one equation (`remat2`).

XLA does not join such an equation with the equal work in the forward pass, and does not begin it before the cotangents
that it reads are there.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from autopar.compiler.jaxprs import compat as jc


@dataclass(frozen=True, kw_only=True)
class Recomputed:
    """The region of one layer, by indices of equations."""

    again: frozenset[int]
    """Equations of the forward pass that run again."""
    backward: frozenset[int]
    """Equations of the backward pass that move into the region."""

    @property
    def equations(self) -> frozenset[int]:
        """All of them; those that run again are also where they were."""
        return self.again | self.backward

    @property
    def place(self) -> int:
        """The place of the region in program order, the one of the first of its backward equations."""
        return min(self.backward)


def find_region(
    eqns: Sequence[jc.JaxprEqn],
    producer: Mapping[jc.Var, int],
    backward: Collection[int],
    *,
    runs_again: Callable[[jc.Var], bool],
    is_cheap: Callable[[int], bool],
) -> Recomputed | None:
    """Return the region of the backward equations of a layer that read what `runs_again`; None if none of them does.

    Equations that are cheap run again as well where they are read, rather than keep their results.
    """
    moved = _between(eqns, {i for i in backward if any(map(runs_again, jc.operands(eqns[i])))}, backward)
    if not moved:
        return None
    again: set[int] = set()
    stack = [v for i in moved for v in jc.operands(eqns[i])]
    while stack:
        v = stack.pop()
        i = producer.get(v)
        if i is not None and i not in again and (runs_again(v) or is_cheap(i)):
            again.add(i)
            stack.extend(jc.operands(eqns[i]))
    return Recomputed(again=frozenset(again), backward=frozenset(moved))


def _between(eqns: Sequence[jc.JaxprEqn], ends: Set[int], among: Collection[int]) -> set[int]:
    """These equations, and those on the way from one of them to another."""
    made: set[jc.Var] = set()
    after: set[int] = set()
    for i in sorted(among):
        if i in ends or not made.isdisjoint(jc.operands(eqns[i])):
            after.add(i)
            made.update(eqns[i].outvars)
    needed: set[jc.Var] = set()
    between: set[int] = set()
    for i in sorted(after, reverse=True):
        if i in ends or not needed.isdisjoint(eqns[i].outvars):
            between.add(i)
            needed.update(jc.operands(eqns[i]))
    return between


def region_equation(
    closed: jc.ClosedJaxpr, region: Recomputed, readers: Mapping[jc.Var, Collection[int]]
) -> jc.JaxprEqn:
    """Return the region as one equation of the program, with those results that equations outside of it read.

    `readers` are the equations that read a value, and any other number for the results of the program.
    """
    jaxpr, _ = jc.open_jaxpr(closed)
    backward = [jaxpr.eqns[i] for i in sorted(region.backward)]
    eqns = [*(jaxpr.eqns[i] for i in sorted(region.again)), *backward]
    made = {v for eqn in eqns for v in eqn.outvars}
    operands = [v for v in dict.fromkeys(v for eqn in eqns for v in jc.operands(eqn)) if v not in made]
    results = [v for eqn in backward for v in eqn.outvars if not region.backward.issuperset(readers.get(v, ()))]
    copies = {v: jc.value_of_type(v.aval) for v in (*operands, *made)}

    def copied(eqn: jc.JaxprEqn) -> jc.JaxprEqn:
        invars = [atom if isinstance(atom, jc.Literal) else copies[atom] for atom in eqn.invars]
        return eqn.replace(invars=invars, outvars=[copies[v] for v in eqn.outvars])

    inside = list(map(copied, eqns))
    body = jc.part_of(closed, inside, [copies[v] for v in operands], [copies[v] for v in results])
    return jc.recomputation(body, operands, results, backward)


def in_order(eqns: Sequence[jc.JaxprEqn], places: Sequence[int]) -> list[int]:
    """Return the numbers of equations as near to the order of their places as what they read allows."""
    ranked = sorted(range(len(eqns)), key=places.__getitem__)
    makers = {v: rank for rank, number in enumerate(ranked) for v in eqns[number].outvars}
    needs: dict[int, set[int]] = {}
    ordered: set[int] = set()
    for rank, number in enumerate(ranked):
        needs[rank] = {makers[v] for v in jc.operands(eqns[number]) if v in makers}
        if jc.keeps_order(eqns[number]):
            needs[rank] |= ordered
            ordered = {rank}
    return [ranked[rank] for rank in _sorted(needs)]


def _sorted(needs: Mapping[int, set[int]]) -> Iterator[int]:
    """Keys after those that they need, the smallest first."""
    waits = {key: len(needed) for key, needed in needs.items()}
    followers: defaultdict[int, list[int]] = defaultdict(list)
    for key, needed in needs.items():
        for other in needed:
            followers[other].append(key)
    ready = sorted(key for key, count in waits.items() if not count)
    done = 0
    while ready:
        key = heapq.heappop(ready)
        yield key
        done += 1
        for follower in followers[key]:
            waits[follower] -= 1
            if not waits[follower]:
                heapq.heappush(ready, follower)
    assert done == len(needs), "regions wait for one another"
