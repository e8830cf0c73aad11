"""Write down the memory program of a solution, with every form in which a value could be read.

    BlockGraph, states  ->  MemoryProgram over forms

The forms are those of `local_program`. One that has the layout of what it is read from costs nothing in these states;
it is listed all the same, since in other states it would be a copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from autopar.compiler.intra_op.choice_graph import BlockGraph, EquationNode, LayoutNode, NodeTable, chosen_layout
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.flops import aval_bytes
from autopar.compiler.jaxprs.fusion import is_expensive, kind_of
from autopar.compiler.jaxprs.primitives import REMAT
from autopar.compiler.memory.allocation import (
    Border,
    MemoryProgram,
    Moment,
    alive,
    border_of_body,
    joins_late,
    stacked_from,
    taken_places,
    worst_moments,
)
from autopar.compiler.memory.liveness import Op, workspace_bytes, writes_over
from autopar.compiler.resharding.costs import reshard_steps
from autopar.compiler.resharding.steps import collective_of
from autopar.compiler.sharding.layout import Layout, LogicalMesh, num_shards, replicated
from autopar.compiler.sharding.replicated_values import below_split_size
from autopar.compiler.solver.problem import Row


class Form(NamedTuple):
    """A value as it is made (""), as it is kept ("stored"), as a phase reads it, or as a reader wants it."""

    variable: Any
    name: str = ""
    place: str = ""
    """Which of the regions in line it belongs to, if to one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Made:
    """What stands behind a form: its choice (None for what every device holds), and what it is brought from."""

    choice: LayoutNode | None
    origin: Form | None


