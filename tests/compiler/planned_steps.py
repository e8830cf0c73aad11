"""Plan small steps: a traced function whose first results replace its first inputs, on a mesh of a chosen machine."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.intra_op.plan_program import IntraOpPlan, plan_intra_op
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.cse import merge_common_subexpressions
from autopar.compiler.jaxprs.normalize import normalize
from autopar.compiler.sharding.layout import Layout, LogicalMesh
from autopar.compiler.spmd.collectives import LocalCollective, planned_collectives
from autopar.compiler.spmd.local_program import local_block
from autopar.hardware.machine import Link, Machine

LINE = LogicalMesh(shape=(8,), axis_names=("x",))
GRID = LogicalMesh(shape=(2, 4), axis_names=("x", "y"))


def chosen_machine(*, latency_s: float = 1e-9, bandwidth: float = 1e10, **more: Any) -> Machine:
    """A machine of round figures, and of nothing that a kernel or a message takes to start."""
    link = Link(latency_s=latency_s, bandwidth=bandwidth, ramp_bytes=0.0)
    chosen: dict[str, Any] = {
        "peak_flops": {"float32": 1e12, "float16": 2e12, "bfloat16": 2e12},
        "matmul_share": {"float32": 1.0, "float16": 1.0, "bfloat16": 1.0},
        "memory_bandwidth": 1e12,
        "memory_bytes": 1e9,
        "matmul_half_flops": 0.0,
        "kernel_s": 0.0,
        "intra": link,
        "inter": link,
        "domain": 64,
        "in_step_share": 0.88,
        "convolution_share": {"float32": 0.73, "float16": 0.73, "bfloat16": 0.73},
    }
    return Machine(name="chosen", devices_per_host=8, kind="chosen", sources={}, **(chosen | more))


def mesh_costs(mesh: LogicalMesh, **chosen: Any) -> MeshCosts:
    """Devices on which even small arrays are worth splitting, unless `chosen_machine` is told otherwise."""
    return MeshCosts(machine=chosen_machine(**chosen), mesh=mesh)


def traced(step: Callable[..., Any], *args: Any) -> jc.ClosedJaxpr:
    """The program of a step as the planner takes it."""
    return merge_common_subexpressions(normalize(jax.make_jaxpr(step)(*args)))


def plan_step(
    closed: jc.ClosedJaxpr, mesh: LogicalMesh, *, num_state: int = 0, chosen: MeshCosts | None = None, **options: Any
) -> IntraOpPlan:
    """The best plan when the first `num_state` results replace the inputs of the same number."""
    state = {number: number for number in range(num_state)}
    return plan_intra_op(closed, chosen or mesh_costs(mesh), state_outputs=state, time_limit_s=20, **options)


def input_layouts(found: IntraOpPlan) -> Sequence[Layout | None]:
    """In which layouts the inputs come."""
    return found.plan.arguments


def collectives(closed: jc.ClosedJaxpr, found: IntraOpPlan, mesh: LogicalMesh) -> list[LocalCollective]:
    """Collectives of a step."""
    return list(planned_collectives(local_block(jc.open_jaxpr(closed)[0], found.plan, mesh), mesh))
