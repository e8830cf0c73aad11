"""Build the stage graph of placed equations: one small program per stage and kind of work.

    Placement -> StageGraph

A forward or backward task holds its anchored equations and the unplaced ones that they need; what it makes and another
task reads becomes a named value. Update equations form update rounds: round 0 reads gradients and state,
round r + 1 reads what a task of round r made on another stage (the scalars of a global-norm clip), so that a round is
one exchange.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from autopar.compiler.frontend.layer_scans import LeafRows
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.microbatch.accumulate import accumulation_axis, accumulation_kind
from autopar.compiler.pipeline.offloaded_values import handed_on_devices
from autopar.compiler.pipeline.phases import Phase
from autopar.compiler.pipeline.placement import Placement
from autopar.compiler.pipeline.stage_graph import (
    Accumulation,
    GraphInput,
    GraphOutput,
    GraphValue,
    StageGraph,
    StageTask,
)
from autopar.compiler.pipeline.tasks import ORDER, TaskEquations, TaskKey, find_task_equations
from autopar.compiler.pipeline.update_tasks import UpdateRounds, ValueKey, floating_key, unplaced_key


def build_stage_graph(
    placement: Placement,
    *,
    name: str,
    inputs: Sequence[LeafRows],
    outputs: Sequence[LeafRows],
    input_names: Sequence[str],
    leaf_names: Sequence[str],
    again: Mapping[int, Collection[int]],
    layer_of: Mapping[int, int],
    split_weight_gradients: bool = False,
    state_outputs: Mapping[int, int] | None = None,
    host_state: Sequence[Collection[str]] = (),
) -> StageGraph:
    """Build the stage graph.

    `inputs` and `outputs` say which piece of which leaf the step's flat values are; `input_names` name the step's
    inputs, `leaf_names` the leaves; `state_outputs` pairs flat outputs with the flat inputs that they replace. The
    backward tasks of stages in `again` compute these of their layers again, where `layer_of` tells the layer of each
    equation that runs with the microbatches; with `split_weight_gradients` what no earlier stage waits for becomes a
    task W. `host_state` names the leaves that are kept on the host, part by part: each part has updates of its own.
    """
    task_equations = find_task_equations(
        placement,
        again=again,
        layer_of=layer_of,
        split_weight_gradients=split_weight_gradients,
    )
    builder = _Builder(placement, task_equations, input_names)
    return builder.build(name, inputs, outputs, leaf_names, state_outputs or {}, host_state)


class _Builder:
    """Tables shared by the steps of `build_stage_graph`."""

    def __init__(self, placement: Placement, task_equations: TaskEquations, input_names: Sequence[str]) -> None:
        self.placement = placement
        self.phases = placement.phases
        self.step = self.phases.step
        self.jaxpr = self.step.jaxpr.jaxpr
        self.eqns = self.phases.equations
        self.operands, self.producer = self.phases.operands, self.phases.producer
        self.consts = dict(zip(self.jaxpr.constvars, self.step.jaxpr.consts, strict=True))
        self.task_equations = task_equations
        self.names: dict[ValueKey, str] = {(v, None): n for v, n in zip(self.jaxpr.invars, input_names, strict=True)}
        specs = zip(self.jaxpr.invars, self.step.inputs, strict=True)
        self.of_microbatch = {v for v, spec in specs if spec.kind != "whole"}
        self.values: dict[str, GraphValue] = {}

    # --- values ---------------------------------------------------------------------------------------------

    def _key(self, v: jc.Var, place: tuple[int, int]) -> ValueKey:
        """`place`: the stage and the round of the task that makes or reads it."""
        return unplaced_key(v, *place) if self._unplaced(v) else (v, None)

    def _unplaced(self, v: jc.Var) -> bool:
        i = self.producer.get(v)
        return i is not None and Phase.UNPLACED in self.phases.of[i]

    def name(self, key: ValueKey, *, per_microbatch: bool) -> str:
        """The name of a value, given when it is first met: after the primitive that made it, or what it totals."""
        if key not in self.names:
            v, tag = key
            text = self._made_name(v) + ("" if tag is None else "/total" if tag == "sum" else f"/{tag}")
            taken = text in self.values  # totals of one value, of different kinds
            self.names[key] = f"{text}_{self.producer[v]}" if taken else text
        name = self.names[key]
        if name not in self.values:
            v, tag = key
            aval: Any = v.aval
            self.values[name] = GraphValue(
                name=name,
                shape=tuple(aval.shape),
                dtype=aval.dtype,
                weak_type=aval.weak_type,
                per_microbatch=per_microbatch,
                copy_of="" if per_microbatch or tag in (None, "sum") else self._made_name(v),
            )
        return name

    def _made_name(self, v: jc.Var) -> str:
        i = self.producer[v]
        operand = self.eqns[i].invars[0] if self.eqns[i].invars else None
        if Phase.ACCUMULATE in self.phases.of[i] and isinstance(operand, jc.Var):
            return (self._made_name(operand) if operand in self.producer else self.names[operand, None]) + "/total"
        position = self.eqns[i].outvars.index(v)
        return f"{self.eqns[i].primitive.name}_{i}" + (f".{position}" if position else "")

    # --- tasks ----------------------------------------------------------------------------------------------

    def build(
        self,
        name: str,
        inputs: Sequence[LeafRows],
        outputs: Sequence[LeafRows],
        leaf_names: Sequence[str],
        state_outputs: Mapping[int, int],
        host_state: Sequence[Collection[str]],
    ) -> StageGraph:
        updates = UpdateRounds(self.placement, self.task_equations.reads)
        updates.assign_outputs(state_outputs)
        if host_state:
            part_of = {name: number for number, names in enumerate(host_state) for name in names}
            read_by = {
                v: part_of[leaf_names[inputs[spec.leaf].leaf]]
                for v, spec in zip(self.jaxpr.invars, self.step.inputs, strict=True)
                if spec.leaf is not None and leaf_names[inputs[spec.leaf].leaf] in part_of
            }
            updates.split_by_parts(read_by)
        micro = [self._microbatch_task(key) for key in self.task_equations.equations]
        once = [self._update_task(key, updates) for key in updates.tasks()]
        micro, offloaded = handed_on_devices(micro)
        tasks = _in_order([*micro, *once], self.phases.num_rounds)
        return StageGraph(
            name=name,
            num_stages=self.placement.num_stages,
            num_rounds=self.phases.num_rounds,
            num_microbatches=self.step.num_microbatches,
            tasks=tuple(tasks),
            inputs=tuple(self._graph_inputs(inputs, leaf_names, tasks)),
            outputs=tuple(self._graph_outputs(outputs, updates, state_outputs)),
            values=self.values,
            offloaded=offloaded,
        )

    def _microbatch_task(self, key: TaskKey) -> StageTask:
        kind, stage, round_number = key
        indices = self.task_equations.equations[key]
        eqns = [self.task_equations.all_equations[i] for i in indices]
        made = {v for eqn in eqns for v in eqn.outvars}
        accumulated = [self.eqns[i] for i in self.task_equations.accumulations.get(key, [])]
        tied = self.task_equations.tied.get(key, [])
        wanted = self._read_elsewhere(key)
        wanted.update((v, None) for e in accumulated if isinstance(v := e.invars[0], jc.Var))
        wanted.update((v, None) for v in tied)
        read = self.task_equations.reads[key]
        reads = dict.fromkeys(v for v in read if v not in made and v not in self.consts)
        reads |= dict.fromkeys(v for v in wanted if v not in made)  # a batch input passed on as it is
        results = list(wanted)
        return StageTask(
            kind=kind,
            stage=stage,
            round=round_number,
            jaxpr=jc.part_of(self.step.jaxpr, eqns, list(reads), results),
            inputs=tuple(self._input_name(v, key[1:]) for v in reads),
            outputs=tuple(self.name(self._key(v, key[1:]), per_microbatch=True) for v in results),
            accumulations=tuple(
                [self._accumulation(e, key[1:]) for e in accumulated]
                + [self._tied_accumulation(v, key[1:]) for v in tied]
            ),
        )

    def _input_name(self, v: jc.Var, place: tuple[int, int]) -> str:
        i = self.producer.get(v)
        if i is None:
            return self.name((v, None), per_microbatch=v in self.of_microbatch)
        own = self.phases.of[i]
        if own & {Phase.FORWARD, Phase.BACKWARD, Phase.UNPLACED}:
            return self.name(self._key(v, place), per_microbatch=True)
        floating = Phase.STEP in own and i not in self.placement.stages
        return self.name(floating_key(v, place[0]) if floating else (v, None), per_microbatch=False)

    def _read_elsewhere(self, key: TaskKey) -> dict[jc.Var, None]:
        """Values of this task that other microbatch tasks read and do not make themselves, in order of appearance."""

        def is_read(v: jc.Var) -> bool:
            return any(
                not self._unplaced(v) or (other[1:] == key[1:] and v in self.task_equations.kept[other])
                for other in self._readers.get(v, ())
            )

        made = dict.fromkeys(self.task_equations.made(key))
        return {v: None for v in made if is_read(v) and self._first_maker(key, v)}

    @cached_property
    def _readers(self) -> Mapping[jc.Var, Collection[TaskKey]]:
        """The microbatch tasks that read a value and do not make it."""
        readers: dict[jc.Var, set[TaskKey]] = {}
        for key, read in self.task_equations.reads.items():
            made = set(self.task_equations.made(key))
            for v in (v for v in read if v not in made):
                readers.setdefault(v, set()).add(key)
        return readers

    def _first_maker(self, key: TaskKey, v: jc.Var) -> bool:
        """Return whether no earlier task of the stage has made a value: only the first one hands it on.

        Every round has unplaced values of its own.
        """
        kind, stage, round_number = key
        earlier = [(other, stage, round_number) for other in ORDER[: ORDER.index(kind)]]
        if not self._unplaced(v):
            earlier += [(other, stage, before) for before in range(round_number) for other in ORDER]
        return not any(v in self.task_equations.made(other) for other in earlier)

    def _accumulation(self, eqn: jc.JaxprEqn, place: tuple[int, int]) -> Accumulation:
        source: Any = eqn.invars[0]
        operand = self.name(self._key(source, place), per_microbatch=True)
        result = self.name((eqn.outvars[0], None), per_microbatch=False)
        return Accumulation(operand=operand, result=result, kind=accumulation_kind(eqn), axis=accumulation_axis(eqn))

    def _tied_accumulation(self, v: jc.Var, place: tuple[int, int]) -> Accumulation:
        operand = self.name(self._key(v, place), per_microbatch=True)
        return Accumulation(operand=operand, result=self.name((v, "sum"), per_microbatch=False), kind="sum")

    def _update_task(self, key: tuple[int, int, int], updates: UpdateRounds) -> StageTask:
        group, update_round, stage = key
        steps = updates.equations(key)
        reads, results = updates.interface(key)
        return StageTask(
            kind="U",
            stage=stage,
            round=group,
            update_round=update_round,
            jaxpr=updates.program(stage, steps, reads, results),
            inputs=tuple(self.name(k, per_microbatch=False) for k in reads),
            outputs=tuple(self.name(k, per_microbatch=False) for k in results),
        )

    # --- the borders of the graph ---------------------------------------------------------------------------

    def _graph_inputs(
        self, pieces: Sequence[LeafRows], leaf_names: Sequence[str], tasks: Sequence[StageTask]
    ) -> Iterable[GraphInput]:
        readers: dict[str, set[int]] = {}
        for task in tasks:
            for value in task.inputs:
                readers.setdefault(value, set()).add(task.stage)
        passed = {v for v in self.jaxpr.outvars if isinstance(v, jc.Var)}
        for v, spec in zip(self.jaxpr.invars, self.step.inputs, strict=True):
            value = self.name((v, None), per_microbatch=spec.kind != "whole")
            home = self.placement.homes.get(v, 0)
            stages = readers.get(value, set()) | ({home} if v in passed else set())
            owned = spec.kind == "whole" and v not in self.phases.replicated_scalars
            order = sorted(stages | {home} if stages and owned else stages, key=lambda s: (s != home, s))
            piece = pieces[spec.leaf] if spec.leaf is not None else LeafRows(leaf=-1, start=None, stop=None)
            yield GraphInput(
                value=value,
                kind=spec.kind,
                leaf=None if spec.leaf is None else piece.leaf,
                stages=tuple(order),
                owned=owned,
                start=piece.start,
                stop=piece.stop,
                axis=spec.axis,
                name="" if spec.leaf is None else leaf_names[piece.leaf],
            )

    def _graph_outputs(
        self, pieces: Sequence[LeafRows], updates: UpdateRounds, state_outputs: Mapping[int, int]
    ) -> Iterable[GraphOutput]:
        for position, (v, piece) in enumerate(zip(self.jaxpr.outvars, pieces, strict=True)):
            where: dict[str, Any] = {"leaf": piece.leaf, "start": piece.start, "stop": piece.stop}
            if isinstance(v, jc.Literal):
                yield GraphOutput(value=None, literal=v.val, stage=0, **where)
            elif v in self.consts:
                yield GraphOutput(value=None, literal=self.consts[v], stage=0, **where)
            else:
                key, stage = updates.output(v)
                replaced = state_outputs.get(position)
                yield GraphOutput(
                    value=self.name(key, per_microbatch=False),
                    stage=stage,
                    replaces=None if replaced is None else self.names[self.jaxpr.invars[replaced], None],
                    **where,
                )


def _in_order(tasks: Sequence[StageTask], num_rounds: int) -> list[StageTask]:
    """Sort tasks: updates of a group before the round that waits for them, then backward tasks, last stage first."""

    def rank(task: StageTask) -> tuple[int, int, int, int]:
        if task.kind == "U":
            return (2 * task.round, task.update_round, task.stage, 0)
        backward = task.kind != "F"
        return (2 * task.round + 1, int(backward), -task.stage if backward else task.stage, int(task.kind == "W"))

    assert all(task.round <= num_rounds for task in tasks)
    return sorted(tasks, key=rank)