@dataclass(kw_only=True, eq=False)
class Lister:
    """Lists the ops of a block; `made` collects the forms of it and of all blocks within."""

    block: BlockGraph
    states: Sequence[int]
    mesh: LogicalMesh
    product_workspace: float
    nested: bool = False
    made: dict[Form, Made] = field(default_factory=dict[Form, Made])
    ops: list[Op] = field(default_factory=list[Op])
    inner: dict[int, tuple[MemoryProgram, ...]] = field(default_factory=dict[int, tuple[MemoryProgram, ...]])
    mine: list[Form] = field(default_factory=list[Form])
    place: str = ""
    names: dict[Any, Form] = field(default_factory=dict[Any, Form])
    """By input or result of a region, the form that it stands for."""

    def program(self, border: Border) -> MemoryProgram:
        """The block's memory program; to be called once."""
        jaxpr = self.block.jaxpr
        inputs = [self._define(v, choice) for v, choice in zip(jaxpr.invars, self.block.arguments, strict=True)]
        ends = self.run()
        return MemoryProgram(
            ops=self.ops,
            inputs=inputs,
            outputs=ends,
            nbytes={form: self._nbytes(form) for form in self.mine},
            inner=self.inner,
            border=border,
        ).order_ops()

    def run(self) -> list[Form | None]:
        """List the ops; the results in the forms in which they leave."""
        jaxpr = self.block.jaxpr
        for v in jaxpr.constvars:
            self._define(v, None)
        for eqn, choice in zip(jaxpr.eqns, self.block.equations, strict=True):
            self._add(eqn, EquationNode() if choice is None else choice)
        phase = "body" if self.nested else "update"
        return [self._read(a, choice, phase) for a, choice in zip(jaxpr.outvars, self.block.results, strict=True)]

    def layout(self, form: Form) -> Layout:
        """The layout of a form in these states."""
        return self._layout(self.made[form].choice, form.variable)

    def _layout(self, choice: LayoutNode | None, atom: Any) -> Layout:
        return replicated(atom.aval.ndim) if choice is None else chosen_layout(choice, self.states)

    def _nbytes(self, form: Form) -> float:
        aval = form.variable.aval
        return aval_bytes(aval) / num_shards(aval.shape, self.layout(form), self.mesh)

    def _form_of(self, atom: Any) -> Form:
        """A value as it is made."""
        return self.names.get(atom, Form(atom, "", self.place))

    def _define(self, v: Any, choice: LayoutNode | None) -> Form | None:
        return None if below_split_size(v.aval) else self._make(self._form_of(v), choice, None)

    def _make(self, form: Form, choice: LayoutNode | None, origin: Form | None) -> Form:
        self.made[form] = Made(choice=choice, origin=origin)
        self.mine.append(form)
        return form

    def _add(self, eqn: jc.JaxprEqn, choice: EquationNode) -> None:
        phase = "body" if self.nested else jc.ad_phase(eqn) or "update"
        arguments = choice.arguments or (None,) * len(eqn.invars)
        found = [self._read(atom, argument, phase) for atom, argument in zip(eqn.invars, arguments, strict=True)]
        if choice.bodies and eqn.primitive.name in REMAT:
            self._run_in_line(eqn, choice.bodies[0], found)
        else:
            self._append(eqn, choice, found)

    def _run_in_line(self, eqn: jc.JaxprEqn, body: BlockGraph, found: Sequence[Form | None]) -> None:
        given = zip(body.jaxpr.invars, map(self._called, eqn.invars, found), strict=True)
        region = Lister(
            block=body,
            states=self.states,
            mesh=self.mesh,
            product_workspace=self.product_workspace,
            nested=True,
            made=self.made,
            ops=self.ops,
            inner=self.inner,
            mine=self.mine,
            place=f"{self.place} in region {len(self.ops)}",
            names=dict(given),
        )
        ends = zip(eqn.outvars, body.jaxpr.outvars, region.run(), strict=True)
        self.names.update((v, region._called(inside, end)) for v, inside, end in ends)

    def _called(self, atom: Any, form: Form | None) -> Form:
        """What stands for an operand: the form in which it is read, if it is large enough to have one."""
        if form is not None:
            return form
        return Form(None, repr(atom.val)) if isinstance(atom, jc.Literal) else self._form_of(atom)

    def _append(self, eqn: jc.JaxprEqn, choice: EquationNode, found: Sequence[Form | None]) -> None:
        made = zip(eqn.outvars, choice.results or (None,) * len(eqn.outvars), strict=True)
        results = tuple(form for v, result in made if (form := self._define(v, result)) is not None)
        reads = tuple(form for form in found if form is not None)
        if choice.bodies:
            bodies = [self._body(eqn, number, body) for number, body in enumerate(choice.bodies)]
            self.inner[len(self.ops)] = tuple(bodies)
            stacks = tuple(form for v in eqn.outvars[stacked_from(eqn) :] if (form := self._form_of(v)) in self.made)
            op = Op("apart", reads, results, over=writes_over(eqn), late=joins_late(eqn), stacks=stacks)
        else:
            kind = kind_of(eqn)
            kind = "fused" if kind == "view" and not (reads and results) else kind
            op = Op(
                kind,
                reads,
                results,
                expensive=is_expensive(eqn),
                over=writes_over(eqn),
                workspace=workspace_bytes(eqn, self.product_workspace),
            )
        self.ops.append(op)

    def _body(self, eqn: jc.JaxprEqn, number: int, body: BlockGraph) -> MemoryProgram:
        border = border_of_body(eqn, number, len(body.jaxpr.invars), len(body.jaxpr.outvars))
        lister = Lister(
            block=body,
            states=self.states,
            mesh=self.mesh,
            product_workspace=self.product_workspace,
            nested=True,
            made=self.made,
        )
        return lister.program(border)

    def _read(self, atom: Any, choice: LayoutNode | None, phase: str) -> Form | None:
        """The form in which a reader of this phase finds the value that it wants in the layout of `choice`."""
        if isinstance(atom, jc.Literal) or below_split_size(atom.aval):
            return None
        first: Any = self.block.equivalent.get(atom, atom)
        form, wanted = self._form_of(atom), self._layout(choice, atom)
        planned = {"stored": self.block.stored.get(first), phase: self.block.copies.get(first, {}).get(phase)}
        for name, kept in planned.items():
            if self.layout(form) != wanted or name == "stored":
                form = form if kept is None else self._form(form, Form(atom, name, self.place), kept)
        return form if choice is None else self._form(form, Form(atom, f"{phase} {wanted}", self.place), choice)

    def _form(self, origin: Form, wanted: Form, choice: LayoutNode) -> Form:
        if wanted in self.made:
            return wanted
        source, target = self.layout(origin), self._layout(choice, wanted.variable)
        if source != target and target == self.layout(self._form_of(wanted.variable)):
            return self._form_of(wanted.variable)
        self.ops.append(self._move(origin, wanted, source, target))
        return self._make(wanted, choice, origin)

    def _move(self, origin: Form, wanted: Form, source: Layout, target: Layout) -> Op:
        if source == target:
            return Op("form", (origin,), (wanted,))
        kind = collective_of(reshard_steps(source, target, tuple(wanted.variable.aval.shape), self.mesh))
        return Op("apart" if kind else "fused", (origin,), (wanted,), collective=kind)


