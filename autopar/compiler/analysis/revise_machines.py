"""Move the meshes of a plan to another machine of the cluster, and find the figure for which the plan is worse there.

places      each mesh on idle devices of each other machine, or exchanged with the nearest mesh on that machine
deciding    the plan and such a choice are planned again in clusters whose machines agree in one figure (rate, links,
            memory): the choice is worse for the figure whose agreement helps it the most
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import combinations
from typing import Any

from autopar.compiler.analysis.revision import Planning, stages_words
from autopar.compiler.costs.mesh_costs import with_links
from autopar.compiler.lowering.sharded_step import logical_mesh
from autopar.compiler.planning.one_mesh import mesh_choices
from autopar.hardware.cluster import Cluster
from autopar.hardware.machine import Machine
from autopar.ir.axis_links import AxisLinks
from autopar.ir.plan import MeshPlan, Plan
from autopar.methods import Auto

FIGURES = {
    "rate": (
        "memory_bandwidth",
        "peak_flops",
        "matmul_share",
        "matmul_half_flops",
        "kernel_s",
        "in_step_share",
        "convolution_share",
        "narrow_share",
        "batched_share",
        "unaligned_share",
        "exponentials",
        "dispatch_s",
        "launch_s",
        "execution_s",
    ),
    "links": ("intra", "inter", "hidden_share"),
    "memory": ("memory_bytes",),
}
"""The reasons for which a stage can be on a machine, each with its fields of `Machine`."""
_THAT = {"rate": "that", "links": "those", "memory": "that"}


@dataclass(frozen=True, kw_only=True)
class Place:
    """A choice in words, and the meshes with it; None where there is none, for the reason in `refused`."""

    choice: str
    meshes: tuple[MeshPlan, ...] | None = None
    refused: str = ""


@dataclass(frozen=True, kw_only=True)
class Deciding:
    """The figure that a choice is worse for.

    Where all devices of `cluster` have that figure of `machine`, and links between machines are its own fastest ones if
    it is the links, a step of `plan`, the choice, takes `step_time_s`, and of `instead_of`, the plan, `planned_s`.
    """

    figure: str
    machine: str
    cluster: Cluster
    plan: Plan
    instead_of: Plan
    step_time_s: float
    planned_s: float

    def to_data(self) -> dict[str, Any]:
        """Return the figure and the seconds as JSON values."""
        names = ("figure", "machine", "step_time_s", "planned_s")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        return (
            f"by its {self.figure}: with {_THAT[self.figure]} of {self.machine} for all {1e3 * self.step_time_s:.4g} "
            f"ms, the plan {1e3 * self.planned_s:.4g}"
        )


def places(planning: Planning) -> Iterator[Place]:
    """Yield the meshes of a plan with each of them on each other machine."""
    plan, cluster = planning.plan, planning.cluster
    used = {device for mesh in plan.meshes for device in mesh.devices}
    groups = [cluster.group_of(mesh.devices) for mesh in plan.meshes]
    exchanged: set[tuple[int, int]] = set()
    for number, mesh in enumerate(plan.meshes):
        for group, first in enumerate(cluster.first_devices):
            there, size = cluster.groups[group], len(mesh.devices)
            idle = [n for n in range(first, first + there.num_devices) if n not in used]
            others = [n for n, other in enumerate(groups) if other == group]
            if group == groups[number]:
                continue
            if len(idle) >= size or (idle and len(plan.meshes) == 1):
                yield from _on_idle(plan, number, idle[: min(size, len(idle))], there.machine)
            elif others:
                pair = min(number, near := min(others, key=lambda n: abs(n - number))), max(number, near)
                if pair not in exchanged:
                    yield _exchanged(planning, *pair)
                exchanged.add(pair)
            else:
                words = f"{stages_words(plan, number)} on {there.machine.name}"
                refused = f"of its {there.num_devices} devices {len(idle)} are idle, and it needs {size}"
                yield Place(choice=words, refused=refused)


def _on_idle(plan: Plan, number: int, devices: list[int], machine: Machine) -> Iterator[Place]:
    """Yield the meshes with one of them on other devices: in its shape, or, if these are fewer, in each of theirs."""
    mesh, words = plan.meshes[number], f"{stages_words(plan, number)} on {machine.name}"
    fewer = len(devices) < len(mesh.devices)
    shapes = [each.shape for each in mesh_choices(Auto(), len(devices))] if fewer else [mesh.shape]
    for shape in shapes:
        names = mesh.axis_names if len(shape) == len(mesh.axis_names) else Auto(mesh_shape=shape).mesh_axes
        bare = MeshPlan(devices=tuple(devices), shape=shape, axis_names=names, machine=machine.name)
        moved = replace(bare, links=with_links(logical_mesh(bare), machine).links)
        meshes = tuple(moved if n == number else each for n, each in enumerate(plan.meshes))
        yield Place(choice=words + f", as {'x'.join(map(str, shape))}" * (len(shapes) > 1), meshes=meshes)


def _exchanged(planning: Planning, one: int, other: int) -> Place:
    plan, meshes = planning.plan, list(planning.plan.meshes)
    meshes[one], meshes[other] = meshes[other], meshes[one]
    words = [f"{stages_words(plan, n)} on {planning.cluster.machine_of(meshes[n].devices).name}" for n in (one, other)]
    return Place(choice=", ".join(words), meshes=tuple(meshes))


def deciding(planning: Planning, plan: Plan, anew: Callable[[Planning, Plan], Plan]) -> Deciding | None:
    """Return the figure that a plan is worse for than the one planned; None if it is so for no single figure.

    `anew` lays out a plan anew. What does not fit is worse for its memory.
    """
    fits = planning.fits(plan)
    behind_by = planning.price(plan).step_time_s / planning.price(planning.plan).step_time_s
    if fits and behind_by <= 1:
        return None
    moved = next(n for n, mesh in enumerate(plan.meshes) if mesh.devices != planning.plan.meshes[n].devices)
    own = planning.cluster.machine_of(planning.plan.meshes[moved].devices)
    most = max((group.machine for group in planning.cluster.groups), key=lambda machine: machine.memory_bytes)
    found: list[tuple[float, Deciding]] = []
    for figure, machine in (("rate", own), ("links", own)) if fits else (("memory", most),):
        there = planning.on(alike(planning.cluster, figure, machine))
        choice, planned = (anew(there, _relinked(each, there.cluster)) for each in (plan, planning.plan))
        took_s, planned_s = there.price(choice).step_time_s, there.price(planned).step_time_s
        decided = Deciding(
            figure=figure,
            machine=machine.name,
            cluster=there.cluster,
            plan=choice,
            instead_of=planned,
            step_time_s=took_s,
            planned_s=planned_s,
        )
        if there.fits(choice) if figure == "memory" else took_s / planned_s < behind_by:
            found.append((took_s / planned_s, decided))
    return min(found, key=lambda each: each[0])[1] if found else None


def _relinked(plan: Plan, cluster: Cluster) -> Plan:
    """Return a plan with the links of its meshes in a cluster, where it has them."""

    def links_of(mesh: MeshPlan) -> AxisLinks | None:
        machine = cluster.machine_of(mesh.devices)
        return None if mesh.links is None else with_links(logical_mesh(mesh), machine).links

    return replace(plan, meshes=tuple(replace(mesh, links=links_of(mesh)) for mesh in plan.meshes))


def alike(cluster: Cluster, figure: str, machine: Machine) -> Cluster:
    """Return the cluster with one figure, of `FIGURES`, of a machine for all its machines.

    Of links, those between machines are the fastest that the machine has.
    """
    assert all(name in {each.name for each in fields(Machine)} for name in FIGURES[figure])
    same = {name: getattr(machine, name) for name in FIGURES[figure]}
    groups = [
        Cluster(num_devices=group.num_devices, machine=replace(group.machine, **same)) for group in cluster.groups
    ]
    pairs = combinations(range(len(groups)), 2)
    between = {pair: machine.intra if figure == "links" else cluster.link_between(*pair) for pair in pairs}
    return Cluster.of_groups(groups, between)
