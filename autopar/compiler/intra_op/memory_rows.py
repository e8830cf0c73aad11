"""Bound the memory of a plan while it is being searched for: linear rows over the options, made when violated.

    assignment  ->  the program that it means, its worst moments  ->  a row for each of these above the budget

        Σ bytes_v(x_v) + Σ copy_uv(x_u, x_v) <= budget      over what is in memory at that moment

The program is the one of the plan, listed as for its estimate, with every form in which a value could be read. A value
costs the bytes of the form in which it is kept then; a copy in another form for some readers costs its own bytes if the
layouts differ, nothing if they agree. An array that lies in the place of another costs nothing while it is no larger
than that. So a row is the modelled memory of a moment as a function of all options, exact for the assignment that it
was made for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.compiler.intra_op.choice_graph import BlockGraph, EquationNode, LayoutNode, NodeTable, block_plan_of
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.flops import aval_bytes
from autopar.compiler.jaxprs.primitives import REMAT
from autopar.compiler.memory.allocation import Moment, alive, alive_in_places, worst_moments
from autopar.compiler.memory.joined_collectives import JoinedArray
from autopar.compiler.memory.listing import BlockValue, listed_step
from autopar.compiler.sharding.layout import Layout, LogicalMesh, num_shards
from autopar.compiler.solver.problem import Row
from autopar.compiler.spmd.local_program import LocalBlock, Reshard, RunBody, Value, local_block, value_bytes

_MOMENTS_AT_ONCE = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Forms:
    """The values of a program and of the blocks in it."""

    nodes: dict[BlockValue, LayoutNode] = field(default_factory=dict[BlockValue, LayoutNode])
    """The node that lays out a value; values that are replicated for free have none."""
    origins: dict[BlockValue, BlockValue] = field(default_factory=dict[BlockValue, BlockValue])
    """The value that a value is brought from, in the same block or around it."""

    def add(self, block: LocalBlock, graph: BlockGraph) -> None:
        """Note the values of a block and of those inside; the graph may be that of a layer like it."""
        nodes = {id(eqn): node for eqn, node in zip(block.jaxpr.eqns, graph.equations, strict=True)}
        alike = dict(zip(_variables(block.jaxpr), _variables(graph.jaxpr), strict=True))
        self._note(block, block.inputs, graph.arguments)
        for action in block.actions:
            if isinstance(action, Reshard):
                variable = alike.get(action.result.variable, action.result.variable)
                self._note(block, (action.result,), (_planned(graph, variable, action.result.form),))
                if isinstance(action.operand, Value):
                    self.origins[BlockValue(block, action.result)] = BlockValue(block, action.operand)
                continue
            node = nodes[id(action.eqn)] or EquationNode()
            self._note_read(block, action.operands, node.arguments)
            self._note(block, action.results, node.results)
            if isinstance(action, RunBody):
                self._enter(block, action, node)
        self._note_read(block, block.outputs, graph.results)

    def _enter(self, block: LocalBlock, action: RunBody, node: EquationNode) -> None:
        for body, graph in zip(action.bodies, node.bodies, strict=True):
            if action.eqn.primitive.name in REMAT:  # which stands in line
                pairs = [
                    *((body, inside, block, given) for inside, given in zip(body.inputs, action.operands, strict=True)),
                    *((block, made, body, end) for made, end in zip(action.results, body.outputs, strict=True)),
                ]
                for mine, value, other, origin in pairs:
                    if isinstance(origin, Value):
                        self.origins[BlockValue(mine, value)] = BlockValue(other, origin)
            self.add(body, graph)

    def _note(self, block: LocalBlock, values: Sequence[Value], nodes: Sequence[LayoutNode | None]) -> None:
        self.nodes.update((BlockValue(block, v), node) for v, node in zip(values, nodes) if node is not None)

    def _note_read(self, block: LocalBlock, values: Sequence[Any], nodes: Sequence[LayoutNode | None]) -> None:
        """Note the nodes of the forms that were made for a reader."""
        for value, node in zip(values, nodes):
            if isinstance(value, Value) and value.form and node is not None:
                self.nodes.setdefault(BlockValue(block, value), node)


def _variables(jaxpr: jc.Jaxpr) -> list[jc.Var]:
    """Return all variables of a jaxpr in its own order, the same in jaxprs that are alike."""
    return [*jaxpr.invars, *jaxpr.constvars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]


def _planned(graph: BlockGraph, variable: Any, form: str) -> LayoutNode | None:
    """Return the node of a stored form, or of one for all readers of a phase."""
    return graph.stored.get(variable) if form == "stored" else graph.copies.get(variable, {}).get(form)


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelledMemory:
    """The bytes that the plan of an assignment keeps in memory at its worst moments."""

    mesh: LogicalMesh
    arguments: _Terms
    arguments_bytes: float
    moments: Sequence[Moment]
    """The moments, the worst first."""
    forms: Forms

    @property
    def peak_bytes(self) -> float:
        """Bytes that it needs at most."""
        return self.arguments_bytes + self.moments[0].nbytes

    def rows_above(self, limit_bytes: float) -> list[Row]:
        """Return the rows of the moments that need more than that."""
        return [
            self.arguments.plus(moment, self.forms, self.mesh).row(f"memory at {number}", limit_bytes)
            for number, moment in enumerate(self.moments)
            if self.arguments_bytes + moment.nbytes > limit_bytes
        ]


def modelled_memory(
    graph: BlockGraph, table: NodeTable, assignment: Sequence[int], donated: Collection[int]
) -> ModelledMemory:
    """Return the memory of the plan that an assignment means. `donated` are the inputs that a step may overwrite."""
    block = local_block(graph.jaxpr, block_plan_of(graph, assignment), table.mesh, every_form=True)
    program = listed_step(block, table.mesh, donated, table.mesh_costs.machine)
    forms = Forms()
    forms.add(block, graph)
    arguments = _Terms.of_inputs(graph, table.mesh)
    return ModelledMemory(
        mesh=table.mesh,
        arguments=arguments,
        arguments_bytes=arguments.value(assignment),
        moments=worst_moments(program, _MOMENTS_AT_ONCE),
        forms=forms,
    )


# --- rows ---------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Terms:
    """A sum of bytes, over options of nodes and of pairs of nodes."""

    constant: float = 0.0
    nodes: dict[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])
    edges: dict[tuple[int, int], np.ndarray] = field(default_factory=dict[tuple[int, int], np.ndarray])

    @staticmethod
    def of_inputs(graph: BlockGraph, mesh: LogicalMesh) -> _Terms:
        """Return the bytes of the step's arguments, which are there all the time."""
        terms = _Terms()
        for v, node in zip(graph.jaxpr.invars, graph.arguments, strict=True):
            terms.add(v.aval, node, mesh)
        return terms

    def plus(self, moment: Moment, forms: Forms, mesh: LogicalMesh) -> _Terms:
        """Return the sum of these and of what is in memory at a moment."""
        terms = _Terms(constant=self.constant, nodes=dict(self.nodes), edges=dict(self.edges))
        at: Moment | None = moment
        while at is not None:
            terms.constant += at.program.workspace(at.time)
            for form, origin in _kept(at, forms):
                mine, theirs = (
                    forms.nodes.get(form._replace(twin=False)),
                    None if origin is None else forms.nodes.get(origin),
                )
                wider = at.program.nbytes[form] / value_bytes(form.value, mesh)
                if origin is None and mine is not None:
                    terms.add(form.value.variable.aval, mine, mesh, wider)
                elif mine is not None and theirs is not None and mine.number != theirs.number:
                    terms.add_copy(form.value.variable.aval, theirs, mine, mesh)
                elif origin is None or form.value.layout != origin.value.layout:
                    terms.constant += at.program.nbytes[form]
            for form, owner in alive_in_places(at):
                if isinstance(form, BlockValue) and isinstance(owner, BlockValue):
                    terms.add_where_larger(form, owner, forms, mesh)
            at = at.inside
        return terms

    def add_where_larger(self, form: BlockValue, owner: BlockValue, forms: Forms, mesh: LogicalMesh) -> None:
        """Add an array where it is larger than the one in whose place it lies."""
        mine, theirs = (forms.nodes.get(each._replace(twin=False)) for each in (form, owner))
        if mine is None or theirs is None or mine.number == theirs.number:
            return
        sizes = _bytes_of(form.value.variable.aval, mine.layouts, mesh)
        places = _bytes_of(owner.value.variable.aval, theirs.layouts, mesh)
        self.add_pairs(theirs, mine, np.where(sizes > places[:, None], sizes, 0.0))

    def add(self, aval: Any, node: LayoutNode | None, mesh: LogicalMesh, wider: float = 1.0) -> None:
        """Add an array in the layout of a node, `wider` than its type by that factor."""
        if node is None:
            self.constant += aval_bytes(aval)
        else:
            nbytes = wider * _bytes_of(aval, node.layouts, mesh)
            self.nodes[node.number] = self.nodes[node.number] + nbytes if node.number in self.nodes else nbytes

    def add_copy(self, aval: Any, source: LayoutNode, target: LayoutNode, mesh: LogicalMesh) -> None:
        """Add a copy in the layout of `target`, if that is not the one of `source`."""
        differ = np.array([[a != b for b in target.layouts] for a in source.layouts])
        self.add_pairs(source, target, differ * _bytes_of(aval, target.layouts, mesh))

    def add_pairs(self, source: LayoutNode, target: LayoutNode, matrix: np.ndarray) -> None:
        """Add bytes for each pair of layouts of two nodes."""
        key = (source.number, target.number)
        if source.number > target.number:
            key, matrix = (target.number, source.number), matrix.T
        self.edges[key] = self.edges[key] + matrix if key in self.edges else matrix

    def value(self, options: Sequence[int]) -> float:
        """Return the sum for an assignment."""
        nodes = sum(float(nbytes[options[node]]) for node, nbytes in self.nodes.items())
        return self.constant + nodes + sum(float(m[options[i], options[j]]) for (i, j), m in self.edges.items())

    def row(self, name: str, limit: float) -> Row:
        """Return the sum as a row."""
        return Row(name=name, nodes=self.nodes, edges=self.edges, limit=limit - self.constant)