# Bound the memory of a plan while it is being searched for: linear rows over the choices, made when they are
# violated
# states  ->  the program that they mean, its worst moments  ->  a row for each of these above the budget
#
#         Σ bytes_v(x_v) + Σ copy_uv(x_u, x_v) <= budget      over what is in memory at that moment
#
# A value costs the bytes of the form in which it is kept then; a copy in another form for some readers costs its own
# bytes if the layouts differ, nothing if they agree. So a row is the modelled memory of a moment as a function of all
# states, exact for the states that it was made for.

_MOMENTS_AT_ONCE = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelledMemory:
    """What the plan that a solution means keeps in memory at its worst moments."""

    mesh: LogicalMesh
    arguments: _Terms
    arguments_bytes: float
    moments: Sequence[Moment]
    """The worst first."""
    forms: Mapping[Form, Made]

    @property
    def peak_bytes(self) -> float:
        """What it needs at most."""
        return self.arguments_bytes + self.moments[0].nbytes

    def rows_above(self, limit_bytes: float) -> list[Row]:
        """The rows of the moments that need more than that."""
        return [
            self.arguments.plus(moment, self.forms, self.mesh).row(f"memory at {number}", limit_bytes)
            for number, moment in enumerate(self.moments)
            if self.arguments_bytes + moment.nbytes > limit_bytes
        ]


def modelled_memory(
    choices: BlockGraph,
    table: NodeTable,
    states: Sequence[int],
    donated: Collection[int] = (),
) -> ModelledMemory:
    """The memory of a solution. `donated` are the inputs that a step may overwrite."""
    program, forms = _step(choices, table, states, donated)
    arguments = _Terms.of_inputs(choices, table.mesh)
    return ModelledMemory(
        mesh=table.mesh,
        arguments=arguments,
        arguments_bytes=arguments.value(states),
        moments=worst_moments(program, _MOMENTS_AT_ONCE),
        forms=forms,
    )


