"""Keep what the graphs of all programs on one mesh have in common: the choices of equal equations, and reshardings.

    equation                             ->  Alternatives     strategies, with the layouts and seconds of each
    layouts of two nodes, a shape        ->  seconds for no bytes, and for every byte, of every pair

Both depend on the mesh and its costs alone. Layers repeat, and microbatches, depths and stages change few types: so
nearly all that a graph asks for was there before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autopar.compiler.costs.compute import seconds_by_strategy
from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.fusion import Traffic
from autopar.compiler.resharding.costs import STATE_COPIES, ReshardLines, reshard_lines, split_alike
from autopar.compiler.sharding.layout import Layout, num_shards, used_axes
from autopar.compiler.sharding.rule import Rule
from autopar.compiler.sharding.strategies import Strategy, possible_sums, strategies

FloatArray = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.intp]

MOST_MESHES = 64
"""Meshes whose tables are kept, those used last."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Alternatives:
    """The strategies of equal equations: the layouts that each reads and gives, and its seconds as it is fused."""

    strategies: tuple[Strategy, ...]
    operands: tuple[tuple[Layout, ...], ...]
    results: tuple[tuple[Layout, ...], ...]
    known: dict[Traffic, FloatArray] = field(default_factory=dict[Traffic, FloatArray])

    @classmethod
    def of(cls, eqn: jc.JaxprEqn, every: tuple[Strategy, ...]) -> Alternatives:
        """Return the columns of some strategies."""
        return cls(
            strategies=every,
            operands=tuple(tuple([s.operands[place] for s in every]) for place in range(len(eqn.invars))),
            results=tuple(tuple([s.results[place] for s in every]) for place in range(len(eqn.outvars))),
        )

    def seconds(self, eqn: jc.JaxprEqn, traffic: Traffic, mesh_costs: MeshCosts) -> FloatArray:
        """Return the seconds of an equation by each strategy."""
        found = self.known.get(traffic)
        if found is None:
            found = self.known[traffic] = seconds_by_strategy(eqn, self.strategies, mesh_costs, traffic)
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class LayoutList:
    """The different layouts among those of a node's options, and which of them each option has."""

    number: int
    layouts: tuple[Layout, ...]
    of_option: IndexArray
    has_sums: bool
    """True if some of them are sums that are still to be made."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MeshTables:
    """The choices of equations on a mesh, and its reshardings; `costs` price them."""

    costs: MeshCosts
    choices: dict[Hashable, Alternatives] = field(default_factory=dict[Hashable, Alternatives])
    lists: dict[tuple[Layout, ...], LayoutList] = field(default_factory=dict[tuple[Layout, ...], LayoutList])
    lines: dict[Hashable, ReshardLines] = field(default_factory=dict[Hashable, ReshardLines])

    def alternatives(
        self, eqn: jc.JaxprEqn, kind: Hashable, maybe_partial: frozenset[int], rule: Callable[[jc.JaxprEqn], Rule]
    ) -> Alternatives:
        """Return the strategies of an equation whose `equation_classes` entry is `kind`."""
        key = (kind, possible_sums(eqn, maybe_partial))
        if key not in self.choices:
            every = strategies(eqn, rule(eqn), self.costs.mesh, maybe_partial=maybe_partial)
            self.choices[key] = Alternatives.of(eqn, every)
        return self.choices[key]

    def layout_list(self, layouts: tuple[Layout, ...]) -> LayoutList:
        """Return the different ones of some layouts."""
        found = self.lists.get(layouts)
        if found is None:
            number = {layout: place for place, layout in enumerate(dict.fromkeys(layouts))}
            found = self.lists[layouts] = LayoutList(
                number=len(self.lists),
                layouts=tuple(number),
                of_option=np.array([number[layout] for layout in layouts], np.intp),
                has_sums=any(layout.partial for layout in number),
            )
        return found

    def reshard_s(
        self, source: LayoutList, target: LayoutList, shape: tuple[int, ...], nbytes: float, *, in_update: bool
    ) -> FloatArray:
        """Return the seconds of bringing an array of so many bytes from every layout of one list to every one of other.

        Collectives of the update share their latency.
        """
        alike = split_alike(shape, self.costs.mesh)
        key = (source.number, target.number, alike, in_update)
        if key not in self.lines:
            costs = self.costs.combined() if in_update else self.costs
            self.lines[key] = reshard_lines(source.layouts, target.layouts, alike, costs)
        return self.lines[key].seconds(nbytes)

    def state_copies_s(
        self, source: LayoutList, target: LayoutList, shape: tuple[int, ...], nbytes: float
    ) -> FloatArray:
        """Return the seconds of copying state to another place and back, of so many bytes in the layouts of `target`.

        It is copied where an array comes from each layout of `source` by a sum or a gather.
        """
        mesh, machine = self.costs.mesh, self.costs.machine
        made = [[_is_collected(before, after) for after in target.layouts] for before in source.layouts]
        parts = [nbytes / num_shards(shape, layout, mesh) for layout in target.layouts]
        return np.array(made) * STATE_COPIES * np.array(parts) / machine.memory_bandwidth


def _is_collected(source: Layout, target: Layout) -> bool:
    """Return true if an array is summed or gathered over an axis on its way from one layout to another."""
    return not (set(source.partial) <= set(target.partial) and set(used_axes(source)) <= set(used_axes(target)))


@functools.lru_cache(maxsize=MOST_MESHES)
def mesh_tables(mesh_costs: MeshCosts) -> MeshTables:
    """Return the tables of a mesh, which grow with what is planned for it."""
    return MeshTables(costs=mesh_costs)
