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
from functools import lru_cache

from autopar.compiler.inter_op.stage_costs import Stage, StageCost, Timing
from autopar.compiler.planning.stage_costs import RangeCosts
from autopar.hardware.cluster import Cluster
from autopar.ir.clocks import Executables, Hosts, SharedCompute, take_compute
from autopar.ir.schedule import Schedule
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

    Without `hosts` nothing takes time to be started. Between stages every microbatch sends one value. The clocks are
    those of `ir.clocks`, advanced by a list of events that candidates of the same order share.
    """
    durations_s: list[float] = []
    for stage in stages:
        cost = costs[stage.mesh]
        split_off_s = cost.weight_s if timing.schedule.splits_weight_gradients else 0.0
        parts_s = cost.forward_s, cost.backward_s - split_off_s, cost.weight_s
        durations_s += [stage.share * part_s for part_s in parts_s]
    events = _events(timing.schedule, tuple(stage.mesh for stage in stages), timing.num_microbatches)
    clocks = _HostClocks(len(costs), hosts)
    run, dispatched = clocks.run, clocks.dispatched
    mesh_s, link_s, arrival_s = [0.0] * len(costs), [0.0] * len(costs) ** 2, [0.0] * len(events)
    for number, (mesh, duration, awaited, link, cut) in enumerate(events):
        now_s = mesh_s[mesh]
        if awaited >= 0 and arrival_s[awaited] > now_s:
            now_s = arrival_s[awaited]
        mesh_s[mesh] = now_s = run(mesh, now_s, durations_s[duration])
        if link >= 0:
            made_s = dispatched(len(costs) + link, now_s)
            if link_s[link] > made_s:
                made_s = link_s[link]
            arrival_s[number] = link_s[link] = made_s + stages[cut].link_s
    return max(run(mesh, now_s, costs[mesh].update_s) for mesh, now_s in enumerate(mesh_s))


_Event = tuple[int, int, int, int, int]
"""The mesh of a task, its duration, the event that it awaits, the link behind it, and the cut that this crosses; -1
where there is none."""


@lru_cache(maxsize=16)
def _events(schedule: Schedule, stage_mesh: tuple[int, ...], num_microbatches: int) -> list[_Event]:
    """Return the tasks of a step in an order in which none comes before what it awaits."""
    order = schedule_tasks(schedule, stage_mesh=stage_mesh, num_microbatches=num_microbatches)
    num_stages, num_meshes = len(stage_mesh), max(stage_mesh) + 1
    made, events = dict[Task, int](), list[_Event]()
    for mesh, task in linear_order(order, num_stages):
        needed = task_needed(task, num_stages)
        awaited = -1 if needed is None or stage_mesh[needed.stage] == mesh else made[needed]
        reader, link, cut = {"F": task.stage + 1, "B": task.stage - 1}.get(task.kind, -1), -1, -1
        if 0 <= reader < num_stages and stage_mesh[reader] != mesh:
            made[task], link, cut = len(events), mesh * num_meshes + stage_mesh[reader], min(task.stage, reader)
        events.append((mesh, 3 * task.stage + "FBW".index(task.kind), awaited, link, cut))
    return events


class _HostClocks:
    """When hosts have started the work of meshes and of the links between them, and what of their compute is taken.

    Of n meshes the link from a to b has the number n + a·n + b.
    """

    def __init__(self, num_meshes: int, hosts: Hosts | None) -> None:
        """Hosts that start the work of the same meshes, as fast as each other, are one."""
        of_mesh = [frozenset[int]()] * num_meshes if hosts is None else hosts.of_mesh
        alike: dict[object, int] = {}
        for host in sorted(frozenset[int]().union(*of_mesh)):
            assert hosts is not None
            mine = tuple(mesh for mesh, theirs in enumerate(of_mesh) if host in theirs)
            alike.setdefault((mine, hosts.dispatch_s[host]), host)
        kept = frozenset(alike.values())
        places = [*of_mesh, *(here | there for here in of_mesh for there in of_mesh)]
        self.starting = [sorted(kept.intersection(place)) for place in places]
        self.dispatch_s = {host: hosts.dispatch_s[host] for host in kept} if hosts is not None else {}
        self.host_s = {host: -seconds for host, seconds in self.dispatch_s.items()}
        shares = hosts.shares if hosts is not None else ()
        compute = {host: SharedCompute() for each in shares for host in each}
        self.needs = [[(compute[host], share) for host, share in each.items()] for each in shares]
        self.executables = Executables(hosts)

    def run(self, mesh: int, now_s: float, duration_s: float) -> float:
        """Return when a mesh that has nothing else to do from now on has done work that takes so long alone."""
        start_s = self.dispatched(mesh, now_s)
        duration_s += self.executables.next_s(mesh)
        return take_compute(self.needs[mesh], start_s, duration_s)[1] if self.needs else start_s + duration_s

    def dispatched(self, place: int, now_s: float) -> float:
        """Return when the last host of a place has started one more piece of work there, from now on."""
        host_s, dispatch_s = self.host_s, self.dispatch_s
        for host in self.starting[place]:
            ready_s = host_s[host] = host_s[host] + dispatch_s[host]
            if ready_s > now_s:
                now_s = ready_s
        return now_s
