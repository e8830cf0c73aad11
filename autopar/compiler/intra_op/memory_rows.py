"""Bound the memory of a plan while it is being searched for: linear rows over the choices, made when they are violated.

    states  ->  the program that they mean, its worst moments  ->  a row for each of these above the budget

        Σ bytes_v(x_v) + Σ copy_uv(x_u, x_v) <= budget      over what is in memory at that moment

A value costs the bytes of the form in which it is kept then; a copy in another form for some readers costs its own
bytes if the layouts differ, nothing if they agree. So a row is the modelled memory of a moment as a function of all
states, exact for the states that it was made for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.compiler.costs.compilers import GPU, Compiler
from autopar.compiler.intra_op.choice_graph import BlockChoices, Choice, ChoiceTable, chosen
from autopar.compiler.intra_op.choice_memory import Form, Lister, Made
from autopar.compiler.jaxprs.flops import aval_bytes
from autopar.compiler.memory.allocation import Border, MemoryProgram, Moment, alive, taken_places, worst_moments
from autopar.compiler.sharding.layout import Layout, LogicalMesh, num_shards, replicated
from autopar.compiler.solver.problem import Row

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
    choices: BlockChoices,
    table: ChoiceTable,
    states: Sequence[int],
    donated: Collection[int] = (),
    *,
    compiler: Compiler = GPU,
) -> ModelledMemory:
    """The memory of a solution. `donated` are the inputs that a step may overwrite."""
    program, forms = _step(choices, table.mesh, states, donated, compiler)
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
    def of_inputs(choices: BlockChoices, mesh: LogicalMesh) -> _Terms:
        """The step's arguments, which are there all the time."""
        terms = _Terms()
        for v, choice in zip(choices.jaxpr.invars, choices.arguments, strict=True):
            terms.add(aval_bytes(v.aval), choice, mesh)
        return terms

    def plus(self, moment: Moment, forms: Mapping[Form, Made], mesh: LogicalMesh) -> _Terms:
        """These and what is in memory at a moment."""
        terms = _Terms(constant=self.constant, nodes=dict(self.nodes), edges=dict(self.edges))
        at: Moment | None = moment
        while at is not None:
            compiler = at.program.compiler
            terms.constant += at.program.workspace(at.time)
            for form, origin in _kept(at, forms):
                mine, theirs = forms[form].choice, None if origin is None else forms[origin].choice
                if origin is None:
                    terms.add(at.program.share(form) * compiler.nbytes(form.variable.aval), mine, mesh)
                elif mine is not None and theirs is not None and mine.node != theirs.node:
                    terms.add_copy(compiler.nbytes(form.variable.aval), theirs, mine, mesh)
            at = at.inside
        return terms

    def add(self, whole_bytes: float, choice: Choice | None, mesh: LogicalMesh) -> None:
        """Add an array in the layout of a choice."""
        if choice is None:
            self.constant += whole_bytes
        else:
            nbytes = _bytes_of(whole_bytes, choice.layouts, mesh)
            self.nodes[choice.node] = self.nodes[choice.node] + nbytes if choice.node in self.nodes else nbytes

    def add_copy(self, whole_bytes: float, source: Choice, target: Choice, mesh: LogicalMesh) -> None:
        """Add a copy in the layout of `target`, if that is not the one of `source`."""
        differ = np.array([[a != b for b in target.layouts] for a in source.layouts])
        matrix = differ * _bytes_of(whole_bytes, target.layouts, mesh)
        key = (source.node, target.node)
        if source.node > target.node:
            key, matrix = (target.node, source.node), matrix.T
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
    saved = [root for root in alive(moment) if moment.program.is_input(root)]
    yield from ((root, None) for root in saved if isinstance(root, Form))
    for root in alive(moment):
        assert isinstance(root, Form)
        if moment.program.is_input(root):
            continue
        mine = wanted.get(root, [root])
        first: Form | None = None
        for form in mine:
            origin = _nearest(form, forms, lives.places, mine)
            # Two copies of what is itself no longer there are one array where their layouts agree.
            yield form, first if origin is None else origin
            first = form if first is None and origin is None else first
    for root, life in lives.whole.items():
        if not life.allocated or moment.program.is_input(root):  # which is there all the time
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
    choices: BlockChoices, mesh: LogicalMesh, states: Sequence[int], donated: Collection[int], compiler: Compiler
) -> tuple[MemoryProgram, Mapping[Form, Made]]:
    lister = Lister(block=choices, states=states, mesh=mesh, compiler=compiler)
    ends = zip(choices.jaxpr.outvars, choices.results, strict=True)
    border = Border(
        taken=taken_places(
            [_type(v, c, states) for v, c in zip(choices.jaxpr.invars, choices.arguments, strict=True)],
            [_type(v, c, states) for v, c in ends],
            donated,
        )
    )
    return lister.program(border), lister.made


def _type(atom: Any, choice: Choice | None, states: Sequence[int]) -> Any:
    layout = replicated(atom.aval.ndim) if choice is None else chosen(choice, states)
    return atom.aval.shape, atom.aval.dtype, layout


def _bytes_of(whole_bytes: float, layouts: Sequence[Layout], mesh: LogicalMesh) -> np.ndarray:
    return whole_bytes / np.array([num_shards(layout, mesh) for layout in layouts], dtype=float)
