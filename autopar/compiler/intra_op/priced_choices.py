"""Plan a group of tasks for several prices of memory: what no price touches is reduced once, for all of them.

    TaskChoices, names of values that may have a price   ->   a smaller problem, in which these values are still free
    that, prices                                         ->   GroupPlan

Reductions are exact whatever the costs of nodes that they leave alone (`reduce_problem` calls them protected).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from autopar.compiler.intra_op.task_group import GroupPlan, TaskChoices
from autopar.compiler.solver.presolve import Reduced, reduce_problem
from autopar.compiler.solver.problem import Problem
from autopar.compiler.solver.solve import MAX_GAP, solve_or_recall


@dataclass(frozen=True, kw_only=True, eq=False)
class PricedChoices:
    """The choices of a group, of whose values those with these names may have a price."""

    choices: TaskChoices
    names: Collection[str]

    @cached_property
    def _reduced(self) -> Reduced:
        values = self.choices.values
        protected = {choice.node for name in self.names if (choice := values.get(name)) is not None}
        return reduce_problem(self.choices.table.problem(), protected)

    def best(
        self,
        prices: Mapping[str, float],
        *,
        time_limit_s: float = 60.0,
        max_gap: float = MAX_GAP,
        cache_directory: Path | None = None,
    ) -> GroupPlan:
        """The best layouts, as `TaskChoices.best`, up to a gap: a share of their price and time."""
        problem = self._priced(prices)
        found = solve_or_recall(problem, cache_directory, time_limit_s=time_limit_s, max_gap=max_gap)
        return self.choices.plan_of(
            replace(
                found,
                states=self._reduced.expand(found.states),
                value=found.value + self._reduced.constant,
                lower_bound=found.lower_bound + self._reduced.constant,
            )
        )

    def _priced(self, prices: Mapping[str, float]) -> Problem:
        assert prices.keys() <= set(self.names), "a price for a value that was not to have one"
        charges, reduced = self.choices.charges(prices), self._reduced
        costs = tuple(
            cost + charges[node][states] if node in charges else cost
            for node, states, cost in zip(reduced.nodes, reduced.states, reduced.core.costs, strict=True)
        )
        return replace(reduced.core, costs=costs)
