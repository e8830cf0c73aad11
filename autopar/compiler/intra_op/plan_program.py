"""Plan a program on one logical mesh: rules, MRF problem, optimum, layouts.

    jaxpr, MeshCosts  ->  IntraOpPlan

`choice_graph` builds the problem and states the integer program. Within a memory budget, the program that an assignment
means is listed, and the rows of its worst moments (`memory_rows`) bound the others while the solver searches. The model
is not exact: the budget's headroom, which the compiled step may need beyond the modelled peak, is kept free.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.intra_op.choice_graph import (
    BlockGraph,
    NodeTable,
    Planner,
    block_plan_of,
    build_graph,
)
from autopar.compiler.intra_op.control_flow import enter
from autopar.compiler.intra_op.fold_layers import fold, unfolded
from autopar.compiler.intra_op.memory_rows import modelled_memory
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.equation_keys import equation_key, equation_keys
from autopar.compiler.jaxprs.flops import aval_bytes
from autopar.compiler.jaxprs.primitives import NESTED
from autopar.compiler.memory.estimate import MemoryBudget, MemoryEstimate, peak_memory
from autopar.compiler.sharding.layout import Layout, LogicalMesh, even_layouts
from autopar.compiler.sharding.replicated_values import below_split_size
from autopar.compiler.sharding.rule import Rule
from autopar.compiler.sharding.rule_lookup import sharding_rules
from autopar.compiler.sharding.strategies import Strategy
from autopar.compiler.solver.constrained import NoneWithin, minimize_within_limits
from autopar.compiler.solver.feasibility import Measured
from autopar.compiler.solver.optimum_cache import cached
from autopar.compiler.solver.problem import Assignment, NoneBelow, Optimum
from autopar.compiler.solver.solve import MAX_GAP, ROUND_OFF, solve
from autopar.compiler.spmd.block_plan import BlockPlan
from autopar.compiler.spmd.local_program import LocalBlock, local_block
from autopar.errors import MemoryTooSmall
from autopar.plain_text import size_words

FOLD_FROM = 1500
"""Equations below which planning every layer by itself takes a few seconds at most."""
GAP_WITHIN_MEMORY = 0.01
"""Gap up to which plans within a budget are proven: the rows of one assignment are no better than this for others."""
ROW_ERROR = 0.02
"""Share of the budget by which the rows of an assignment may be wrong about others."""
NUM_NAMED = 4
"""Arrays that an error names, the largest first."""


@dataclass(frozen=True, kw_only=True, eq=False)
class IntraOpPlan:
    """The layouts of every value, and how good they are."""

    optimum: Optimum
    choices: BlockGraph
    table: NodeTable
    program: PlannedProgram

    @property
    def plan(self) -> BlockPlan:
        """The layouts of every value."""
        return self.program.plan


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedProgram:
    """The program of every device by some layouts, and the memory that it needs."""

    plan: BlockPlan
    choices: BlockGraph
    table: NodeTable
    donated: Collection[int]

    @cached_property
    def block(self) -> LocalBlock:
        """The program of one device."""
        return local_block(self.choices.jaxpr, self.plan, self.table.mesh)

    @cached_property
    def memory(self) -> MemoryEstimate:
        """The memory that a device needs for it."""
        return peak_memory(self.block, self.table.mesh, self.donated, machine=self.table.mesh_costs.machine)


@dataclass(frozen=True, kw_only=True, eq=False)
class Constraints:
    """Fix decisions before the search: layouts of inputs and results by number, and which strategies are allowed."""

    inputs: dict[int, tuple[Layout, ...]] = field(default_factory=dict[int, tuple[Layout, ...]])
    results: dict[int, tuple[Layout, ...]] = field(default_factory=dict[int, tuple[Layout, ...]])
    restrict: Callable[[jc.JaxprEqn, tuple[Strategy, ...]], tuple[Strategy, ...]] = lambda eqn, every: every
    constraint_key: Callable[[jc.JaxprEqn], Hashable] = lambda eqn: None
    forms: Callable[[jc.Var, tuple[Layout, ...]], tuple[Layout, ...]] = lambda v, every: every
    """As in `Planner`."""
    keep_split: frozenset[int] = frozenset()
    """As in `Planner`."""


def plan_intra_op(
    closed: jc.ClosedJaxpr, mesh_costs: MeshCosts, *, below_s: float = math.inf, **options: Any
) -> IntraOpPlan:
    """Return the best layouts of a program's values, for the `options` of `intra_op_problem`.

    Raises `MemoryTooSmall` if no plan is found that fits, and `NoneBelow` as soon as it is known that none takes less
    than `below_s`.
    """
    return intra_op_problem(closed, mesh_costs, **options).best(below_s)


def intra_op_problem(
    closed: jc.ClosedJaxpr,
    mesh_costs: MeshCosts,
    *,
    state_outputs: dict[int, int],
    constraints: Constraints | None = None,
    input_names: Sequence[str] | None = None,
    fold_from: int = FOLD_FROM,
    budget: MemoryBudget | None = None,
    donated: Collection[int] = (),
    time_limit_s: float = 60.0,
    cache_directory: Path | None = None,
) -> IntraOpProblem:
    """Return the choice of layouts of a program's values. `state_outputs` maps results to the inputs they replace.

    Where the inputs have names, the layers of a program of at least `fold_from` equations are planned as one.
    The `budget` is of a device, the inputs `donated` being overwritten. Optima are kept in `cache_directory`, if one is
    given.
    """
    constraints = Constraints() if constraints is None else constraints
    budget = MemoryBudget() if budget is None else budget
    jaxpr, mesh = jc.open_jaxpr(closed)[0], mesh_costs.mesh
    table = NodeTable(mesh_costs=mesh_costs)
    inputs = [constraints.inputs.get(i, _layouts(v.aval, mesh)) for i, v in enumerate(jaxpr.invars)]
    folded = unfolded(jaxpr)
    if input_names is not None and _num_equations(jaxpr) >= fold_from:
        folded = fold(
            closed,
            input_names,
            [layouts is None for layouts in inputs],
            state_outputs=state_outputs,
            input_marks=constraints.inputs,
            equation_mark=constraints.constraint_key,
            bodies_from=fold_from,
        )
    choices = build_graph(
        planner_of(table, [jaxpr], constraints),
        jaxpr,
        inputs=inputs,
        results=[constraints.results.get(i, _layouts(v.aval, mesh)) for i, v in enumerate(jaxpr.outvars)],
        state_outputs=state_outputs,
        folded=folded,
    )
    if all_bytes(jaxpr) + mesh_costs.machine.product_workspace_bytes <= budget.limit_bytes:
        budget = replace(budget, nbytes=math.inf)  # whatever the layouts are, everything at once fits
    search = MemorySearch(
        choices=choices,
        table=table,
        budget=budget,
        donated=donated,
        input_names=[f"input {n}" for n in range(len(jaxpr.invars))] if input_names is None else input_names,
    )
    return IntraOpProblem(search=search, time_limit_s=time_limit_s, cache_directory=cache_directory)


def _num_equations(jaxpr: jc.Jaxpr) -> int:
    """Return the equations of a program and of the bodies of its loops."""
    bodies = [jc.open_jaxpr(jp.scan_of(eqn).body)[0] for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    return len(jaxpr.eqns) + sum(len(body.eqns) for body in bodies)


@dataclass(frozen=True, kw_only=True, eq=False)
class IntraOpProblem:
    """The choice of layouts of a program's values."""

    search: MemorySearch
    time_limit_s: float
    cache_directory: Path | None

    def unlimited(self, below_s: float = math.inf) -> Optimum:
        """Return the best layouts if memory had no end; raise `NoneBelow` if even they take no less than `below_s`."""
        return solve(self.search.table.problem(), time_limit_s=self.time_limit_s, below=below_s)

    def fits(self, optimum: Optimum) -> bool:
        """Return whether layouts fit into memory."""
        return not self.search.is_limited or self.search.excess(optimum.assignment) <= 0

    def best(self, below_s: float = math.inf, unlimited: Optimum | None = None) -> IntraOpPlan:
        """Return the best layouts that fit; raise `MemoryTooSmall` where none do, `NoneBelow` where none are quick.

        `unlimited` are the best if memory had no end, where they are known.
        """
        search, make = self.search, partial(self._solved, below_s, unlimited)
        below = [str(below_s)] if search.is_limited and math.isfinite(below_s) else []
        more = str(search.budget.limit_bytes), str(sorted(search.donated)), str(self.time_limit_s), *below
        optimum = cached(search.table.problem(), self.cache_directory, make, *more)
        return IntraOpPlan(
            optimum=optimum, choices=search.choices, table=search.table, program=search.program(optimum.assignment)
        )

    def _solved(self, below_s: float, unlimited: Optimum | None) -> Optimum:
        if unlimited is not None and unlimited.lower_bound >= (1 - ROUND_OFF) * below_s:
            raise NoneBelow(unlimited.lower_bound)
        if unlimited is not None and unlimited.value < below_s:
            proven = unlimited.gap <= MAX_GAP or not self.search.is_limited
            if proven and self.fits(unlimited):
                return unlimited
        if not self.search.is_limited:
            return solve(self.search.table.problem(), time_limit_s=self.time_limit_s, below=below_s)
        return solve_within_memory(self.search, time_limit_s=self.time_limit_s, below_s=below_s)


