"""The stage graph: a train step as tasks of stages, each a small program of its own, joined by named values.

    F0 -> F1 -> ... -> F(S-1)      forward, for every microbatch
    B0 <- B1 <- ... <- B(S-1)      backward (W: weight gradients, where a schedule wants them apart)
    U0    U1    ...    U(S-1)      update, once per step; in rounds where scalars cross stages

A value is either of one microbatch or of the whole step; an accumulation turns the first kind into the second. Every
value is an input or made by one task, before the tasks that read it, and has the type that these declare: `verify`
checks that. `evaluate` is the meaning of a stage graph: it must equal the step it was cut from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.microbatch.accumulate import combine
from autopar.plain_text import microbatches_in_words


@dataclass(frozen=True, kw_only=True)
class GraphValue:
    """A value that crosses from one task to another. Shape in elements, of one microbatch if `per_microbatch`."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    per_microbatch: bool
    weak_type: bool = False
    copy_of: str = ""
    """A name for what every stage that reads it computes for itself, once per step: the same for all of these."""


@dataclass(frozen=True, kw_only=True)
class Accumulation:
    """`result` = the sum (max, min, and, or, mean, concatenation along `axis`) of `operand` over the microbatches.

    Of a lane, over those that it runs; its mean is its share of the mean over all.
    """

    operand: str
    result: str
    kind: str
    axis: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class StageTask:
    """The work of one stage: F, B or W of a microbatch, or U once per step. Inputs and outputs are value names."""

    kind: str
    stage: int
    round: int
    update_round: int = 0
    jaxpr: jc.ClosedJaxpr
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    accumulations: tuple[Accumulation, ...] = ()

    @property
    def name(self) -> str:
        """`F0`, `B1`, `U0.1` (update round 1), `F0'` (second round)."""
        return f"{self.kind}{self.stage}" + (f".{self.update_round}" if self.update_round else "") + "'" * self.round


@dataclass(frozen=True, kw_only=True)
class GraphInput:
    """An input value: a flat argument, a piece of it (axis 0), its microbatch, or the microbatch's number."""

    value: str
    kind: str  # "whole" | "microbatch" | "index"
    leaf: int | None
    stages: tuple[int, ...]  # that read it, its owner first
    owned: bool = False  # lives on its owner and is sent to other readers; otherwise every reader is given it
    start: int | None = None
    stop: int | None = None
    axis: int = 0  # along which microbatches are sliced
    name: str = ""  # of the leaf


@dataclass(frozen=True, kw_only=True)
class GraphOutput:
    """A piece of a result: a value, owned by a stage, or a constant."""

    leaf: int
    value: str | None
    stage: int
    literal: Any = None
    start: int | None = None
    stop: int | None = None
    replaces: str | None = None  # the input value whose successor this is


@dataclass(frozen=True, kw_only=True, eq=False)
class StageGraph:
    """All tasks of a step, in an order in which they may run."""

    name: str
    num_stages: int
    num_rounds: int
    num_microbatches: int
    tasks: tuple[StageTask, ...]
    values: Mapping[str, GraphValue]
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    microbatches: tuple[range, ...] = ()
    """The microbatches that each stage runs, if there are lanes; those of a lane run the same. Empty: all run all."""
    offloaded: frozenset[str] = frozenset()
    """Values that the step itself puts on the host between its forward and its backward pass."""

    def microbatches_of(self, stage: int) -> range:
        """Return the microbatches that a stage runs."""
        return self.microbatches[stage] if self.microbatches else range(self.num_microbatches)

    @cached_property
    def read(self) -> frozenset[str]:
        """Values that some task reads."""
        return frozenset(name for task in self.tasks for name in task.inputs)

    @cached_property
    def per_microbatch(self) -> frozenset[str]:
        """Values of one microbatch."""
        return frozenset(name for name, value in self.values.items() if value.per_microbatch)

    @cached_property
    def replaced(self) -> Mapping[str, str]:
        """The state of its type that each new state replaces."""
        return {
            out.value: out.replaces
            for out in self.outputs
            if out.value is not None and out.replaces is not None and self._are_alike(out.value, out.replaces)
        }

    def _are_alike(self, name: str, other: str) -> bool:
        mine, theirs = self.values[name], self.values[other]
        return mine.shape == theirs.shape and mine.dtype == theirs.dtype

    @cached_property
    def hidden_totals(self) -> frozenset[str]:
        """Totals over the microbatches that are no results, and that no other stage reads."""
        totals = {a.result for task in self.tasks for a in task.accumulations if a.kind in ("sum", "mean")}
        return frozenset(totals - {out.value for out in self.outputs} - self.crossing.keys())

    @cached_property
    def read_in_later_rounds(self) -> frozenset[str]:
        """Values of a microbatch that a round leaves for a later one: by then every microbatch has made its own."""
        tasks = [task for task in self.tasks if task.kind != "U"]
        made = {name: task.round for task in tasks for name in task.outputs}
        return frozenset(n for task in tasks for n in task.inputs if made.get(n, task.round) < task.round)

    @cached_property
    def crossing(self) -> Mapping[str, tuple[int, tuple[int, ...]]]:
        """Values made on one stage and read on others: name -> (stage that makes it, stages that read it)."""
        made = {name: task.stage for task in self.tasks for name in _made_by(task)}
        made |= {i.value: i.stages[0] for i in self.inputs if i.stages and i.owned and i.value in self.values}
        read: dict[str, set[int]] = {}
        for task in self.tasks:
            for name in task.inputs:
                if name in made and made[name] != task.stage:
                    read.setdefault(name, set()).add(task.stage)
        small = {i.value for i in self.inputs if i.kind != "whole"}
        return {n: (made[n], tuple(sorted(stages))) for n, stages in read.items() if n not in small}

    def verify(self) -> None:
        """Assert that tasks read what is there, in the types of the values, and that every result is made."""
        stages = range(self.num_stages)
        there = {i.value for i in self.inputs}
        for task in self.tasks:
            assert task.stage in stages, f"{task.name} is on stage {task.stage} of {self.num_stages}"
            missing = [name for name in task.inputs if name not in there]
            assert not missing, f"{task.name} reads {missing}, which no task has made before it"
            again = [name for name in _made_by(task) if name in there and name not in task.inputs]
            assert not again, f"{task.name} makes {again}, which are there already"
            there.update(_made_by(task))
            _check_types(task, self.values)
        for out in self.outputs:
            assert out.value is None or out.value in there, f"result {out.leaf} is {out.value}, which no task makes"
            assert out.stage in stages, f"result {out.leaf} is on stage {out.stage} of {self.num_stages}"

    def __str__(self) -> str:
        lines = [
            f"StageGraph of {self.name}: {self.num_stages} stages, {microbatches_in_words(self.num_microbatches)}, "
            f"{self.num_rounds} round{'s' if self.num_rounds > 1 else ''}"
        ]
        for task in self.tasks:
            lines.append(
                f"  {task.name:6} {len(task.jaxpr.jaxpr.eqns):5} equations, {len(task.inputs):3} in, "
                f"{len(task.outputs):3} out, {len(task.accumulations):3} accumulated"
            )
        for name, (source, readers) in sorted(self.crossing.items(), key=lambda item: item[1]):
            v = self.values[name]
            when = "per microbatch" if v.per_microbatch else "per step"
            lines.append(f"  {source} -> {','.join(map(str, readers))}: {name} {v.dtype}{list(v.shape)} {when}")
        return "\n".join(lines)


