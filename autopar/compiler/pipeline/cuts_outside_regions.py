"""Find where a layer may begin without cutting through a region of `jax.checkpoint`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.primitives import REMAT
from autopar.compiler.pipeline.phases import Phase, Phases, parameter_sources


def cut_allowed(phases: Phases, order: Sequence[int]) -> list[bool]:
    """For each position of `order`, the forward equations, whether a layer may begin there without cutting a region.

    A region's forward reaches from what follows its input activations to the last equation that reads one of its own
    parameters: those that no other backward equation reads.
    """
    forward = _Forward(phases, order)
    allowed = [True] * len(order)
    for first, last in forward.spans():
        allowed[first + 1 : last + 1] = [False] * (last - first)
    return allowed


class _Forward:
    """Who reads what along the forward, by position in `order`."""

    def __init__(self, phases: Phases, order: Sequence[int]) -> None:
        self.eqns = phases.equations
        self.order = order
        self.parameters = parameter_sources(phases)
        self.backward = [eqn for eqn, own in zip(self.eqns, phases.of, strict=True) if Phase.BACKWARD in own]
        self.producer = {v: p for p, i in enumerate(order) for v in self.eqns[i].outvars}
        self.readers: dict[jc.Var, list[int]] = {}
        for p, i in enumerate(order):
            for parameter in self._read(self.eqns[i]):
                self.readers.setdefault(parameter, []).append(p)

    def spans(self) -> Iterator[tuple[int, int]]:
        """The first and last position of each region's forward."""
        num_readers = Counter(v for eqn in self.backward for v in self._read(eqn))
        for eqn in self.backward:
            if eqn.primitive.name in REMAT:
                own = [v for v in self._read(eqn) if num_readers[v] == 1 and v in self.readers]
                inside = self._inside(eqn, own)
                if inside:
                    yield min(inside), max(inside)

    def _read(self, eqn: jc.JaxprEqn) -> set[jc.Var]:
        return {p for v in jc.operands(eqn) for p in self.parameters.get(v, ())}

    def _inside(self, eqn: jc.JaxprEqn, own: Sequence[jc.Var]) -> set[int]:
        """The readers of the region's own parameters, and what leads there from its input activations."""
        activations = {v for v in jc.operands(eqn) if v in self.producer}
        before = self._ancestors([self.producer[v] for v in activations], set())
        after = set(activations)
        for i in self.order:
            if not after.isdisjoint(jc.operands(self.eqns[i])):
                after.update(self.eqns[i].outvars)
        follows = {p for p, i in enumerate(self.order) if not after.isdisjoint(jc.operands(self.eqns[i]))}
        # A parameter that is also read elsewhere (a tied embedding) says nothing about the region.
        readers = [p for v in own if not activations or follows.issuperset(self.readers[v]) for p in self.readers[v]]
        return {*readers, *(self._ancestors(readers, before) & follows)}

    def _ancestors(self, positions: Iterable[int], known: Collection[int]) -> set[int]:
        """These positions and those that they follow from, without the known ones."""
        ancestors: set[int] = set()
        stack = list(positions)
        while stack:
            p = stack.pop()
            if p not in ancestors and p not in known:
                ancestors.add(p)
                operands = jc.operands(self.eqns[self.order[p]])
                stack.extend(self.producer[v] for v in operands if v in self.producer)
        return ancestors
