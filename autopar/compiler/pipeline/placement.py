"""Give every equation of a microbatched step a stage, once its forward layers have theirs.

    Phases, stage of every layer  ->  Placement

- A forward equation lives in its layer's stage. A later pass's lives where its operands and parameters live: that of a
  later round, or of another loss over the same parameters, and a model that is evaluated beside (a target network lives
  with the parameters that it follows).
- A backward equation lives on the lowest stage among its activations, each counted where the forward read it last:
  residuals stay, only cotangents travel.
- A parameter lives where it is used; used by several stages (tied), it is owned by the first of them, and its gradients
  are accumulated on each stage and added once per step: the `add_any` that joins them is moved behind the accumulation.
- An update equation lives with the parameter that it updates, or else with its largest placed operand. What derives
  from scalars only (a learning rate, a clipping factor) is recomputed where needed, so that scalars move and tensors
  stay.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.joined import Joined
from autopar.compiler.jaxprs.primitives import CONTROL_FLOW, NESTED, PRODUCTS, REORDERINGS, WIDENING
from autopar.compiler.microbatch.accumulate import accumulation_kind
from autopar.compiler.pipeline.phases import Phase, Phases, parameter_sources

_LINEAR = {
    "add_any",
    "convert_element_type",
    "transpose",
    "reshape",
    "copy",
    "neg",
    "squeeze",
    "mul",
    "div",
    "slice",
    WIDENING,
}
# Results of the shape of an operand whose axes are not the operand's.
_MOVES_AXES = CONTROL_FLOW | REORDERINGS | {"concatenate", "dot_general", "gather", "reshape", "scatter", "sort"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """The stages of equations and values. Equations by index in `phases.equations`."""

    phases: Phases
    num_stages: int
    stages: Mapping[int, int]
    """Equation -> stage; unplaced equations and those recomputed where needed have none."""
    homes: Mapping[jc.Var, int]
    """Owner of every value that has one: inputs, accumulated values, results of placed update equations."""
    deferred: frozenset[int]
    """Backward equations (sums of tied gradients) that run once per step, on accumulated operands."""


@lru_cache(maxsize=6)
def layer_order(phases: Phases) -> tuple[int, ...]:
    """The forward equations that are cut into layers, in program order: those of the first pass through the model.

    In a step that takes a gradient they are those that are differentiated. The pass may take several rounds, as batch
    normalisation does; it ends before what waits for a backward pass. Those of the last few steps are remembered.
    """
    forward = {jc.ad_phase(eqn) for eqn in phases.equations} & {"forward"} or {None}
    order: list[int] = []
    late: set[jc.Var] = set()
    for i, (eqn, own) in enumerate(zip(phases.equations, phases.of, strict=True)):
        if Phase.BACKWARD in own or not late.isdisjoint(jc.operands(eqn)):
            late.update(eqn.outvars)
        elif Phase.FORWARD in own and jc.ad_phase(eqn) in forward:
            order.append(i)
    again = _passes_again(phases, order)
    return tuple(i for i in order if i not in again)


def _passes_again(phases: Phases, order: Sequence[int]) -> set[int]:
    """The equations of passes that begin at the examples and read parameters of an earlier pass only.

    What has one product alone is no pass (the projection of the next input of an unrolled recurrence).
    """
    sources = parameter_sources(phases)
    chains = Joined()
    again: dict[jc.Var, int] = {}
    activations: set[jc.Var] = set()
    seen: set[jc.Var] = set()
    for i in order:
        operands = jc.operands(phases.equations[i])
        parameters = {p for v in operands for p in sources.get(v, ())}
        before = [v for v in operands if v in activations]
        activations.update(phases.equations[i].outvars)
        if (parameters or before) and parameters <= seen and all(v in again for v in before):
            again.update((v, i) for v in phases.equations[i].outvars)
            for v in before:
                chains.join(again[v], i)
        seen |= parameters
    products: dict[Hashable, set[jc.Var]] = {}
    for i in set(again.values()):
        eqn = phases.equations[i]
        if eqn.primitive.name in PRODUCTS | NESTED:
            read = {p for v in jc.operands(eqn) for p in sources.get(v, ())}
            products.setdefault(chains.find(i), set()).update(read)
    return {i for i in again.values() if len(products.get(chains.find(i), ())) > 1}


def place_equations(
    phases: Phases, *, layer_stage: Mapping[int, int], num_stages: int, deferred: Collection[int] = ()
) -> Placement:
    """Place every equation. `layer_stage` gives the stage of each equation of `layer_order`.

    Sums in `deferred`, which the placement of another lane has put off, are put off as well.
    """
    placer = _Placer(phases, num_stages, dict(layer_stage), deferred)
    for round_number in range(phases.num_rounds):
        placer.place_microbatch_equations(round_number)
        placer.find_parameter_homes()
        placer.defer_tied_sums(round_number)
        placer.place_update_equations(round_number)
    return Placement(
        phases=phases,
        num_stages=num_stages,
        stages=placer.stages,
        homes=placer.homes,
        deferred=frozenset(placer.deferred),
    )


class _Placer:
    """The sweeps of `place_equations`, over shared tables."""

    def __init__(
        self, phases: Phases, num_stages: int, layer_stage: dict[int, int], deferred_elsewhere: Collection[int]
    ) -> None:
        self.phases = phases
        self.eqns = phases.equations
        self.num_stages = num_stages
        self.layer_stage = layer_stage
        self.stages: dict[int, int] = {}
        self.homes: dict[jc.Var, int] = {}
        self.micro_stage: dict[jc.Var, int] = {}  # of activations and cotangents
        self.reach: dict[jc.Var, int] = {}  # the last stage that an activation is read on in the forward pass
        self.deferred_elsewhere = deferred_elsewhere
        self.deferred: set[int] = set()
        self.operands, self.producer, self.consumers = phases.operands, phases.producer, phases.consumers
        jaxpr = phases.step.jaxpr.jaxpr
        self.inputs = {
            v
            for v, spec in zip(jaxpr.invars, phases.step.inputs, strict=True)
            if spec.kind == "whole" and v not in phases.replicated_scalars
        }

    # --- per microbatch -------------------------------------------------------------------------------------------

    def place_microbatch_equations(self, round_number: int) -> None:
        mine = [i for i in range(len(self.eqns)) if self.phases.rounds[i] == round_number]
        forward = [i for i in mine if Phase.FORWARD in self.phases.of[i]]
        needed = self._needed_on(forward)
        homes = self._homes_by_layers()
        for i in forward:
            stage = self.layer_stage.get(i)
            self._put(i, min(self._latest(self.eqns[i], homes), needed[i]) if stage is None else stage)
        self._find_reach(mine)
        only = {v: min(stages) for v, stages in self._parameter_stages().items() if len(stages) == 1}
        for i in mine:
            if Phase.BACKWARD in self.phases.of[i]:
                self._put(i, self._earliest(self.eqns[i], only))

    def _find_reach(self, equations: Iterable[int]) -> None:
        for i in equations:
            if Phase.FORWARD in self.phases.of[i]:
                for v in self.operands[i]:
                    if v in self.micro_stage:
                        self.reach[v] = max(self.reach.get(v, self.micro_stage[v]), self.stages[i])

    def _put(self, index: int, stage: int) -> None:
        self.stages[index] = stage
        self.micro_stage.update((v, stage) for v in self.eqns[index].outvars)

    def _needed_on(self, forward: Sequence[int]) -> dict[int, int]:
        """Return for each equation the lowest stage of a layer that needs its results, directly or not."""
        needed: dict[int, int] = {}
        for i in reversed(forward):
            readers = [needed[c] for v in self.eqns[i].outvars for c in self.consumers.get(v, []) if c in needed]
            needed[i] = self.layer_stage.get(i, min(readers, default=self.num_stages - 1))
        return needed

    def _homes_by_layers(self) -> dict[jc.Var, int]:
        """The homes so far, of parameters by the layers that read them, and of what is joined elementwise with them."""
        homes = dict(self.homes)
        for i in sorted(self.layer_stage):
            for v in self._origins(self.operands[i]) & self.inputs:
                homes[v] = min(homes.get(v, self.layer_stage[i]), self.layer_stage[i])
        once = [i for i in range(len(self.eqns)) if Phase.STEP in self.phases.of[i]]
        joined, of_class = self._homes_of_classes(homes, once)
        return {v: of_class[c] for v in self.inputs if (c := joined.find(v)) in of_class} | homes

    def _latest(self, eqn: jc.JaxprEqn, homes: Mapping[jc.Var, int]) -> int:
        stages = [self.micro_stage[v] for v in jc.operands(eqn) if v in self.micro_stage]
        parameters = [homes[v] for v in self._origins(jc.operands(eqn)) if v in homes]
        return max([*stages, *parameters], default=0)

    def _earliest(self, eqn: jc.JaxprEqn, only: Mapping[jc.Var, int]) -> int:
        """The lowest stage among activations, and parameters that only one stage uses.

        An activation that the forward pass has sent on counts where it was sent last: a weight's gradient is made where
        the weight is, from the activation that its stage received.
        """
        stages = [self.reach.get(v, self.micro_stage[v]) for v in jc.operands(eqn) if v in self.micro_stage]
        parameters = [only[v] for v in self._origins(jc.operands(eqn)) if v in only]
        return min([*stages, *parameters], default=self.num_stages - 1)

    def _origins(self, variables: Iterable[jc.Var]) -> set[jc.Var]:
        """The inputs and completed values that variables derive from through unplaced equations."""
        origins: set[jc.Var] = set()
        seen: set[jc.Var] = set()
        stack = list(variables)
        while stack:
            v = stack.pop()
            if v in seen:
                continue
            seen.add(v)
            index = self.producer.get(v)
            if index is not None and Phase.UNPLACED in self.phases.of[index]:
                stack.extend(self.operands[index])
            else:
                origins.add(v)
        return origins

    def find_parameter_homes(self) -> None:
        """Find the home of each parameter: the first stage that uses it."""
        for v, stages in self._parameter_stages().items():
            self.homes.setdefault(v, min(stages))

    def _parameter_stages(self) -> dict[jc.Var, set[int]]:
        """The stages that read each parameter along with the microbatches, directly or through unplaced equations."""
        used: dict[jc.Var, set[int]] = {}
        for i, stage in self.stages.items():
            if self.phases.of[i] & {Phase.FORWARD, Phase.BACKWARD}:
                for v in self._origins(self.operands[i]) & self.inputs:
                    used.setdefault(v, set()).add(stage)
        return used

    # --- tied gradients -------------------------------------------------------------------------------------------

    def defer_tied_sums(self, round_number: int) -> None:
        """Find the linear tails of the backward pass that join gradients of several stages."""
        candidates = self._only_accumulated(round_number)
        for i in sorted(candidates):
            eqn = self.eqns[i]
            producers = [self.producer.get(v) for v in jc.operands(eqn)]
            stages = {self.micro_stage[v] for v in jc.operands(eqn) if v in self.micro_stage}
            joins = eqn.primitive.name == "add_any" and len(stages) > 1
            if joins or i in self.deferred_elsewhere or any(p in self.deferred for p in producers):
                self.deferred.add(i)
                self.stages.pop(i, None)
        for i, eqn in enumerate(self.eqns):
            if Phase.ACCUMULATE in self.phases.of[i] and self.phases.rounds[i] == round_number:
                self._place_accumulated(i, eqn)

    def _only_accumulated(self, round_number: int) -> set[int]:
        """Linear backward equations whose results only go, through such equations, into sums over microbatches."""
        tails: set[int] = set()
        for i in range(len(self.eqns) - 1, -1, -1):
            eqn = self.eqns[i]
            if Phase.BACKWARD not in self.phases.of[i] or self.phases.rounds[i] != round_number:
                continue
            consumers = [c for v in eqn.outvars for c in self.consumers.get(v, [])]
            if self._linear(eqn) and consumers and all(c in tails or self._sums(c) for c in consumers):
                tails.add(i)
        return tails

    def _linear(self, eqn: jc.JaxprEqn) -> bool:
        activations = sum(v in self.micro_stage for v in jc.operands(eqn))
        if eqn.primitive.name in ("mul", "div"):
            return activations == 1 and isinstance(eqn.invars[1], jc.Literal)
        return eqn.primitive.name in _LINEAR and activations == len(eqn.invars)

    def _sums(self, index: int) -> bool:
        """Tell if an equation sums over the microbatches what none of them waits for."""
        if Phase.ACCUMULATE not in self.phases.of[index]:
            return False
        readers = [self.phases.of[c] for v in self.eqns[index].outvars for c in self.consumers.get(v, [])]
        awaited = any(own & {Phase.FORWARD, Phase.BACKWARD, Phase.UNPLACED} for own in readers)
        return not awaited and accumulation_kind(self.eqns[index]) in ("sum", "mean")

    def _place_accumulated(self, index: int, eqn: jc.JaxprEqn) -> None:
        (operand,) = eqn.invars
        if isinstance(operand, jc.Literal) or self.producer.get(operand) in self.deferred:
            return
        if operand in self.micro_stage:
            self.stages[index] = self.micro_stage[operand]
        else:  # the same for every microbatch, or a batch input as it is
            self.stages[index] = self._latest(eqn, self.homes)
        self.homes[eqn.outvars[0]] = self.stages[index]

    # --- once per step --------------------------------------------------------------------------------------------

    def place_update_equations(self, round_number: int) -> None:
        """Sweep forward (follow the largest placed operand) and backward (join the consumer) until nothing moves."""
        last = round_number + 1 == self.phases.num_rounds
        todo = [
            i
            for i, own in enumerate(self.phases.of)
            if (Phase.STEP in own and (last or self.phases.rounds[i] <= round_number + 1)) or i in self.deferred
        ]
        todo = [i for i in todo if i not in self.stages]
        self._follow_parameters(todo)
        while self._follow_operands(todo) or self._join_consumers(todo):
            todo = [i for i in todo if i not in self.stages]
        if last:
            self._settle_orphans(todo)

    def _follow_parameters(self, todo: Sequence[int]) -> None:
        """Place equations that are joined elementwise with a parameter on its stage, wherever its gradient is made."""
        joined, homes = self._homes_of_classes(self.homes, todo)
        for i in todo:
            stages = [homes[c] for v in self.eqns[i].outvars if (c := joined.find(v)) in homes]
            if stages:
                self._read(i)
                self._settle(i, min(stages))

    def _homes_of_classes(
        self, homes: Mapping[jc.Var, int], equations: Iterable[int]
    ) -> tuple[Joined, dict[Hashable, int]]:
        """The classes of what equations join elementwise, and the first home of a parameter in each."""
        joined = Joined()
        for i in equations:
            for operand, result in _joined_values(self.eqns[i]):
                joined.join(operand, result)
        first: dict[Hashable, int] = {}
        for v in self.inputs & homes.keys():
            first[joined.find(v)] = min(homes[v], first.get(joined.find(v), self.num_stages))
        return joined, first

    def _follow_operands(self, todo: Sequence[int]) -> bool:
        moved = False
        for i in todo:
            tensors = [v for v in self._read(i) if v in self.homes and _size(v) > 1]
            if i not in self.stages and tensors:
                largest = max(_size(v) for v in tensors)
                stage = min(self.homes[v] for v in tensors if _size(v) == largest)
                self._settle(i, stage)
                moved = True
        return moved

    def _read(self, index: int) -> list[jc.Var]:
        """Operands of an update equation; a deferred sum reads accumulated gradients, where they were made."""
        operands = self.operands[index]
        if index in self.deferred:
            for v in operands:
                if v in self.micro_stage and self.producer[v] not in self.deferred:
                    self.homes.setdefault(v, self.micro_stage[v])
        return operands

    def _join_consumers(self, todo: Sequence[int]) -> bool:
        moved = False
        for i in reversed(todo):
            if i in self.stages or not self._orphan(self.eqns[i]):
                continue
            stage = next((s for v in self.eqns[i].outvars if (s := self._consumer_stage(v)) is not None), None)
            if stage is not None:
                self._settle(i, stage)
                moved = True
        return moved

    def _consumer_stage(self, v: jc.Var) -> int | None:
        """The stage of the first placed equation that reads a tensor."""
        if _size(v) <= 1:
            return None
        return next((self.stages[c] for c in self.consumers.get(v, []) if c in self.stages), None)

    def _runs_once(self, index: int) -> bool:
        return Phase.STEP in self.phases.of[index] or index in self.deferred

    def _orphan(self, eqn: jc.JaxprEqn) -> bool:
        """True if the equation reads a tensor that has a home to be found (an optimizer's moment, for example)."""
        return any(v in self.inputs or self._made_of_orphans(v) for v in jc.operands(eqn))

    def _made_of_orphans(self, v: jc.Var) -> bool:
        index = self.producer.get(v)
        return (
            index is not None
            and index not in self.stages
            and self._runs_once(index)
            and _size(v) > 1
            and self._orphan(self.eqns[index])
        )

    def _settle(self, index: int, stage: int) -> None:
        self.stages[index] = stage
        eqn = self.eqns[index]
        self.homes.update((v, stage) for v in eqn.outvars)
        if index in self.deferred:
            sums = [c for v in eqn.outvars for c in self.consumers[v] if c not in self.deferred]
            self.homes.update((self.eqns[c].outvars[0], stage) for c in sums)
        for v in jc.operands(eqn):
            if v in self.inputs:
                self.homes.setdefault(v, stage)

    def _settle_orphans(self, todo: Sequence[int]) -> None:
        """Place state that touches nothing placed, for it is never differentiated, on the first stage."""
        for i in todo:
            if i not in self.stages and self._orphan(self.eqns[i]):
                self._settle(i, 0)
        self._follow_operands([i for i in todo if i not in self.stages])
        for v in self.inputs:
            self.homes.setdefault(v, 0)


def _size(v: jc.Var) -> int:
    aval: Any = v.aval
    return math.prod(aval.shape)


def _joined_values(eqn: jc.JaxprEqn) -> Iterator[tuple[jc.Var, jc.Var]]:
    """Operand and result of every pair that the equation joins element by element.

    So a parameter goes with its gradient, its moments and its successor.
    """
    if eqn.primitive.name in _MOVES_AXES:
        return
    for out in eqn.outvars:
        for v in eqn.invars:
            if isinstance(v, jc.Var) and _shape(out) and _shape(v) == _shape(out):
                yield v, out


def _shape(v: jc.Var) -> tuple[int, ...]:
    aval: Any = v.aval
    return tuple(aval.shape)
