"""Find the operands in which an equation is linear: f(a + b) = f(a) + f(b) on a set of them, the others fixed.

A sum over devices or over microbatches may then be taken after the equation instead of before it.
"""

from __future__ import annotations

from autopar.compiler.jaxprs import compat as jc
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
