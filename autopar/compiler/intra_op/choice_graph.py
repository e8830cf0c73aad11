"""Turn a program into an MRF problem: a node for whatever can be laid out, an edge for whatever is read.

    input          a layout for each leaf; the state that the step returns must come back in it
    equation       a strategy of its rule; what it reads costs the resharding from its producer's layout
    stored form    a value with several readers is reduced or gathered once for all of them, and kept so
    copy           ... and once more for all readers of one phase, as the backward pass: kept for these only
    body           loops, branches and remat regions are entered: a carry has one layout, coming in and going out

so that ZeRO is the gradient's and the moments' layout, Megatron the strategies of two products, and regathering for
the backward pass a copy that differs from the stored form.

Node i has one option x_i. With s_i[a] = 1 where x_i = a, the integer program is

    min  Σ_i Σ_a c_i[a] s_i[a]                  seconds of equation i by strategy a,
                                                times how often it runs                  → BlockBuilder._choose
                                                and of constants that it reads           → BlockBuilder._charge_constant
         + Σ_(i,j) Σ_ab M_ij[a,b] s_i[a] s_j[b] seconds of resharding a value from its
                                                producer's layout to its reader's        → NodeTable.add_edge
    s.t. Σ_a s_i[a] = 1                         one layout or strategy per node          → linear_program._as_program
         M_ij[a,b] = ∞                          no such resharding                       → reshard_lines
         s_i = s_j                              state comes back as it came, a carry as
                                                it goes in: they share one node          → build_graph, control_flow
         a among the options of i               the user's constraints, the rules        → Planner.alternatives
         Σ w_i[a] s_i[a] + Σ W_ij[a,b] s_i[a] s_j[b] <= bytes of a device,
                                                at every moment of the step              → memory_rows.modelled_memory

The products s_i[a] s_j[b] become variables e_ij[a,b] of the linear program (`linear_program`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from autopar.compiler.costs.compute import equation_s
from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.intra_op.fold_layers import Fold
from autopar.compiler.intra_op.mesh_tables import Alternatives, LayoutList, MeshTables, mesh_tables
from autopar.compiler.intra_op.state_copies import transposed_gradients
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.equation_keys import equation_classes
from autopar.compiler.jaxprs.fusion import Traffic, fused_traffic
from autopar.compiler.jaxprs.fusion_kinds import FusionRules
from autopar.compiler.jaxprs.primitives import NESTED, WIDENING
from autopar.compiler.sharding.layout import Layout, LogicalMesh, all_layouts, replicated, used_axes, without_ones
from autopar.compiler.sharding.replicated_values import free_results
from autopar.compiler.sharding.rule import Rule, shapes_of
from autopar.compiler.sharding.strategies import Strategy
from autopar.compiler.solver.problem import MRF
from autopar.compiler.spmd.block_plan import BlockPlan, EquationPlan, value_numbers
from autopar.compiler.spmd.combining import CombinedValues, combined_values
from autopar.compiler.spmd.phase import phase_of


class LayoutNode(NamedTuple):
    """A node, and the layout that each of its options means for one value.

    Whatever has a layout points to a node: a strategy of an equation lays out all of its operands and results.
    """

    number: int
    layouts: tuple[Layout, ...]


class Reader(NamedTuple):
    """A reader of a value: the layouts that it wants, and in which phase of the step."""

    node: LayoutNode
    phase: str


@dataclass(frozen=True, kw_only=True, eq=False)
class EquationNode:
    """An equation with its node: a strategy for each option, or the bodies that it runs."""

    number: int | None = None
    strategies: tuple[Strategy, ...] = ()
    arguments: tuple[LayoutNode | None, ...] = ()
    """The layouts in which the operands of an equation with bodies come in; None for what is free."""
    results: tuple[LayoutNode | None, ...] = ()
    bodies: tuple[BlockGraph, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockGraph:
    """The nodes of one jaxpr: None for equations that every device evaluates alike at no cost."""

    jaxpr: jc.Jaxpr
    arguments: tuple[LayoutNode | None, ...]
    equations: list[EquationNode | None]
    stored: dict[jc.Var, LayoutNode] = field(default_factory=dict[jc.Var, LayoutNode])
    """The form in which a value with several readers is kept."""
    copies: dict[jc.Var, dict[str, LayoutNode]] = field(default_factory=dict[jc.Var, dict[str, LayoutNode]])
    """The form in which the several readers of a phase read a value, by value and phase."""
    results: list[LayoutNode | None] = field(default_factory=list[LayoutNode | None])
    kept: list[tuple[LayoutNode, jc.Var]] = field(default_factory=list[tuple[LayoutNode, jc.Var]])
    """The forms in which values of a forward task wait for the backward pass that it holds, and these values."""
    waits_for_sums: bool = False
    """As in `BlockPlan`."""


@dataclass(kw_only=True)
class NodeTable:
    """Nodes and edges while they are collected."""

    mesh_costs: MeshCosts
    costs: list[np.ndarray] = field(default_factory=list[np.ndarray])
    names: list[str] = field(default_factory=list[str])
    edges: dict[tuple[int, int], np.ndarray] = field(default_factory=dict[tuple[int, int], np.ndarray])
    lists: dict[int, tuple[tuple[Layout, ...], LayoutList]] = field(
        default_factory=dict[int, tuple[tuple[Layout, ...], LayoutList]]
    )
    """The lists of layouts of nodes by their identity. The layouts are kept so that it stays theirs."""
    reshardings: dict[Hashable, np.ndarray] = field(default_factory=dict[Hashable, np.ndarray])

    @property
    def mesh(self) -> LogicalMesh:
        """The mesh that the layouts are for."""
        return self.mesh_costs.mesh

    @cached_property
    def tables(self) -> MeshTables:
        """Tables of the mesh that other graphs have filled."""
        return mesh_tables(self.mesh_costs)

    def add_node(self, name: str, costs: np.ndarray | Sequence[float]) -> int:
        """Add a node with the cost of each of its options, in seconds; return its number."""
        self.costs.append(np.asarray(costs, dtype=float))
        self.names.append(name)
        return len(self.costs) - 1

    def add_layouts(self, name: str, layouts: tuple[Layout, ...]) -> LayoutNode:
        """Add a node whose options are layouts, all free of cost."""
        return LayoutNode(self.add_node(name, np.zeros(len(layouts))), layouts)

    def add_edge(
        self,
        source: LayoutNode,
        target: LayoutNode,
        aval: Any,
        weight: float,
        phase: str,
        *,
        summed: bool = True,
        copied: float = 0.0,
    ) -> None:
        """Charge for resharding `aval` from `source` to `target`. In the update collectives share their latency.

        If it may not be `summed` here, summands stay summands. If it is summed or gathered, so many bytes of state are
        `copied` for each of its own.
        """
        shape, in_update = tuple(aval.shape), phase == "update"
        nbytes = math.prod(shape) * aval.dtype.itemsize
        before, after = self.list_of(source), self.list_of(target)
        key = (before.number, after.number, shape, nbytes, weight, in_update, copied)
        if key not in self.reshardings:
            seconds = self.tables.reshard_s(before, after, shape, nbytes, in_update=in_update)
            if copied:
                seconds = seconds + self.tables.state_copies_s(before, after, shape, copied * nbytes)
            self.reshardings[key] = (seconds * weight)[before.of_option[:, None], after.of_option]
        seconds = self.reshardings[key]
        self.charge(
            source.number, target.number, seconds if summed else seconds + _infinite_sums(source, target, self.mesh)
        )

    def list_of(self, node: LayoutNode) -> LayoutList:
        """Return the different layouts of a node's options."""
        found = self.lists.get(id(node.layouts))
        if found is None:
            found = self.lists[id(node.layouts)] = node.layouts, self.tables.layout_list(node.layouts)
        return found[1]

    def charge(self, source: int, target: int, matrix: np.ndarray) -> None:
        """Add the costs of pairs of options; those of one node with itself are on the diagonal."""
        if source == target:
            self.costs[source] = self.costs[source] + np.diagonal(matrix)
            return
        key, matrix = ((source, target), matrix) if source < target else ((target, source), matrix.T)
        self.edges[key] = self.edges[key] + matrix if key in self.edges else matrix

    def problem(self) -> MRF:
        """Return the nodes and edges as a problem for the solver."""
        return MRF(costs=tuple(self.costs), edges=dict(self.edges))