def _made_by(task: StageTask) -> Iterable[str]:
    yield from task.outputs
    yield from (a.result for a in task.accumulations)


def _check_types(task: StageTask, values: Mapping[str, GraphValue]) -> None:
    borders = ((task.inputs, task.jaxpr.in_avals), (task.outputs, task.jaxpr.out_avals))
    for names, avals in borders:
        for name, aval in zip(names, avals, strict=True):
            value = values[name]
            assert (value.shape, value.dtype) == (aval.shape, aval.dtype), f"{task.name}: {name} is {value}, not {aval}"
    for a in task.accumulations:
        assert a.operand in task.outputs, f"{task.name} adds up {a.operand}, which it does not make"
        assert not values[a.result].per_microbatch, f"{a.result} is a total, and yet of one microbatch"
    if task.kind == "U":
        per_microbatch = [name for name in (*task.inputs, *task.outputs) if values[name].per_microbatch]
        assert not per_microbatch, f"{task.name} runs once per step, and has {per_microbatch} of one microbatch"


def evaluate(graph: StageGraph, leaves: Sequence[Any]) -> list[Any]:
    """Run the graph task by task, without stages, schedules or devices: the reference for everything behind it.

    `leaves` are the flat inputs of the step; the result has one entry per flat output.
    """
    step_values: dict[str, Any] = {}
    for spec in graph.inputs:
        if spec.kind == "whole" and spec.leaf is not None:
            step_values[spec.value] = (
                leaves[spec.leaf] if spec.start is None else leaves[spec.leaf][spec.start : spec.stop]
            )
    micro_values = [_microbatch_inputs(graph, leaves, m) for m in range(graph.num_microbatches)]
    for round_number in range(graph.num_rounds + 1):
        _run_updates(graph, round_number, step_values)
        for microbatch, env in enumerate(micro_values):
            for task in graph.tasks:
                runs = microbatch in graph.microbatches_of(task.stage)
                if task.kind != "U" and task.round == round_number and runs:
                    env.update(_run(task, {**step_values, **env}))
        for task in graph.tasks:
            if task.kind != "U" and task.round == round_number:
                own = graph.microbatches_of(task.stage)
                for a in task.accumulations:
                    total = combine(a.kind, a.axis, [micro_values[m][a.operand] for m in own])
                    whole = a.kind != "mean" or len(own) == graph.num_microbatches
                    step_values[a.result] = total if whole else total * (len(own) / graph.num_microbatches)
    return _assemble(graph, step_values)


def _microbatch_inputs(graph: StageGraph, leaves: Sequence[Any], microbatch: int) -> dict[str, Any]:
    env: dict[str, Any] = {}
    for spec in graph.inputs:
        if spec.kind == "index":
            env[spec.value] = jnp.int32(microbatch)
        elif spec.kind == "microbatch" and spec.leaf is not None:
            size = leaves[spec.leaf].shape[spec.axis] // graph.num_microbatches
            start = microbatch * size
            env[spec.value] = jax.lax.slice_in_dim(leaves[spec.leaf], start, start + size, axis=spec.axis)
    return env


def _run(task: StageTask, env: Mapping[str, Any]) -> dict[str, Any]:
    return dict(zip(task.outputs, jc.jaxpr_as_fun(task.jaxpr)(*[env[n] for n in task.inputs]), strict=True))


def _run_updates(graph: StageGraph, group: int, step_values: dict[str, Any]) -> None:
    for task in graph.tasks:
        if task.kind == "U" and task.round == group:
            step_values.update(_run(task, step_values))


def _assemble(graph: StageGraph, step_values: Mapping[str, Any]) -> list[Any]:
    results: dict[int, list[Any]] = {}
    for out in graph.outputs:
        results.setdefault(out.leaf, []).append(out.literal if out.value is None else step_values[out.value])
    return [
        parts[0] if len(parts) == 1 else jax.lax.concatenate([jnp.asarray(p) for p in parts], 0)
        for _, parts in sorted(results.items())
    ]
