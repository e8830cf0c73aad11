"""Plan a program on one logical mesh: rules, graph of choices, optimum, layouts.

jaxpr, mesh, figures  ->  IntraOpPlan
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.compiler.costs.compilers import Compiler, compiler_for
from autopar.compiler.costs.mesh_costs import MeshFigures
from autopar.compiler.intra_op.choice_graph import BlockChoices, ChoiceTable, planned
from autopar.compiler.intra_op.fold import fold, unfolded
from autopar.compiler.intra_op.graph import Planner, build_graph
from autopar.compiler.intra_op.memory_budget import MemorySearch, solve_within_memory
from autopar.compiler.intra_op.nested import enter
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.equation_keys import NESTED, equation_key
from autopar.compiler.sharding.free_values import is_small
from autopar.compiler.sharding.layout import Layout, LogicalMesh, all_layouts
from autopar.compiler.sharding.rule import Rule
from autopar.compiler.sharding.rule_lookup import sharding_rules
from autopar.compiler.sharding.strategies import Strategy
from autopar.compiler.solver.problem import Optimum
from autopar.compiler.solver.solve import cached, problem_fingerprint, solve
from autopar.compiler.spmd.block_plan import BlockPlan

# Latency of a collective of the update: XLA combines many into one.
_SHARE_OF_LATENCY = 0.05
# Below this many equations, planning every layer by itself takes a few seconds at most.
FOLD_FROM = 1500


@dataclass(frozen=True, kw_only=True, eq=False)
class IntraOpPlan:
    """The layouts of every value, and how good they are."""

    plan: BlockPlan
    optimum: Optimum
    choices: BlockChoices
    table: ChoiceTable


@dataclass(frozen=True, kw_only=True, eq=False)
class Wishes:
    """What is fixed before the search: layouts of inputs and results by number, and which strategies are allowed."""

    inputs: dict[int, tuple[Layout, ...]] = field(default_factory=dict[int, tuple[Layout, ...]])
    results: dict[int, tuple[Layout, ...]] = field(default_factory=dict[int, tuple[Layout, ...]])
    restrict: Callable[[jc.JaxprEqn, tuple[Strategy, ...]], tuple[Strategy, ...]] = lambda eqn, every: every
    restricted_as: Callable[[jc.JaxprEqn], Hashable] = lambda eqn: None
    keep_split: frozenset[int] = frozenset()
    """As in `Planner`."""


def plan_intra_op(
    closed: jc.ClosedJaxpr,
    mesh: LogicalMesh,
    figures: MeshFigures,
    *,
    state_outputs: dict[int, int],
    wishes: Wishes | None = None,
    input_names: Sequence[str] | None = None,
    fold_from: int = FOLD_FROM,
    memory_budget: float | None = None,
    memory_headroom: float | None = None,
    donated: Collection[int] = (),
    time_limit_s: float = 60.0,
    cache_directory: Path | None = None,
) -> IntraOpPlan:
    """The best layouts of a program's values. `state_outputs` maps results to the inputs that they replace.

    Where the inputs have names, the layers of a program of at least `fold_from` equations are planned as one.
    `memory_budget` are bytes that a device may use, the inputs `donated` being overwritten, of which the compiler's
    headroom is kept free, or `memory_headroom`; raises `MemoryTooSmall` if no plan is found that fits. Optima are kept
    in `cache_directory`, if one is given.
    """
    wishes = Wishes() if wishes is None else wishes
    jaxpr, _ = jc.open_jaxpr(closed)
    table = ChoiceTable(mesh=mesh, figures=figures, update_figures=with_shared_latency(figures))
    planner = Planner(
        table=table, rules=rules_of([jaxpr]), restrict=wishes.restrict, restricted_as=wishes.restricted_as, enter=enter
    )
    inputs = [wishes.inputs.get(i, _layouts(v.aval, mesh)) for i, v in enumerate(jaxpr.invars)]
    folded = unfolded(closed)
    if input_names is not None and len(jaxpr.eqns) >= fold_from:
        folded = fold(
            closed,
            input_names,
            [layouts is None for layouts in inputs],
            state_outputs=state_outputs,
            input_marks=wishes.inputs,
            equation_mark=wishes.restricted_as,
        )
    choices = build_graph(
        planner,
        jaxpr,
        inputs=inputs,
        results=[wishes.results.get(i, _layouts(v.aval, mesh)) for i, v in enumerate(jaxpr.outvars)],
        state_outputs=state_outputs,
        classes=folded.classes,
        alike_inputs=folded.alike_inputs,
    )
    problem = table.problem()

    def best() -> Optimum:
        if memory_budget is None:
            return solve(problem, time_limit_s=time_limit_s)
        compiler = _compiler(figures, memory_headroom)
        search = MemorySearch(
            choices=choices, table=table, budget_bytes=memory_budget, donated=donated, compiler=compiler
        )
        return solve_within_memory(search, time_limit_s=time_limit_s)

    if cache_directory is None:
        optimum = best()
    else:
        more = (str(memory_budget), str(memory_headroom), str(sorted(donated)), str(time_limit_s))
        optimum = cached(problem_fingerprint(problem, *more), cache_directory, best)
    return IntraOpPlan(plan=planned(choices, optimum.states), optimum=optimum, choices=choices, table=table)


def _compiler(figures: MeshFigures, headroom: float | None) -> Compiler:
    compiler = compiler_for(figures.name)
    return compiler if headroom is None else dataclasses.replace(compiler, headroom=headroom)


def with_shared_latency(figures: MeshFigures) -> MeshFigures:
    """Figures of the update, whose collectives share their latency."""
    return dataclasses.replace(figures, combined_latency=_SHARE_OF_LATENCY)


def _layouts(aval: Any, mesh: LogicalMesh) -> tuple[Layout, ...] | None:
    return None if is_small(aval) else all_layouts(tuple(aval.shape), mesh)


def rules_of(jaxprs: Sequence[jc.Jaxpr]) -> Callable[[jc.JaxprEqn], Rule]:
    """The rules of all equations of some programs at every depth, found together."""
    eqns = [eqn for jaxpr in jaxprs for eqn in _equations(jaxpr)]
    rules = dict(zip(map(equation_key, eqns), sharding_rules(eqns), strict=True))
    return lambda eqn: rules[equation_key(eqn)]


def _equations(jaxpr: Any) -> Iterator[jc.JaxprEqn]:
    for eqn in jc.open_jaxpr(jaxpr)[0].eqns:
        if eqn.primitive.name not in NESTED:
            yield eqn
        else:
            for body in jc.subjaxprs(eqn):
                yield from _equations(body)
