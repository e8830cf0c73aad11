"""Search for the best plan that fits a device's memory, or say why there is none.

The rows of `memory_rows` bound the modelled memory while the solver searches. The plan that comes out is written down
and estimated again; if it still needs more than the budget, the search is repeated with a tighter one. The model is not
exact: what the compiled step may need beyond the modelled peak, the compiler's `headroom`, is kept free.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.compiler.intra_op.block_plan import planned
from autopar.compiler.intra_op.choice_graph import BlockChoices, ChoiceTable
from autopar.compiler.intra_op.choice_problem import Infeasible, Optimum, Problem, Row, States, choice_value
from autopar.compiler.intra_op.compilers import GPU, Compiler
from autopar.compiler.intra_op.ilp import solve
from autopar.compiler.intra_op.local_program import local_block
from autopar.compiler.intra_op.memory_model import MemoryEstimate, peak_memory
from autopar.compiler.intra_op.memory_rows import memory_rows
from autopar.compiler.intra_op.minimize import Effort, minimize
from autopar.compiler.intra_op.rows import weights_as_costs
from autopar.errors import MemoryTooSmall, SolverFailed

_ATTEMPTS = 4
_ROUNDS = 8
# Below the budget by this share after a plan that did not fit.
_MARGIN = 0.005
_NUM_NAMED = 4
# The model of memory is no better than this.
_MAX_GAP = 0.005


@dataclass(frozen=True, kw_only=True, eq=False)
class MemorySearch:
    """A choice graph whose plans must fit `budget_bytes` on every device."""

    choices: BlockChoices
    table: ChoiceTable
    budget_bytes: float
    donated: Collection[int]
    compiler: Compiler = GPU

    def estimate(self, states: Sequence[int]) -> MemoryEstimate:
        """The modelled memory of the plan that a solution means."""
        block = local_block(self.choices.jaxpr, planned(self.choices, states), self.table.mesh)
        return peak_memory(block, self.table.mesh, self.donated, compiler=self.compiler)


def solve_within_memory(search: MemorySearch, *, time_limit_s: float) -> Optimum:
    """The best plan within the budget. Raises `MemoryTooSmall` if none is found."""
    began = time.monotonic()
    deadline = began + time_limit_s
    budget = search.budget_bytes / (1 + search.compiler.headroom)
    limit = budget
    problem = search.table.problem()
    for _ in range(_ATTEMPTS):
        rows = memory_rows(search.choices, search.table, limit, search.donated, compiler=search.compiler)
        try:
            optimum = solve(
                problem, violated_rows=rows, max_gap=_MAX_GAP, time_limit_s=max(1.0, deadline - time.monotonic())
            )
        except (Infeasible, SolverFailed):
            break
        peak_bytes = search.estimate(optimum.states).peak_bytes
        if peak_bytes <= budget:
            return optimum
        limit = min(limit, limit * budget / peak_bytes) * (1 - _MARGIN)
    states, least = least_memory(search, time_limit_s=time_limit_s)
    if least.peak_bytes > budget:
        raise MemoryTooSmall(_lesson(search, least))
    return Optimum(
        states=states,
        value=choice_value(problem, states),
        lower_bound=0.0,
        seconds=time.monotonic() - began,
        how="least memory",
    )


def least_memory(search: MemorySearch, *, time_limit_s: float) -> tuple[States, MemoryEstimate]:
    """The plan of least memory that is found by lowering the worst moments of all plans before, taken together."""
    deadline = time.monotonic() + time_limit_s
    problem = search.table.problem()
    states = minimize(problem, Effort(deadline=deadline, max_gap=0.01)).states
    assert states is not None
    best, least = states, search.estimate(states)
    rows: list[Row] = []
    for _ in range(_ROUNDS):
        limit = 0.9 * least.peak_bytes
        rows += memory_rows(search.choices, search.table, limit, search.donated, compiler=search.compiler)(states)
        states = minimize(_memory_alone(problem, rows), Effort(deadline=deadline, max_gap=0.01)).states
        if states is None or time.monotonic() > deadline:
            break
        found = search.estimate(states)
        if found.peak_bytes < least.peak_bytes:
            best, least = states, found
    return best, least


def _memory_alone(problem: Problem, rows: Sequence[Row]) -> Problem:
    """The problem whose costs are the bytes of all rows together."""
    nodes: dict[int, np.ndarray] = {}
    edges: dict[tuple[int, int], np.ndarray] = {}
    for row in rows:
        for node, weight in row.nodes.items():
            nodes[node] = nodes[node] + weight if node in nodes else weight
        for ends, weight in row.edges.items():
            edges[ends] = edges[ends] + weight if ends in edges else weight
    return weights_as_costs(problem, Row(name="memory", nodes=nodes, edges=edges, limit=0.0))


def _lesson(search: MemorySearch, least: MemoryEstimate) -> str:
    named = "; ".join(f"{_size(nbytes)} for {what}" for what, nbytes in least.largest[:_NUM_NAMED])
    mesh, needed = search.table.mesh, search.compiler.needed_bytes(least.peak_bytes)
    return (
        f"The step needs at least {_size(needed)} per device on the mesh {mesh.shape}, of which "
        f"{_size(least.arguments_bytes)} are its arguments; the budget is {_size(search.budget_bytes)}. "
        f"Most is taken at {least.at}: {named}. Give it more devices, split the batch into more microbatches, "
        "recompute layers (jax.checkpoint), donate the state, or raise the budget."
    )


def _size(nbytes: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes / 1024:.1f} KiB"
