"""Plan programs that hand values to each other, the tasks of a stage, together.

    F   activation, parameters    ->  activation, residuals              every microbatch
    B   residuals, cotangent      ->  cotangent, totals of gradients     every microbatch
    U   totals, state             ->  state                              every step

A value has one layout between tasks: a node of its own, from which all tasks read it, and into which the task that
makes it brings it. So the state's layout serves the forward pass and the update alike, and a total that only this
stage reads may stay a sum over mesh axes until the update: gradients are then reduced once per step.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.intra_op.choice_graph import (
    BlockBuilder,
    BlockGraph,
    LayoutNode,
    NodeTable,
    Planner,
    block_plan_of,
)
from autopar.compiler.intra_op.fold_layers import Fold, fold, program_key, unfolded
from autopar.compiler.intra_op.plan_program import FOLD_FROM, Constraints, planner_of
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.flops import aval_bytes
from autopar.compiler.sharding.layout import Layout, LogicalMesh, even_layouts, num_shards, used_axes
from autopar.compiler.sharding.replicated_values import below_split_size
from autopar.compiler.solver.optimum_cache import solve_or_recall
from autopar.compiler.solver.presolve import ReducedMRF, reduce_problem
from autopar.compiler.solver.problem import MRF, Optimum
from autopar.compiler.solver.solve import MAX_GAP
from autopar.compiler.spmd.block_plan import BlockPlan
from autopar.compiler.spmd.combining import CombinedValues, combined_values
from autopar.compiler.spmd.local_program import LocalBlock, local_block

KEPT_WITHIN = "kept within a task"
"""The name, among those that have multipliers, of what forward tasks keep for the backward pass that they hold."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupTask:
    """A program, the names of what it reads and makes, how many times a step runs it, and in which phase."""

    name: str
    jaxpr: jc.ClosedJaxpr
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    times: float
    phase: str
    donated: tuple[int, ...] = ()
    """The inputs, by number, whose places results may take."""
    parameters: tuple[int, ...] = ()
    """The inputs, by number, that are there before the step."""
    gradients: tuple[int, ...] = ()
    """The outputs, by number, that an update reads."""

    @cached_property
    def key(self) -> Hashable:
        """Equal for tasks whose programs compute the same from inputs of the same types."""
        return program_key(self.jaxpr)

    @cached_property
    def combined(self) -> CombinedValues:
        """The values whose collectives are combined; all that an update brings in, as the sums of gradients, are."""
        given = None if self.phase == "update" else self.parameters
        return combined_values(jc.open_jaxpr(self.jaxpr)[0], self.phase, given, self.gradients)


def local_task(task: GroupTask, plan: BlockPlan, mesh: LogicalMesh) -> LocalBlock:
    """Return what one device does of a task."""
    return local_block(jc.open_jaxpr(task.jaxpr)[0], plan, mesh, phase=task.phase, combined=task.combined)


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupConstraints:
    """Restrictions of the values between tasks, by their names.

    `alike` maps values to those that have their layout: new state to what it replaces. `sums` may stay partial sums.
    `allowed` fixes layouts.
    """

    alike: Mapping[str, str] = field(default_factory=dict[str, str])
    sums: Collection[str] = ()
    allowed: Mapping[str, tuple[Layout, ...]] = field(default_factory=dict[str, tuple[Layout, ...]])
    equations: Constraints = field(default_factory=Constraints)


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupPlan:
    """The layouts of values between tasks, None for what is free, and of everything inside of each task."""

    layouts: Mapping[str, Layout | None]
    tasks: Mapping[str, BlockPlan]
    optimum: Optimum


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskGraph:
    """The graph of a group, from which plans for several memory multipliers are made."""

    tasks: Sequence[GroupTask]
    blocks: Sequence[BlockGraph]
    values: Mapping[str, LayoutNode | None]
    types: Mapping[str, Any]
    table: NodeTable

    def best(
        self,
        multipliers: Mapping[str, float],
        *,
        time_limit_s: float = 60.0,
        max_gap: float = MAX_GAP,
        cache_directory: Path | None = None,
    ) -> GroupPlan:
        """Return the best layouts at memory multipliers: seconds for every byte of a value that a device holds."""
        charges = self.charges(multipliers)
        costs = tuple(cost + charges[node] if node in charges else cost for node, cost in enumerate(self.table.costs))
        problem = MRF(costs=costs, edges=dict(self.table.edges))
        return self.plan_of(solve_or_recall(problem, cache_directory, time_limit_s=time_limit_s, max_gap=max_gap))

    def charges(self, multipliers: Mapping[str, float]) -> dict[int, np.ndarray]:
        """Return by node what its options cost more at memory multipliers."""
        found: dict[int, np.ndarray] = {}
        each: list[tuple[str, LayoutNode | None, Any]] = [
            (name, self.values[name], self.types[name]) for name in sorted(multipliers) if name in self.values
        ]
        each += [(KEPT_WITHIN, node, v.aval) for node, v in self.kept if KEPT_WITHIN in multipliers]
        for name, node, aval in each:
            if node is not None:
                multiplier = multipliers[name]
                shares = np.array([1 / num_shards(aval.shape, layout, self.table.mesh) for layout in node.layouts])
                found[node.number] = found.get(node.number, 0.0) + multiplier * aval_bytes(aval) * shares
        return found

    @cached_property
    def kept(self) -> list[tuple[LayoutNode, jc.Var]]:
        """The forms in which values wait for the backward pass in the forward task that holds it."""
        return [each for block in self.blocks for each in block.kept]

    def plan_of(self, optimum: Optimum) -> GroupPlan:
        """Return the plan that an optimum means."""
        options = optimum.assignment
        return GroupPlan(
            layouts={n: None if c is None else c.layouts[options[c.number]] for n, c in self.values.items()},
            tasks={
                task.name: block_plan_of(block, options) for task, block in zip(self.tasks, self.blocks, strict=True)
            },
            optimum=optimum,
        )


