"""Check that a plan fits a program and its devices, wherever it came from."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from jax.sharding import PartitionSpec

from autopar.compiler.frontend.trace import Trace
from autopar.errors import PlanMismatch
from autopar.hardware.cluster import Cluster
from autopar.ir.instructions import listed, spec_parts
from autopar.ir.plan import MeshPlan, Plan


def check_plan(plan: Plan, trace: Trace, *, num_devices: int) -> None:
    """Raise `PlanMismatch` unless the plan was made for this program and its devices are there."""
    if plan.fingerprint not in ("", trace.fingerprint):
        raise PlanMismatch(
            f"The plan was made for the program {plan.fingerprint}, {trace.name} on these arguments is "
            f"{trace.fingerprint}: another step, other shapes, or another release of JAX. Make a new plan with "
            "step.trace(...).plan(), or load the one that belongs to this program."
        )
    check_inputs_and_devices(plan, trace, num_devices=num_devices)


def check_inputs_and_devices(plan: Plan, trace: Trace, *, num_devices: int) -> None:
    """Raise `PlanMismatch` unless the plan's devices are there and its layouts fit the arguments of its program."""
    needed = max(max(mesh.devices) for mesh in plan.meshes) + 1
    if needed > num_devices:
        raise PlanMismatch(
            f"The plan uses {plan.num_devices} devices numbered up to {needed - 1}, there are {num_devices}. "
            f"Run it where there are {needed} devices, or make a plan for {num_devices}."
        )
    for number, mesh in enumerate(plan.meshes):
        if plan.sharding is None and mesh.sharding is None and len(mesh.devices) > 1:
            raise PlanMismatch(
                f"The plan has no layouts for mesh {number} of {len(mesh.devices)} devices; only a mesh of one device "
                "can do without. Make a plan with step.trace(...).plan()."
            )
    shapes = {leaf.name: leaf.aval.shape for leaf in trace.inputs}
    for name, spec in sorted(plan.input_specs.items()):
        if name not in shapes:
            raise PlanMismatch(
                f"The plan gives a spec to {name!r}, which is no input of {trace.name}. Its inputs are "
                f"{listed(tuple(sorted(shapes)))}. Use one of these names, or leave the spec out."
            )
        for mesh in plan.meshes:
            _check_spec_fits(name, shapes[name], spec, mesh)


def with_machines(plan: Plan, cluster: Cluster) -> Plan:
    """Return the plan with the machine of every mesh, if the cluster has several."""
    if not cluster.is_mixed:
        return plan
    meshes = tuple(replace(mesh, machine=cluster.machine_of(mesh.devices).name) for mesh in plan.meshes)
    return replace(plan, meshes=meshes)


def check_machines(plan: Plan, cluster: Cluster) -> None:
    """Raise `PlanMismatch` if the cluster has several machines, and a mesh lies on another than it was planned for.

    Raises `InvalidArgument` for a mesh with devices of several.
    """
    if not cluster.is_mixed:
        return
    for number, mesh in enumerate(plan.meshes):
        found = cluster.machine_of(mesh.devices).name
        if mesh.machine not in ("", found):
            raise PlanMismatch(
                f"Mesh {number} was planned for devices {mesh.devices[0]} to {mesh.devices[-1]} of {mesh.machine!r}, "
                f"in this cluster they are of {found!r}. Give the groups of the cluster in the order in which they "
                "were planned for, or make a new plan."
            )


def _check_spec_fits(name: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: MeshPlan) -> None:
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    parts = spec_parts(spec, defaultdict(lambda: 1, sizes))  # the spec may be over the axes of another mesh
    if len(parts) > len(shape) or any(size % count for size, count in zip(shape, parts)):
        raise PlanMismatch(
            f"The plan splits {name}, of shape {shape}, by {spec} over a mesh of {sizes}. Every entry needs an axis of "
            "the array, whose size it divides: give another spec, or make a new plan."
        )
