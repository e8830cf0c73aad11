"""Choose what a backward task computes again of those layers of its stage that are, one by one.

    forward and backward equations of a stage, their layers  ->  regions

Each layer runs again within a region, which keeps its values until its backward pass and no longer. What layers hand on
is kept for every microbatch. The last layer does not run again where the forward pass is in the same task. Where the
backward pass waits for all microbatches (statistics of the batch, examples that meet all others, a second gradient) it
is in a later round than the forward pass; layers of earlier rounds run again there as well.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.primitives import REMAT
from autopar.compiler.pipeline.phases import Phase, Phases
from autopar.compiler.pipeline.regions import Recomputed, find_region


@dataclass(frozen=True, kw_only=True, eq=False)
class StageEquations:
    """The backward equations of one stage in a round, and the forward ones until then, by index."""

    phases: Phases
    layer_of: Mapping[int, int]
    """The layer of each equation that runs with the microbatches."""
    forward: Set[int]
    backward: Set[int]
    again: Collection[int]
    """The layers that are computed again."""
    together: bool
    """True if the backward pass is in one task with a forward pass."""

    def recomputed(self) -> tuple[list[Recomputed], set[int]]:
        """Return the regions of the layers, and the forward equations that run again outside of any.

        Regions move equations. Where some of the backward pass have to keep their order, layers run again as they are;
        if `together`, none does.
        """
        eqns = self.phases.equations
        may_repeat = {i for i in self.forward if not eqns[i].effects and eqns[i].primitive.name not in REMAT}
        backward = self._backward_by_layers()
        if not backward or any(jc.keeps_order(eqns[i]) for i in self.backward):
            mine = [i for i in may_repeat if self.layer_of[i] in self.again]
            return [], set() if self.together else self._needed(self.backward, mine)
        forward: defaultdict[int, set[int]] = defaultdict(set)
        for i in may_repeat:
            forward[self.layer_of[i]].add(i)
        layers = sorted(backward, reverse=True)
        draws = self._draws({layer: forward[layer] | backward[layer] for layer in layers})
        regions: list[Recomputed] = []
        kept = set[jc.Var]()
        for number, layer in enumerate(layers):
            runs_again = layer in self.again and (number or not self.together)
            again = forward[layer] | draws[layer] if runs_again else set[int]()
            region = self._region(again, backward[layer], kept)
            kept = self._read_by(backward[layer] if region is None else backward[layer] | region.again)
            regions += [] if region is None else [region]
        return regions, set()

    def _backward_by_layers(self) -> dict[int, set[int]]:
        """The backward equations by layers, none of which waits for a lower one."""
        layers: dict[int, int] = {}
        last = max((self.layer_of[i] for i in self.forward), default=0)
        for i in sorted(self.backward):
            made = (self.phases.producer.get(v) for v in self.phases.operands[i])
            layers[i] = min([self.layer_of.get(i, last), *(layers[j] for j in made if j in layers)])
        found: defaultdict[int, set[int]] = defaultdict(set)
        for i, layer in layers.items():
            found[layer].add(i)
        return dict(found)

    def _region(self, again: Collection[int], backward: Collection[int], kept: Set[jc.Var]) -> Recomputed | None:
        """Return the region of one layer, which has what is `kept` for the layer behind it just before."""
        phases = self.phases
        return find_region(
            phases.equations,
            phases.producer,
            backward,
            runs_again=lambda v: phases.producer.get(v) in again and v not in kept,
            is_cheap=lambda i: self._is_unplaced(i) and phases.costly.isdisjoint(phases.equations[i].outvars),
        )

    def _needed(self, readers: Collection[int], among: Collection[int]) -> set[int]:
        """Return these forward equations that others need, directly or through each other."""
        wanted, needed = self._read_by(readers), set[int]()
        for i in sorted(among, reverse=True):
            if not wanted.isdisjoint(self.phases.equations[i].outvars):
                needed.add(i)
                wanted.update(self.phases.operands[i])
        return needed

    def _read_by(self, equations: Iterable[int]) -> set[jc.Var]:
        return {v for i in equations for v in self.phases.operands[i]}

    def _draws(self, layers: Mapping[int, Collection[int]]) -> dict[int, set[int]]:
        """Return for each layer the unplaced equations (casts of parameters, dropout draws) that it alone needs."""
        unplaced = {layer: self._unplaced_for(own) for layer, own in layers.items()}
        num_readers = Counter(i for own in unplaced.values() for i in own)
        return {layer: {i for i in own if num_readers[i] == 1} for layer, own in unplaced.items()}

    def _unplaced_for(self, equations: Iterable[int]) -> set[int]:
        found, stack = set[int](), list(equations)
        while stack:
            for v in self.phases.operands[stack.pop()]:
                i = self.phases.producer.get(v)
                if i is not None and i not in found and self._is_unplaced(i):
                    found.add(i)
                    stack.append(i)
        return found

    def _is_unplaced(self, i: int) -> bool:
        return Phase.UNPLACED in self.phases.of[i] and not self.phases.equations[i].effects
