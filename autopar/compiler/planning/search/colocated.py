"""Search the stages of a model that puts some of them on the devices of others: every choice of the meshes' devices.

    StageProblem, RangeCosts, schedule  ->  (Stage, ...), (VirtualStage, ...)     a stage of the first for every mesh

The model names the stages, so that only the submesh of each mesh is open: there are few choices, and all are looked at.
Those that are the fastest by the closed form of the schedule are simulated, in which the tasks of a mesh follow each
other as they can.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from autopar.compiler.inter_op.stage_costs import Stage, StageCost, Timing
from autopar.compiler.inter_op.submeshes import Submesh, place_in_groups
from autopar.compiler.planning.demands.scope_demands import is_of_kind
from autopar.compiler.planning.stages.stage_costs import RangeCosts
from autopar.compiler.planning.stages.stage_problem import StageProblem
from autopar.compiler.planning.stages.virtual_stages import VirtualStage, simulate_schedule_s
from autopar.errors import InvalidArgument, MemoryTooSmall

_MOST_SIMULATED = 16

ColocatedStages = tuple[tuple[Stage, ...], tuple[VirtualStage, ...]]


def colocated_stages(problem: StageProblem, ranges: RangeCosts, timing: Timing) -> list[tuple[float, ColocatedStages]]:
    """Return the fastest stages by their simulated seconds, with these, the best first.

    Raises `MemoryTooSmall` where none fits, and `InvalidArgument` where the devices cannot be divided so.
    """
    meshes = problem.stage_meshes
    layers_of = [[layer for layer, mesh in enumerate(meshes) if mesh == number] for number in range(max(meshes) + 1)]
    choices = [[each for each in problem.submeshes() if _is_allowed(problem, ranges, own, each)] for own in layers_of]
    placed = [each for each in itertools.product(*choices) if place_in_groups(each, problem.clusters) is not None]
    if not placed:
        raise InvalidArgument(
            f"The stages {', '.join(map(str, problem.named_stages))} have no place on {problem.hardware}. Give other "
            "`devices` to them, or leave these out."
        )
    ranges.solve({submesh for each in placed for submesh in each if submesh not in ranges.solved})
    found: list[tuple[float, ColocatedStages]] = []
    for submeshes in placed:
        stages = [
            _stage(problem, ranges, timing, own, submesh) for own, submesh in zip(layers_of, submeshes, strict=True)
        ]
        fitting = tuple(stage for stage in stages if stage is not None)
        if len(fitting) == len(stages):
            links_s = _links_s(ranges, meshes, submeshes)
            by_formula_s = timing.step_time_s([stage.cost for stage in fitting], links_s)
            found.append((by_formula_s, (fitting, _virtual_stages(ranges, meshes, fitting, links_s))))
    if not found:
        raise MemoryTooSmall(
            f"The stages {', '.join(map(str, problem.named_stages))} do not fit on {problem.hardware} with "
            f"{problem.memory_bytes / 2**30:.3g} GiB each. Without the colocation each may lie on its own."
        )
    found = sorted(found, key=lambda each: each[0])[:_MOST_SIMULATED]
    simulated = [
        (simulate_schedule_s(timing, virtual, [stage.cost for stage in stages]), (stages, virtual))
        for _, (stages, virtual) in found
    ]
    return sorted(simulated, key=lambda each: each[0])


def _is_allowed(problem: StageProblem, ranges: RangeCosts, own: Sequence[int], submesh: Submesh) -> bool:
    """Return whether the stages of a mesh may be on a submesh, as the model and the method say."""
    shape = problem.method.mesh_shape
    if shape is not None and math.prod(shape) != submesh.num_devices:
        return False
    for layer in own:
        stage = problem.named_stages[layer]
        if stage.devices not in (None, submesh.num_devices):
            return False
        if not is_of_kind(problem.hardware.groups[submesh.group], stage):
            return False
        if submesh.num_devices % ranges.layers.least_devices[ranges.layers.class_of[layer]]:
            return False
    return True


def _stage(
    problem: StageProblem, ranges: RangeCosts, timing: Timing, own: Sequence[int], submesh: Submesh
) -> Stage | None:
    """Return the fastest way to run the stages of a mesh on a submesh that fits; None if none does."""
    behind = len(problem.named_stages) - 1 - own[0]
    in_flight = timing.num_in_flight(stages_behind=behind, num_stages=len(problem.named_stages))
    memory = problem.expected_bytes[submesh.group]
    fitting = [cost for cost in _ways(ranges, own, submesh) if cost.peak_bytes(in_flight) <= memory]
    if not fitting:
        return None
    count = timing.num_microbatches
    best = min(fitting, key=lambda cost: count * (cost.forward_s + cost.backward_s) + cost.update_s)
    return Stage(start=own[0], stop=own[0] + len(own), submesh=submesh, cost=best)


def _ways(ranges: RangeCosts, own: Sequence[int], submesh: Submesh) -> Iterator[StageCost]:
    """Yield the costs of the stages of a mesh together, all with one way to choose layouts."""
    choices = dict.fromkeys(cost.choice for layer in own for cost in ranges(layer, layer + 1, submesh))
    for choice in choices:
        costs = [ranges.cost(layer, layer + 1, submesh, choice) for layer in own]
        yield StageCost(
            forward_s=sum(cost.forward_s for cost in costs),
            backward_s=sum(cost.backward_s for cost in costs),
            update_s=sum(cost.update_s for cost in costs),
            weight_s=sum(cost.weight_s for cost in costs),
            state_bytes=sum(cost.state_bytes for cost in costs),
            activation_bytes=sum(cost.activation_bytes for cost in costs),
            temporary_bytes=max(cost.temporary_bytes for cost in costs),
            update_bytes=sum(cost.update_bytes for cost in costs),
            choice=choice,
        )


def _links_s(ranges: RangeCosts, meshes: Sequence[int], submeshes: Sequence[Submesh]) -> list[float]:
    """Return the seconds there and back of a microbatch over the cut behind every stage but the last."""
    return [
        0.0 if here == there else ranges.transfer_s(cut, submeshes[here], submeshes[there])
        for cut, (here, there) in enumerate(itertools.pairwise(meshes), start=1)
    ]


def _virtual_stages(
    ranges: RangeCosts, meshes: Sequence[int], stages: Sequence[Stage], links_s: Sequence[float]
) -> tuple[VirtualStage, ...]:
    costs = [
        ranges.cost(layer, layer + 1, stages[mesh].submesh, stages[mesh].cost.choice)
        for layer, mesh in enumerate(meshes)
    ]
    whole_s = [stage.cost.forward_s + stage.cost.backward_s for stage in stages]
    return tuple(
        VirtualStage(
            mesh=mesh,
            layers=(layer, layer + 1),
            share=(cost.forward_s + cost.backward_s) / whole_s[mesh] if whole_s[mesh] else 1 / meshes.count(mesh),
            link_s=link_s / 2,
        )
        for layer, (mesh, cost, link_s) in enumerate(zip(meshes, costs, [*links_s, 0.0], strict=True))
    )
