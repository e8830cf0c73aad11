"""The nodes of the choice graph, and how they hang together with the program.

A node is a choice among states: a strategy of an equation, or the layout of an input, of a loop's carry, of a copy.
Whatever has a layout points to a node and says which layout each state of it means (`Choice`). A value that is read
costs the resharding from its own layout to the one that its reader wants: an edge between their two nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from autopar.compiler.costs.mesh_costs import MeshFigures
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.resharding.costs import reshard_matrix
from autopar.compiler.sharding.layout import Layout, LogicalMesh
from autopar.compiler.sharding.strategies import Strategy
from autopar.compiler.solver.problem import Problem
from autopar.compiler.spmd.block_plan import BlockPlan, EquationPlan, value_numbers


class Choice(NamedTuple):
    """A node, and the layout that each of its states means here."""

    node: int
    layouts: tuple[Layout, ...]


class Use(NamedTuple):
    """A reader of a value: the layouts that it wants, how often it reads, and in which phase of the step."""

    choice: Choice
    weight: float
    phase: str


@dataclass(frozen=True, kw_only=True, eq=False)
class EquationChoice:
    """An equation with its node: a strategy for each state, or the bodies that it runs."""

    node: int | None = None
    strategies: tuple[Strategy, ...] = ()
    arguments: tuple[Choice | None, ...] = ()
    """Of an equation with bodies: the layouts in which its operands come in; None for what is free."""
    results: tuple[Choice | None, ...] = ()
    bodies: tuple[BlockChoices, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockChoices:
    """The choices of one jaxpr: None for equations that every device evaluates alike at no cost."""

    jaxpr: jc.Jaxpr
    arguments: tuple[Choice | None, ...]
    equations: list[EquationChoice | None]
    stored: dict[jc.Var, Choice] = field(default_factory=dict[jc.Var, Choice])
    """The form in which a value with several readers is kept."""
    copies: dict[jc.Var, dict[str, Choice]] = field(default_factory=dict[jc.Var, dict[str, Choice]])
    """By phase, the form in which it is read by the several readers of the phase."""
    results: list[Choice | None] = field(default_factory=list[Choice | None])
    alike: dict[jc.Var, jc.Var] = field(default_factory=dict[jc.Var, jc.Var])
    """The value that stands for a value of folded layers; `stored` and `copies` go by it."""


@dataclass(kw_only=True)
class ChoiceTable:
    """Nodes and edges while they are collected."""

    mesh: LogicalMesh
    figures: MeshFigures
    update_figures: MeshFigures
    """Figures for collectives of the update, which XLA combines: their latency is shared."""
    costs: list[np.ndarray] = field(default_factory=list[np.ndarray])
    names: list[str] = field(default_factory=list[str])
    edges: dict[tuple[int, int], np.ndarray] = field(default_factory=dict[tuple[int, int], np.ndarray])

    def add_node(self, name: str, costs: np.ndarray | Sequence[float]) -> int:
        """A new node with the cost of each of its states, in seconds."""
        self.costs.append(np.asarray(costs, dtype=float))
        self.names.append(name)
        return len(self.costs) - 1

    def add_layouts(self, name: str, layouts: tuple[Layout, ...]) -> Choice:
        """A new node whose states are layouts, all free of cost."""
        return Choice(self.add_node(name, np.zeros(len(layouts))), layouts)

    def add_edge(self, source: Choice, target: Choice, aval: Any, weight: float, phase: str) -> None:
        """Charge for resharding `aval` from `source` to `target`."""
        figures = self.update_figures if phase == "update" else self.figures
        itemsize = aval.dtype.itemsize
        matrix = _expanded(source.layouts, target.layouts, tuple(aval.shape), itemsize, self.mesh, figures)
        self.charge(source.node, target.node, matrix * weight)

    def charge(self, source: int, target: int, matrix: np.ndarray) -> None:
        """Add the costs of pairs of states; those of one node with itself are on the diagonal."""
        if source == target:
            self.costs[source] = self.costs[source] + np.diagonal(matrix)
            return
        key, matrix = ((source, target), matrix) if source < target else ((target, source), matrix.T)
        self.edges[key] = self.edges[key] + matrix if key in self.edges else matrix

    def problem(self) -> Problem:
        """The choices as a problem for the solver."""
        return Problem(costs=tuple(self.costs), edges=dict(self.edges))


def _expanded(
    sources: tuple[Layout, ...],
    targets: tuple[Layout, ...],
    shape: tuple[int, ...],
    itemsize: int,
    mesh: LogicalMesh,
    figures: MeshFigures,
) -> np.ndarray:
    """Resharding times for every pair of states, computed once for each pair of different layouts."""
    rows, columns = dict.fromkeys(sources), dict.fromkeys(targets)
    small = reshard_matrix(tuple(rows), tuple(columns), shape, itemsize, mesh, figures)
    row_number = {layout: number for number, layout in enumerate(rows)}
    column_number = {layout: number for number, layout in enumerate(columns)}
    index = np.ix_([row_number[layout] for layout in sources], [column_number[layout] for layout in targets])
    return small[index]


def chosen(choice: Choice, states: Sequence[int]) -> Layout:
    """The layout of a choice in a solution."""
    return choice.layouts[states[choice.node]]


def planned(block: BlockChoices, states: Sequence[int]) -> BlockPlan:
    """The plan that a solution means."""

    def layout(choice: Choice | None) -> Layout | None:
        return None if choice is None else choice.layouts[states[choice.node]]

    def equation(choice: EquationChoice) -> EquationPlan:
        if choice.node is not None:
            strategy = choice.strategies[states[choice.node]]
            return EquationPlan(operands=strategy.operands, results=strategy.results, combined=strategy.combined)
        return EquationPlan(
            operands=tuple(layout(c) for c in choice.arguments),
            results=tuple(layout(c) for c in choice.results),
            bodies=tuple(planned(body, states) for body in choice.bodies),
        )

    # Equations of folded layers share one choice.
    made = {id(c): equation(c) for c in block.equations if c is not None}
    forms: dict[tuple[int, str], Layout] = {}
    for v, number in value_numbers(block.jaxpr).items():
        first = block.alike.get(v, v)
        if first in block.stored:
            forms[number, "stored"] = block.stored[first].layouts[states[block.stored[first].node]]
        for phase, choice in block.copies.get(first, {}).items():
            forms[number, phase] = choice.layouts[states[choice.node]]
    return BlockPlan(
        arguments=tuple(layout(c) for c in block.arguments),
        equations=tuple(None if c is None else made[id(c)] for c in block.equations),
        results=tuple(layout(c) for c in block.results),
        forms=forms,
    )
