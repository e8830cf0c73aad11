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

import numpy as np

from autopar.compiler.costs import aval_bytes
from autopar.compiler.intra_op.block_plan import planned
from autopar.compiler.intra_op.choice_problem import Optimum, Problem
from autopar.compiler.intra_op.ilp import solve
from autopar.compiler.intra_op.layout import num_shards
from autopar.compiler.intra_op.reductions import Reduced, reduce_problem
from autopar.compiler.intra_op.solution_cache import cached, problem_fingerprint
from autopar.compiler.intra_op.task_group import GroupPlan, TaskChoices


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
        self, prices: Mapping[str, float], *, time_limit_s: float = 60.0, cache_directory: Path | None = None
    ) -> GroupPlan:
        """The best layouts, as `TaskChoices.best`: `prices` are seconds for every byte that a device holds."""
        problem = self._priced(prices)

        def solved() -> Optimum:
            return solve(problem, time_limit_s=time_limit_s)

        if cache_directory is None:
            found = solved()
        else:
            found = cached(problem_fingerprint(problem, str(time_limit_s)), cache_directory, solved)
        reduced, choices = self._reduced, self.choices
        optimum = replace(
            found,
            states=reduced.expand(found.states),
            value=found.value + reduced.constant,
            lower_bound=found.lower_bound + reduced.constant,
        )
        return GroupPlan(
            layouts={n: None if c is None else c.layouts[optimum.states[c.node]] for n, c in choices.values.items()},
            tasks={
                task.name: planned(block, optimum.states)
                for task, block in zip(choices.tasks, choices.blocks, strict=True)
            },
            optimum=optimum,
        )

    def _priced(self, prices: Mapping[str, float]) -> Problem:
        assert prices.keys() <= set(self.names), "a price for a value that was not to have one"
        core, costs = self._reduced.core, list(self._reduced.core.costs)
        places = {node: place for place, node in enumerate(self._reduced.nodes)}
        for name, price in sorted(prices.items()):
            choice = self.choices.values.get(name)
            if choice is not None:
                place = places[choice.node]
                shards = [
                    num_shards(choice.layouts[state], self.choices.table.mesh) for state in self._reduced.states[place]
                ]
                costs[place] = costs[place] + price * aval_bytes(self.choices.types[name]) / np.array(shards)
        return replace(core, costs=tuple(costs))
