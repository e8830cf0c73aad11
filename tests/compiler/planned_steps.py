"""Plan small steps: a traced function whose first results replace its first inputs, on a mesh with chosen figures."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar.compiler.costs.mesh_costs import MeshFigures
from autopar.compiler.intra_op.plan_program import IntraOpPlan, plan_intra_op
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.cse import merge_common_subexpressions
from autopar.compiler.jaxprs.normalize import normalize
from autopar.compiler.sharding.layout import Layout, LogicalMesh
from autopar.compiler.spmd.collectives import PlannedCollective, planned_collectives
from autopar.compiler.spmd.local_program import local_block

LINE = LogicalMesh(shape=(8,), axis_names=("x",))
GRID = LogicalMesh(shape=(2, 4), axis_names=("x", "y"))


def figures(mesh: LogicalMesh, *, latency_s: float = 1e-9, bandwidth: float = 1e10) -> MeshFigures:
    """A device on which even small arrays are worth splitting."""
    return MeshFigures(
        name="chosen",
        matmul_flops=1e12,
        matmul_flops_16=2e12,
        memory_bandwidth=1e12,
        memory_bytes=1e9,
        latency_s=(latency_s,) * len(mesh.shape),
        bandwidth=(bandwidth,) * len(mesh.shape),
    )


def traced(step: Callable[..., Any], *args: Any) -> jc.ClosedJaxpr:
    """The program of a step as the planner takes it."""
    return merge_common_subexpressions(normalize(jax.make_jaxpr(step)(*args)))


def plan_step(
    closed: jc.ClosedJaxpr, mesh: LogicalMesh, *, num_state: int = 0, chosen: MeshFigures | None = None, **options: Any
) -> IntraOpPlan:
    """The best plan when the first `num_state` results replace the inputs of the same number."""
    state = {number: number for number in range(num_state)}
    return plan_intra_op(closed, mesh, chosen or figures(mesh), state_outputs=state, time_limit_s=20, **options)


def input_layouts(found: IntraOpPlan) -> Sequence[Layout | None]:
    """In which layouts the inputs come."""
    return found.plan.arguments


def collectives(closed: jc.ClosedJaxpr, found: IntraOpPlan, mesh: LogicalMesh) -> list[PlannedCollective]:
    """What a step moves."""
    return list(planned_collectives(local_block(jc.open_jaxpr(closed)[0], found.plan, mesh), mesh))
