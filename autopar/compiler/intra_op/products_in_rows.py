"""Give a product its left operand in rows, for compilers that leave columns to a slower kernel.

    x^T y, with x and y matrices of examples  ->  (copy of x^T) y

XLA for CPUs has fast kernels for [free, summed] x [summed, free]. Operands of more dimensions it brings into that order
itself; a left matrix [summed, free] it does not, and a plain transpose it would fold into the product again.
"""

from __future__ import annotations

from typing import Any

from jax import lax

from autopar.compiler.costs.compilers import Compiler
from autopar.compiler.intra_op.operand_order import is_in_columns
from autopar.compiler.jaxprs import compat as jc

_lax: Any = lax


def needs_rows(eqn: jc.JaxprEqn, compiler: Compiler) -> bool:
    """Whether the left operand of an equation must be copied into rows by the program itself."""
    return compiler.turns_operands and eqn.primitive.name == "dot_general" and is_in_columns(eqn)


def product_in_rows(eqn: jc.JaxprEqn, left: Any, right: Any) -> Any:
    """The product of parts of the operands, where the left ones are in columns."""
    (_, (summed,)), batch = eqn.params["dimension_numbers"]
    with jc.under_scope_of(eqn):
        rows = _lax.optimization_barrier(_lax.transpose(left, (1, 0)))
        return lax.dot_general(
            rows,
            right,
            (((1,), (summed,)), batch),
            precision=eqn.params["precision"],
            preferred_element_type=eqn.params["preferred_element_type"],
        )