def block_plan_of(block: BlockGraph, options: Sequence[int]) -> BlockPlan:
    """Return the plan that an assignment means."""

    def layout(node: LayoutNode | None) -> Layout | None:
        return None if node is None else node.layouts[options[node.number]]

    def equation(node: EquationNode) -> EquationPlan:
        if node.number is not None:
            strategy = node.strategies[options[node.number]]
            return EquationPlan(operands=strategy.operands, results=strategy.results, combined=strategy.combined)
        return EquationPlan(
            operands=tuple(layout(c) for c in node.arguments),
            results=tuple(layout(c) for c in node.results),
            bodies=tuple(block_plan_of(body, options) for body in node.bodies),
        )

    # Equations of folded layers share one node.
    made = {id(c): equation(c) for c in block.equations if c is not None}
    forms: dict[tuple[int, str], Layout] = {}
    for v, number in value_numbers(block.jaxpr).items():
        if v in block.stored:
            forms[number, "stored"] = block.stored[v].layouts[options[block.stored[v].number]]
        for phase, node in block.copies.get(v, {}).items():
            forms[number, phase] = node.layouts[options[node.number]]
    return BlockPlan(
        arguments=tuple(layout(c) for c in block.arguments),
        equations=tuple(None if c is None else made[id(c)] for c in block.equations),
        results=tuple(layout(c) for c in block.results),
        forms=forms,
        waits_for_sums=block.waits_for_sums,
    )


