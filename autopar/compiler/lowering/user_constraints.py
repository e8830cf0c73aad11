"""Check what a user wrote into the model about places and order, and carry it over: sharding constraints, callbacks.

A `with_sharding_constraint` names the axes of a mesh that the user made. A stage has a mesh of its own, so the
constraint moves to the axes of the same names there. Callbacks that must keep an order need one executable that all of
them are in.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from autopar.compiler.frontend.trace import Trace
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.evaluate import rewrite
from autopar.errors import InvalidArgument, Unsupported
from autopar.ir.instructions import spec_axes, spec_parts
from autopar.ir.plan import MeshPlan, Plan


def check_callbacks(trace: Trace, plan: Plan) -> None:
    """Raise `Unsupported` for ordered callbacks in several executables, or on more devices than JAX can order."""
    several = plan.num_stages > 1 or plan.num_microbatches > 1
    for eqn in jc.all_equations(trace.jaxpr):
        if several and jc.keeps_order(eqn):
            raise Unsupported(
                f"The step calls Python in order, by {jc.describe(eqn)}, and the plan has {plan.num_stages} stages and "
                f"{plan.num_microbatches} microbatches, which have no common order. Use ordered=False, or one stage "
                "and one microbatch."
            )
        if plan.num_devices > 1 and jc.runs_on_one_device(eqn):
            raise Unsupported(
                f"The step calls Python in order, by {jc.describe(eqn)}, which JAX supports on one device only; the "
                f"plan has {plan.num_devices}. Use ordered=False, or pass `devices=` with one."
            )


def has_constraints(closed: jc.ClosedJaxpr) -> bool:
    """True if the program holds any sharding constraint of the user."""
    return any(eqn.primitive.name == "sharding_constraint" for eqn in jc.all_equations(closed))


def on_mesh(closed: jc.ClosedJaxpr, mesh: MeshPlan) -> jc.ClosedJaxpr:
    """The program with its sharding constraints on the axes of `mesh`.

    Raises `InvalidArgument` for a constraint over axes that the mesh does not have, or that do not divide its value.
    """
    if not has_constraints(closed):
        return closed
    target = AbstractMesh(mesh.shape, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.shape))
    return _moved(closed, target)


def _moved(closed: Any, target: AbstractMesh) -> jc.ClosedJaxpr:
    def on_target(_: int, eqn: jc.JaxprEqn, values: list[Any]) -> list[Any]:
        if eqn.primitive.name != "sharding_constraint":
            return jc.bind_equation(eqn, values, jc.map_subjaxprs(eqn, lambda sub: _moved(sub, target)))
        with jc.under_scope_of(eqn):
            return [jax.lax.with_sharding_constraint(values[0], _on_target(eqn, target))]

    return rewrite(closed, on_target)


def _on_target(eqn: jc.JaxprEqn, target: AbstractMesh) -> NamedSharding:
    wanted = jp.asked_sharding(eqn)
    if not isinstance(wanted, NamedSharding):
        raise Unsupported(
            f"The sharding constraint {jc.describe(eqn)} is a {type(wanted).__name__}; only NamedSharding, or a "
            "PartitionSpec, can be moved to the mesh of a stage."
        )
    sizes = dict(zip(target.axis_names, target.axis_sizes, strict=True))
    aval: Any = eqn.outvars[0].aval
    shape = aval.shape
    missing = [name for entry in wanted.spec for name in spec_axes(entry) if name not in sizes]
    if missing:
        raise InvalidArgument(
            f"The sharding constraint {jc.describe(eqn)} names the mesh axis {missing[0]!r}; the mesh of its stage has "
            f"{list(sizes)}. Name the axes alike with axis_names=, or leave the constraint out."
        )
    for axis, parts in enumerate(spec_parts(wanted.spec, sizes)):
        if shape[axis] % parts:
            raise InvalidArgument(
                f"The sharding constraint {jc.describe(eqn)} splits axis {axis} of size {shape[axis]} into {parts} "
                "parts on the mesh of its stage, which does not divide. Use another mesh_shape or fewer microbatches."
            )
    return NamedSharding(target, wanted.spec)