_bytes_of: weakref.WeakKeyDictionary[jc.Jaxpr, float] = weakref.WeakKeyDictionary()


def all_bytes(jaxpr: jc.Jaxpr) -> float:
    """Return the bytes of all that a program is given and makes, with a copy for every reader, on one device."""
    if jaxpr not in _bytes_of:
        _bytes_of[jaxpr] = _counted_bytes(jaxpr)
    return _bytes_of[jaxpr]


def _counted_bytes(jaxpr: jc.Jaxpr) -> float:
    used = 0
    for eqn in jc.all_equations(jaxpr):
        used += sum([aval_bytes(v.aval) for v in jc.operands(eqn)]) + 2 * sum([aval_bytes(v.aval) for v in eqn.outvars])
    return used + sum(aval_bytes(v.aval) for v in (*jaxpr.invars, *jaxpr.constvars))


def planner_of(table: NodeTable, jaxprs: Sequence[jc.Jaxpr], constraints: Constraints) -> Planner:
    """Return what the blocks of some programs share."""
    return Planner(
        table=table,
        rules=_rules_of(jaxprs),
        restrict=constraints.restrict,
        constraint_key=constraints.constraint_key,
        enter=enter,
        forms=constraints.forms,
        keep_split=constraints.keep_split,
    )


