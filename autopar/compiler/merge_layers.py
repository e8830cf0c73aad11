"""Gather placed equations into tasks: one small program per stage and kind of work.

    Placement -> StageGraph

A forward or backward task holds its anchored equations and the free ones that they need; what it makes and another task reads
becomes a named value. Update equations form waves: wave 0 reads gradients and state, wave w + 1 reads what a task of wave
w made on another stage (the scalars of a global-norm clip), so a wave is one exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autopar.compiler import jax_compat as jc
from autopar.compiler.layer_loops import Piece
from autopar.compiler.placement import Placement
from autopar.compiler.regions import Region
from autopar.compiler.stage_graph import (
    Accumulation,
    GraphInput,
    GraphOutput,
    StageGraph,
    StageTask,
    Value,
)
from autopar.compiler.update_waves import Key, UpdateWaves, floating_key, free_key

_MICRO = ("F", "B", "W")


def merge_layers(
    placement: Placement,
    *,
    name: str,
    inputs: Sequence[Piece],
    outputs: Sequence[Piece],
    input_names: Sequence[str],
    leaf_names: Sequence[str],
    remat_stages: Iterable[int] = (),
    split_weight_gradients: bool = False,
    state_outputs: Mapping[int, int] | None = None,
) -> StageGraph:
    """Build the stage graph.

    `inputs` and `outputs` say which piece of which leaf the step's flat values are; `input_names` name the step's inputs,
    `leaf_names` the leaves;
    `state_outputs` pairs flat outputs with the flat inputs that they replace. Stages in `remat_stages` compute their forward
    again in the backward task; with `split_weight_gradients` what no earlier stage waits for becomes a task W.
    """
    merger = _Merger(placement, input_names, frozenset(remat_stages))
    merger.collect_microbatch_tasks(split_weight_gradients)
    return merger.build(name, inputs, outputs, leaf_names, state_outputs or {})


class _Merger:
    """Tables shared by the steps of `merge_layers`."""

    def __init__(self, placement: Placement, input_names: Sequence[str], remat_stages: frozenset[int]) -> None:
        self.placement = placement
        self.regions = placement.regions
        self.step = self.regions.step
        self.jaxpr = self.step.jaxpr.jaxpr
        self.eqns = self.regions.equations
        self.remat_stages = remat_stages
        self.producer = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self.consts = dict(zip(self.jaxpr.constvars, self.step.jaxpr.consts, strict=True))
        self.members: dict[tuple[str, int, int], list[int]] = {}
        self.names: dict[Key, str] = {
            (v, None): n for v, n in zip(self.jaxpr.invars, input_names, strict=True)
        }
        specs = zip(self.jaxpr.invars, self.step.inputs, strict=True)
        self.of_microbatch = {v for v, spec in specs if spec.kind != "whole"}
        self.values: dict[str, Value] = {}
        self.accumulations: dict[tuple[str, int, int], list[int]] = {}
        self.tied: dict[tuple[str, int, int], list[jc.Var]] = {}

    # --- which equations belong to which task ------------------------------------------------------------------------

    def collect_microbatch_tasks(self, split_weight_gradients: bool) -> None:
        anchored: dict[tuple[str, int, int], list[int]] = {}
        for i, stage in self.placement.stages.items():
            if self.regions.kinds[i] & {Region.FORWARD, Region.BACKWARD} and i not in self.placement.deferred:
                anchored.setdefault((self._kind(i), stage, self.regions.rounds[i]), []).append(i)
        self._attach_accumulations(anchored)
        for key, indices in list(anchored.items()):
            if key[0] == "B" and key[1] in self.remat_stages:
                anchored[key] = self._with_forward(key, indices)
        if split_weight_gradients:
            self._split_weight_gradients(anchored)
        for key in sorted(anchored, key=lambda k: (k[2], _MICRO.index(k[0]), k[1])):
            self.members[key] = self._closure(anchored[key], self._kept_by_earlier_tasks(key))

    def _attach_accumulations(self, anchored: dict[tuple[str, int, int], list[int]]) -> None:
        """Every accumulation belongs to the task that makes its operand; tied gradients are accumulated on their own."""
        for i, eqn in enumerate(self.eqns):
            if Region.ACCUMULATE not in self.regions.kinds[i] or self._deferred(eqn.invars[0]):
                continue
            producer = self.producer.get(eqn.invars[0]) if isinstance(eqn.invars[0], jc.Var) else None
            kind = "F" if producer is None else self._kind(producer)
            key = (kind, self.placement.stages[i], self.regions.rounds[i])
            self.accumulations.setdefault(key, []).append(i)
            members = anchored.setdefault(key, [])
            if producer is not None and Region.FREE in self.regions.kinds[producer]:
                members.append(producer)
        for i in sorted(self.placement.deferred):
            for v in _operands(self.eqns[i]):
                if not self._deferred(v):
                    producer = self.producer[v]
                    key = (self._kind(producer), self.placement.stages[producer], self.regions.rounds[producer])
                    known = self.tied.setdefault(key, [])
                    if v not in known:
                        known.append(v)

    def _kind(self, index: int) -> str:
        """With one stage nothing happens between forward and backward: they are one task."""
        backward = Region.BACKWARD in self.regions.kinds[index] and self.placement.num_stages > 1
        return "B" if backward else "F"

    def _deferred(self, atom: Any) -> bool:
        return isinstance(atom, jc.Var) and self.producer.get(atom) in self.placement.deferred

    def _with_forward(self, key: tuple[str, int, int], indices: list[int]) -> list[int]:
        """A rematerialised stage: the backward task also holds the forward equations whose results it reads."""
        needed = {v for i in indices for v in _operands(self.eqns[i])}
        found = set(indices)
        for i in range(max(indices), -1, -1):
            same = self.placement.stages.get(i) == key[1] and self.regions.rounds[i] == key[2]
            if same and Region.FORWARD in self.regions.kinds[i] and needed.intersection(self.eqns[i].outvars):
                if not self.eqns[i].effects:
                    found.add(i)
                    needed.update(_operands(self.eqns[i]))
        return sorted(found)

    def _split_weight_gradients(self, anchored: dict[tuple[str, int, int], list[int]]) -> None:
        """Move to W what no other stage waits for (Zero Bubble, arXiv 2401.10241, section 2)."""
        for key in [k for k in anchored if k[0] == "B" and k[1] not in self.remat_stages]:
            indices = anchored[key]
            outside = {
                v
                for other, others in anchored.items()
                if other[1] != key[1] or other[2] != key[2]
                for i in others
                for v in _operands(self.eqns[i])
            }
            wanted, first = set(outside), set[int]()
            for i in reversed(indices):
                if wanted.intersection(self.eqns[i].outvars):
                    first.add(i)
                    wanted.update(_operands(self.eqns[i]))
            rest = [i for i in indices if i not in first]
            if not rest:
                continue
            anchored[key] = [i for i in indices if i in first]
            anchored[("W", *key[1:])] = rest
            self._move_accumulations(key, set(rest))

    def _move_accumulations(self, key: tuple[str, int, int], moved: set[int]) -> None:
        target = ("W", *key[1:])
        mine = self.accumulations.pop(key, [])
        for i in mine:
            late = self.producer.get(self.eqns[i].invars[0]) in moved
            self.accumulations.setdefault(target if late else key, []).append(i)
        for v in self.tied.pop(key, []):
            self.tied.setdefault(target if self.producer[v] in moved else key, []).append(v)

    def _kept_by_earlier_tasks(self, key: tuple[str, int, int]) -> set[jc.Var]:
        """Costly free values that an earlier task of the same stage has made: read, not made again."""
        kind, stage, round_number = key
        if kind == "F" or stage in self.remat_stages:
            return set()
        kept: set[jc.Var] = set()
        for earlier in _MICRO[: _MICRO.index(kind)]:
            for i in self.members.get((earlier, stage, round_number), []):
                kept.update(v for v in self.eqns[i].outvars if v in self.regions.costly)
        return kept

    def _closure(self, indices: Sequence[int], kept: set[jc.Var]) -> list[int]:
        """The equations and the free ones that they need, in program order."""
        found = set(indices)
        stack = list(indices)
        while stack:
            for v in _operands(self.eqns[stack.pop()]):
                i = self.producer.get(v)
                if i is not None and i not in found and v not in kept and Region.FREE in self.regions.kinds[i]:
                    found.add(i)
                    stack.append(i)
        return sorted(found)

    # --- values --------------------------------------------------------------------------------------------------------

    def _key(self, v: jc.Var, stage: int) -> Key:
        return free_key(v, stage) if self._free(v) else (v, None)

    def _free(self, v: jc.Var) -> bool:
        i = self.producer.get(v)
        return i is not None and Region.FREE in self.regions.kinds[i]

    def name(self, key: Key, *, per_microbatch: bool) -> str:
        """The name of a value, given when it is first met: the primitive that made it and its number; a total, of what."""
        if key not in self.names:
            v, tag = key
            text = self._made_name(v) + ("" if tag is None else "/total" if tag == "sum" else f"/{tag}")
            taken = text in self.values  # totals of one value, of different kinds
            self.names[key] = f"{text}_{self.producer[v]}" if taken else text
        name = self.names[key]
        if name not in self.values:
            aval = key[0].aval
            self.values[name] = Value(
                name=name, shape=tuple(aval.shape), dtype=aval.dtype, per_microbatch=per_microbatch
            )
        return name

    def _made_name(self, v: jc.Var) -> str:
        i = self.producer[v]
        operand = self.eqns[i].invars[0] if self.eqns[i].invars else None
        if Region.ACCUMULATE in self.regions.kinds[i] and isinstance(operand, jc.Var):
            return (self._made_name(operand) if operand in self.producer else self.names[operand, None]) + "/total"
        position = self.eqns[i].outvars.index(v)
        return f"{self.eqns[i].primitive.name}_{i}" + (f".{position}" if position else "")

    # --- tasks ---------------------------------------------------------------------------------------------------------

    def build(
        self,
        name: str,
        inputs: Sequence[Piece],
        outputs: Sequence[Piece],
        leaf_names: Sequence[str],
        state_outputs: Mapping[int, int],
    ) -> StageGraph:
        waves = UpdateWaves(self.placement, self.members)
        waves.assign_outputs(state_outputs)
        micro = [self._microbatch_task(key) for key in self.members]
        updates = [self._update_task(key, waves) for key in waves.tasks()]
        tasks = _in_order([*micro, *updates], self.regions.num_rounds)
        return StageGraph(
            name=name,
            num_stages=self.placement.num_stages,
            num_rounds=self.regions.num_rounds,
            num_microbatches=self.step.num_microbatches,
            tasks=tuple(tasks),
            inputs=tuple(self._graph_inputs(inputs, leaf_names, tasks)),
            outputs=tuple(self._graph_outputs(outputs, waves, state_outputs)),
            values=self.values,
        )

    def _microbatch_task(self, key: tuple[str, int, int]) -> StageTask:
        kind, stage, round_number = key
        indices = self.members[key]
        made = {v for i in indices for v in self.eqns[i].outvars}
        accumulated = [self.eqns[i] for i in self.accumulations.get(key, [])]
        tied = self.tied.get(key, [])
        wanted = self._read_elsewhere(key, made)
        wanted.update((v, None) for e in accumulated if isinstance(v := e.invars[0], jc.Var))
        wanted.update((v, None) for v in tied)
        reads = dict.fromkeys(v for i in indices for v in _operands(self.eqns[i]) if v not in made and v not in self.consts)
        reads |= dict.fromkeys(v for v in wanted if v not in made)  # a batch input passed on as it is
        results = list(wanted)
        return StageTask(
            kind=kind,
            stage=stage,
            round=round_number,
            jaxpr=self._program(indices, list(reads), results),
            inputs=tuple(self._input_name(v, stage) for v in reads),
            outputs=tuple(self.name(self._key(v, stage), per_microbatch=True) for v in results),
            accumulations=tuple(
                [self._accumulation(e, stage) for e in accumulated] + [self._tied_accumulation(v, stage) for v in tied]
            ),
        )

    def _input_name(self, v: jc.Var, stage: int) -> str:
        i = self.producer.get(v)
        if i is None:
            return self.name((v, None), per_microbatch=v in self.of_microbatch)
        kinds = self.regions.kinds[i]
        if kinds & {Region.FORWARD, Region.BACKWARD, Region.FREE}:
            return self.name(self._key(v, stage), per_microbatch=True)
        floating = Region.STEP in kinds and i not in self.placement.stages
        return self.name(floating_key(v, stage) if floating else (v, None), per_microbatch=False)

    def _read_elsewhere(self, key: tuple[str, int, int], made: set[jc.Var]) -> dict[jc.Var, None]:
        """Values of this task that other microbatch tasks read and do not make themselves, in order of appearance."""
        _, stage, _ = key
        readers: set[jc.Var] = set()
        for other, indices in self.members.items():
            if other == key:
                continue
            theirs = {v for i in indices for v in self.eqns[i].outvars}
            for i in indices:
                for v in _operands(self.eqns[i]):
                    if v not in theirs and (not self._free(v) or (other[1] == stage and v in self._kept_by_earlier_tasks(other))):
                        readers.add(v)
        found = dict.fromkeys(v for i in self.members[key] for v in self.eqns[i].outvars if v in readers)
        return {v: None for v in found if v in made and self._first_maker(key, v)}

    def _first_maker(self, key: tuple[str, int, int], v: jc.Var) -> bool:
        """A free value kept from F is not handed on again by B."""
        earlier = _MICRO[: _MICRO.index(key[0])]
        return not any(
            v in self.eqns[i].outvars for kind in earlier for i in self.members.get((kind, *key[1:]), [])
        )

    def _accumulation(self, eqn: jc.JaxprEqn, stage: int) -> Accumulation:
        operand = self.name(self._key(eqn.invars[0], stage), per_microbatch=True)
        result = self.name((eqn.outvars[0], None), per_microbatch=False)
        return Accumulation(operand=operand, result=result, kind=eqn.params["kind"], axis=eqn.params.get("axis") or 0)

    def _tied_accumulation(self, v: jc.Var, stage: int) -> Accumulation:
        operand = self.name(self._key(v, stage), per_microbatch=True)
        return Accumulation(operand=operand, result=self.name((v, "sum"), per_microbatch=False), kind="sum")

    def _update_task(self, key: tuple[int, int, int], waves: UpdateWaves) -> StageTask:
        group, wave, stage = key
        steps = waves.equations(key)
        reads, results = waves.interface(key)
        return StageTask(
            kind="U",
            stage=stage,
            round=group,
            wave=wave,
            jaxpr=waves.program(stage, steps, reads, results, self.consts),
            inputs=tuple(self.name(k, per_microbatch=False) for k in reads),
            outputs=tuple(self.name(k, per_microbatch=False) for k in results),
        )

    def _program(self, indices: Sequence[int], reads: Sequence[jc.Var], results: Sequence[jc.Var]) -> jc.ClosedJaxpr:
        def run(*args: Any) -> list[Any]:
            env: dict[jc.Var, Any] = {**self.consts, **dict(zip(reads, args, strict=True))}
            for i in indices:
                eqn = self.eqns[i]
                values = [a.val if isinstance(a, jc.Literal) else env[a] for a in eqn.invars]
                env.update(zip(eqn.outvars, jc.bind_equation(eqn, values), strict=True))
            return [env[v] for v in results]

        return jc.trace(run, [v.aval for v in reads])

    # --- the borders of the graph ----------------------------------------------------------------------------------------

    def _graph_inputs(
        self, pieces: Sequence[Piece], leaf_names: Sequence[str], tasks: Sequence[StageTask]
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
            owned = spec.kind == "whole" and v not in self.regions.homeless
            order = sorted(stages | {home} if stages and owned else stages, key=lambda s: (s != home, s))
            piece = pieces[spec.leaf] if spec.leaf is not None else Piece(leaf=-1, start=None, stop=None)
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
        self, pieces: Sequence[Piece], waves: UpdateWaves, state_outputs: Mapping[int, int]
    ) -> Iterable[GraphOutput]:
        for position, (v, piece) in enumerate(zip(self.jaxpr.outvars, pieces, strict=True)):
            where = {"leaf": piece.leaf, "start": piece.start, "stop": piece.stop}
            if isinstance(v, jc.Literal):
                yield GraphOutput(value=None, literal=v.val, stage=0, **where)
            elif v in self.consts:
                yield GraphOutput(value=None, literal=self.consts[v], stage=0, **where)
            else:
                key, stage = waves.output(v)
                replaced = state_outputs.get(position)
                yield GraphOutput(
                    value=self.name(key, per_microbatch=False),
                    stage=stage,
                    replaces=None if replaced is None else self.names[self.jaxpr.invars[replaced], None],
                    **where,
                )


def _in_order(tasks: Sequence[StageTask], num_rounds: int) -> list[StageTask]:
    """Updates of a group before the round that waits for them; backward from the last stage to the first."""

    def rank(task: StageTask) -> tuple[int, int, int, int]:
        if task.kind == "U":
            return (2 * task.round, task.wave, task.stage, 0)
        backward = task.kind != "F"
        return (2 * task.round + 1, int(backward), -task.stage if backward else task.stage, int(task.kind == "W"))

    assert all(task.round <= num_rounds for task in tasks)
    return sorted(tasks, key=rank)


def _operands(eqn: jc.JaxprEqn) -> list[jc.Var]:
    return [v for v in eqn.invars if isinstance(v, jc.Var)]
