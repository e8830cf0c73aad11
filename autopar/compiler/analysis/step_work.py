"""Tell what a step does, however it is planned: its FLOPs, examples and tokens, and what each of its inputs is for.

    Trace  ->  StepWork
    Trace  ->  category and path of every input

FLOPs are those of the traced step, once: what `jax.checkpoint` computes again is work of the implementation, as in
model FLOPs utilization (Chowdhery et al. 2022, appendix B).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax.numpy as jnp

from autopar.compiler.frontend.trace import Trace
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.flops import flops_where, runs_jaxprs
from autopar.compiler.jaxprs.primitives import PRODUCTS
from autopar.ir.memory_part import Category

# The scope that `jax.checkpoint` puts around what it computes again.
_AGAIN = "rematted_computation"


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The work of one step. `dtype` is what most of its products' FLOPs are computed in."""

    flops: float
    dtype: str
    examples: int | None
    """Examples of the batch; None for a step without one."""
    tokens: int | None
    """Elements of the largest integer array of the batch with at least two axes; None where there is none."""


@lru_cache(maxsize=6)
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
        examples=trace.num_rows if batch else None,
        tokens=max(tokens, default=None),
    )


def input_parts(trace: Trace) -> tuple[tuple[Category, str], ...]:
    """Return the category and the path of every input.

    State is what an output replaces; of it, parameters are what a differentiated equation reads. Of a step that
    replaces nothing, as an evaluation, parameters are its arrays of floating-point numbers beside the batch.
    """
    jaxpr = jc.open_jaxpr(trace.jaxpr)[0]
    differentiated = {id(atom) for eqn in jaxpr.eqns if jc.ad_phase(eqn) for atom in eqn.invars}
    replaced = set(trace.state_outputs.values())

    def category(number: int) -> Category:
        if number in trace.batch_inputs:
            return "batch"
        if not replaced and (aval := trace.inputs[number].aval).shape and jnp.issubdtype(aval.dtype, jnp.floating):
            return "parameters"
        if number not in replaced:
            return "other inputs"
        return "parameters" if id(jaxpr.invars[number]) in differentiated else "optimizer"

    return tuple((category(number), leaf.name) for number, leaf in enumerate(trace.inputs))


def _first_time(eqn: jc.JaxprEqn) -> bool:
    return _AGAIN not in jc.scope_of(eqn).split("/")


def _dtype_of_products(trace: Trace) -> str:
    products = (eqn for eqn in jc.all_equations(trace.jaxpr) if eqn.primitive.name in PRODUCTS)
    found = sorted({_dtype(eqn) for eqn in products})
    flops = {dtype: flops_where(trace.jaxpr, partial(_product_of, dtype)) for dtype in found}
    return max(found, key=flops.__getitem__, default="float32")


def _product_of(dtype: str, eqn: jc.JaxprEqn) -> bool:
    counted = (eqn.primitive.name in PRODUCTS and _dtype(eqn) == dtype) or runs_jaxprs(eqn)
    return counted and _first_time(eqn)


def _dtype(eqn: jc.JaxprEqn) -> str:
    operand: Any = eqn.invars[0].aval
    return str(operand.dtype)