def _infinite_sums(source: LayoutNode, target: LayoutNode, mesh: LogicalMesh) -> np.ndarray:
    """Return infinity for every pair of options between which summands are summed, else 0."""
    before, after = ([set(without_ones(layout, mesh).partial) for layout in node.layouts] for node in (source, target))
    return np.array([[0.0 if mine <= theirs else np.inf for theirs in after] for mine in before])


PHASES = ("forward", "backward", "update", "body")


@dataclass(kw_only=True, eq=False)
class _Constant:
    """A free equation while nodes are collected: its number, and who reads its results."""

    number: int
    readers: dict[Any, tuple[LayoutNode, str]] = field(default_factory=dict[Any, tuple[LayoutNode, str]])
    """The readers that take the part that they want, with their phases."""
    whole: bool = False
    """True if a reader takes all of it on every device, whatever the layouts are."""


class _Part(NamedTuple):
    """The seconds in which a device makes a part of a constant, and the layouts of the operands that it takes."""

    seconds: float
    operands: tuple[Layout, ...]


class _Parts(NamedTuple):
    """The cost of the whole of a constant, and of each of its parts that an equation can make by itself."""

    whole: _Part
    split: dict[Layout, _Part]


class _Key(NamedTuple):
    """Identify a read in folded layers: the reader, and its operand's number."""

    reader: Any
    operand: int
    phase: str


@dataclass(kw_only=True, eq=False)
class Planner:
    """The parts that all blocks of a program share: the nodes, the rules, and which strategies may be chosen."""

    table: NodeTable
    rules: Callable[[jc.JaxprEqn], Rule]
    restrict: Callable[[jc.JaxprEqn, tuple[Strategy, ...]], tuple[Strategy, ...]]
    """Selects the strategies of an equation that may be chosen."""
    constraint_key: Callable[[jc.JaxprEqn], Hashable]
    """Key of everything but the equation itself on which these depend."""
    enter: Callable[[BlockBuilder, jc.JaxprEqn, float, Fold | None], EquationNode]
    """Makes the nodes of loops, of which the body may be folded, branches and remat regions."""
    forms: Callable[[jc.Var, tuple[Layout, ...]], tuple[Layout, ...]] = lambda v, every: every
    """Selects the layouts in which a value may be kept or handed on, between the equations that make and read it."""
    restricted: dict[Hashable, Alternatives] = field(default_factory=dict[Hashable, Alternatives])
    keep_split: frozenset[int] = frozenset()
    """Mesh axes over which what can only come split is stored split: it is gathered anew for every phase."""

    def alternatives(self, eqn: jc.JaxprEqn, kind: Hashable, maybe_partial: frozenset[int]) -> Alternatives:
        """Return the strategies that may be chosen for an equation of a kind: an entry of `equation_classes`."""
        every = self.table.tables.alternatives(eqn, kind, maybe_partial, self.rules)
        key = (id(every), self.constraint_key(eqn))
        if key not in self.restricted:
            kept = self.restrict(eqn, every.strategies)
            self.restricted[key] = every if kept == every.strategies else Alternatives.of(eqn, kept)
        return self.restricted[key]


