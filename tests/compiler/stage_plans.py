"""Plans of several stages whose layouts are planned: pipelines by hand, with an optimum for every mesh."""

import dataclasses
from typing import Any

from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.lowering.sharded_step import logical_mesh
from autopar.compiler.lowering.stage_programs import tasks_of_stages
from autopar.compiler.passes import cut_step
from autopar.compiler.planning.mesh_sharding import mesh_constraints, plan_mesh
from autopar.hardware.machine import Machine
from autopar.ir.plan import Plan
from tests.small_steps import SEPARATE

CPU = Machine.named("cpu")
QUICK = dataclasses.replace(SEPARATE, intra=dataclasses.replace(SEPARATE.intra, latency_s=1e-9))
"""Links without latency, so that even small arrays are worth splitting."""


def with_planned_layouts(traced: Any, plan: Plan, machine: Machine = QUICK) -> Plan:
    """The plan with the best layouts for each of its meshes."""
    graph = cut_step(traced.trace, plan)
    meshes = []
    for number, mesh in enumerate(plan.meshes):
        tasks = tasks_of_stages(graph, plan.stages_on(number))
        mesh_costs = MeshCosts(machine=machine, mesh=logical_mesh(mesh))
        sharding = plan_mesh(tasks, mesh_constraints(graph, tasks), mesh_costs)
        meshes.append(dataclasses.replace(mesh, sharding=sharding))
    return dataclasses.replace(plan, meshes=tuple(meshes))
