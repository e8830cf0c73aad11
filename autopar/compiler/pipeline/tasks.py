"""Find which equations each forward, backward and weight-gradient task holds.

    Placement -> TaskEquations

A task holds the equations placed on its stage, and the unplaced ones that they need. Costly unplaced values (masks,
dropout draws) are made once, by the forward task, and kept for the backward one; cheap ones (casts of parameters) are
made again, so that no copy of them waits in memory. So are activations, where cheap equations make them of others that
wait anyway (`recomputed_values`).

Layers that are computed again are so one by one, the last one first: what a layer makes again and the backward
equations that read it are one equation (`regions`). Where equations of the backward pass have to keep their order, they
stay as they are, and these layers are made again at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.pipeline.phases import Phase
from autopar.compiler.pipeline.placement import Placement
from autopar.compiler.pipeline.recomputed_layers import StageEquations
from autopar.compiler.pipeline.recomputed_values import values_to_keep
from autopar.compiler.pipeline.regions import Recomputed, in_order, region_equation

TaskKey = tuple[str, int, int]
"""Kind ("F", "B", "W"), stage, round."""

ORDER = ("F", "B", "W")


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskEquations:
    """The equations of every microbatch task, by index in an order in which each finds what it reads."""

    all_equations: Sequence[jc.JaxprEqn]
    """Those of the step, and behind them those of layers that are computed again."""
    equations: Mapping[TaskKey, list[int]]
    accumulations: Mapping[TaskKey, list[int]]
    """`accumulate` equations whose operand the task makes."""
    tied: Mapping[TaskKey, list[jc.Var]]
    """Gradients of tied parameters that the task makes, accumulated apart and added once per step."""
    kept: Mapping[TaskKey, frozenset[jc.Var]]
    """Unplaced values that an earlier task of the stage hands on."""

    @cached_property
    def reads(self) -> Mapping[TaskKey, Collection[jc.Var]]:
        """The values that the equations of each task read."""
        return {
            key: dict.fromkeys(v for i in indices for v in jc.operands(self.all_equations[i]))
            for key, indices in self.equations.items()
        }

    def made(self, key: TaskKey) -> Iterator[jc.Var]:
        """Yield what the equations of a task make."""
        return (v for i in self.equations.get(key, ()) for v in self.all_equations[i].outvars)


def find_task_equations(
    placement: Placement,
    *,
    again: Mapping[int, Collection[int]],
    layer_of: Mapping[int, int],
    split_weight_gradients: bool,
) -> TaskEquations:
    """Gather the equations of every task.

    Stages compute these of their layers `again`; `layer_of` tells the layers of what runs with the microbatches.
    """
    gatherer = _Gatherer(placement, again, layer_of)
    gatherer.gather(split_weight_gradients)
    return TaskEquations(
        all_equations=gatherer.all_equations,
        equations=gatherer.equations,
        accumulations=gatherer.accumulations,
        tied=gatherer.tied,
        kept={key: frozenset(gatherer.kept_by_earlier_tasks(key)) for key in gatherer.equations},
    )


class _Gatherer:
    """The tables of `find_task_equations` while it works."""

    def __init__(self, placement: Placement, again: Mapping[int, Collection[int]], layer_of: Mapping[int, int]) -> None:
        self.placement = placement
        self.phases = placement.phases
        self.eqns = self.phases.equations
        self.all_equations = list(self.eqns)
        self.regions: dict[int, Recomputed] = {}
        self.layers_again, self.layer_of = again, layer_of
        specs = zip(self.phases.step.jaxpr.jaxpr.invars, self.phases.step.inputs, strict=True)
        self.of_microbatch = {v for v, spec in specs if spec.kind != "whole"}
        self.operands, self.producer = self.phases.operands, self.phases.producer
        self.again: dict[TaskKey, set[int]] = {}
        self.equations: dict[TaskKey, list[int]] = {}
        self.accumulations: dict[TaskKey, list[int]] = {}
        self.tied: dict[TaskKey, list[jc.Var]] = {}

    def gather(self, split_weight_gradients: bool) -> None:
        anchored: dict[TaskKey, list[int]] = {}
        for i, stage in self.placement.stages.items():
            if self.phases.of[i] & {Phase.FORWARD, Phase.BACKWARD} and i not in self.placement.deferred:
                anchored.setdefault((self._kind(i), stage, self.phases.rounds[i]), []).append(i)
        self._attach_accumulations(anchored)
        for key, indices in list(anchored.items()):
            if key[1] in self.layers_again and key[0] == self._backward_kind:
                anchored[key] = self._recomputing(key, indices)
        if split_weight_gradients:
            self._split_weight_gradients(anchored)
        if self._backward_kind != "F":
            for key in [k for k in anchored if k[0] == "F" and not self._runs_again(k[1])]:
                self._make_again(anchored, key)
        for key in sorted(anchored, key=lambda k: (k[2], ORDER.index(k[0]), k[1])):
            again = self.again.get(key, set[int]())
            closure = self._closure([*anchored[key], *again], self.kept_by_earlier_tasks(key))
            self.equations[key] = self._when_first_read(closure, again - set(anchored[key])) if again else closure
            if not self.regions.keys().isdisjoint(closure):
                indices = sorted(closure, key=self._place) if not again else self.equations[key]
                order = in_order([self.all_equations[i] for i in indices], range(len(indices)))
                self.equations[key] = [indices[number] for number in order]

    def _attach_accumulations(self, anchored: dict[TaskKey, list[int]]) -> None:
        """Give each accumulation to the task that makes its operand; gradients of tied parameters have their own."""
        for i, eqn in enumerate(self.eqns):
            if Phase.ACCUMULATE not in self.phases.of[i] or self._deferred(eqn.invars[0]):
                continue
            producer = self.producer.get(eqn.invars[0]) if isinstance(eqn.invars[0], jc.Var) else None
            kind = "F" if producer is None else self._kind(producer)
            key = (kind, self.placement.stages[i], self.phases.rounds[i])
            self.accumulations.setdefault(key, []).append(i)
            equations = anchored.setdefault(key, [])
            if producer is not None and Phase.UNPLACED in self.phases.of[producer]:
                equations.append(producer)
        for i in sorted(self.placement.deferred):
            for v in self.operands[i]:
                if not self._deferred(v):
                    producer = self.producer[v]
                    key = (self._kind(producer), self.placement.stages[producer], self.phases.rounds[producer])
                    known = self.tied.setdefault(key, [])
                    if v not in known:
                        known.append(v)

    @property
    def _backward_kind(self) -> str:
        """The kind of backward tasks. With one stage nothing happens between forward and backward: they are one."""
        return "B" if self.placement.num_stages > 1 else "F"

    def _kind(self, index: int) -> str:
        return self._backward_kind if Phase.BACKWARD in self.phases.of[index] else "F"

    def _deferred(self, atom: Any) -> bool:
        return isinstance(atom, jc.Var) and self.producer.get(atom) in self.placement.deferred

    def _recomputing(self, key: TaskKey, indices: Sequence[int]) -> list[int]:
        """Return the equations of a backward task with what it computes again, also of the rounds before."""
        _, stage, round_number = key
        mine = [i for i, own in self.placement.stages.items() if own == stage and self.phases.rounds[i] <= round_number]
        backward = {i for i in indices if Phase.BACKWARD in self.phases.of[i]}
        forward = {i for i in mine if Phase.FORWARD in self.phases.of[i]} - backward
        regions, again = StageEquations(
            phases=self.phases,
            layer_of=self.layer_of,
            forward=forward,
            backward=backward,
            again=self.layers_again[stage],
            together=key[0] == "F" and any(self.phases.rounds[i] == round_number for i in forward),
        ).recomputed()
        moved = set[int]().union(*(region.backward for region in regions))
        return sorted((again | set(indices)) - moved) + [self._add(region) for region in regions]

    def _runs_again(self, stage: int) -> bool:
        """Return whether a stage computes all of its layers again."""
        return stage in self.layers_again and self._layers_of_stages[stage] <= {*self.layers_again[stage]}

    @cached_property
    def _layers_of_stages(self) -> Mapping[int, set[int]]:
        layers: dict[int, set[int]] = {}
        for i, stage in self.placement.stages.items():
            if Phase.FORWARD in self.phases.of[i]:
                layers.setdefault(stage, set()).add(self.layer_of[i])
        return layers

    def _add(self, region: Recomputed) -> int:
        """Add the equation of a region behind those of the step; return its index."""
        number = len(self.all_equations)
        self.all_equations.append(region_equation(self.phases.step.jaxpr, region, self.readers))
        self.regions[number] = region
        return number

    @cached_property
    def readers(self) -> Mapping[jc.Var, Collection[int]]:
        """The equations that read a value; behind them all, the results of the step."""
        results = {v: (len(self.eqns),) for v in self.phases.step.jaxpr.jaxpr.outvars if isinstance(v, jc.Var)}
        return {v: (*self.phases.consumers.get(v, ()), *results.get(v, ())) for v in self.producer}

    def _make_again(self, anchored: dict[TaskKey, list[int]], forward: TaskKey) -> None:
        """Add to the later tasks of a stage the cheap equations that they compute again, to save memory in between."""
        later = [key for kind in ORDER[1:] if (key := (kind, *forward[1:])) in anchored]
        producers = {v: self.eqns[i] for i in sorted(anchored[forward]) for v in self.eqns[i].outvars}
        readers = [self.all_equations[i] for key in later for i in anchored[key]]
        kept = values_to_keep(producers, readers, self._is_free)
        for key in later:
            missing = [v for i in anchored[key] for v in jc.operands(self.all_equations[i])]
            again = set[int]()
            while missing:
                v = missing.pop()
                if v in producers and v not in kept and (i := self.producer[v]) not in again:
                    again.add(i)
                    missing += self.operands[i]
            self.again[key] = again

    def _when_first_read(self, indices: Sequence[int], again: Collection[int]) -> list[int]:
        """Move each recomputed equation to just before its first reader, so that its result is kept for no longer."""
        first_reader: dict[int, int] = {}
        for i in reversed(indices):
            place = first_reader[i] if i in again else self._place(i)
            for v in jc.operands(self.all_equations[i]):
                j = self.producer.get(v)
                if j is not None and j in again:
                    first_reader[j] = min(place, first_reader.get(j, place))
        return sorted(indices, key=lambda i: (first_reader[i], 0, i) if i in again else (self._place(i), 1, i))

    def _place(self, index: int) -> int:
        """Return the place of an equation in program order."""
        return self.regions[index].place if index in self.regions else index

    def _is_free(self, v: jc.Var) -> bool:
        """True for a value that is not kept for a later task: of the whole step, or made cheaply where it is read."""
        i = self.producer.get(v)
        if i is None:
            return v not in self.of_microbatch
        if not self.phases.of[i] & {Phase.FORWARD, Phase.BACKWARD, Phase.UNPLACED}:
            return True
        return Phase.UNPLACED in self.phases.of[i] and v not in self.phases.costly

    def _split_weight_gradients(self, anchored: dict[TaskKey, list[int]]) -> None:
        """Move to W what no other stage waits for (Zero Bubble, arXiv 2401.10241, section 2)."""
        read_on: dict[jc.Var, set[tuple[int, int]]] = {}
        for key, indices in anchored.items():
            for v in (v for i in indices for v in jc.operands(self.all_equations[i])):
                read_on.setdefault(v, set()).add(key[1:])
        for key in [k for k in anchored if k[0] == "B" and k[1] not in self.layers_again]:
            indices, wanted, first = anchored[key], set[jc.Var](), set[int]()
            for i in reversed(indices):
                if any(v in wanted or read_on.get(v, set()) - {key[1:]} for v in self.eqns[i].outvars):
                    first.add(i)
                    wanted.update(self.operands[i])
            rest = [i for i in indices if i not in first]
            if not rest or not first:  # nobody waits for the first stage
                continue
            anchored[key] = [i for i in indices if i in first]
            anchored[("W", *key[1:])] = rest
            self._move_accumulations(key, set(rest))

    def _move_accumulations(self, key: TaskKey, moved: set[int]) -> None:
        target = ("W", *key[1:])
        mine = self.accumulations.pop(key, [])
        for i in mine:
            operand: Any = self.eqns[i].invars[0]
            late = self.producer.get(operand) in moved
            self.accumulations.setdefault(target if late else key, []).append(i)
        for v in self.tied.pop(key, []):
            self.tied.setdefault(target if self.producer[v] in moved else key, []).append(v)

    def kept_by_earlier_tasks(self, key: TaskKey) -> set[jc.Var]:
        """Costly unplaced values that an earlier task of the same stage has made: read, not made again."""
        kind, stage, round_number = key
        if kind == "F" or self._runs_again(stage):
            return set()
        kept: set[jc.Var] = set()
        for earlier in ORDER[: ORDER.index(kind)]:
            for i in self.equations.get((earlier, stage, round_number), []):
                kept.update(v for v in self.eqns[i].outvars if v in self.phases.costly)
        return kept

    def _closure(self, indices: Sequence[int], kept: set[jc.Var]) -> list[int]:
        """The equations and the unplaced ones that they need, in program order."""
        closure = set(indices)
        stack = list(indices)
        while stack:
            for v in jc.operands(self.all_equations[stack.pop()]):
                i = self.producer.get(v)
                if i is not None and i not in closure and v not in kept and Phase.UNPLACED in self.phases.of[i]:
                    closure.add(i)
                    stack.append(i)
        return sorted(closure)
