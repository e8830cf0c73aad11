"""Find the values whose collectives a compiler combines with others of their kind, so that they share their latency.

XLA joins collectives of one kind that do not wait for each other. Those of the update are such; so are

    given     gathers of parameters: of what is computed of the program's inputs alone, element by element
    left      sums of gradients: of what only the update reads, or results of the program, element by element

wherever a conversion in between leaves them: the same bytes must not cost more before it than after.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable
from dataclasses import dataclass

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.primitives import ELEMENTWISE, JOINS, REARRANGEMENTS, REMAT
from autopar.compiler.sharding.replicated_values import below_split_size
from autopar.compiler.spmd.phase import phase_of

_BY_ELEMENTS = ELEMENTWISE | REARRANGEMENTS | JOINS


@dataclass(frozen=True, kw_only=True)
class CombinedValues:
    """The values of a jaxpr whose collectives share their latency."""

    given: frozenset[jc.Var]
    left: frozenset[jc.Var]
    again: frozenset[jc.Var]
    """Those of `given` that are read forward too: a gather for the backward pass is then another one, which waits."""

    def share(self, v: jc.Var, phase: str) -> bool:
        """Return whether a collective that brings a value into the form "stored", or that of a phase, is combined."""
        return phase == "update" or v in self.left or (v in self.given and (phase != "backward" or v not in self.again))


_known: weakref.WeakKeyDictionary[jc.Jaxpr, dict[Hashable, CombinedValues]] = weakref.WeakKeyDictionary()


def combined_values(
    jaxpr: jc.Jaxpr,
    phase: str | None = None,
    inputs: Collection[int] | None = None,
    results: Collection[int] | None = None,
) -> CombinedValues:
    """Return the combined values of a jaxpr, found once.

    `phase` is that of all equations, "body" inside of another equation, or None where their scopes tell. `inputs` are
    numbers of those that are there from the start, `results` of those that nothing but an update reads; by default all.
    """
    known = _known.setdefault(jaxpr, {})
    key = phase, inputs if inputs is None else frozenset(inputs), results if results is None else frozenset(results)
    if key not in known:
        known[key] = _combined_values(jaxpr, phase, inputs, results)
    return known[key]


def _combined_values(
    jaxpr: jc.Jaxpr, phase: str | None, inputs: Collection[int] | None, results: Collection[int] | None
) -> CombinedValues:
    given = {v for number, v in enumerate(jaxpr.invars) if inputs is None or number in inputs}
    forward = set[jc.Var]()
    for eqn in jaxpr.eqns:
        operands = jc.operands(eqn)
        if _phase(eqn, phase) == "forward":
            forward.update(operands)
        simple = eqn.primitive.name in _BY_ELEMENTS or all(below_split_size(v.aval) for v in eqn.outvars)
        if simple and operands and all(v in given for v in operands):
            given.update(eqn.outvars)
    ends = [(number, v) for number, v in enumerate(jaxpr.outvars) if isinstance(v, jc.Var)]
    left = {v for number, v in ends if results is None or number in results}
    waiting = {v for _, v in ends if v not in left}
    for eqn in reversed(jaxpr.eqns):
        passes = eqn.primitive.name in _BY_ELEMENTS and all(v in left and v not in waiting for v in eqn.outvars)
        (left if passes or _phase(eqn, phase) == "update" else waiting).update(jc.operands(eqn))
    return CombinedValues(
        given=frozenset(given), left=frozenset(left - waiting - set(jaxpr.invars)), again=frozenset(forward & given)
    )


def combined_in_body(body: jc.Jaxpr, eqn: jc.JaxprEqn, outer: CombinedValues) -> CombinedValues:
    """Return the combined values of a body of an equation; a loop's carry is there at the end of a round only."""
    given = {number for number, v in enumerate(eqn.invars) if isinstance(v, jc.Var) and v in outer.given}
    left = {number for number, v in enumerate(eqn.outvars) if v in outer.left}
    name = eqn.primitive.name
    if name == "scan":
        loop = jp.scan_of(eqn)
        given -= set(range(loop.num_consts, loop.num_consts + loop.num_carry))
    elif name == "cond":
        given = {number - 1 for number in given if number}
    elif name not in REMAT:
        given, left = set[int](), set[int]()
    return combined_values(body, "body", given, left)


def _phase(eqn: jc.JaxprEqn, phase: str | None) -> str:
    return phase if phase == "body" else phase_of(eqn, phase)
