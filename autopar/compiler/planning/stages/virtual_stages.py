"""Divide the layers of every mesh among its virtual stages, and simulate their schedule.

    RangeCosts, stages, virtual stages per mesh  ->  VirtualStage, ...     the mesh and the layers of each
    Timing, VirtualStage, ..., costs             ->  seconds of a step

A search bounds the time of a step by closed forms, which are exact for equal stages. The simulation takes the times
of unequal stages as they are: every task starts when its mesh is free and what it needs has arrived.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations, product
from typing import NamedTuple

from autopar.compiler.inter_op.stage_costs import Stage, StageCost, Timing
from autopar.compiler.inter_op.submeshes import Submesh
from autopar.compiler.planning.stages.layer_costs import LayoutChoice
from autopar.compiler.planning.stages.stage_costs import RangeCosts
from autopar.hardware.cluster import Cluster
from autopar.ir.clocks import Executables, Hosts, SharedCompute, take_compute
from autopar.ir.schedule import Schedule
from autopar.ir.schedules import DEFAULT_SCHEDULE, get_schedule, schedule_tasks, warmed_up
from autopar.ir.task_order import TaskOrder, linear_order, new_task, task_needed

_SHORTER = 1e-6
"""Relative difference of the seconds of visits that count as equally long."""
_HIDDEN_ANYWAY = 0.1
"""Share of a stage's time: links that take no more there and back need no forward task ahead."""


@dataclass(frozen=True, kw_only=True)
class VirtualStage:
    """A stage: its mesh, its layers `[start, stop)`, and its share of the mesh's time."""

    mesh: int
    layers: tuple[int, int]
    share: float
    link_s: float
    """Seconds that a microbatch takes from here to the next stage; the way back takes as long."""


def assign_layers(
    num_layers: Sequence[int], stage_mesh: Sequence[int], before_s: Sequence[Sequence[float]]
) -> list[tuple[int, tuple[int, int]]]:
    """Return the mesh and the layers of every virtual stage in order, for the number of layers of each mesh.

    All meshes take turns in a visit, and the slowest sets the pace. The visits of a mesh have even numbers of layers,
    the last ones one more: the first fill the pipeline, and keep what they make for longest. Then the slowest meshes
    of a visit have a layer in another one instead, as long as all visits together take less time. `before_s` has for
    every mesh and every cut the seconds that the layers before it take there.

    >>> assign_layers([3, 2], [0, 1, 0, 1], [[0, 1, 2, 3, 4, 5]] * 2)
    [(0, (0, 1)), (1, (1, 2)), (0, (2, 4)), (1, (4, 5))]
    """
    every = Counter(stage_mesh)
    counts = [_even_parts(count, every[mesh]) for mesh, count in enumerate(num_layers)]
    slowest = _slowest(counts, stage_mesh, before_s)
    while True:
        total_s = sum(seconds for seconds, _ in slowest)
        moves = permutations(range(len(slowest)), 2)
        tried = [_moved(counts, slowest[visit][1], visit, other) for visit, other in moves]
        found = [(_slowest(each, stage_mesh, before_s), each) for each in tried if each is not None]
        best, others = min(found, key=lambda each: sum(s for s, _ in each[0]), default=(slowest, counts))
        if sum(seconds for seconds, _ in best) >= (1 - _SHORTER) * total_s:
            return _assigned(counts, stage_mesh)
        slowest, counts = best, others


def _even_parts(number: int, parts: int) -> list[int]:
    """Return a number as a sum of as even ones as can be, the last of them one more.

    >>> _even_parts(5, 3)
    [1, 2, 2]
    """
    each, rest = divmod(number, parts)
    return [each + (part >= parts - rest) for part in range(parts)]


def _assigned(counts: Sequence[Sequence[int]], stage_mesh: Sequence[int]) -> list[tuple[int, tuple[int, int]]]:
    """Return the mesh and the layers of every virtual stage, for the numbers of layers of each mesh by visit."""
    assigned: list[tuple[int, tuple[int, int]]] = []
    visits, start = Counter[int](), 0
    for mesh in stage_mesh:
        stop = start + counts[mesh][visits[mesh]]
        assigned.append((mesh, (start, stop)))
        visits[mesh] += 1
        start = stop
    return assigned


