"""How XLA treats an equation as it fuses: in its readers, apart, or in a kernel with a reduction.

equation  ->  FusionKind; whether it rather keeps the result than computes it twice
Machine   ->  FusionRules of its compiler
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.primitives import ARGUMENT_REDUCTIONS, ATTENTION, NESTED
from autopar.hardware.machine import Machine

FusionKind = Literal["constant", "view", "fused", "reduction", "apart"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_VIEWS = _names(
    "reshape squeeze expand_dims transpose copy sharding_constraint layout_constraint stop_gradient name pvary"
)
_REDUCTIONS = _names("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin")
_APART = ATTENTION | _names(
    "dot_general conv_general_dilated ragged_dot ragged_dot_general sort top_k cumsum cumprod cummax cummin "
    "cumlogsumexp reduce_window reduce_window_sum reduce_window_max select_and_scatter_add select_and_gather_add fft "
    "cholesky lu qr geqrf householder_product triangular_solve eigh svd custom_call pallas_call optimization_barrier "
    "dynamic_update_slice pure_callback io_callback declared_rule compress_gradient_in_blocks"
)
_CHEAP = _names(
    "abs add add_any and broadcast_in_dim ceil clamp compress_gradient concatenate convert_element_type dynamic_slice "
    "eq floor gather ge gt iota is_finite le lt max min mul ne neg not or pad rev round select_n sign slice split sub "
    "widen_gradient xor shift_right_logical shift_left bitcast_convert_type integer_pow square"
)


COMPUTED_AGAIN = _names("div exp exp2 expm1 log log1p logistic rsqrt sqrt")
"""Primitives of a few instructions on a GPU: its compiler weighs them against the bytes of keeping the result."""
EXPONENTIALS, MANY_READERS = ("exp", "exp2"), 3
"""Primitives whose results a machine that keeps exponentials keeps, and the number of kernels from which it does."""


def kind_of(eqn: jc.JaxprEqn) -> FusionKind:
    """Return how XLA treats an equation."""
    name = eqn.primitive.name
    if name == "broadcast_in_dim" and not getattr(eqn.invars[0].aval, "shape", ()):
        return "constant"
    if name in _VIEWS:
        return "view"
    if name in _REDUCTIONS:
        same = extent(eqn.invars) == extent(eqn.outvars) and name not in ARGUMENT_REDUCTIONS
        return "view" if same else "reduction"
    apart = name in _APART or name in NESTED or name.startswith("scatter") or jc.moves_memory(eqn)
    return "apart" if apart else "fused"


def kind_beside_products(eqn: jc.JaxprEqn) -> FusionKind:
    """Return the same where kernels of products compute what they read: rows are picked from what is in memory."""
    if eqn.primitive.name == "gather":
        return "apart"
    return "fused" if jp.adds_one_of_each_row(eqn) else kind_of(eqn)


def extent(atoms: Any) -> int:
    """The most elements of an array."""
    return max([math.prod(getattr(atom.aval, "shape", ())) for atom in atoms], default=0)


def is_expensive(eqn: jc.JaxprEqn) -> bool:
    """Return whether XLA rather keeps the equation's result than computes it twice."""
    return eqn.primitive.name not in _CHEAP


class FusionRules(NamedTuple):
    """The fusions that a compiler does, as the fields of `Machine` of the same names say."""

    product_sums: bool
    """True if products write the sums of their results."""
    fuses_products: bool = False
    """True if products compute what they read, and what follows them."""
    holds_rows: bool = False
    """True if rows are reduced in one kernel with what follows; each reader computes exponentials again."""
    keeps_exponentials: bool = False
    """True if exponentials are kept all the same that more than two kernels read."""
    transposes_operands: bool = False
    """True if operands of products are transposed whose dimensions of one kind are not side by side."""
    transposes_kernels: bool = False
    """True if convolutions read copies of kernels that have space first."""
    piece_bytes: float = 64.0
    """Bytes that are written in the time of shorter pieces."""
    erf_flops: float = 1.0
    """Operations that error functions take for each number."""
    fuses: bool = True
    """True if equations are joined in kernels at all."""
    chip_bytes: float = 0.0
    """Memory on the chip that keeps arrays between kernels; 0: none."""
    cores: int = 1
    """Cores of a device, whose parts of a product meet in its memory."""

    @staticmethod
    def of(machine: Machine) -> FusionRules:
        """Return those of the compiler for a machine."""
        return FusionRules(**{name: getattr(machine, name) for name in FusionRules._fields})
