"""Turn a stage task into an executable: what it computes, and the accumulators that it adds to.

With several microbatches, a value that is completed over them becomes an accumulator, an input and an output of the
task that makes its parts: `total, ... = task(total, ...)`. With one microbatch it is an output like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.copying import Copier
from autopar.compiler.jaxprs.flops import jaxpr_bytes, jaxpr_flops
from autopar.compiler.microbatch.accumulate import combine
from autopar.compiler.pipeline.stage_graph import Accumulation, StageGraph, StageTask
from autopar.ir.program import ArrayType, Executable, Task


@dataclass(frozen=True, kw_only=True, eq=False)
class EmittedTask:
    """A task's function with the names of what it reads and writes.

    Names in `per_microbatch` stand for one value per microbatch; accumulators are both inputs and outputs.
    """

    task: StageTask
    jaxpr: jc.ClosedJaxpr
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    per_microbatch: frozenset[str]


def emit_task(graph: StageGraph, task: StageTask) -> EmittedTask:
    """The function of a task, which hands on what some task of the graph reads."""
    read, micro = graph.read, graph.per_microbatch
    if graph.num_microbatches == 1:
        return _emit_single(task, read, micro)
    totals = [a for a in task.accumulations if a.kind != "concatenate"]
    parts = {a.operand for a in task.accumulations if a.kind == "concatenate"}
    handed_on = [n for n in _made(task) if n in read or n in parts or task.kind == "U"]
    return EmittedTask(
        task=task,
        jaxpr=_adding(graph, task, handed_on, totals),
        inputs=(*task.inputs, *(a.result for a in totals)),
        outputs=(*handed_on, *(a.result for a in totals)),
        per_microbatch=micro,
    )


def _adding(
    graph: StageGraph, task: StageTask, handed_on: Sequence[str], totals: Sequence[Accumulation]
) -> jc.ClosedJaxpr:
    """Return the program of a task, of these of its results, with the totals that it adds others to."""
    if not totals and tuple(handed_on) == task.outputs:
        return task.jaxpr
    jaxpr, consts = jc.open_jaxpr(task.jaxpr)
    made = dict(zip(task.outputs, jaxpr.outvars, strict=True))
    copier, inputs, results = Copier(), [*jaxpr.invars], [made[name] for name in handed_on]
    for a in totals:
        avals = _struct(graph, a.operand), made[a.operand].aval
        added, added_consts = jc.open_jaxpr(_addition(a.kind, a.axis, graph.num_microbatches, avals))
        inputs.append(jc.value_of_type(added.invars[0].aval))
        results += copier.run(added, added_consts, [inputs[-1], made[a.operand]])
    kept = [*zip(jaxpr.constvars, consts, strict=True), *copier.consts.values()]
    return jc.program_of(task.jaxpr, inputs, results, [*jaxpr.eqns, *copier.eqns], kept)


def _emit_single(task: StageTask, read: frozenset[str], micro: frozenset[str]) -> EmittedTask:
    """One microbatch: its parts are the completed values."""
    outputs = [(n, n) for n in _made(task) if n in read or task.kind == "U"]
    outputs += [(a.operand, a.result) for a in task.accumulations]
    position = {n: i for i, n in enumerate(task.outputs)}
    return EmittedTask(
        task=task,
        jaxpr=jc.with_outputs(task.jaxpr, [position[n] for n, _ in outputs]),
        inputs=task.inputs,
        outputs=tuple(name for _, name in outputs),
        per_microbatch=micro,
    )


def _made(task: StageTask) -> list[str]:
    """Outputs that are not there already: an input that is accumulated as it is stays the caller's."""
    return [n for n in task.outputs if n not in task.inputs]


@lru_cache(maxsize=1024)
def _addition(kind: str, axis: int, num_microbatches: int, avals: tuple[Any, Any]) -> jc.ClosedJaxpr:
    """Return the program that adds a part to a total, of these types."""

    def add(total: Any, part: Any) -> Any:
        return total + part / num_microbatches if kind == "mean" else combine(kind, axis, [total, part])

    return jc.trace(add, avals)