def _slowest(
    counts: Sequence[Sequence[int]], stage_mesh: Sequence[int], before_s: Sequence[Sequence[float]]
) -> list[tuple[float, list[int]]]:
    """Return for every visit the seconds of the slowest mesh, and all meshes that take about as long."""
    visits = [list[tuple[float, int]]() for _ in counts[0]]
    seen = Counter[int]()
    for mesh, (start, stop) in _assigned(counts, stage_mesh):
        visits[seen[mesh]].append((before_s[mesh][stop] - before_s[mesh][start], mesh))
        seen[mesh] += 1
    slowest_s = [max(visit)[0] for visit in visits]
    return [
        (most_s, [mesh for seconds, mesh in visit if seconds >= (1 - _SHORTER) * most_s])
        for most_s, visit in zip(slowest_s, visits, strict=True)
    ]


def _moved(counts: Sequence[Sequence[int]], meshes: Sequence[int], visit: int, other: int) -> list[list[int]] | None:
    """Return the numbers with a layer of some meshes in another visit; None where one has a single layer to give."""
    if any(counts[mesh][visit] <= 1 for mesh in meshes):
        return None
    moved = [list(each) for each in counts]
    for mesh in meshes:
        moved[mesh][visit] -= 1
        moved[mesh][other] += 1
    return moved


def make_virtual_stages(
    ranges: RangeCosts, stages: Sequence[Stage], devices: Sequence[Sequence[int]], timing: Timing
) -> tuple[VirtualStage, ...]:
    """Return the virtual stages of meshes of these devices, each with its share of the time by its layers' costs."""
    stage_mesh = timing.schedule.meshes_of_stages(len(stages), timing.virtual_stages)
    before_s = {kind: _seconds_before(ranges, stages[-1].stop, *kind) for kind in map(_kind_of, stages)}
    counts = [stage.stop - stage.start for stage in stages]
    assigned = assign_layers(counts, stage_mesh, [before_s[_kind_of(stage)] for stage in stages])
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


def _kind_of(stage: Stage) -> tuple[Submesh, LayoutChoice]:
    return stage.submesh, stage.cost.choice


def _seconds_before(ranges: RangeCosts, num_layers: int, submesh: Submesh, choice: LayoutChoice) -> list[float]:
    """Return for every cut the seconds that a microbatch takes in all layers before it, with one choice of layouts."""
    costs = (ranges.cost(0, cut, submesh, choice) for cut in range(num_layers + 1))
    return [cost.forward_s + cost.backward_s for cost in costs]


def schedule_for_slow_links(
    timing: Timing,
    stages: Sequence[Stage],
    virtual_stages: Sequence[VirtualStage],
    memory_bytes: Sequence[float],
) -> Timing:
    """Return the schedule with as many forward tasks ahead as the links behind each stage need and its memory allows.

    The search takes all links to be hidden by it, and no more to be in flight than by 1F1B. A device of a group has so
    many bytes of memory.
    """
    period_s = max(stage.cost.forward_s + stage.cost.backward_s for stage in stages)
    needed = [max(0, math.ceil(2 * each.link_s / period_s - _HIDDEN_ANYWAY)) for each in virtual_stages]
    extra: list[int] = []
    for number, stage in enumerate(stages):
        behind, free = len(stages) - 1 - number, memory_bytes[stage.submesh.group] - stage.cost.peak_bytes(0)
        activation = stage.cost.activation_bytes
        most = math.inf if activation <= 0 else free // activation - (behind + 1)
        extra.append(max(0, int(min(sum(needed[number:]), most, timing.num_microbatches))))
    return replace(timing, schedule=warmed_up(extra) if any(extra) else get_schedule(DEFAULT_SCHEDULE))


def _same_domain(cluster: Cluster, here: Sequence[int], there: Sequence[int]) -> bool:
    """Return whether two meshes of one group lie in one fast domain."""
    return len({cluster.domain_of(device) for device in (*here, *there)}) == 1


