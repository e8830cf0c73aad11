"""Plan lanes: the devices of every machine of a mixed cluster run the whole step on a share of the microbatches.

    StageProblem, Layers, LayerCosts  ->  Plan, ...    each machine one stage; each machine the best pipeline of its own

The layouts of a lane are the best ones on its devices. With the seconds t of its stages, those x of the links behind
them, and those e in which parameters come and gradients go, n microbatches take a lane

    e + sum (t + x) + (n - 1) max (t + x)

and the shares are such that the slowest lane ends as early as can be. The fastest machine is the first lane, which
holds the state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations

from autopar.compiler.inter_op.stage_costs import Stage, StageCost, Timing
from autopar.compiler.inter_op.submeshes import Submesh, place_in_groups
from autopar.compiler.inter_op.uneven_shares import minmax_split
from autopar.compiler.jaxprs.flops import aval_bytes
from autopar.compiler.pipeline.cut_stages import StageCut, cut_stages
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.planning.search.candidates import solved_searches
from autopar.compiler.planning.stages.layer_classes import Layers
from autopar.compiler.planning.stages.layer_costs import MEMORY_MULTIPLIERS, LayerCosts, LayoutChoice
from autopar.compiler.planning.stages.stage_costs import RangeCosts
from autopar.compiler.planning.stages.stage_layouts import (
    StageLayouts,
    received_seconds,
    stage_shardings,
    with_input_specs,
)
from autopar.compiler.planning.stages.stage_problem import StageProblem, submesh_mesh
from autopar.errors import MemoryTooSmall
from autopar.ir.plan import MeshPlan, Plan, StagePlan
from autopar.ir.schedules import DEFAULT_SCHEDULE, get_schedule

Lane = tuple[Stage, ...]
"""The stages of a lane, each on a mesh of its own."""

_HARDLY_LONGER = 1.1
"""Multiple of the best shares' time up to which others are tried: the formula for it knows no waiting for links."""
_SHARES = (1.0, 0.85, 0.7)
"""Shares of a device's memory that the layers of a stage in a pipeline may need: a stage as a whole may need more."""


def lanes_of_machines(
    problem: StageProblem, layers: Layers, costs: LayerCosts, below_s: float
) -> Iterator[ShardedLanes]:
    """Yield one stage on all devices of each machine as lanes, and the best pipelines of each if they are others.

    None are yielded where all microbatches are best left to one machine. Raises `MemoryTooSmall` where no lanes fit.
    """
    whole, shortages = len(layers.class_of), list[MemoryTooSmall]()
    cost = StageCost(forward_s=0.0, backward_s=0.0, choice=LayoutChoice(MEMORY_MULTIPLIERS[0]))
    single = [(Stage(start=0, stop=whole, submesh=each, cost=cost),) for each in problem.clusters]
    tried: list[list[Lane]] = []
    for share in (1.0, *_SHARES):
        ranges = RangeCosts(replace(problem, share=share), layers, costs)
        lanes = _best_pipelines(ranges, below_s) if tried else single
        if len(lanes) < 2 or any(_shapes(lanes) == _shapes(each) for each in tried):
            continue
        tried.append(lanes)
        try:
            found = _with_best_shares(ranges, lanes)
        except MemoryTooSmall as error:
            shortages.append(error)
            continue
        yield from found
        if len(tried) > 1:
            return
    if len(shortages) == len(tried):
        raise shortages[0]


def _shapes(lanes: Sequence[Lane]) -> list[list[tuple[int, int, Submesh]]]:
    return [[(stage.start, stage.stop, stage.submesh) for stage in lane] for lane in lanes]


def _best_pipelines(ranges: RangeCosts, below_s: float) -> list[Lane]:
    """Return the best stages on each machine, for the share of the microbatches that it is likely to get.

    There is no lane on a machine that gets no share, on which nothing fits, or that takes `below_s` or longer.
    """
    problem, count, num_layers = ranges.problem, ranges.layers.num_microbatches, len(ranges.layers.class_of)
    whole = [ranges(0, num_layers, group)[0] for group in problem.clusters]
    each_s = [cost.forward_s + cost.backward_s for cost in whole]
    shares = minmax_split([[n * seconds for n in range(count + 1)] for seconds in each_s], count)
    lanes: list[Lane] = []
    for group, share in ((group, share) for group, share in zip(problem.clusters, shares, strict=True) if share):
        timing = Timing(schedule=get_schedule(DEFAULT_SCHEDULE), num_microbatches=share)
        with suppress(MemoryTooSmall):
            searches = solved_searches(problem, ranges, timing, None, (group,), (1, num_layers), below_s)
            lanes += [search.best.stages for search in searches[-1:]]
    return lanes