# --- rows ---------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Terms:
    """A sum of bytes, over states and pairs of states."""

    constant: float = 0.0
    nodes: dict[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])
    edges: dict[tuple[int, int], np.ndarray] = field(default_factory=dict[tuple[int, int], np.ndarray])

    @staticmethod
    def of_inputs(choices: BlockGraph, mesh: LogicalMesh) -> _Terms:
        """The step's arguments, which are there all the time."""
        terms = _Terms()
        for v, choice in zip(choices.jaxpr.invars, choices.arguments, strict=True):
            terms.add(v.aval, choice, mesh)
        return terms

    def plus(self, moment: Moment, forms: Mapping[Form, Made], mesh: LogicalMesh) -> _Terms:
        """These and what is in memory at a moment."""
        terms = _Terms(constant=self.constant, nodes=dict(self.nodes), edges=dict(self.edges))
        at: Moment | None = moment
        while at is not None:
            terms.constant += at.program.workspace(at.time)
            for form, origin in _kept(at, forms):
                mine, theirs = forms[form].choice, None if origin is None else forms[origin].choice
                if origin is None:
                    terms.add(form.variable.aval, mine, mesh)
                elif mine is not None and theirs is not None and mine.number != theirs.number:
                    terms.add_copy(form.variable.aval, theirs, mine, mesh)
            at = at.inside
        return terms

    def add(self, aval: Any, choice: LayoutNode | None, mesh: LogicalMesh) -> None:
        """Add an array in the layout of a choice."""
        if choice is None:
            self.constant += aval_bytes(aval)
        else:
            nbytes = _bytes_of(aval, choice.layouts, mesh)
            self.nodes[choice.number] = self.nodes[choice.number] + nbytes if choice.number in self.nodes else nbytes

    def add_copy(self, aval: Any, source: LayoutNode, target: LayoutNode, mesh: LogicalMesh) -> None:
        """Add a copy in the layout of `target`, if that is not the one of `source`."""
        differ = np.array([[a != b for b in target.layouts] for a in source.layouts])
        matrix = differ * _bytes_of(aval, target.layouts, mesh)
        key = (source.number, target.number)
        if source.number > target.number:
            key, matrix = (target.number, source.number), matrix.T
        self.edges[key] = self.edges[key] + matrix if key in self.edges else matrix

    def value(self, states: Sequence[int]) -> float:
        """The sum for a solution."""
        nodes = sum(float(nbytes[states[node]]) for node, nbytes in self.nodes.items())
        return self.constant + nodes + sum(float(m[states[i], states[j]]) for (i, j), m in self.edges.items())

    def row(self, name: str, limit: float) -> Row:
        """The sum as a row."""
        return Row(name=name, nodes=self.nodes, edges=self.edges, limit=limit - self.constant)


def _kept(moment: Moment, forms: Mapping[Form, Made]) -> Iterator[tuple[Form, Form | None]]:
    """The forms that are wanted at a moment, each with the form that is in memory anyway and may serve for it."""
    lives, time = moment.program.lives, moment.time
    wanted: dict[Any, list[Form]] = {}
    for form, life in lives.parts.items():
        assert isinstance(form, Form)
        if life.start <= time < life.stop:
            wanted.setdefault(lives.roots.get(form, form), []).append(form)
    for root in alive(moment):
        assert isinstance(root, Form)
        mine = wanted.get(root, [root])
        first: Form | None = None
        for form in mine:
            origin = _nearest(form, forms, lives.places, mine)
            # Two copies of what is itself no longer there are one array where their layouts agree.
            yield form, first if origin is None else origin
            first = form if first is None and origin is None else first
    for root, life in lives.whole.items():
        if not life.allocated:  # an input, which is there all the time
            copies = [form for form in wanted.get(root, ()) if form != root]
            there = {root, *copies, *lives.places.values()}
            yield from ((form, _nearest(form, forms, lives.places, there)) for form in copies)


def _nearest(form: Form, forms: Mapping[Form, Made], places: Mapping[Any, Any], among: Collection[Any]) -> Form | None:
    """The nearest of some forms that a form is brought from; it may be through a view of it."""
    origin = forms[form].origin
    while origin is not None and places.get(origin, origin) not in among:
        origin = forms[origin].origin
    return origin


def _step(
    choices: BlockGraph, table: NodeTable, states: Sequence[int], donated: Collection[int]
) -> tuple[MemoryProgram, Mapping[Form, Made]]:
    workspace = table.mesh_costs.machine.product_workspace_bytes
    lister = Lister(block=choices, states=states, mesh=table.mesh, product_workspace=workspace)
    ends = zip(choices.jaxpr.outvars, choices.results, strict=True)
    border = Border(
        taken=taken_places(
            [_type(v, c, states) for v, c in zip(choices.jaxpr.invars, choices.arguments, strict=True)],
            [_type(v, c, states) for v, c in ends],
            donated,
        )
    )
    return lister.program(border), lister.made


def _type(atom: Any, choice: LayoutNode | None, states: Sequence[int]) -> Any:
    layout = replicated(atom.aval.ndim) if choice is None else chosen_layout(choice, states)
    return atom.aval.shape, atom.aval.dtype, layout


def _bytes_of(aval: Any, layouts: Sequence[Layout], mesh: LogicalMesh) -> np.ndarray:
    return aval_bytes(aval) / np.array([num_shards(aval.shape, layout, mesh) for layout in layouts], dtype=float)