@dataclass(kw_only=True, eq=False)
class BlockBuilder:
    """One jaxpr while its nodes are collected. Folded equations and values go by their representatives."""

    planner: Planner
    jaxpr: jc.Jaxpr
    arguments: tuple[LayoutNode | None, ...]
    weight: float
    nested: bool
    folded: Fold
    combined: CombinedValues
    """The values whose collectives share their latency."""
    copied: Mapping[jc.Var, float] = field(default_factory=dict[jc.Var, float])
    """The values whose sums have state copied, with its bytes for each of theirs."""
    within: jc.JaxprEqn | None = None
    """The equation of which this jaxpr is a body."""
    only_phase: str | None = None
    """The phase of its equations, where that is known; otherwise the scopes tell."""
    sources: dict[jc.Var, LayoutNode] = field(default_factory=dict[jc.Var, LayoutNode])
    free: set[jc.Var] = field(default_factory=set[jc.Var])
    equivalent: dict[jc.Var, jc.Var] = field(default_factory=dict[jc.Var, jc.Var])
    uses: dict[jc.Var, dict[Hashable, Reader]] = field(default_factory=dict[jc.Var, dict[Hashable, Reader]])
    equations: list[EquationNode | None] = field(default_factory=list[EquationNode | None])
    kinds: Sequence[Hashable] = ()
    traffic: Sequence[Traffic] = ()
    """The traffic of each equation, while nodes are collected."""
    constants: dict[jc.Var, _Constant] = field(default_factory=dict[jc.Var, _Constant])
    """The equation that makes each free value."""
    widened: set[jc.Var] = field(default_factory=set[jc.Var])
    """The values that are to be summed in more bits: not before they have these."""
    given: set[jc.Var] = field(default_factory=set[jc.Var])
    """The inputs."""
    made_late: set[jc.Var] = field(default_factory=set[jc.Var])
    """The values that a backward pass makes."""

    def collect(self) -> None:
        """Make the nodes of all equations, and note who reads what."""
        machine = self.planner.table.mesh_costs.machine
        self.kinds = equation_classes(self.jaxpr)
        self.traffic = fused_traffic(self.jaxpr, self.within, rules=FusionRules.of(machine))
        self.free.update(self.jaxpr.constvars)
        self.given.update(self.jaxpr.invars)
        for v, node in zip(self.jaxpr.invars, self.arguments, strict=True):
            if node is None:
                self.free.add(v)
            else:
                self.sources.setdefault(self.first(v), node)
        equivalent: dict[int, list[int]] = {}
        for number, first in enumerate(self.folded.classes):
            equivalent.setdefault(first, []).append(number)
        for number, eqn in enumerate(self.jaxpr.eqns):
            self._add(number, eqn, equivalent)

    def first(self, v: jc.Var) -> jc.Var:
        """Return the value that stands for one of folded layers."""
        return self.equivalent.get(v, v)

    def source(self, atom: Any) -> LayoutNode | None:
        """Return the node that makes a value; None for a value that is replicated for free."""
        if isinstance(atom, jc.Literal) or atom in self.free:
            return None
        return self.sources[self.first(atom)]

    def read(self, atom: Any, node: LayoutNode, key: _Key | Any, *, phase: str) -> None:
        """Note that a node reads a value; what equivalent readers of folded layers want of it is made once."""
        if isinstance(atom, jc.Literal):
            return
        if atom in self.free:
            if atom in self.constants:
                self.constants[atom].readers[key] = node, phase
            return
        self.uses.setdefault(atom, {})[key] = Reader(node, phase)

    def phase(self, eqn: jc.JaxprEqn) -> str:
        """Return the phase in which an equation reads its operands."""
        return "body" if self.nested else phase_of(eqn, self.only_phase)

    def _add(self, number: int, eqn: jc.JaxprEqn, equivalent: Mapping[int, Sequence[int]]) -> None:
        first, body = self.folded.classes[number], self.folded.bodies.get(number)
        is_free = [isinstance(a, jc.Literal) or a in self.free for a in eqn.invars]
        freed = free_results(eqn, is_free)
        if any(freed):
            self.free.update(v for v, free in zip(eqn.outvars, freed, strict=True) if free)
        if all(freed) and not eqn.effects:
            self.constants.update(dict.fromkeys(eqn.outvars, _Constant(number=number)))
            self.equations.append(None)
            return
        for v, original in zip(eqn.outvars, self.jaxpr.eqns[first].outvars, strict=True):
            self.equivalent[v] = original
        if first < number:
            node = self.equations[first]
            assert node is not None
        elif eqn.primitive.name in NESTED:
            node = self.planner.enter(self, eqn, self.weight * len(equivalent[first]), body)
        else:
            node = self._choose(eqn, number, [self.traffic[each] for each in equivalent[first]])
        for result, earlier in body.equivalent_results.items() if body else ():
            self.equivalent[eqn.outvars[result]] = eqn.outvars[earlier]
        self.equations.append(node)
        for v, result in zip(eqn.outvars, node.results, strict=True):
            if result is not None:
                self.sources.setdefault(self.equivalent[v], result)
        if eqn.primitive.name == WIDENING and isinstance(eqn.invars[0], jc.Var):
            self.widened.add(self.first(eqn.invars[0]))
        phase = self.phase(eqn)
        if phase == "backward":
            self.made_late.update(eqn.outvars)
        for operand, (atom, argument) in enumerate(zip(eqn.invars, node.arguments, strict=True)):
            if argument is not None:
                like = body.equivalent_inputs.get(operand, operand) if body else operand
                self.read(atom, argument, _Key(first, like, phase), phase=phase)
            else:
                self._read_whole(atom)

    def _read_whole(self, atom: Any) -> None:
        """Note that every device reads all of a free value."""
        if not isinstance(atom, jc.Literal) and atom in self.constants:
            self.constants[atom].whole = True

    def _choose(self, eqn: jc.JaxprEqn, number: int, traffic: Sequence[Traffic]) -> EquationNode:
        """Return the node of equivalent equations, each with its own traffic."""
        partial = frozenset(
            [
                operand
                for operand, atom in enumerate(eqn.invars)
                if (source := self.source(atom)) is not None and self.planner.table.list_of(source).has_sums
            ]
        )
        found = self.planner.alternatives(eqn, self.kinds[number], partial)
        costs = self.planner.table.mesh_costs
        seconds = sum([found.seconds(eqn, each, costs) for each in traffic], np.zeros(len(found.strategies)))
        node = self.planner.table.add_node(f"{eqn.primitive.name} {number}", seconds * self.weight)
        return EquationNode(
            number=node,
            strategies=found.strategies,
            arguments=tuple([LayoutNode(node, layouts) for layouts in found.operands]),
            results=tuple([LayoutNode(node, layouts) for layouts in found.results]),
        )

    def finish(self, results: Sequence[LayoutNode | None]) -> BlockGraph:
        """Connect every value with its readers, over stored forms and copies where there are several."""
        done = BlockGraph(
            jaxpr=self.jaxpr,
            arguments=self.arguments,
            equations=self.equations,
            results=list(results),
            waits_for_sums=self.planner.table.mesh_costs.machine.ends_sums_late,
        )
        equivalent: dict[jc.Var, list[jc.Var]] = {}
        for v in self.uses:
            equivalent.setdefault(self.first(v), []).append(v)
        for first, values in equivalent.items():
            self._connect(first, values, done)
        for atom, node in zip(self.jaxpr.outvars, results, strict=True):
            if node is None:
                self._read_whole(atom)
        self._charge_constants()
        return done

    def _charge_constants(self) -> None:
        """Charge readers for constants, of which a device makes the parts that they want.

        The whole of one is made once for all of its readers, a part once for those of a phase. They share the seconds
        as if all wanted the same; where they do not, that is less than the program takes.
        """
        tables: dict[_Constant, _Parts] = {}
        for constant in dict.fromkeys(self.constants.values()):
            parts = self._parts(constant.number)
            operands = jc.operands(self.jaxpr.eqns[constant.number])
            if any(each.seconds for each in (parts.whole, *parts.split.values())) or any(
                self.constants.get(v) in tables for v in operands
            ):
                tables[constant] = parts
        for constant, parts in reversed(tables.items()):  # readers of constants come before them
            self._charge_constant(constant, parts)

    def _parts(self, number: int) -> _Parts:
        """Return what a constant takes, by the layout of its result."""
        eqn, costs = self.jaxpr.eqns[number], self.planner.table.mesh_costs
        if eqn.primitive.name in NESTED or len(eqn.outvars) > 1:
            strategy = Strategy(
                operands=tuple(replicated(len(shape)) for shape in shapes_of(eqn.invars)),
                results=tuple(replicated(len(shape)) for shape in shapes_of(eqn.outvars)),
            )
            return _Parts(_Part(equation_s(eqn, strategy, costs, self.traffic[number]), strategy.operands), {})
        summands = frozenset(range(len(eqn.invars)))
        found = self.planner.table.tables.alternatives(eqn, self.kinds[number], summands, self.planner.rules)
        parts: dict[Layout, _Part] = {}
        seconds = found.seconds(eqn, self.traffic[number], costs).tolist()
        for strategy, part_s in zip(found.strategies, seconds, strict=True):
            if not strategy.combined:
                parts.setdefault(strategy.results[0], _Part(part_s, strategy.operands))
        return _Parts(parts.pop(found.results[0][0]), parts)

    def _charge_constant(self, constant: _Constant, parts: _Parts) -> None:
        table, eqn, whole_s = self.planner.table, self.jaxpr.eqns[constant.number], parts.whole.seconds
        if constant.whole:
            if whole_s:
                table.add_node(f"{eqn.primitive.name} {constant.number}", [self.weight * whole_s])
            whole_s = 0.0
            for atom in eqn.invars:
                self._read_whole(atom)
        per_phase = Counter(phase for _, phase in constant.readers.values())
        for node, phase in list(constant.readers.values()):
            chosen = [parts.split.get(layout, parts.whole) for layout in node.layouts]
            shares = [
                whole_s / len(constant.readers) if part is parts.whole else part.seconds / per_phase[phase]
                for part in chosen
            ]
            table.costs[node.number] = table.costs[node.number] + self.weight * np.array(shares)
            for place, atom in enumerate(eqn.invars):
                wanted = LayoutNode(node.number, tuple(part.operands[place] for part in chosen))
                # One reader for all ways to it through other constants, of which there may be 2^60.
                self.read(atom, wanted, ("constant", wanted, phase), phase=phase)

    def _connect(self, v: jc.Var, values: Sequence[jc.Var], done: BlockGraph) -> None:
        """Connect the values that one stands for: those of several readers over the same forms, others directly."""
        source, several = self.sources[v], [each for each in values if len(self.uses[each]) > 1]
        readers = {key: reader for each in values for key, reader in self.uses[each].items()}
        alone = Counter(key for each in values for key in self.uses[each] if len(self.uses[each]) == 1)
        for key, times in alone.items():
            self._reshard(v, source, readers[key].node, times, readers[key].phase, _replaces(key))
        before = self.only_phase == "forward" and v not in self.made_late
        waits = before and any(reader.phase == "backward" for reader in readers.values())
        if waits and v not in self.given:
            done.kept.extend((source, each) for each in values if len(self.uses[each]) == 1)
        if not several:
            return
        reads = Counter(key for each in several for key in self.uses[each])
        phases = dict.fromkeys(readers[key].phase for key in reads)
        stored = self._form(v, "stored", source)
        self._reshard(v, source, stored, len(several), min(phases, key=PHASES.index))
        done.stored.update(dict.fromkeys(several, stored))
        if waits and ("forward" in phases or v not in self.given):
            done.kept.extend((stored if "forward" in phases else source, each) for each in several)
        for phase in phases:
            mine, origin = [key for key in reads if readers[key].phase == phase], stored
            if len(mine) > 1 and len(phases) > 1:
                origin = self._form(v, phase, stored)
                self._reshard(v, stored, origin, len(several), phase)
                for each in several:
                    done.copies.setdefault(each, {})[phase] = origin
            for key in mine:
                self._reshard(v, origin, readers[key].node, reads[key], phase, _replaces(key))

    def _reshard(
        self, v: jc.Var, source: LayoutNode, target: LayoutNode, times: int, phase: str, replaces: bool = False
    ) -> None:
        """Add an edge; a collective that is combined with others costs what one of the update does.

        What `replaces` state is copied itself where the compiler copies state, if it is gathered.
        """
        phase, weight = "update" if self.combined.share(v, phase) else phase, self.weight * times
        copied = self.copied.get(v, 0.0) + (replaces and self.planner.table.mesh_costs.machine.copies_state)
        self.planner.table.add_edge(source, target, v.aval, weight, phase, summed=v not in self.widened, copied=copied)

    def _form(self, v: jc.Var, name: str, source: LayoutNode) -> LayoutNode:
        aval: Any = v.aval
        layouts = self.planner.forms(v, all_layouts(tuple(aval.shape), self.planner.table.mesh))
        for axis in self.planner.keep_split if name == "stored" else ():
            if all(axis in used_axes(layout) for layout in source.layouts):
                layouts = tuple(layout for layout in layouts if axis in used_axes(layout))
        return self.planner.table.add_layouts(f"{name} {v.aval.str_short()} of {source.number}", layouts)