def _struct(graph: StageGraph, name: str) -> jax.ShapeDtypeStruct:
    value = graph.values[name]
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def emit_zeros(graph: StageGraph, task: StageTask) -> EmittedTask | None:
    """The start of a task's accumulators: the neutral element of each. None where there is nothing to accumulate."""
    totals = [a for a in task.accumulations if a.kind != "concatenate"]
    if graph.num_microbatches == 1 or not totals:
        return None

    def run() -> list[Any]:
        return [
            jnp.full(graph.values[a.operand].shape, _neutral(a.kind, graph.values[a.operand].dtype)) for a in totals
        ]

    return _once(task, "Z", run, [], [a.result for a in totals])


def emit_concatenation(graph: StageGraph, task: StageTask) -> EmittedTask | None:
    """Join the parts of per-example results, one of each microbatch in order. None where there are no such results."""
    joined = [a for a in task.accumulations if a.kind == "concatenate"]
    if graph.num_microbatches == 1 or not joined:
        return None
    own = graph.microbatches_of(task.stage)
    count = len(own)

    def run(*parts: Any) -> list[Any]:
        return [jnp.concatenate(parts[i * count : (i + 1) * count], axis=a.axis) for i, a in enumerate(joined)]

    inputs = [instance(a.operand, m) for a in joined for m in own]
    avals = [_struct(graph, a.operand) for a in joined for _ in own]
    return _once(task, "C", run, list(zip(inputs, avals, strict=True)), [a.result for a in joined])


def _once(
    task: StageTask,
    kind: str,
    run: Callable[..., Any],
    inputs: Sequence[tuple[str, Any]],
    outputs: Sequence[str],
) -> EmittedTask:
    # The update round tells apart the accumulators of forward and backward tasks of one stage.
    update_round = ("F", "B", "W").index(task.kind)
    jaxpr = jc.trace(run, [aval for _, aval in inputs])
    names = tuple(name for name, _ in inputs)
    return EmittedTask(
        task=StageTask(
            kind=kind,
            stage=task.stage,
            round=task.round,
            update_round=update_round,
            jaxpr=jaxpr,
            inputs=names,
            outputs=tuple(outputs),
        ),
        jaxpr=jaxpr,
        inputs=names,
        outputs=tuple(outputs),
        per_microbatch=frozenset(),
    )


def _neutral(kind: str, dtype: Any) -> Any:
    match kind:
        case "sum" | "mean":
            return np.zeros((), dtype)
        case "and" | "or":
            return np.array(kind == "and")
        case "max" | "min":
            limits = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
            infinite = jnp.issubdtype(dtype, jnp.floating)
            low, high = (-np.inf, np.inf) if infinite else (limits.min, limits.max)
            return np.array(low if kind == "max" else high, dtype)
        case _:
            raise AssertionError(kind)


def instance(name: str, microbatch: int | None) -> str:
    """The name of a value of one microbatch: `h_1@2`."""
    return name if microbatch is None else f"{name}@{microbatch}"


def executable_of(
    emitted: EmittedTask, mesh: int, types: Mapping[str, ArrayType], donated: Sequence[int]
) -> Executable:
    """The executable of a task on a mesh, with the types that the mesh declares for its values."""
    return Executable(
        name=executable_name(emitted),
        mesh=mesh,
        inputs=tuple(types[n] for n in emitted.inputs),
        outputs=tuple(types[n] for n in emitted.outputs),
        donated=tuple(donated),
        flops=jaxpr_flops(emitted.jaxpr),
        bytes_accessed=jaxpr_bytes(emitted.jaxpr),
        jaxpr=emitted.jaxpr,
    )


def executable_name(emitted: EmittedTask) -> str:
    """A name for the reader: `forward_0`, `update_1.w1`, `backward_0.r1`."""
    words = {
        "F": "forward", "B": "backward", "W": "weight_gradient", "U": "update", "P": "prologue", "Z": "zeros",
        "C": "concatenate",
    }  # fmt: skip
    task = task_of(emitted, None)
    update_round = f".w{task.update_round}" if task.update_round else ""
    return f"{words[task.kind]}_{task.stage}{update_round}" + (f".r{task.round}" if task.round else "")


def task_of(emitted: EmittedTask, microbatch: int | None) -> Task:
    """Return the name of a run of the task.

    Updates of group 0 come before all rounds, those of group g belong to round g - 1.
    """
    task = emitted.task
    kind, round_number = task.kind, task.round
    if kind == "U":
        kind, round_number = ("U", round_number - 1) if round_number else ("P", 0)
    return Task(kind=kind, stage=task.stage, microbatch=microbatch, round=round_number, update_round=task.update_round)