def _layouts(aval: Any, mesh: LogicalMesh) -> tuple[Layout, ...] | None:
    """The layouts that an input or a result may have; None for what is small."""
    return None if below_split_size(aval) else even_layouts(tuple(aval.shape), mesh)


def _rules_of(jaxprs: Sequence[jc.Jaxpr]) -> Callable[[jc.JaxprEqn], Rule]:
    """Return the rules of all equations of some programs at every depth, found together."""
    different = {key: eqn for jaxpr in jaxprs for key, eqn in _equations(jaxpr)}
    rules = dict(zip(different, sharding_rules(list(different.values()), list(different)), strict=True))
    return lambda eqn: rules[equation_key(eqn)]


def _equations(jaxpr: Any) -> Iterator[tuple[Hashable, jc.JaxprEqn]]:
    opened, _ = jc.open_jaxpr(jaxpr)
    for key, eqn in zip(equation_keys(opened), opened.eqns, strict=True):
        if eqn.primitive.name not in NESTED:
            yield key, eqn
        else:
            for body in jc.subjaxprs(eqn):
                yield from _equations(body)


@dataclass(frozen=True, kw_only=True, eq=False)
class MemorySearch:
    """The graph of a program whose plans must fit a budget on every device."""

    choices: BlockGraph
    table: NodeTable
    budget: MemoryBudget
    donated: Collection[int]
    input_names: Sequence[str]
    fitting: dict[Assignment, PlannedProgram] = field(default_factory=dict[Assignment, PlannedProgram])
    """The programs met that fit, one of which the best will be."""
    excesses: dict[Assignment, float] = field(default_factory=dict[Assignment, float])
    """By how many bytes the programs met exceed the budget."""

    def program(self, assignment: Assignment) -> PlannedProgram:
        """Return the program that an assignment means."""
        if assignment in self.fitting:
            return self.fitting[assignment]
        plan = block_plan_of(self.choices, assignment)
        return PlannedProgram(plan=plan, choices=self.choices, table=self.table, donated=self.donated)

    @property
    def is_limited(self) -> bool:
        """True if there are assignments that may need more than the budget."""
        return math.isfinite(self.budget.nbytes)

    def excess(self, assignment: Assignment) -> float:
        """Return by how many bytes an assignment exceeds the budget."""
        if assignment not in self.excesses:
            program = self.program(assignment)
            self.excesses[assignment] = program.memory.peak_bytes - self.budget.limit_bytes
            if self.excesses[assignment] <= 0:
                self.fitting[assignment] = program
        return self.excesses[assignment]

    def measure(self, assignment: Assignment) -> Measured:
        """Return by how many bytes an assignment exceeds the budget, and the rows of the moments when it does.

        Only these take the forms in which its values could be read as well.
        """
        if (excess := self.excess(assignment)) <= 0:
            return Measured(excess=excess, rows=())
        memory, limit = modelled_memory(self.choices, self.table, assignment, self.donated), self.budget.limit_bytes
        excess = memory.peak_bytes - limit
        if excess <= 0:
            return Measured(excess=excess, rows=())
        # By more than rounding, so that the rows exclude the assignment.
        return Measured(excess=excess, rows=memory.rows_above(min(limit, (1 - 1e-6) * memory.peak_bytes)))