def task_graph(tasks: Sequence[GroupTask], mesh_costs: MeshCosts, constraints: GroupConstraints) -> TaskGraph:
    """Return the graph of the tasks of a stage, which are listed in an order in which they may run.

    The objective is the time of all of them in one step, each as often as it runs. Programs of at least `FOLD_FROM`
    equations together have their repeated layers planned as one, and their equal tasks, where there are several stages.
    """
    table = NodeTable(mesh_costs=mesh_costs)
    group = _Group(table=table, constraints=constraints)
    bodies = [jc.open_jaxpr(task.jaxpr)[0] for task in tasks]
    planner = planner_of(table, bodies, constraints.equations)
    folding = sum(len(body.eqns) for body in bodies) >= FOLD_FROM
    folds = [_folded(task, body, constraints) if folding else unfolded(body) for task, body in zip(tasks, bodies)]
    firsts = _firsts_alike(tasks, folds, constraints) if folding else list(range(len(tasks)))
    group.tie(tasks, folds, firsts)
    blocks: list[BlockGraph] = []
    for number, (task, body, folded, first) in enumerate(zip(tasks, bodies, folds, firsts, strict=True)):
        if first == number:
            blocks.append(group.collect(planner, task, body, folded, times=firsts.count(number)))
        else:
            group.meet(task, body)
            blocks.append(blocks[first])
    return TaskGraph(tasks=tuple(tasks), blocks=blocks, values=group.values, types=group.types, table=table)


def _folded(task: GroupTask, body: jc.Jaxpr, constraints: GroupConstraints) -> Fold:
    position = {name: number for number, name in enumerate(task.inputs)}
    replaced = {
        number: position[constraints.alike.get(name, name)]
        for number, name in enumerate(task.outputs)
        if constraints.alike.get(name, name) in position
    }
    return fold(
        task.jaxpr,
        task.inputs,
        [
            below_split_size(v.aval) and name not in constraints.allowed
            for name, v in zip(task.inputs, body.invars, strict=True)
        ],
        state_outputs=replaced,
        # A sum that is made here may stay partial; one that is received may not, however like it the layers are.
        input_marks={
            number: (constraints.allowed.get(name), name in constraints.sums)
            for name, number in position.items()
            if name in constraints.allowed or name in constraints.sums
        },
        equation_mark=constraints.equations.constraint_key,
    )


def _firsts_alike(tasks: Sequence[GroupTask], folds: Sequence[Fold], constraints: GroupConstraints) -> list[int]:
    """Return by task the first one that computes the same, as often and under the same constraints."""
    numbers: dict[Hashable, int] = {}
    mark, firsts = constraints.equations.constraint_key, list[int]()
    for number, (task, folded) in enumerate(zip(tasks, folds, strict=True)):
        names, position = (*task.inputs, *task.outputs), {name: place for place, name in enumerate(task.inputs)}
        like = [constraints.alike.get(name, "") for name in names]
        key = (
            (task.key, task.phase, task.times, task.donated, task.parameters, task.gradients),
            (tuple(folded.classes), tuple(folded.equivalent_inputs.items())),
            tuple((constraints.allowed.get(name), name in constraints.sums) for name in names),
            tuple(position.get(name, name) for name in like),
            tuple(mark(eqn) for eqn in jc.all_equations(task.jaxpr)),
        )
        firsts.append(numbers.setdefault(key, number))
    return firsts


