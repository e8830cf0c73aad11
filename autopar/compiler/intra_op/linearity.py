"""Which operands of an equation may be sums still to be made, so that its results are such sums too.

f is linear in a set of operands if f(a + b) = f(a) + f(b) on them together, the others fixed. Then a device that holds
summands of these operands computes a summand of the result, and the reduction can wait: one all-reduce for the sum of
three gradients instead of three, one for all microbatches instead of one for each.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from autopar.compiler.jaxprs import compat as jc

# Linear in their first operand, whatever the others are (sizes, indices).
_IN_FIRST = frozenset(
    {
        "broadcast_in_dim",
        "copy",
        "copy_p",
        "dynamic_slice",
        "expand_dims",
        "neg",
        "reshape",
        "rev",
        "slice",
        "squeeze",
        "transpose",
    }
)
_ARITHMETIC_IN_FIRST = frozenset({"cumsum", "div", "reduce_sum", "reduce_window_sum"})
# Arithmetic on summands rounds each of them: in 16 bits that would be seen in the sum.
_LEAST_BYTES = 4
# Additions are rounded in any order, and no more often in this one: gradients of microbatches are summed up so.
_ADDITIONS = frozenset({"add", "add_any"})
_IN_BOTH = _ADDITIONS | {"sub"}
_IN_EITHER = frozenset({"mul", "dot_general", "conv_general_dilated"})


def linear_operands(eqn: jc.JaxprEqn) -> tuple[tuple[int, ...], ...]:
    """The sets of operands that an equation is linear in; none if it is not linear, or sums in fewer bits."""
    types = [getattr(v.aval, "dtype", None) for v in eqn.outvars]
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in types if dtype is not None):
        return ()
    name = eqn.primitive.name
    if name in _IN_FIRST:
        return ((0,),)
    if name in _ADDITIONS:
        return ((0, 1),)
    if any(dtype.itemsize < _LEAST_BYTES for dtype in types if dtype is not None):
        return ()
    if name in _ARITHMETIC_IN_FIRST:
        return ((0,),)
    if name in _IN_BOTH:
        return ((0, 1),)
    if name in _IN_EITHER:
        return ((0,), (1,))
    return _others(eqn)


def _others(eqn: jc.JaxprEqn) -> tuple[tuple[int, ...], ...]:
    everything = tuple(range(len(eqn.invars)))
    match eqn.primitive.name:
        case "convert_element_type":
            # Rounding summands to fewer bits loses what rounding their sum keeps.
            source, target = (_bits(v.aval) for v in (eqn.invars[0], eqn.outvars[0]))
            return ((0,),) if 0 < source <= target else ()
        case "gather":
            # A sum of what fills the places outside would be another number, unless that is none.
            return ((0,),) if eqn.params["fill_value"] in (None, 0) else ()
        case "concatenate":
            return (everything,)
        case "select_n":
            return (everything[1:],)
        case "pad":
            return ((0,),) if _is_zero(eqn.invars[1]) else ()
        case "dynamic_update_slice":
            return ((0, 1),)
        case "scatter-add":
            return ((0, 2),)
        case _:
            return ()


def _bits(aval: Any) -> int:
    return 8 * aval.dtype.itemsize if jnp.issubdtype(aval.dtype, jnp.floating) else 0


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, jc.Literal) and not atom.val
