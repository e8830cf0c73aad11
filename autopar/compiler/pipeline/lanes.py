"""Make lanes of a stage: several meshes that run it, each on microbatches of its own.

    StageGraph of one stage, shares  ->  StageGraph of as many stages, the lanes

Every lane has the forward and backward tasks, and sums over its own microbatches. The first lane holds the state: what
the others read of it is sent to them, and an update task of it adds the sums of all. Microbatches are equal, so that
sums over lanes have the right weights whatever the shares are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.microbatch.accumulate import combine
from autopar.compiler.pipeline.stage_graph import Accumulation, GraphInput, GraphValue, StageGraph, StageTask


def with_lanes(graph: StageGraph, shares: Sequence[int]) -> StageGraph:
    """Return the graph of one stage as lanes that run these numbers of its microbatches."""
    assert graph.num_stages == 1 and sum(shares) == graph.num_microbatches
    lanes = range(len(shares))
    tasks: list[StageTask] = []
    for round_number in range(graph.num_rounds + 1):
        before = [task for task in graph.tasks if task.kind != "U" and task.round == round_number - 1]
        sums = [a for task in before for a in task.accumulations]
        updates = [task for task in graph.tasks if task.kind == "U" and task.round == round_number]
        if sums:
            tasks.append(_added(graph, sums, round_number, shares))
            updates = [replace(task, update_round=task.update_round + 1) for task in updates]
        tasks += updates
        each = [task for task in graph.tasks if task.kind != "U" and task.round == round_number]
        tasks += [_of_lane(task, lane) for lane in lanes for task in each]
    every = [a for task in graph.tasks for a in task.accumulations]
    values = dict(graph.values) | {
        own.name: own for a in every for lane in lanes for own in [_own_sum(graph, a, lane, shares[lane])]
    }
    state = {out.replaces for out in graph.outputs}
    return replace(
        graph,
        num_stages=len(shares),
        tasks=tuple(tasks),
        values=values,
        inputs=tuple(_read_by(spec, tasks, spec.value in state) for spec in graph.inputs),
        shares=tuple(shares),
    )


def _of_lane(task: StageTask, lane: int) -> StageTask:
    own = tuple(replace(a, result=_name(a, lane)) for a in task.accumulations)
    return replace(task, stage=lane, accumulations=own)


def _name(a: Accumulation, lane: int) -> str:
    return f"{a.result}.lane{lane}"


def _own_sum(graph: StageGraph, a: Accumulation, lane: int, share: int) -> GraphValue:
    total = graph.values[a.result]
    shape = list(total.shape)
    if a.kind == "concatenate":
        shape[a.axis] = shape[a.axis] // graph.num_microbatches * share
    return replace(total, name=_name(a, lane), shape=tuple(shape))


def _added(graph: StageGraph, sums: Sequence[Accumulation], round_number: int, shares: Sequence[int]) -> StageTask:
    """Return the task that makes the values of the whole batch of those of the lanes."""
    num_lanes = len(shares)
    own = [_own_sum(graph, a, lane, share) for a in sums for lane, share in enumerate(shares)]

    def add(*parts: Any) -> list[Any]:
        each = [parts[i * num_lanes : (i + 1) * num_lanes] for i in range(len(sums))]
        kinds = ["sum" if a.kind == "mean" else a.kind for a in sums]
        return [combine(kind, a.axis, parts) for kind, a, parts in zip(kinds, sums, each, strict=True)]

    return StageTask(
        kind="U",
        stage=0,
        round=round_number,
        jaxpr=jc.trace(add, [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in own]),
        inputs=tuple(each.name for each in own),
        outputs=tuple(a.result for a in sums),
    )


def _read_by(spec: GraphInput, tasks: Sequence[StageTask], is_state: bool) -> GraphInput:
    """Return an input with the lanes that read it; state lies on the first one, which sends it to the others."""
    readers = sorted({task.stage for task in tasks if spec.value in task.inputs})
    owned = is_state or spec.owned
    stages = tuple(dict.fromkeys([0, *readers])) if owned or (spec.stages and not readers) else tuple(readers)
    return replace(spec, stages=stages, owned=owned)
