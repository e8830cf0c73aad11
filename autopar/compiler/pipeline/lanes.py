"""Join the stages of lanes: pipelines side by side, each of which runs the whole step on microbatches of its own.

    StageGraph of every lane, shares  ->  StageGraph of all their stages

    lane 0   F0 -> F1 -> F2 -> B2 -> B1 -> B0    microbatches 0 .. 5     U0 U1 U2
    lane 1   F3 -> F4 -> B4 -> B3                microbatches 6, 7

Lanes may be cut at other places, and into other numbers of stages. Each sums over its own microbatches. The first lane
holds the state: what the others read of it is sent to them by the stage that has it, which adds up the sums of all
lanes before it updates. Microbatches are equal, so that sums over lanes have the right weights whatever the shares are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.microbatch.accumulate import combine
from autopar.compiler.pipeline.stage_graph import Accumulation, GraphInput, GraphValue, StageGraph, StageTask


def with_lanes(lanes: Sequence[StageGraph], shares: Sequence[int]) -> StageGraph:
    """Return the graph of lanes that run these numbers of the microbatches of one step.

    All lanes must sum the same values over the microbatches, wherever their stages begin.
    """
    first = lanes[0]
    assert sum(shares) == first.num_microbatches and len(shares) == len(lanes)
    offsets = [0, *itertools.accumulate(lane.num_stages for lane in lanes)]
    own = [_of_lane(lane, number, offsets[number], first) for number, lane in enumerate(lanes)]
    tasks: list[StageTask] = []
    for round_number in range(first.num_rounds + 1):
        added = list(_added(first, round_number, shares))
        updates = (task for task in first.tasks if task.kind == "U" and task.round == round_number)
        tasks += added
        tasks += [replace(task, update_round=task.update_round + bool(added)) for task in updates]
        tasks += [task for each in own for task in each if task.round == round_number]
    values = dict(first.values)
    for number, lane in enumerate(lanes):
        rename = _renamed(lane, number, first)
        values |= {rename(v.name): replace(v, name=rename(v.name)) for v in lane.values.values() if v.per_microbatch}
        values |= {sum_.name: sum_ for a in _sums(lane) for sum_ in [_own_sum(lane, a, number, shares[number])]}
    assert all({a.result for a in _sums(lane)} == {a.result for a in _sums(first)} for lane in lanes)
    return replace(
        first,
        num_stages=offsets[-1],
        tasks=tuple(tasks),
        values=values,
        inputs=tuple(_inputs(first, tasks)),
        microbatches=tuple(
            range(stop - share, stop)
            for lane, share, stop in zip(lanes, shares, itertools.accumulate(shares), strict=True)
            for _ in range(lane.num_stages)
        ),
        offloaded=frozenset(
            rename(name)
            for number, lane in enumerate(lanes)
            for rename in [_renamed(lane, number, first)]
            for name in lane.offloaded
        ),
    )


def _sums(lane: StageGraph) -> list[Accumulation]:
    return [a for task in lane.tasks for a in task.accumulations]


def _renamed(lane: StageGraph, number: int, first: StageGraph) -> Callable[[str], str]:
    """Return the names in the joint graph: a lane has values of its microbatches, and shares those of the step."""
    given = {spec.value for spec in lane.inputs}
    once = {name for task in first.tasks for name in task.outputs if task.kind == "U"}
    # What is computed on every stage that reads it is taken from one stage of the first lane.
    copies = {first.values[name].copy_of: name for name in sorted(once, reverse=True) if first.values[name].copy_of}

    def rename(name: str) -> str:
        if name in given | once:
            return name
        value = lane.values[name]
        return f"{name}.lane{number}" if value.per_microbatch else copies.get(value.copy_of, name)

    return rename


def _of_lane(lane: StageGraph, number: int, offset: int, first: StageGraph) -> list[StageTask]:
    """Return the tasks of a lane's microbatches."""
    rename = _renamed(lane, number, first)
    return [
        replace(
            task,
            stage=offset + task.stage,
            inputs=tuple(map(rename, task.inputs)),
            outputs=tuple(map(rename, task.outputs)),
            accumulations=tuple(
                replace(a, operand=rename(a.operand), result=_name(a, number)) for a in task.accumulations
            ),
        )
        for task in lane.tasks
        if task.kind != "U"
    ]


def _name(a: Accumulation, number: int) -> str:
    return f"{a.result}.lane{number}"


def _own_sum(lane: StageGraph, a: Accumulation, number: int, share: int) -> GraphValue:
    total = lane.values[a.result]
    shape = list(total.shape)
    if a.kind == "concatenate":
        shape[a.axis] = shape[a.axis] // lane.num_microbatches * share
    return replace(total, name=_name(a, number), shape=tuple(shape))


def _added(first: StageGraph, round_number: int, shares: Sequence[int]) -> Iterator[StageTask]:
    """Yield, for the stages of the first lane, the tasks that make the values of the whole batch of those of lanes."""
    for stage in range(first.num_stages):
        before = (t for t in first.tasks if t.kind != "U" and t.round == round_number - 1 and t.stage == stage)
        if sums := [a for task in before for a in task.accumulations]:
            yield _adding(first, stage, sums, round_number, shares)


def _adding(
    first: StageGraph, stage: int, sums: Sequence[Accumulation], round_number: int, shares: Sequence[int]
) -> StageTask:
    num_lanes = len(shares)
    own = [_own_sum(first, a, lane, share) for a in sums for lane, share in enumerate(shares)]

    def add(*parts: Any) -> list[Any]:
        each = [parts[i * num_lanes : (i + 1) * num_lanes] for i in range(len(sums))]
        kinds = ["sum" if a.kind == "mean" else a.kind for a in sums]
        return [combine(kind, a.axis, parts) for kind, a, parts in zip(kinds, sums, each, strict=True)]

    return StageTask(
        kind="U",
        stage=stage,
        round=round_number,
        jaxpr=jc.trace(add, [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in own]),
        inputs=tuple(each.name for each in own),
        outputs=tuple(a.result for a in sums),
    )


def _inputs(first: StageGraph, tasks: Sequence[StageTask]) -> Iterator[GraphInput]:
    """Yield the inputs with the stages that read them; state lies in the first lane, which sends it to the others."""
    homes = {out.replaces: out.stage for out in first.outputs if out.replaces is not None}
    readers: dict[str, set[int]] = {}
    for task in tasks:
        for name in task.inputs:
            readers.setdefault(name, set()).add(task.stage)
    for spec in first.inputs:
        read, owned = sorted(readers.get(spec.value, ())), spec.owned or spec.value in homes
        home = (homes[spec.value],) if spec.value in homes and not spec.owned else spec.stages[:1]
        stages = tuple(dict.fromkeys([*home, *read])) if owned or not read else tuple(read)
        yield replace(spec, stages=stages, owned=owned)
