"""Price what a plan runs: modelled seconds of every executable, whichever way the plan came about.

layouts of the stages planned     the times of the plan
layouts of one mesh planned       the times of its program on every device
one device for a mesh             the times of its programs on one device
"""

from __future__ import annotations

from dataclasses import replace

from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.frontend.trace import Trace
from autopar.compiler.intra_op.plan_tasks import GroupConstraints, GroupTask
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.cse import merge_common_subexpressions
from autopar.compiler.lowering.sharded_step import logical_mesh, sharded_step
from autopar.compiler.memory.estimate import peak_memory
from autopar.compiler.planning.mesh_sharding import plan_mesh
from autopar.compiler.spmd.block_times import block_times
from autopar.errors import InvalidArgument
from autopar.hardware.cluster import Cluster
from autopar.hardware.machine import Machine
from autopar.ir.plan import MeshPlan, Plan
from autopar.ir.plan_sharding import MeshSharding, TaskTimes
from autopar.ir.program import Executable, Program


def price_plan(trace: Trace, plan: Plan, program: Program, *, cluster: Cluster) -> Plan:
    """The plan with the times of every mesh, for the devices of a cluster; `program` is what it was lowered to.

    Raises `InvalidArgument` for a plan whose times were modelled for others.
    """
    meshes: list[MeshPlan] = []
    for number, mesh in enumerate(plan.meshes):
        machine = cluster.machine_of(mesh.devices)
        mesh_costs = MeshCosts(machine=machine, mesh=logical_mesh(mesh))
        sharding = mesh.sharding
        if plan.sharding is not None:
            _check_machine(plan.sharding.figures, machine)
            sharding = _whole_step(trace, plan, mesh_costs)
        elif sharding is not None:
            _check_machine(sharding.figures, machine)
        else:
            mine = [executable for executable in program.executables.values() if executable.mesh == number]
            sharding = plan_mesh([_alone(each) for each in mine], GroupConstraints(), mesh_costs)
        meshes.append(replace(mesh, sharding=sharding))
    return replace(plan, meshes=tuple(meshes))


def _whole_step(trace: Trace, plan: Plan, mesh_costs: MeshCosts) -> MeshSharding:
    """A step on one mesh as one task."""
    assert plan.sharding is not None
    block = sharded_step(trace, plan).block
    memory = peak_memory(block, mesh_costs.mesh, trace.donated_inputs, machine=mesh_costs.machine)
    took = block_times(block, mesh_costs, memory.copied)
    times = TaskTimes(compute_s=took.compute_s, collective_s=took.collective_s)
    return MeshSharding(
        layouts={},
        times={trace.name: times},
        collectives=plan.sharding.collectives,
        objective_s=plan.sharding.step_time_s,
        lower_bound_s=plan.sharding.lower_bound_s,
        figures=mesh_costs.machine.name,
        temporary_bytes={trace.name: plan.sharding.peak_bytes - memory.arguments_bytes},
        temporary_parts={trace.name: memory.parts},
    )


def _alone(executable: Executable) -> GroupTask:
    """An executable by itself: its values bind it to no other, for one device has only one layout.

    What it computes twice counts once, as in a step that is planned for one mesh: XLA merges it.
    """
    jaxpr: jc.ClosedJaxpr = merge_common_subexpressions(executable.jaxpr)
    return GroupTask(
        name=executable.name,
        jaxpr=jaxpr,
        inputs=tuple(f"{executable.name} operand {i}" for i in range(len(executable.inputs))),
        outputs=tuple(f"{executable.name} result {i}" for i in range(len(executable.outputs))),
        times=1.0,
        phase="forward",
        donated=executable.donated,
    )


def _check_machine(planned_for: str, machine: Machine) -> None:
    if planned_for != machine.name:
        raise InvalidArgument(
            f"The plan's times are modelled for {planned_for!r}, the cluster is of {machine.name!r}. Give simulate the "
            "cluster that the plan was made for, or plan for this one with parallelize(step, cluster=...)."
        )
