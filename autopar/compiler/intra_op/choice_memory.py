"""Write down the memory program of a solution, with every form in which a value could be read.

    BlockChoices, states  ->  MemoryProgram over forms

The forms are those of `local_program`. One that has the layout of what it is read from costs nothing in these states;
it is listed all the same, since in other states it would be a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autopar.compiler import jax_compat as jc
from autopar.compiler.costs import aval_bytes
from autopar.compiler.intra_op.allocation import Border, MemoryProgram, border_of_body, joins_late
from autopar.compiler.intra_op.choice_graph import BlockChoices, Choice, EquationChoice, chosen
from autopar.compiler.intra_op.free_values import is_small
from autopar.compiler.intra_op.layout import Layout, LogicalMesh, num_shards, replicated
from autopar.compiler.intra_op.lifetimes import Kind, Work, is_dear, kind_of, writes_over
from autopar.compiler.intra_op.resharding import reshard_steps
from autopar.compiler.intra_op.resharding_steps import collective_kind


class Form(NamedTuple):
    """A value as it is made (""), as it is kept ("stored"), as a phase reads it, or as a reader wants it."""

    variable: Any
    name: str = ""


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
    nested: bool = False
    made: dict[Form, Made] = field(default_factory=dict[Form, Made])
    works: list[Work] = field(default_factory=list[Work])
    inner: dict[int, tuple[MemoryProgram, ...]] = field(default_factory=dict[int, tuple[MemoryProgram, ...]])
    mine: list[Form] = field(default_factory=list[Form])

    def program(self, border: Border) -> MemoryProgram:
        """The block's memory program; to be called once."""
        jaxpr = self.block.jaxpr
        inputs = [self._define(v, choice) for v, choice in zip(jaxpr.invars, self.block.arguments, strict=True)]
        for v in jaxpr.constvars:
            self._define(v, None)
        for eqn, choice in zip(jaxpr.eqns, self.block.equations, strict=True):
            self._add(eqn, choice)
        phase = "body" if self.nested else "update"
        ends = [self._read(a, choice, phase) for a, choice in zip(jaxpr.outvars, self.block.results, strict=True)]
        return MemoryProgram(
            works=self.works,
            inputs=inputs,
            outputs=ends,
            nbytes={form: self._nbytes(form) for form in self.mine},
            inner=self.inner,
            border=border,
        )

    def layout(self, form: Form) -> Layout:
        """The layout of a form in these states."""
        return self._layout(self.made[form].choice, form.variable)

    def _layout(self, choice: Choice | None, atom: Any) -> Layout:
        return replicated(atom.aval.ndim) if choice is None else chosen(choice, self.states)

    def _nbytes(self, form: Form) -> float:
        return aval_bytes(form.variable.aval) / num_shards(self.layout(form), self.mesh)

    def _define(self, v: Any, choice: Choice | None) -> Form | None:
        return None if is_small(v.aval) else self._make(Form(v), choice, None)

    def _make(self, form: Form, choice: Choice | None, origin: Form | None) -> Form:
        self.made[form] = Made(choice=choice, origin=origin)
        self.mine.append(form)
        return form

    def _add(self, eqn: jc.JaxprEqn, choice: EquationChoice | None) -> None:
        phase = "body" if self.nested else jc.ad_phase(eqn) or "update"
        choice = EquationChoice() if choice is None else choice
        arguments = choice.arguments or (None,) * len(eqn.invars)
        found = [self._read(atom, argument, phase) for atom, argument in zip(eqn.invars, arguments, strict=True)]
        reads = tuple(form for form in found if form is not None)
        made = zip(eqn.outvars, choice.results or (None,) * len(eqn.outvars), strict=True)
        results = tuple(form for v, result in made if (form := self._define(v, result)) is not None)
        if choice.bodies:
            self.inner[len(self.works)] = tuple(
                self._body(eqn, number, body) for number, body in enumerate(choice.bodies)
            )
            self.works.append(Work("apart", reads, results, over=writes_over(eqn), late=joins_late(eqn)))
        else:
            kind: Kind = kind_of(eqn)
            kind = "fused" if kind == "view" and not (reads and results) else kind
            self.works.append(Work(kind, reads, results, dear=is_dear(eqn), over=writes_over(eqn)))

    def _body(self, eqn: jc.JaxprEqn, number: int, body: BlockChoices) -> MemoryProgram:
        border = border_of_body(eqn, number, len(body.jaxpr.invars), len(body.jaxpr.outvars))
        return Lister(block=body, states=self.states, mesh=self.mesh, nested=True, made=self.made).program(border)

    def _read(self, atom: Any, choice: Choice | None, phase: str) -> Form | None:
        """The form in which a reader of this phase finds the value that it wants in the layout of `choice`."""
        if isinstance(atom, jc.Literal) or is_small(atom.aval):
            return None
        first: Any = self.block.alike.get(atom, atom)
        form, wanted = Form(atom), self._layout(choice, atom)
        planned = {"stored": self.block.stored.get(first), phase: self.block.copies.get(first, {}).get(phase)}
        for name, kept in planned.items():
            if self.layout(form) != wanted or name == "stored":
                form = form if kept is None else self._form(form, Form(atom, name), kept)
        return form if choice is None else self._form(form, Form(atom, f"{phase} {wanted}"), choice)

    def _form(self, origin: Form, wanted: Form, choice: Choice) -> Form:
        if wanted in self.made:
            return wanted
        source, target = self.layout(origin), self._layout(choice, wanted.variable)
        if source != target and target == self.layout(Form(wanted.variable)):
            return Form(wanted.variable)
        self.works.append(Work(self._kind(source, target, wanted), (origin,), (wanted,)))
        return self._make(wanted, choice, origin)

    def _kind(self, source: Layout, target: Layout, form: Form) -> Kind:
        if source == target:
            return "form"
        steps = reshard_steps(source, target, tuple(form.variable.aval.shape), self.mesh)
        return "apart" if any(collective_kind(step) is not None for step in steps) else "fused"