def solve_within_memory(search: MemorySearch, *, time_limit_s: float, below_s: float) -> Optimum:
    """Return the best plan within the budget; raise `MemoryTooSmall` if none is found, `NoneBelow` if none is quick."""
    limit = search.budget.limit_bytes
    try:
        return minimize_within_limits(
            search.table.problem(),
            search.measure,
            time_limit_s=time_limit_s,
            max_gap=GAP_WITHIN_MEMORY,
            hopeless_excess=ROW_ERROR * limit,
            below=below_s,
        )
    except NoneWithin as none:
        least = search.program(none.least.assignment).memory
        share = least.peak_bytes / limit
        raise MemoryTooSmall(_shortage(search, least, limit + none.least.bound), least_share=share) from None


def _shortage(search: MemorySearch, least: MemoryEstimate, bound_bytes: float) -> str:
    named = "; ".join(
        f"{size_words(nbytes)} for {what}" for what, nbytes in least.largest(search.input_names)[:NUM_NAMED]
    )
    budget = search.budget
    needed = budget.needed_bytes(least.peak_bytes)
    bound = min(needed, budget.needed_bytes(bound_bytes))
    unsure = "" if bound > budget.nbytes else "No plan was found, nor proof that there is none. "
    return (
        f"{unsure}The step needs at least {size_words(bound)} per device on the mesh {search.table.mesh.shape}, and "
        f"{size_words(needed)} by the plan of least memory that was found, of which "
        f"{size_words(least.arguments_bytes)} are its arguments; the budget is {size_words(budget.nbytes)}. "
        f"Most is taken at {least.at}: {named}."
    )