@dataclass(kw_only=True, eq=False)
class _Group:
    """The nodes of the values between tasks, while they are collected."""

    table: NodeTable
    constraints: GroupConstraints
    values: dict[str, LayoutNode | None] = field(default_factory=dict[str, LayoutNode | None])
    types: dict[str, Any] = field(default_factory=dict[str, Any])
    roots: dict[str, str] = field(default_factory=dict[str, str])

    def root(self, name: str) -> str:
        """Return the value whose layout a value has."""
        while name in self.roots:
            name = self.roots[name]
        return name

    def tie(self, tasks: Sequence[GroupTask], folds: Sequence[Fold], firsts: Sequence[int]) -> None:
        """Give one layout to what replaces each other, and to what is equivalent in repeated layers and tasks."""
        pairs: list[tuple[str, str]] = list(self.constraints.alike.items())
        for task, folded, number in zip(tasks, folds, firsts, strict=True):
            like = tasks[number]
            pairs += [(task.inputs[i], task.inputs[first]) for i, first in folded.equivalent_inputs.items()]
            pairs += zip((*task.inputs, *task.outputs), (*like.inputs, *like.outputs), strict=True)
        for name, other in pairs:
            name, other = self.root(name), self.root(other)
            if name != other:
                self.roots[name] = other

    def value(self, name: str, aval: Any) -> LayoutNode | None:
        """Return the node of a value, made when it is first met; None for what is free."""
        root = self.root(name)
        self.types[name] = aval
        if root not in self.values:
            free = below_split_size(aval) and root not in self.constraints.allowed
            self.values[root] = None if free else self._new(root, aval)
        self.values[name] = self.values[root]
        return self.values[name]

    def meet(self, task: GroupTask, body: jc.Jaxpr) -> None:
        """Note the values of a task that is like one whose nodes are collected."""
        for name, atom in zip((*task.inputs, *task.outputs), (*body.invars, *body.outvars), strict=True):
            self.value(name, atom.aval)

    def _new(self, name: str, aval: Any) -> LayoutNode:
        mesh = self.table.mesh
        layouts = self.constraints.allowed.get(name, even_layouts(tuple(aval.shape), mesh))
        if name in self.constraints.sums:
            layouts = (*layouts, *with_partial_sums(layouts, mesh))
        return self.table.add_layouts(f"value {name}", layouts)

    def collect(self, planner: Planner, task: GroupTask, body: jc.Jaxpr, folded: Fold, times: int) -> BlockGraph:
        """Collect the nodes of so many tasks that are alike, of which this is the first."""
        equivalent = {body.invars[i]: body.invars[first] for i, first in folded.equivalent_inputs.items()}
        block = BlockBuilder(
            planner=planner,
            jaxpr=body,
            arguments=tuple(self.value(name, v.aval) for name, v in zip(task.inputs, body.invars, strict=True)),
            weight=times * task.times,
            nested=False,
            folded=folded,
            only_phase=task.phase,
            combined=task.combined,
            equivalent=equivalent,
        )
        block.collect()
        return block.finish([self._end(block, *end, task) for end in zip(task.outputs, body.outvars, strict=True)])

    def _end(self, block: BlockBuilder, name: str, atom: Any, task: GroupTask) -> LayoutNode | None:
        root = self.root(name)
        if root not in self.values and (isinstance(atom, jc.Literal) or atom in block.free):
            self.values[root] = None
        node = self.value(name, atom.aval)
        if node is not None:
            block.read(atom, node, ("value", node.number), phase=task.phase)
        return node


def with_partial_sums(layouts: Iterable[Layout], mesh: LogicalMesh) -> tuple[Layout, ...]:
    """Return the layouts with a sum over some of the axes that do not split the array still to be made."""
    found: list[Layout] = []
    for layout in layouts:
        unused = [axis for axis in range(len(mesh.shape)) if axis not in used_axes(layout) and mesh.shape[axis] > 1]
        for count in range(1, len(unused) + 1):
            found += [Layout(layout.dims, axes) for axes in itertools.combinations(unused, count)]
    return tuple(found)


@dataclass(frozen=True, kw_only=True, eq=False)
class PricedTaskGraph:
    """The graph of a group, reduced once for all multipliers: values with these names may have one.

    Reductions are exact whatever the costs of nodes that they leave alone (`reduce_problem` calls them protected).
    """

    graph: TaskGraph
    names: Collection[str]

    @cached_property
    def _reduced(self) -> ReducedMRF:
        values = self.graph.values
        protected = {node.number for name in self.names if (node := values.get(name)) is not None}
        return reduce_problem(self.graph.table.problem(), protected)

    def best(
        self,
        multipliers: Mapping[str, float],
        *,
        time_limit_s: float = 60.0,
        max_gap: float = MAX_GAP,
        cache_directory: Path | None = None,
    ) -> GroupPlan:
        """Return the best layouts, as `TaskGraph.best`, up to a gap: a share of their price and time."""
        if not multipliers:  # the solver's own reductions leave nothing alone
            return self.graph.best({}, time_limit_s=time_limit_s, max_gap=max_gap, cache_directory=cache_directory)
        problem = self._with_multipliers(multipliers)
        found = solve_or_recall(problem, cache_directory, time_limit_s=time_limit_s, max_gap=max_gap)
        return self.graph.plan_of(
            replace(
                found,
                assignment=self._reduced.expand(found.assignment),
                value=found.value + self._reduced.constant,
                lower_bound=found.lower_bound + self._reduced.constant,
            )
        )

    def _with_multipliers(self, multipliers: Mapping[str, float]) -> MRF:
        assert multipliers.keys() <= set(self.names), "a multiplier for a value that was not to have one"
        charges, reduced = self.graph.charges(multipliers), self._reduced
        costs = tuple(
            cost + charges[node][options] if node in charges else cost
            for node, options, cost in zip(reduced.nodes, reduced.options, reduced.core.costs, strict=True)
        )
        return replace(reduced.core, costs=costs)
