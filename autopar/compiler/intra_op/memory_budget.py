"""Search for the best plan that fits a device's memory, or say why there is none.

The memory of a choice is modelled by `memory_rows`, whose rows bound it while the solver searches, and estimated from
the program that it means. The rows of a choice are tightened by what the estimate says more than they do. The model is
not exact: what the compiled step may need beyond the modelled peak, the compiler's `headroom`, is kept free.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autopar.compiler.costs.compilers import GPU, Compiler
from autopar.compiler.intra_op.choice_graph import BlockChoices, ChoiceTable, planned
from autopar.compiler.intra_op.memory_rows import modelled_memory
from autopar.compiler.memory.estimate import MemoryEstimate, peak_memory
from autopar.compiler.solver.budget import NoneWithin, minimize_within_limits
from autopar.compiler.solver.feasibility import Measured
from autopar.compiler.solver.problem import Optimum, States
from autopar.compiler.spmd.local_program import local_block
from autopar.errors import MemoryTooSmall

_NUM_NAMED = 4
# The rows of one choice are no better than this for others.
_MAX_GAP = 0.01
# By this share of the budget the rows of a choice may be wrong about others.
_ROW_ERROR = 0.02
# By this share of the budget the model may differ from the estimate; beyond, the estimate is not looked at.
_MODEL_ERROR = 0.1


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

    @property
    def limit_bytes(self) -> float:
        """What the modelled peak must not exceed."""
        return self.budget_bytes / (1 + self.compiler.headroom)

    def measure(self, states: States) -> Measured:
        """By how many bytes a solution exceeds the budget, and the rows of the moments when it does."""
        limit = self.limit_bytes
        memory = modelled_memory(self.choices, self.table, states, self.donated, compiler=self.compiler)
        if memory.peak_bytes > (1 + _MODEL_ERROR) * limit:
            return Measured(excess=memory.peak_bytes - limit, rows=memory.rows_above(limit))
        peak_bytes = self.estimate(states).peak_bytes
        if peak_bytes <= limit:
            return Measured(excess=peak_bytes - limit, rows=())
        tighter = limit - max(0.0, peak_bytes - memory.peak_bytes)
        return Measured(excess=peak_bytes - limit, rows=memory.rows_above(min(tighter, memory.peak_bytes * (1 - 1e-6))))


def solve_within_memory(search: MemorySearch, *, time_limit_s: float) -> Optimum:
    """The best plan within the budget. Raises `MemoryTooSmall` if none is found."""
    limit = search.limit_bytes
    try:
        return minimize_within_limits(
            search.table.problem(),
            search.measure,
            time_limit_s=time_limit_s,
            max_gap=_MAX_GAP,
            clearly=_ROW_ERROR * limit,
        )
    except NoneWithin as none:
        least = search.estimate(none.lowered.states)
        raise MemoryTooSmall(_lesson(search, least, limit + none.lowered.bound)) from None


def _lesson(search: MemorySearch, least: MemoryEstimate, bound_bytes: float) -> str:
    named = "; ".join(f"{_size(nbytes)} for {what}" for what, nbytes in least.largest[:_NUM_NAMED])
    needed = search.compiler.needed_bytes(least.peak_bytes)
    bound = min(needed, search.compiler.needed_bytes(bound_bytes))
    unsure = "" if bound > search.budget_bytes else "No plan was found, nor proof that there is none. "
    return (
        f"{unsure}The step needs at least {_size(bound)} per device on the mesh {search.table.mesh.shape}, and "
        f"{_size(needed)} by the plan of least memory that was found, of which {_size(least.arguments_bytes)} are its "
        f"arguments; the budget is {_size(search.budget_bytes)}. Most is taken at {least.at}: {named}. Give it more "
        "devices, split the batch into more microbatches, recompute layers (jax.checkpoint), donate the state, or "
        f"raise the budget to {_size(needed)}."
    )


def _size(nbytes: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes / 1024:.1f} KiB"
