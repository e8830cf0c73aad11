"""Count the work of a step, however it is planned: its FLOPs, its examples and its tokens.

    Trace  ->  StepWork

FLOPs are those of the traced step, once: what `jax.checkpoint` computes again is work of the implementation, as in
model FLOPs utilization (Chowdhery et al. 2022, appendix B).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp

from autopar.compiler.frontend.trace import Trace
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.flops import flops_where, runs_jaxprs
from autopar.compiler.jaxprs.primitives import PRODUCTS

# The scope that `jax.checkpoint` puts around what it computes again.
_AGAIN = "rematted_computation"


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The work of one step. `dtype` is what most of its products' FLOPs are computed in."""

    flops: float
    dtype: str
    examples: int | None
    """Of the batch; None for a step without one."""
    tokens: int | None
    """Elements of the largest integer array of the batch with at least two axes; None where there is none."""


def step_work(trace: Trace) -> StepWork:
    """Count a traced step."""
    batch: list[Any] = [trace.inputs[i].aval for i in trace.batch_inputs]
    # One integer per example is a label, and single bytes are pixels.
    tokens = [
        math.prod(aval.shape)
        for aval in batch
        if len(aval.shape) >= 2 and jnp.issubdtype(aval.dtype, jnp.integer) and aval.dtype.itemsize > 1
    ]
    return StepWork(
        flops=flops_where(trace.jaxpr, _first_time),
        dtype=_dtype_of_products(trace),
        examples=batch[0].shape[0] if batch else None,
        tokens=max(tokens, default=None),
    )


def _first_time(eqn: jc.JaxprEqn) -> bool:
    return _AGAIN not in jc.scope_of(eqn).split("/")


def _dtype_of_products(trace: Trace) -> str:
    products = (eqn for eqn in jc.all_equations(trace.jaxpr) if eqn.primitive.name in PRODUCTS)
    found = sorted({_dtype(eqn) for eqn in products})
    flops = {dtype: flops_where(trace.jaxpr, partial(_product_of, dtype)) for dtype in found}
    return max(found, key=flops.__getitem__, default="float32")


def _product_of(dtype: str, eqn: jc.JaxprEqn) -> bool:
    if not _first_time(eqn):
        return False
    return runs_jaxprs(eqn) or (eqn.primitive.name in PRODUCTS and _dtype(eqn) == dtype)


def _dtype(eqn: jc.JaxprEqn) -> str:
    operand: Any = eqn.invars[0].aval
    return str(operand.dtype)
