"""Find the operands in which an equation is linear: f(a + b) = f(a) + f(b) on a set of them, the others fixed.

A sum over devices or over microbatches may then be taken after the equation instead of before it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs import primitives

Operands = tuple[int, ...]

EXACT_IN_FIRST = primitives.REARRANGEMENTS | {"gather", "neg"}
"""Primitives that are linear in their first operand, and round no element."""
_IN_FIRST = EXACT_IN_FIRST | primitives.names(
    "conj convert_element_type cumsum div fft imag real reduce_precision reduce_sum reduce_window_sum "
    "select_and_gather_add select_and_scatter_add widen_gradient"
)
_IN_BOTH = primitives.ADDITIONS | {"complex", "dynamic_update_slice", "pad", "sub"}
BILINEAR = primitives.PRODUCTS | {"mul"}


def linear_operands(eqn: jc.JaxprEqn) -> tuple[Operands, ...]:
    """Return the largest sets of operands in which real arithmetic is linear; none if it is not linear."""
    name, every = eqn.primitive.name, tuple(range(len(eqn.invars)))
    if name in _IN_FIRST:
        return ((0,),)
    if name in _IN_BOTH:
        return ((0, 1),)
    if name in BILINEAR:
        return ((0,), (1,))
    if name in primitives.JOINS:
        return (every,)
    if name == "select_n":
        return (every[1:],)
    if name in ("scatter-add", "scatter-sub"):
        return ((0, 2),)
    return ((1,),) if name == "triangular_solve" else ()


def carried_sums(loop: jp.Scan) -> list[bool]:
    """Return for each value that a loop carries whether its rounds add to it and do nothing else with it."""
    body, _ = jc.open_jaxpr(loop.body)
    read = Counter(v for eqn in body.eqns for v in jc.operands(eqn))
    read.update(v for v in body.outvars if isinstance(v, jc.Var))
    added = {v: eqn.outvars[0] for eqn in body.eqns if _adds(eqn) for v in jc.operands(eqn)}

    def is_sum(before: jc.Var, after: object) -> bool:
        while before in added and read[before] == 1:
            before = added[before]
        return before is after and read[before] == 1

    carried = body.invars[loop.num_consts : loop.first_x]
    return [v is not after and is_sum(v, after) for v, after in zip(carried, body.outvars)]


def _adds(eqn: jc.JaxprEqn) -> bool:
    """Return whether an equation adds to its operands, or gives one another weak type."""
    atoms: list[Any] = [*eqn.invars[:1], *eqn.outvars]
    retyped = eqn.primitive.name == "convert_element_type" and len({atom.aval.dtype for atom in atoms}) == 1
    return retyped or eqn.primitive.name in primitives.ADDITIONS
