"""Divide the layers of every mesh among its virtual stages, and simulate their schedule.

    RangeCosts, stages, virtual stages per mesh  ->  VirtualStage, ...     the mesh and the layers of each
    Timing, VirtualStage, ..., costs             ->  seconds of a step

A search bounds the time of a step by closed forms, which are exact for equal stages. The simulation takes the times
of unequal stages as they are: every task starts when its mesh is free and what it needs has arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.compiler.inter_op.stage_costs import Stage, StageCost, Timing
from autopar.compiler.planning.stage_costs import RangeCosts
from autopar.hardware.cluster import Cluster
from autopar.ir.clocks import Clocks, Delivery, Hosts
from autopar.ir.schedules import schedule_tasks
from autopar.ir.task_order import linear_order, task_needed
from autopar.ir.tasks import Task


@dataclass(frozen=True, kw_only=True)
class VirtualStage:
    """A stage: its mesh, its layers `[start, stop)`, and its share of the mesh's time."""

    mesh: int
    layers: tuple[int, int]
    share: float
    link_s: float
    """Seconds that a microbatch takes from here to the next stage; the way back takes as long."""


def assign_layers(num_layers: Sequence[int], stage_mesh: Sequence[int]) -> list[tuple[int, tuple[int, int]]]:
    """Return the mesh and the layers of every virtual stage in order, for the number of layers of each mesh.

    >>> assign_layers([3, 2], [0, 1, 0, 1])
    [(0, (0, 2)), (1, (2, 3)), (0, (3, 4)), (1, (4, 5))]
    """
    assigned: list[tuple[int, tuple[int, int]]] = []
    every, before, start = Counter(stage_mesh), Counter[int](), 0
    for mesh in stage_mesh:
        each, rest = divmod(num_layers[mesh], every[mesh])
        stop = start + each + (before[mesh] < rest)
        assigned.append((mesh, (start, stop)))
        before[mesh] += 1
        start = stop
    return assigned


def make_virtual_stages(
    ranges: RangeCosts, stages: Sequence[Stage], devices: Sequence[Sequence[int]], timing: Timing
) -> tuple[VirtualStage, ...]:
    """Return the virtual stages of meshes of these devices, each with its share of the time by its layers' costs."""
    stage_mesh = timing.schedule.meshes_of_stages(len(stages), timing.virtual_stages)
    assigned = assign_layers([stage.stop - stage.start for stage in stages], stage_mesh)
    times_s: list[float] = []
    for mesh, layers in assigned:
        cost = ranges.cost(*layers, stages[mesh].submesh, stages[mesh].cost.choice)
        times_s.append(cost.forward_s + cost.backward_s)
    mesh_s = [sum(s for s, (owner, _) in zip(times_s, assigned) if owner == mesh) for mesh in range(len(stages))]

    def link_s(number: int, cut: int) -> float:
        if number + 1 == len(assigned):
            return 0.0
        here, there = (mesh for mesh, _ in assigned[number : number + 2])
        near = _same_domain(ranges.problem.hardware, devices[here], devices[there])
        return ranges.transfer_s(cut, stages[here].submesh, stages[there].submesh, same_domain=near) / 2

    return tuple(
        VirtualStage(
            mesh=mesh,
            layers=(start, stop),
            share=times_s[number] / mesh_s[mesh] if mesh_s[mesh] else 1 / timing.virtual_stages,
            link_s=link_s(number, stop),
        )
        for number, (mesh, (start, stop)) in enumerate(assigned)
    )


def _same_domain(cluster: Cluster, here: Sequence[int], there: Sequence[int]) -> bool:
    """Return whether two meshes of one group lie in one fast domain."""
    return len({cluster.domain_of(device) for device in (*here, *there)}) == 1


def simulate_schedule_s(
    timing: Timing, stages: Sequence[VirtualStage], costs: Sequence[StageCost], hosts: Hosts | None = None
) -> float:
    """Return the seconds of a step of these stages, for the costs of every mesh; its update follows its last task.

    Without `hosts` nothing takes time to be started. Between stages every microbatch sends one value.
    """
    durations_s: dict[tuple[str, int], float] = {}
    for number, stage in enumerate(stages):
        cost = costs[stage.mesh]
        split_off_s = cost.weight_s if timing.schedule.splits_weight_gradients else 0.0
        durations_s["F", number] = stage.share * cost.forward_s
        durations_s["B", number] = stage.share * (cost.backward_s - split_off_s)
        durations_s["W", number] = stage.share * cost.weight_s
    order = schedule_tasks(
        timing.schedule, stage_mesh=[stage.mesh for stage in stages], num_microbatches=timing.num_microbatches
    )
    clocks = Clocks(len(costs), hosts)
    deliveries: dict[Task, Delivery] = {}
    for mesh, task in linear_order(order, len(stages)):
        needed = task_needed(task, len(stages))
        if needed is not None and stages[needed.stage].mesh != mesh:
            clocks.receive(mesh, deliveries.pop(needed))
        clocks.run(mesh, durations_s[task.kind, task.stage])
        reader = {"F": task.stage + 1, "B": task.stage - 1}.get(task.kind, -1)
        if 0 <= reader < len(stages) and stages[reader].mesh != mesh:
            link_s = stages[min(task.stage, reader)].link_s
            deliveries[task] = clocks.send(mesh, stages[reader].mesh, link_s)
    return max(clocks.run(mesh, cost.update_s)[1] for mesh, cost in enumerate(costs))