def _kept(moment: Moment, forms: Forms) -> Iterator[tuple[BlockValue, BlockValue | None]]:
    """Yield the forms that are wanted at a moment, each with the form in memory anyway that may serve for it."""
    lives, time = moment.program.lives, moment.time
    wanted: dict[Any, list[BlockValue]] = {}
    for form, life in lives.parts.items():
        if isinstance(form, BlockValue) and life.start <= time < life.stop:
            wanted.setdefault(lives.roots.get(form, form), []).append(form)
    for root in alive(moment):
        if isinstance(root, JoinedArray):
            parts = root.parts if moment.program.nbytes[root] else ()
            yield from ((part, None) for part in parts if isinstance(part, BlockValue))
            continue
        assert isinstance(root, BlockValue)
        mine = wanted.get(root, [root])
        first: BlockValue | None = None
        for form in mine:
            origin = _nearest(form, forms, lives.places, mine)
            # Two copies of what is itself no longer there are one array where their layouts agree.
            yield form, first if origin is None else origin
            first = form if first is None and origin is None else first
    viewed = set(lives.places.values())
    for root, life in lives.whole.items():
        if not life.allocated:  # an input, which is there all the time
            copies = [form for form in wanted.get(root, ()) if form != root]
            there = {root, *copies}
            yield from ((form, _nearest(form, forms, lives.places, there, viewed)) for form in copies)


def _nearest(form: BlockValue, forms: Forms, places: Mapping[Any, Any], *among: Collection[Any]) -> BlockValue | None:
    """Return the nearest of the forms in some collections that a form is brought from; it may be by a view of it."""
    origin = forms.origins.get(form)
    while origin is not None and not any(places.get(origin, origin) in each for each in among):
        origin = forms.origins.get(origin)
    return origin


def _bytes_of(aval: Any, layouts: Sequence[Layout], mesh: LogicalMesh) -> np.ndarray:
    return aval_bytes(aval) / np.array([num_shards(aval.shape, layout, mesh) for layout in layouts], dtype=float)