def _replaces(key: Hashable) -> bool:
    """Return true if a read is that of new state which takes the place of the old one."""
    return isinstance(key, _Key) and key.reader == "state"


def build_graph(
    planner: Planner,
    jaxpr: jc.Jaxpr,
    *,
    inputs: Sequence[tuple[Layout, ...] | None],
    results: Sequence[tuple[Layout, ...] | None],
    state_outputs: dict[int, int],
    folded: Fold,
) -> BlockGraph:
    """Return the graph of a whole step.

    `inputs` are the layouts that each input may have, None for what is small; `results` those of each result that is
    not state.
    """
    table, equivalent_inputs = planner.table, folded.equivalent_inputs
    arguments: list[LayoutNode | None] = []
    for number, layouts in enumerate(inputs):
        if (first := equivalent_inputs.get(number, number)) < number:
            arguments.append(arguments[first])
        else:
            arguments.append(None if layouts is None else table.add_layouts(f"input {number}", layouts))
    equivalent = {jaxpr.invars[i]: jaxpr.invars[first] for i, first in equivalent_inputs.items()}
    block = BlockBuilder(
        planner=planner,
        jaxpr=jaxpr,
        arguments=tuple(arguments),
        weight=1.0,
        nested=False,
        folded=folded,
        equivalent=equivalent,
        combined=combined_values(jaxpr),
        copied=transposed_gradients(jaxpr, state_outputs) if table.mesh_costs.machine.copies_state else {},
    )
    block.collect()
    ends: list[LayoutNode | None] = []
    for number, atom in enumerate(jaxpr.outvars):
        ends.append(_end(block, number, atom, arguments, results[number], state_outputs, equivalent_inputs))
    return block.finish(ends)


def _end(
    block: BlockBuilder,
    number: int,
    atom: Any,
    arguments: Sequence[LayoutNode | None],
    layouts: tuple[Layout, ...] | None,
    state_outputs: dict[int, int],
    equivalent_inputs: Mapping[int, int],
) -> LayoutNode | None:
    """Return the node of a result: that of the state that it replaces, or one of its own."""
    if isinstance(atom, jc.Literal) or atom in block.free:
        return None
    if number in state_outputs and arguments[state_outputs[number]] is not None:
        end = arguments[state_outputs[number]]
        key: Any = _Key("state", equivalent_inputs.get(state_outputs[number], state_outputs[number]), "update")
    else:
        aval: Any = atom.aval
        end = block.planner.table.add_layouts(f"result {number}", layouts or (replicated(aval.ndim),))
        key = _Key("result", number, "update")
    assert end is not None
    block.read(atom, end, key, phase="update")
    return end
