"""Copy a program with some of its equations replaced by programs: what stays is not traced again.

    copy_program(closed, replacement)  ->  ClosedJaxpr

`replacement(eqn, place)` is the program that stands for an equation, of the same operands; None for an equation that
stays. Every copy has values of its own, and the name stack and line of its equation, within those of a place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autopar.compiler.jaxprs import compat as jc


class Replaced(NamedTuple):
    """A program that stands for an equation."""

    program: jc.ClosedJaxpr
    place: jc.SourcePlace
    """The place of its equations."""
    again: bool
    """True if its equations may be replaced in turn."""


Replacement = Callable[[jc.JaxprEqn, jc.SourcePlace], Replaced | None]


def copy_program(closed: jc.ClosedJaxpr, replacement: Replacement, place: jc.SourcePlace) -> jc.ClosedJaxpr:
    """Return the program of the same inputs in which equations are replaced."""
    jaxpr, consts = jc.open_jaxpr(closed)
    copier = Copier()
    inputs = [jc.value_of_type(v.aval) for v in jaxpr.invars]
    results = copier.run(jaxpr, consts, inputs, replacement, place)
    return jc.program_of(closed, inputs, results, copier.eqns, copier.consts.values())


@dataclass(kw_only=True, eq=False)
class Copier:
    """The copies of equations, in order, and the constants that they read."""

    eqns: list[jc.JaxprEqn] = field(default_factory=list[jc.JaxprEqn])
    consts: dict[int, tuple[Any, Any]] = field(default_factory=dict[int, tuple[Any, Any]])
    """The constants by their identity, each behind the variable or literal that stands for it."""

    def run(
        self,
        jaxpr: jc.Jaxpr,
        consts: Sequence[Any],
        operands: Sequence[Any],
        replacement: Replacement | None = None,
        place: jc.SourcePlace = jc.NOWHERE,
    ) -> list[Any]:
        """Copy the equations of a program on these operands; return its results."""
        values: dict[jc.Var, Any] = dict(zip(jaxpr.invars, operands, strict=True))
        constants = dict(zip(jaxpr.constvars, consts, strict=True))

        def read(atom: Any) -> Any:
            if isinstance(atom, jc.Literal):
                return atom
            return self.constant(constants[atom]) if atom in constants else values[atom]

        for eqn in jaxpr.eqns:
            given = [read(atom) for atom in eqn.invars]
            replaced = replacement and replacement(eqn, place)
            if replaced is None and _may_fold(eqn, given):
                unknown = [atom for atom in given if isinstance(atom, jc.Var)]
                made = self.run(*jc.open_jaxpr(_on_literals(eqn, given, place)), unknown, place=place)
            elif replaced is None:
                made = [jc.value_of_type(v.aval) for v in eqn.outvars]
                self.eqns.append(place.equation(eqn, given, made))
            else:
                inner = replacement if replaced.again else None
                made = self.run(*jc.open_jaxpr(replaced.program), given, inner, replaced.place)
            values.update(zip(eqn.outvars, made, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def constant(self, value: Any) -> Any:
        """Return a constant as what reads it does: a scalar is a literal."""
        if id(value) not in self.consts:
            self.consts[id(value)] = jc.constant_atom(value), value
        return self.consts[id(value)][0]


def _may_fold(eqn: jc.JaxprEqn, given: Sequence[Any]) -> bool:
    """Return whether an equation reads literals in place of values, so that JAX may compute it at once."""
    literal = any(isinstance(atom, jc.Literal) and atom is not old for atom, old in zip(given, eqn.invars, strict=True))
    return literal and not jc.is_plain(eqn.primitive)


def _on_literals(eqn: jc.JaxprEqn, given: Sequence[Any], place: jc.SourcePlace) -> jc.ClosedJaxpr:
    """Return what JAX makes of an equation, of those of its operands that are no literals."""

    def run(*values: Any) -> list[Any]:
        rest = iter(values)
        return jc.bind_equation(eqn, [a.val if isinstance(a, jc.Literal) else next(rest) for a in given])

    with place.context():
        return jc.trace(run, [atom.aval for atom in given if isinstance(atom, jc.Var)])
