"""Write down the memory program of a solution, with every form in which a value could be read.

    BlockChoices, states  ->  MemoryProgram over forms

The forms are those of `local_program`. One that has the layout of what it is read from costs nothing in these states;
it is listed all the same, since in other states it would be a copy. What a compiler copies and merges besides is as in
`memory_listing`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autopar.compiler.costs.compilers import GPU, Compiler
from autopar.compiler.intra_op.choice_graph import BlockChoices, Choice, EquationChoice, chosen
from autopar.compiler.intra_op.operand_order import copies_of_operands
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.equation_keys import REMAT, equation_key
from autopar.compiler.memory.allocation import Border, MemoryProgram, border_of_body, joins_late, stacked_from
from autopar.compiler.memory.liveness import Work, is_dear, kind_of, writes_over
from autopar.compiler.resharding.costs import reshard_steps
from autopar.compiler.resharding.steps import collective_of
from autopar.compiler.sharding.free_values import is_small
from autopar.compiler.sharding.layout import Layout, LogicalMesh, num_shards, replicated


class Form(NamedTuple):
    """A value as it is made (""), as it is kept ("stored"), as a phase reads it, or as a reader wants it."""

    variable: Any
    name: str = ""
    place: str = ""
    """Which of the regions in line it belongs to, if to one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Made:
    """What stands behind a form: its choice (None for what every device holds), and what it is brought from."""

    choice: Choice | None
    origin: Form | None