def simulate_schedule_s(
    timing: Timing, stages: Sequence[VirtualStage], costs: Sequence[StageCost], hosts: Hosts | None = None
) -> float:
    """Return the seconds of a step of these stages, for the costs of every mesh; its update follows its last task.

    Without `hosts` nothing takes time to be started. Between stages every microbatch sends one value. The clocks are
    those of `ir.clocks`, advanced by a list of events that candidates of the same order on alike hosts share.
    """
    durations_s: list[float] = []
    for stage in stages:
        durations_s += [stage.share * part_s for part_s in _parts_s(costs[stage.mesh], timing)]
    stage_mesh = tuple(stage.mesh for stage in stages)
    schedule, starts = timing.schedule, _Starts.of(len(costs), hosts)
    undivided = frozenset(n for n, cost in enumerate(costs) if schedule.splits_weight_gradients and not cost.weight_s)
    events, updates_s = _events(schedule, stage_mesh, timing.num_microbatches, undivided, starts)
    run = _MeshCompute(hosts).run if hosts is not None and (hosts.shares or hosts.execution_s) else None
    mesh_s, link_s, arrivals_s = [0.0] * len(costs), [0.0] * len(costs) ** 2, [0.0]
    for mesh, duration, started_s, awaited, link, cut, sent_s in events:
        now_s = mesh_s[mesh]
        if arrivals_s[awaited] > now_s:
            now_s = arrivals_s[awaited]
        if started_s > now_s:
            now_s = started_s
        now_s = now_s + durations_s[duration] if run is None else run(mesh, now_s, durations_s[duration])
        mesh_s[mesh] = now_s
        if link >= 0:
            if link_s[link] > now_s:
                now_s = link_s[link]
            if sent_s > now_s:
                now_s = sent_s
            link_s[link] = now_s = now_s + stages[cut].link_s
            arrivals_s.append(now_s)
    ends_s: list[float] = []
    for mesh, (now_s, started_s) in enumerate(zip(mesh_s, updates_s, strict=True)):
        start_s, update_s = max(now_s, started_s), costs[mesh].update_s
        ends_s.append(start_s + update_s if run is None else run(mesh, start_s, update_s))
    return max(ends_s)


def least_part(costs: Sequence[StageCost], known: Sequence[StageCost], timing: Timing) -> float:
    """Return r <= 1 so that a step takes at least r times what it takes with other, `known` costs of its meshes.

    No task takes less than r times what it took. It starts at the largest of several sums of what tasks, links and
    hosts take, and so at least at r times when it did; where meshes share the compute of a host, it may not.
    """
    parts = [
        part_s / known_s
        for cost, other in zip(costs, known, strict=True)
        for part_s, known_s in zip(
            (*_parts_s(cost, timing), cost.update_s), (*_parts_s(other, timing), other.update_s), strict=True
        )
        if known_s > 0
    ]
    return min([1.0, *parts])


def _parts_s(cost: StageCost, timing: Timing) -> tuple[float, float, float]:
    """Return the seconds of the tasks F, B and W of a stage."""
    split_off_s = cost.weight_s if timing.schedule.splits_weight_gradients else 0.0
    return cost.forward_s, cost.backward_s - split_off_s, cost.weight_s


@dataclass(frozen=True, kw_only=True)
class _Starts:
    """The hosts that start the work of meshes, and how long each takes for one piece."""

    of_mesh: tuple[tuple[int, ...], ...]
    dispatch_s: tuple[float, ...]

    @classmethod
    def of(cls, num_meshes: int, hosts: Hosts | None) -> _Starts:
        """Return them; hosts that start the work of the same meshes, as fast as each other, are one."""
        if hosts is None:
            return cls(of_mesh=((),) * num_meshes, dispatch_s=())
        meshes: dict[int, list[int]] = {}
        for mesh, mine in enumerate(hosts.of_mesh):
            for host in sorted(mine):
                meshes.setdefault(host, []).append(mesh)
        alike = list(dict.fromkeys((tuple(own), hosts.dispatch_s[host]) for host, own in meshes.items()))
        return cls(
            of_mesh=tuple(tuple(n for n, (own, _) in enumerate(alike) if mesh in own) for mesh in range(num_meshes)),
            dispatch_s=tuple(dispatch_s for _, dispatch_s in alike),
        )


_Event = tuple[int, int, float, int, int, int, float]
"""The mesh of a task, its duration, when hosts have started it, and the arrival that it awaits, 0 for none; the link
behind it and the cut that this crosses, -1 where there is none, and when hosts have started what it carries."""


