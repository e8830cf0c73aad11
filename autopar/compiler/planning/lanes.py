"""Plan lanes: the devices of every machine of a mixed cluster run the whole step on a share of the microbatches.

    StageProblem, layers for a number of microbatches  ->  Plan

The layouts of a lane are the best ones on its devices. With the seconds that they take for a microbatch, and those in
which parameters come and gradients go, the shares are such that the slowest lane ends as early as can be. The fastest
machine is the first lane, which holds the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.compiler.inter_op.stage_costs import Stage, StageCost, Timing
from autopar.compiler.inter_op.submeshes import Submesh, place_in_groups
from autopar.compiler.inter_op.uneven_shares import minmax_split
from autopar.compiler.jaxprs.flops import aval_bytes
from autopar.compiler.pipeline.cut_stages import StageCut, cut_stages
from autopar.compiler.pipeline.stage_graph import StageGraph
from autopar.compiler.planning.layer_classes import Layers
from autopar.compiler.planning.layer_costs import MEMORY_MULTIPLIERS, LayoutChoice
from autopar.compiler.planning.stage_costs import StageProblem, submesh_mesh
from autopar.compiler.planning.stage_layouts import StageLayouts, received_seconds, stage_shardings, with_input_specs
from autopar.errors import MemoryTooSmall
from autopar.ir.plan import MeshPlan, Plan, StagePlan
from autopar.ir.schedules import DEFAULT_SCHEDULE, get_schedule


def plan_lanes(problem: StageProblem, layers: Layers) -> Plan | None:
    """Return the plan of lanes, one for each machine; None where all microbatches are best left to one of them.

    Raises `MemoryTooSmall` if the step does not fit on the devices of a machine.
    """
    submeshes, count = list(problem.clusters), layers.num_microbatches
    even = [count // len(submeshes) + (lane < count % len(submeshes)) for lane in range(len(submeshes))]
    first = _Lanes.of(problem, layers, submeshes, even)
    order = sorted(range(len(submeshes)), key=lambda lane: first.seconds[lane])
    if order[0]:
        submeshes = [submeshes[lane] for lane in order]
        first = _Lanes.of(problem, layers, submeshes, even)
    shares = minmax_split([first.table(lane) for lane in range(len(submeshes))], count)
    kept = [lane for lane, share in enumerate(shares) if share]
    if len(kept) < 2 or kept[0]:
        return None
    return _Lanes.of(problem, layers, [submeshes[lane] for lane in kept], [shares[lane] for lane in kept]).plan()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Lanes:
    """Lanes with given shares, and their layouts."""

    bare: Plan
    graph: StageGraph
    layouts: Sequence[StageLayouts]
    exchange_s: Sequence[float]
    """By lane, the seconds in which parameters come and sums go, once a step."""

    @classmethod
    def of(cls, problem: StageProblem, layers: Layers, submeshes: Sequence[Submesh], shares: Sequence[int]) -> _Lanes:
        """Return the best layouts of lanes with these shares. Raises `MemoryTooSmall` where one does not fit."""
        devices, method = place_in_groups(submeshes, problem.clusters), problem.method
        assert devices is not None
        shapes = [submesh_mesh(problem, submesh) for submesh in submeshes]
        whole = (0, len(layers.cuts) + 1)
        bare = Plan(
            fingerprint=problem.trace.fingerprint,
            method="Auto",
            meshes=tuple(
                MeshPlan(devices=mine, shape=mesh.shape, axis_names=mesh.axis_names, links=mesh.links)
                for mine, mesh in zip(devices, shapes, strict=True)
            ),
            stages=tuple(
                StagePlan(layers=whole, mesh=lane, remat=layers.prepared.recomputes, microbatches=share)
                for lane, share in enumerate(shares)
            ),
            cuts=layers.cuts,
            loop_pieces=layers.loop_pieces,
            num_microbatches=layers.num_microbatches,
            schedule=DEFAULT_SCHEDULE,
            input_specs={},
            batch_statistics=method.batch_statistics,
            random=method.random,
        )
        graph = cut_stages(layers.prepared, StageCut.of(bare))
        cost = StageCost(forward_s=0.0, backward_s=0.0, choice=LayoutChoice(MEMORY_MULTIPLIERS[0]))
        stages = [Stage(start=0, stop=whole[1], submesh=submesh, cost=cost) for submesh in submeshes]
        timing = Timing(schedule=get_schedule(DEFAULT_SCHEDULE), num_microbatches=layers.num_microbatches)
        layouts = stage_shardings(problem, layers, graph, bare, stages, timing)
        for submesh, each in zip(submeshes, layouts, strict=True):
            if each.peak_bytes > problem.memory_of(submesh):
                raise MemoryTooSmall(
                    f"A lane on {submesh} needs {each.peak_bytes / 2**30:.3g} GiB of a device, and may use "
                    f"{problem.memory_of(submesh) / 2**30:.3g} GiB. Use more and smaller microbatches, or stages."
                )
        exchange_s = [0.0] * len(submeshes)
        for lane in range(len(submeshes)):
            for name, seconds in received_seconds(graph, bare, lane, problem.hardware).items():
                sender, _ = graph.crossing[name]
                parts = min(submeshes[lane].num_devices, submeshes[sender].num_devices)  # each device sends one
                exchange_s[lane or sender] += seconds * aval_bytes(graph.values[name]) / parts
        return cls(bare=bare, graph=graph, layouts=layouts, exchange_s=exchange_s)

    @property
    def seconds(self) -> list[float]:
        """By lane, the seconds of a microbatch."""
        return [each.cost.forward_s + each.cost.backward_s for each in self.layouts]

    def table(self, lane: int) -> list[float]:
        """Return the seconds of 0, 1, 2, ... microbatches; a lane with none exchanges nothing."""
        counts = range(1, self.bare.num_microbatches + 1)
        return [0.0, *(self.exchange_s[lane] + count * self.seconds[lane] for count in counts)]

    def plan(self) -> Plan:
        """Return the plan with its layouts."""
        meshes = zip(self.bare.meshes, self.layouts, strict=True)
        planned = tuple(replace(mesh, sharding=each.sharding) for mesh, each in meshes)
        return with_input_specs(replace(self.bare, meshes=planned), self.graph)