@dataclass(kw_only=True, eq=False)
class Lister:
    """Lists the works of a block; `made` collects the forms of it and of all blocks within."""

    block: BlockChoices
    states: Sequence[int]
    mesh: LogicalMesh
    compiler: Compiler = GPU
    nested: bool = False
    made: dict[Form, Made] = field(default_factory=dict[Form, Made])
    works: list[Work] = field(default_factory=list[Work])
    inner: dict[int, tuple[MemoryProgram, ...]] = field(default_factory=dict[int, tuple[MemoryProgram, ...]])
    mine: list[Form] = field(default_factory=list[Form])
    arguments: set[Form] = field(default_factory=set[Form])
    seen: dict[Hashable, tuple[Form, ...]] = field(default_factory=dict[Hashable, tuple[Form, ...]])
    """By what is computed, the results."""
    place: str = ""
    names: dict[Any, Form] = field(default_factory=dict[Any, Form])
    """By variable of a region, or of results that are merged, the form that it stands for."""

    def program(self, border: Border) -> MemoryProgram:
        """The block's memory program; to be called once."""
        jaxpr = self.block.jaxpr
        inputs = [self._define(v, choice) for v, choice in zip(jaxpr.invars, self.block.arguments, strict=True)]
        self.arguments.update(form for form in inputs if form is not None)
        ends = self.run()
        return MemoryProgram(
            works=self.works,
            inputs=inputs,
            outputs=ends,
            nbytes={form: self._nbytes(form) for form in self.mine},
            inner=self.inner,
            border=border,
            compiler=self.compiler,
        ).arranged()

    def run(self) -> list[Form | None]:
        """List the works; the results in the forms in which they leave."""
        jaxpr = self.block.jaxpr
        for v in jaxpr.constvars:
            self._define(v, None)
        for eqn, choice in zip(jaxpr.eqns, self.block.equations, strict=True):
            self._add(eqn, EquationChoice() if choice is None else choice)
        phase = "body" if self.nested else "update"
        return [self._read(a, choice, phase) for a, choice in zip(jaxpr.outvars, self.block.results, strict=True)]

    def layout(self, form: Form) -> Layout:
        """The layout of a form in these states."""
        return self._layout(self.made[form].choice, form.variable)

    def _layout(self, choice: Choice | None, atom: Any) -> Layout:
        return replicated(atom.aval.ndim) if choice is None else chosen(choice, self.states)

    def _nbytes(self, form: Form) -> float:
        return self.compiler.nbytes(form.variable.aval) / num_shards(self.layout(form), self.mesh)

    def _form_of(self, atom: Any) -> Form:
        """A value as it is made."""
        return self.names.get(atom, Form(atom, "", self.place))

    def _define(self, v: Any, choice: Choice | None) -> Form | None:
        return None if is_small(v.aval) else self._make(self._form_of(v), choice, None)

    def _make(self, form: Form, choice: Choice | None, origin: Form | None) -> Form:
        self.made[form] = Made(choice=choice, origin=origin)
        self.mine.append(form)
        return form

    def _add(self, eqn: jc.JaxprEqn, choice: EquationChoice) -> None:
        phase = "body" if self.nested else jc.ad_phase(eqn) or "update"
        arguments = choice.arguments or (None,) * len(eqn.invars)
        found = [self._read(atom, argument, phase) for atom, argument in zip(eqn.invars, arguments, strict=True)]
        if choice.bodies and eqn.primitive.name in REMAT:
            self._run_in_line(eqn, choice.bodies[0], found)
        elif not self._is_merged(eqn, choice, found):
            self._append(eqn, choice, found)

    def _run_in_line(self, eqn: jc.JaxprEqn, body: BlockChoices, found: Sequence[Form | None]) -> None:
        given = zip(body.jaxpr.invars, map(self._called, eqn.invars, found), strict=True)
        region = Lister(
            block=body,
            states=self.states,
            mesh=self.mesh,
            compiler=self.compiler,
            nested=True,
            made=self.made,
            works=self.works,
            inner=self.inner,
            mine=self.mine,
            arguments=self.arguments,
            seen=self.seen,
            place=f"{self.place} in region {len(self.works)}",
            names=dict(given),
        )
        ends = zip(eqn.outvars, body.jaxpr.outvars, region.run(), strict=True)
        self.names.update((v, region._called(inside, end)) for v, inside, end in ends)

    def _called(self, atom: Any, form: Form | None) -> Form:
        """What stands for an operand: the form in which it is read, if it is large enough to have one."""
        if form is not None:
            return form
        return Form(None, repr(atom.val)) if isinstance(atom, jc.Literal) else self._form_of(atom)

    def _is_merged(self, eqn: jc.JaxprEqn, choice: EquationChoice, found: Sequence[Form | None]) -> bool:
        """Whether the results are there already, if the compiler would see that."""
        if self.compiler.keeps_barriers or choice.bodies or eqn.effects or any(True for _ in jc.subjaxprs(eqn)):
            return False
        layouts = tuple(self._layout(each, v) for v, each in zip(eqn.outvars, choice.results, strict=False))
        operands = tuple(self._value(self._called(a, form)) for a, form in zip(eqn.invars, found, strict=True))
        what = (equation_key(eqn), operands, layouts)
        mine = tuple(map(self._form_of, eqn.outvars))
        there = self.seen.setdefault(what, mine)
        if there == mine:
            return False
        self.names.update(zip(eqn.outvars, there, strict=True))
        return True

    def _value(self, form: Form) -> Hashable:
        """What a form holds: the value as it was made, in a layout."""
        if form not in self.made:
            return form
        layout = self.layout(form)
        while (origin := self.made[form].origin) is not None:
            form = origin
        return form, layout

    def _append(self, eqn: jc.JaxprEqn, choice: EquationChoice, found: Sequence[Form | None]) -> None:
        made = zip(eqn.outvars, choice.results or (None,) * len(eqn.outvars), strict=True)
        results = tuple(form for v, result in made if (form := self._define(v, result)) is not None)
        reads = tuple(form for form in found if form is not None)
        if choice.bodies:
            bodies = [self._body(eqn, number, body) for number, body in enumerate(choice.bodies)]
            self.inner[len(self.works)] = tuple(bodies)
            stacks = tuple(form for v in eqn.outvars[stacked_from(eqn) :] if (form := self._form_of(v)) in self.made)
            work = Work("apart", reads, results, over=writes_over(eqn), late=joins_late(eqn), stacks=stacks)
        else:
            kind = kind_of(eqn)
            kind = "fused" if kind == "view" and not (reads and results) else kind
            workspace = self.compiler.product_workspace_bytes if eqn.primitive.name == "dot_general" else 0.0
            reads = self._copied(eqn, found)
            work = Work(kind, reads, results, dear=is_dear(eqn), over=writes_over(eqn), workspace=workspace)
        self.works.append(work)

    def _copied(self, eqn: jc.JaxprEqn, found: Sequence[Form | None]) -> tuple[Form, ...]:
        """What an equation reads: copies of operands that it wants in another order or in more bits."""
        reads: list[Form] = []
        for form, how in zip(found, copies_of_operands(eqn, self.compiler), strict=True):
            if form is None:
                continue
            if how.order is not None or (how.wide and self._same(form) in self.arguments):
                source = self._same(form)
                form = source._replace(name=f"{source.name} {how}")
                if form not in self.made:
                    self._make(form, self.made[source].choice, None)
                    self.works.append(Work("reduction", (source,), (form,), early=True))
            reads.append(form)
        return tuple(reads)

    def _same(self, form: Form) -> Form:
        """The first of the forms that are the same array as this one in these states: its copies serve them all."""
        while (origin := self.made[form].origin) is not None and self.layout(origin) == self.layout(form):
            form = origin
        return form

    def _body(self, eqn: jc.JaxprEqn, number: int, body: BlockChoices) -> MemoryProgram:
        border = border_of_body(eqn, number, len(body.jaxpr.invars), len(body.jaxpr.outvars))
        lister = Lister(
            block=body, states=self.states, mesh=self.mesh, compiler=self.compiler, nested=True, made=self.made
        )
        return lister.program(border)

    def _read(self, atom: Any, choice: Choice | None, phase: str) -> Form | None:
        """The form in which a reader of this phase finds the value that it wants in the layout of `choice`."""
        if isinstance(atom, jc.Literal) or is_small(atom.aval):
            return None
        first: Any = self.block.alike.get(atom, atom)
        form, wanted = self._form_of(atom), self._layout(choice, atom)
        planned = {"stored": self.block.stored.get(first), phase: self.block.copies.get(first, {}).get(phase)}
        for name, kept in planned.items():
            if self.layout(form) != wanted or name == "stored":
                form = form if kept is None else self._form(form, Form(atom, name, self.place), kept)
        return form if choice is None else self._form(form, Form(atom, f"{phase} {wanted}", self.place), choice)

    def _form(self, origin: Form, wanted: Form, choice: Choice) -> Form:
        if wanted in self.made:
            return wanted
        source, target = self.layout(origin), self._layout(choice, wanted.variable)
        if source != target and target == self.layout(self._form_of(wanted.variable)):
            return self._form_of(wanted.variable)
        origin = self._there(origin, wanted, target)
        self.works.append(self._move(origin, wanted, self.layout(origin), target))
        return self._make(wanted, choice, origin)

    def _there(self, origin: Form, wanted: Form, target: Layout) -> Form:
        """What a form is brought from: the same move made before, if the compiler would see that."""
        if self.compiler.keeps_barriers or self.layout(origin) == target:
            return origin
        (there,) = self.seen.setdefault(("moved", self._value(origin), target), (wanted,))
        return origin if there == wanted else there

    def _move(self, origin: Form, wanted: Form, source: Layout, target: Layout) -> Work:
        if source == target:
            return Work("form", (origin,), (wanted,))
        kind = collective_of(reshard_steps(source, target, tuple(wanted.variable.aval.shape), self.mesh))
        return Work("apart" if kind else "fused", (origin,), (wanted,), collective=kind)
