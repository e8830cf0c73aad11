"""Evaluate a block on whole arrays, with its layouts as sharding constraints: for XLA's partitioner.

    LocalBlock, mesh  ->  function of the block's inputs, to be traced by a user's own `jax.jit`

The layouts are the planned ones; the partitioner decides which collectives they mean. Partial sums and uneven parts
have no such constraint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.evaluate import bind_bodies
from autopar.compiler.jaxprs.primitives import CONSTRAINTS
from autopar.compiler.sharding.layout import Layout, LogicalMesh, to_spec
from autopar.compiler.spmd.evaluated import EvaluatedValues
from autopar.compiler.spmd.local_program import Evaluate, LocalBlock, Reshard, RunBody, Value

_lax: Any = lax


def evaluate_constrained(
    block: LocalBlock, consts: Sequence[Any], args: Sequence[Any], mesh: jax.sharding.Mesh
) -> list[Any]:
    """Return the results of a block on whole arrays, each constrained to its planned layout on `mesh`."""
    logical = LogicalMesh(shape=tuple(mesh.devices.shape), axis_names=tuple(map(str, mesh.axis_names)))
    inputs = [_constrained(x, value.layout, logical, mesh) for value, x in zip(block.inputs, args, strict=True)]
    values = EvaluatedValues.of_inputs(block, consts, inputs)

    def define(value: Value, x: Any) -> None:
        values[value] = _constrained(x, value.layout, logical, mesh)

    for action in block.actions:
        match action:
            case Reshard(operand=operand, result=result, after=after):
                define(result, *values.read_after([operand], after))
            case Evaluate(eqn=eqn, operands=operands, results=results):
                given = list(map(values.read, operands))
                computed = given[:1] if eqn.primitive.name in CONSTRAINTS else jc.bind_equation(eqn, given)
                for value, x in zip(results, computed, strict=True):
                    define(value, x)
            case RunBody(eqn=eqn, operands=operands, results=results, bodies=bodies, after=after):
                inner = [jc.open_jaxpr(body)[1] for body in jp.bodies_of(eqn)]
                computed = bind_bodies(
                    eqn,
                    values.read_after(operands, after),
                    lambda n, inputs, bodies=bodies, inner=inner: evaluate_constrained(
                        bodies[n], inner[n], inputs, mesh
                    ),
                )
                for value, x in zip(results, computed, strict=True):
                    define(value, x)
    return list(map(values.read, block.outputs))


def _constrained(x: Any, layout: Layout, logical: LogicalMesh, mesh: jax.sharding.Mesh) -> Any:
    even = all(size % logical.size(axes) == 0 for size, axes in zip(x.shape, layout.dims, strict=True))
    if layout.partial or not even or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, to_spec(layout, logical)))