@lru_cache(maxsize=64)
def _events(
    schedule: Schedule, stage_mesh: tuple[int, ...], num_microbatches: int, undivided: frozenset[int], starts: _Starts
) -> tuple[list[_Event], list[float]]:
    """Return the tasks of a step, and for each mesh when its hosts have started its update.

    Hosts start them in the order in which programs have them (`Program.linear_order`): meshes take turns, each until it
    has run a task or waits for what another has not sent. Meshes that are `undivided` have no tasks W: none of their
    weight gradients can wait. Arrivals count from 1.
    """
    order = [
        deque(task for task in tasks if task.kind != "W" or mesh not in undivided)
        for mesh, tasks in enumerate(_order(schedule, stage_mesh, num_microbatches))
    ]
    order += [deque() for _ in starts.of_mesh[len(order) :]]  # meshes without tasks have an update alone
    hosts_s = [-each_s for each_s in starts.dispatch_s]

    def started_s(hosts: Iterable[int]) -> float:
        last_s = 0.0
        for host in hosts:
            hosts_s[host] = ready_s = hosts_s[host] + starts.dispatch_s[host]
            if ready_s > last_s:
                last_s = ready_s
        return last_s

    arrivals = {kind: [[0] * num_microbatches for _ in stage_mesh] for kind in "FB"}
    ways = {each: _Way.of(each, stage_mesh, arrivals, starts) for each in product("FBW", range(len(stage_mesh)))}
    events, sent = list[_Event](), 0
    sends: list[tuple[int, _Way, int] | None] = [None] * len(order)
    """The event and the microbatch behind which each mesh has something to send."""
    updates_s: dict[int, float] = {}
    while len(updates_s) < len(order):
        for mesh, tasks in enumerate(order):
            if (ready := sends[mesh]) is not None:
                event, way, microbatch = ready
                sends[mesh], sent = None, sent + 1
                events[event] = (*events[event][:-1], started_s(way.hosts))
                assert way.made is not None
                way.made[microbatch] = sent
            if not tasks:
                if mesh not in updates_s:
                    updates_s[mesh] = started_s(starts.of_mesh[mesh])
                continue
            kind, stage, microbatch, *_ = tasks[0]
            way = ways[kind, stage]
            assert microbatch is not None
            arrival = 0 if way.awaited is None else way.awaited[microbatch]
            if way.awaited is not None and not arrival:
                continue
            tasks.popleft()
            events.append((mesh, way.duration, started_s(starts.of_mesh[mesh]), arrival, way.link, way.cut, 0.0))
            if way.made is not None:
                sends[mesh] = (len(events) - 1, way, microbatch)
    return events, [updates_s[mesh] for mesh in range(len(order))]


@lru_cache(maxsize=16)
def _order(schedule: Schedule, stage_mesh: tuple[int, ...], num_microbatches: int) -> TaskOrder:
    """Return the tasks of every mesh. Raises `InvalidProgram` if they wait for each other in a circle."""
    order = schedule_tasks(schedule, stage_mesh=stage_mesh, num_microbatches=num_microbatches)
    for _ in linear_order(order, len(stage_mesh)):
        pass
    return order


class _Way(NamedTuple):
    """The place of a stage's tasks of one kind among the durations, and what they await, make and send."""

    duration: int
    awaited: list[int] | None
    """The arrival that they await, by microbatch."""
    made: list[int] | None
    """The arrival that they make, by microbatch."""
    link: int
    cut: int
    hosts: Sequence[int]
    """The hosts of both ends of the link."""

    @classmethod
    def of(
        cls,
        kind_of_stage: tuple[str, int],
        stage_mesh: Sequence[int],
        arrivals: Mapping[str, Sequence[list[int]]],
        starts: _Starts,
    ) -> _Way:
        """Return it; arrivals are by kind, stage and microbatch of the task that makes them."""
        kind, stage = kind_of_stage
        mesh, num_stages, num_meshes = stage_mesh[stage], len(stage_mesh), max(stage_mesh) + 1
        needed = task_needed(new_task(kind, stage, 0), num_stages)
        duration, awaited = 3 * stage + "FBW".index(kind), None
        if needed is not None and stage_mesh[needed.stage] != mesh:
            awaited = arrivals[needed.kind][needed.stage]
        reader = {"F": stage + 1, "B": stage - 1}.get(kind, -1)
        if not 0 <= reader < num_stages or stage_mesh[reader] == mesh:
            return cls(duration, awaited, None, -1, -1, ())
        there = stage_mesh[reader]
        hosts = sorted({*starts.of_mesh[mesh], *starts.of_mesh[there]})
        return cls(duration, awaited, arrivals[kind][stage], mesh * num_meshes + there, min(stage, reader), hosts)


class _MeshCompute:
    """The compute of hosts that meshes take, and the seconds that executables take besides their work."""

    def __init__(self, hosts: Hosts) -> None:
        compute = {host: SharedCompute() for each in hosts.shares for host in each}
        self.needs = [[(compute[host], share) for host, share in each.items()] for each in hosts.shares]
        self.executables = Executables(hosts)

    def run(self, mesh: int, start_s: float, duration_s: float) -> float:
        """Return when a mesh that starts work which takes so long alone has done it."""
        duration_s += self.executables.next_s(mesh)
        return take_compute(self.needs[mesh], start_s, duration_s)[1] if self.needs else start_s + duration_s