def _with_best_shares(ranges: RangeCosts, lanes: Sequence[Lane]) -> list[ShardedLanes]:
    """Return these lanes with the best shares, and with the second best if the formula has them hardly slower.

    Each also with layouts that save memory: less of a split state is to be made once the sums of all lanes are there,
    and machines that wait for a slower one gain nothing by less time for a microbatch. None are returned where all
    microbatches are best left to one of them. Raises `MemoryTooSmall` if the step does not fit on the devices of a lane
    with the best shares.
    """
    count = ranges.layers.num_microbatches
    even = [count // len(lanes) + (lane < count % len(lanes)) for lane in range(len(lanes))]
    first = ShardedLanes.of(ranges, lanes, even)
    order = sorted(range(len(lanes)), key=first.pace_s)
    if order[0]:
        lanes = [lanes[lane] for lane in order]
        first = ShardedLanes.of(ranges, lanes, even)
    shares = minmax_split([first.table(lane) for lane in range(len(lanes))], count)
    kept = [lane for lane, share in enumerate(shares) if share]
    if len(kept) < 2 or kept[0]:
        return []
    lanes = [lanes[lane] for lane in kept]
    found = [ShardedLanes.of(ranges, lanes, [shares[lane] for lane in kept])]
    every = [found[0].bare.shares, *_next_best_shares(found[0])]
    others = [(each, MEMORY_MULTIPLIERS[0]) for each in every[1:]]
    others += [(each, price) for price in MEMORY_MULTIPLIERS[1:] for each in every]
    for each, least_price in others:
        with suppress(MemoryTooSmall):
            found.append(ShardedLanes.of(ranges, lanes, each, least_price))
    return found


def _next_best_shares(best: ShardedLanes) -> list[list[int]]:
    """Return the best shares with one microbatch in another lane; none if they take clearly longer by the formula."""
    shares, tables = best.bare.shares, [best.table(lane) for lane in range(len(best.bare.shares))]
    others = [
        [share - (lane == source) + (lane == target) for lane, share in enumerate(shares)]
        for source, target in permutations(range(len(shares)), 2)
        if shares[source] > 1
    ]

    def seconds(each: Sequence[int]) -> float:
        return max(table[share] for table, share in zip(tables, each, strict=True))

    other = min(others, key=seconds, default=None)
    return [other] if other is not None and seconds(other) <= _HARDLY_LONGER * seconds(shares) else []


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedLanes:
    """Lanes with given shares, and the layouts of their stages, of which each has the number of its mesh."""

    ranges: RangeCosts
    stages: Lane
    """The stages of all lanes."""
    bare: Plan
    graph: StageGraph
    layouts: Sequence[StageLayouts]

    @classmethod
    def of(
        cls, ranges: RangeCosts, lanes: Sequence[Lane], shares: Sequence[int], least_price: float = 0.0
    ) -> ShardedLanes:
        """Return the best layouts of lanes with these shares, by no less than a price of memory.

        Raises `MemoryTooSmall` where one does not fit.
        """
        problem, layers = ranges.problem, ranges.layers
        stages = tuple(stage for lane in lanes for stage in lane)
        bare = _bare_plan(ranges, lanes, shares)
        graph = cut_stages(layers.prepared, StageCut.of(bare))
        timing = Timing(schedule=get_schedule(DEFAULT_SCHEDULE), num_microbatches=layers.num_microbatches)
        layouts = stage_shardings(problem, layers, graph, bare, stages, timing, least_price=least_price)
        for stage, each in zip(stages, layouts, strict=True):
            if each.peak_bytes > problem.memory_of(stage.submesh):
                raise MemoryTooSmall(
                    f"A lane on {stage.submesh} devices of {problem.machine_of(stage.submesh).name} needs "
                    f"{each.peak_bytes / 2**30:.3g} GiB of each, and may use "
                    f"{problem.memory_of(stage.submesh) / 2**30:.3g} GiB.",
                    least_share=each.peak_bytes / problem.memory_of(stage.submesh),
                )
        return cls(ranges=ranges, stages=stages, bare=bare, graph=graph, layouts=layouts)

    def seconds(self, lane: int) -> list[float]:
        """Return, by stage of a lane, the seconds of a microbatch there and on the link behind it."""
        costs = [self.layouts[number].cost for number in self.of_lane(lane)]
        each = [cost.forward_s + cost.backward_s for cost in costs]
        for place, number in enumerate(self.of_lane(lane)[:-1]):
            here, there = self.stages[number], self.stages[number + 1]
            each[place] += self.ranges.transfer_s(here.stop, here.submesh, there.submesh)
        return each

    def of_lane(self, lane: int) -> range:
        """Return the numbers of the stages of a lane."""
        return self.bare.lanes[lane]

    def pace_s(self, lane: int) -> float:
        """Return the seconds between two microbatches of a lane."""
        return max(self.seconds(lane))

    @cached_property
    def exchange_s(self) -> Sequence[float]:
        """The seconds, by stage, in which parameters come from the first lane and sums go there, once a step."""
        found, first = [0.0] * len(self.stages), self.of_lane(0)
        for number, stage in enumerate(self.stages):
            for name, seconds in received_seconds(self.graph, self.bare, number, self.ranges.problem.hardware).items():
                sender, _ = self.graph.crossing[name]
                if (number in first) != (sender in first):
                    # Each device sends one part.
                    parts = min(stage.submesh.num_devices, self.stages[sender].submesh.num_devices)
                    other = sender if number in first else number
                    found[other] += seconds * aval_bytes(self.graph.values[name]) / parts
        return found

    def table(self, lane: int) -> list[float]:
        """Return the seconds of 0, 1, 2, ... microbatches; a lane with none exchanges nothing."""
        begins_s = max(self.exchange_s[number] for number in self.of_lane(lane)) + sum(self.seconds(lane))
        return [0.0, *(begins_s + more * self.pace_s(lane) for more in range(self.bare.num_microbatches))]

    @property
    def least_s(self) -> float:
        """A lower bound: the tasks of the busiest stage, and the way of one microbatch to it and back to the first.

        Nothing that runs beside them is in it, so that no order of the tasks takes less.
        """
        least_s = 0.0
        for lane, share in enumerate(self.bare.shares):
            way_s = 0.0
            for number in self.of_lane(lane):
                cost = self.layouts[number].cost
                each_s = cost.forward_s + cost.backward_s
                least_s, way_s = max(least_s, way_s + share * each_s), way_s + each_s
        return least_s

    def plan(self) -> Plan:
        """Return the plan with its layouts."""
        meshes = zip(self.bare.meshes, self.layouts, strict=True)
        planned = tuple(replace(mesh, sharding=each.sharding) for mesh, each in meshes)
        return with_input_specs(replace(self.bare, meshes=planned), self.graph)


def _bare_plan(ranges: RangeCosts, lanes: Sequence[Lane], shares: Sequence[int]) -> Plan:
    """Return the plan of lanes without layouts."""
    problem, layers = ranges.problem, ranges.layers
    stages = [(stage, share) for lane, share in zip(lanes, shares, strict=True) for stage in lane]
    devices = place_in_groups([stage.submesh for stage, _ in stages], problem.clusters)
    assert devices is not None
    meshes: list[MeshPlan] = []
    for mine, (stage, _) in zip(devices, stages, strict=True):
        mesh = submesh_mesh(problem, stage.submesh)
        meshes.append(MeshPlan(devices=mine, shape=mesh.shape, axis_names=mesh.axis_names, links=mesh.links))
    return Plan(
        fingerprint=problem.trace.fingerprint,
        method="Auto",
        meshes=tuple(meshes),
        stages=tuple(
            StagePlan(
                layers=(stage.start, stage.stop),
                mesh=number,
                recomputed=layers.num_recomputed(stage.start, stage.stop, stage.cost.choice.remat),
                microbatches=share,
            )
            for number, (stage, share) in enumerate(stages)
        ),
        cuts=layers.cuts,
        loop_pieces=layers.loop_pieces,
        num_microbatches=layers.num_microbatches,
        schedule=DEFAULT_SCHEDULE,
        input_specs={},
        batch_statistics=problem.method.batch_statistics,
        random=problem.method.random,
    )
