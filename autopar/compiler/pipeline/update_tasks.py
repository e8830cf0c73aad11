"""Arrange what runs once per step in update rounds, so that each exchange between stages happens once.

Update equations come in groups: group g runs before round g of the microbatches, the last one after all rounds. Within
a group, an equation that reads what another stage's update made is one update round later. Equations without a
place (they read only scalars) are computed in every task that needs them.

State that is kept on the host comes to the device in parts. Each round of a stage is then several, one after another:
what reads none of that state, what reads one part of it, for each part, and what joins several.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.microbatch.accumulate import accumulate_p
from autopar.compiler.pipeline.phases import Phase
from autopar.compiler.pipeline.placement import Placement
from autopar.errors import Unsupported

_REPEATED = {Phase.FORWARD, Phase.BACKWARD, Phase.UNPLACED}
ValueKey = tuple[jc.Var, str | None]
"""A variable, and which of its copies: None the only one, "sum" its total, or one of `unplaced_key`, `floating_key`."""


def unplaced_key(v: jc.Var, stage: int, round_number: int) -> ValueKey:
    """An unplaced value as computed on one stage along with a microbatch, again in every round that needs it."""
    return (v, f"{stage}" + "'" * round_number)


def floating_key(v: jc.Var, stage: int) -> ValueKey:
    """A value without a place as computed on one stage once per step."""
    return (v, f"step{stage}")


class UpdateRounds:
    """The tasks (group, update round, stage) of everything that runs once per step."""

    def __init__(self, placement: Placement, reads: Mapping[tuple[str, int, int], Collection[jc.Var]]) -> None:
        """`reads` are the values that the tasks of microbatches read."""
        self.placement = placement
        self.phases = placement.phases
        self.eqns = self.phases.equations
        self.reads = reads
        self.operands, self.producer = self.phases.operands, self.phases.producer
        self.last_group = self.phases.num_rounds
        self.groups = self._find_groups()
        self.update_rounds: dict[int, int] = {}
        self.roots: dict[tuple[int, int, int], list[int]] = {}
        self.outputs: dict[jc.Var, tuple[ValueKey, int]] = {}
        self._closures: dict[tuple[int, ...], list[int]] = {}
        self._assign_placed()
        self._assign_effects()
        self._assign_values_for_microbatches()

    # --- groups and update rounds -------------------------------------------------------------------------------------

    @cached_property
    def _once(self) -> frozenset[int]:
        """The equations that run once per step."""
        return self.placement.deferred | {i for i, own in enumerate(self.phases.of) if Phase.STEP in own}

    def _find_groups(self) -> dict[int, int]:
        """Return for each equation that runs once the latest group that is early enough for every reader."""
        earliest: dict[jc.Var, int] = {}
        groups: dict[int, int] = {}
        for i in range(len(self.eqns) - 1, -1, -1):
            eqn, own = self.eqns[i], self.phases.of[i]
            needed = min([earliest.get(v, self.last_group) for v in eqn.outvars], default=self.last_group)
            if i in self._once or (eqn.primitive is accumulate_p and self._is_alias(i)):
                groups[i] = needed
            readers = [groups[i]] if i in groups else []
            if not own.isdisjoint(_REPEATED) and i not in self.placement.deferred:
                readers.append(self.phases.rounds[i])
            if readers:
                for v in self.operands[i]:
                    earliest[v] = min(earliest.get(v, self.last_group), *readers)
        return groups

    def _is_alias(self, index: int) -> bool:
        """True if an accumulation only names the result of a deferred sum."""
        (operand,) = self.eqns[index].invars
        return isinstance(operand, jc.Var) and self.producer.get(operand) in self.placement.deferred

    def _assign_placed(self) -> None:
        for i in sorted(i for i in self.groups if i in self.placement.stages):
            stage, group = self.placement.stages[i], self.groups[i]
            self.update_rounds[i] = self._available(self.operands[i], stage, group)
            self.roots.setdefault((group, self.update_rounds[i], stage), []).append(i)

    def _available(self, variables: Sequence[jc.Var], stage: int, group: int) -> int:
        """The update round of `group` in which `stage` can read all of them."""
        update_round = 0
        seen: set[jc.Var] = set()
        stack = list(variables)
        while stack:
            v = stack.pop()
            if v in seen:
                continue
            seen.add(v)
            i = self.producer.get(v)
            if i is None:
                continue
            if i in self.update_rounds:
                if self.groups[i] == group:
                    update_round = max(update_round, self.update_rounds[i] + (self.placement.stages[i] != stage))
            elif self._floating(i) or self._is_alias_equation(i):
                stack.extend(self.operands[i])
        return update_round

    def _floating(self, index: int) -> bool:
        return index in self._without_place

    @cached_property
    def _without_place(self) -> frozenset[int]:
        """The equations that run once per step and have no place."""
        return self._once - self.placement.stages.keys()

    def _is_alias_equation(self, index: int) -> bool:
        return self.eqns[index].primitive is accumulate_p and self._is_alias(index)

    # --- roots without a place ------------------------------------------------------------------------------

    def _assign_effects(self) -> None:
        for i, eqn in enumerate(self.eqns):
            if eqn.effects and self._floating(i):
                self._add_root(i, self._nearest_stage(jc.operands(eqn)), self.last_group)

    def _assign_values_for_microbatches(self) -> None:
        for (_, stage, round_number), read in self.reads.items():
            for v in read:
                i = self.producer.get(v)
                if i is not None and self._floating(i) and Phase.UNPLACED not in self.phases.of[i]:
                    self._add_root(i, stage, round_number)

    def assign_outputs(self, state_outputs: Mapping[int, int]) -> None:
        """Decide where each result of the step is: where it is made, or for scalars where its successor is read."""
        jaxpr = self.phases.step.jaxpr.jaxpr
        for position, v in enumerate(jaxpr.outvars):
            if isinstance(v, jc.Literal) or v in jaxpr.constvars:
                continue
            i = self.producer.get(v)
            if i is None:
                self.outputs[v] = ((v, None), self.placement.homes.get(v, 0))
            elif self._floating(i):
                replaced = state_outputs.get(position)
                home = self.placement.homes.get(jaxpr.invars[replaced]) if replaced is not None else None
                stage = self._nearest_stage([v]) if home is None else home
                self._add_root(i, stage, self.last_group)
                self.outputs[v] = (floating_key(v, stage), stage)
            else:
                key = self.source(v, i, 0)
                self.outputs[v] = (key, self._stage_of(key, v))

    def output(self, v: jc.Var) -> tuple[ValueKey, int]:
        """The value that is a result of the step, and its stage."""
        return self.outputs[v]

    def _stage_of(self, key: ValueKey, v: jc.Var) -> int:
        if key[1] == "sum":
            return self.placement.stages[self.producer[key[0]]]
        if v not in self.placement.homes:
            eqn = self.eqns[self.producer[v]]
            raise Unsupported(
                f"The result of {jc.describe(eqn)} is computed for every microbatch, and nothing adds these up: it "
                "depends on random numbers that all examples share, as in variational inference. Use one microbatch on "
                "one mesh: DataParallel(), or Auto(num_stages=1, num_microbatches=1)."
            )
        return self.placement.homes[v]

    def _nearest_stage(self, variables: Sequence[jc.Var]) -> int:
        """The highest stage among the placed values that these derive from; 0 if there are none."""
        stages = [0]
        seen: set[jc.Var] = set()
        stack = list(variables)
        while stack:
            v = stack.pop()
            i = self.producer.get(v)
            if v in seen:
                continue
            seen.add(v)
            if v in self.placement.homes:
                stages.append(self.placement.homes[v])
            elif i is not None and self._floating(i):
                stack.extend(self.operands[i])
        return max(stages)

    def _add_root(self, index: int, stage: int, group: int) -> None:
        update_round = self._available(self.operands[index], stage, group)
        roots = self.roots.setdefault((group, update_round, stage), [])
        if index not in roots:
            roots.append(index)

    # --- parts of the state -----------------------------------------------------------------------------------

    def split_by_parts(self, part_of: Mapping[jc.Var, int]) -> None:
        """Split the rounds by the parts of the state that equations read, themselves or through others.

        What an equation reads, its readers read as well, so that in the order above each finds what it needs. What
        reads no part is computed along with the only one that reads it, and what does is computed in the same round.
        """
        every = frozenset(part_of.values())
        parts: dict[jc.Var, frozenset[int]] = {v: frozenset((part,)) for v, part in part_of.items()}
        order: dict[int, int] = {}
        for i, eqn in enumerate(self.eqns):
            read = frozenset[int]()
            if i in self.groups:  # what is computed for each microbatch from parameters is no part of them
                read = read.union(*(parts.get(v, frozenset()) for v in jc.operands(eqn)))
            read = every if eqn.effects and i in self._once else read  # effects stay in order
            parts.update((v, read) for v in eqn.outvars if read)
            order[i] = 0 if not read else 1 + min(read) if len(read) == 1 else 2 + max(every)
        self._delay([i for i in order if order[i]])
        task_of = {i: key for key, indices in self.roots.items() for i in indices}
        for i in sorted((i for i in task_of if order[i] == 0), reverse=True):
            readers = [r for v in self.eqns[i].outvars for r in self.phases.consumers.get(v, ())]
            wanted = {(task_of.get(r), order[r]) for r in readers}
            shown = self._shown.intersection(self.eqns[i].outvars)
            if len(wanted) == 1 and task_of[i] == next(iter(wanted))[0] and not shown:
                order[i] = next(iter(wanted))[1]
        roots: dict[tuple[int, int, int], list[int]] = {}
        offsets: dict[int, int] = {}
        for (group, _), keys in groupby(sorted(self.roots), key=lambda key: key[:2]):
            longest = 0
            for key in keys:
                found = sorted({order[i] for i in self.roots[key]})
                longest = max(longest, len(found))
                for place, wanted in enumerate(found):
                    mine = [i for i in self.roots[key] if order[i] == wanted]
                    roots[group, offsets.get(group, 0) + place, key[2]] = mine
            offsets[group] = offsets.get(group, 0) + longest
        self.roots = roots

    def _delay(self, equations: Sequence[int]) -> None:
        """Move equations to the later round of their stage that has all their readers, so that state comes once."""
        task_of = {i: key for key, indices in self.roots.items() for i in indices}
        for i in sorted((i for i in equations if i in task_of), reverse=True):
            outvars = self.eqns[i].outvars
            readers = {task_of.get(r) for v in outvars for r in self.phases.consumers.get(v, ())}
            later = next(iter(readers)) if len(readers) == 1 else None
            (group, update_round, stage) = task_of[i]
            if later is None or self._shown.intersection(outvars) or self.eqns[i].effects:
                continue
            if (later[0], later[2]) == (group, stage) and later[1] > update_round:
                task_of[i] = later
        roots: dict[tuple[int, int, int], list[int]] = {}
        for i in sorted(task_of):
            roots.setdefault(task_of[i], []).append(i)
        self.roots = roots

    @cached_property
    def _shown(self) -> frozenset[jc.Var]:
        """The results of the step."""
        return frozenset(v for v in self.phases.step.jaxpr.jaxpr.outvars if isinstance(v, jc.Var))

    # --- tasks ----------------------------------------------------------------------------------------------

    def tasks(self) -> list[tuple[int, int, int]]:
        """All (group, update round, stage), in order."""
        return sorted(self.roots)

    def equations(self, key: tuple[int, int, int]) -> list[int]:
        """A task's equations with those without a place that they need, in program order."""
        roots = tuple(self.roots[key])
        if roots not in self._closures:
            closure = set(roots)
            stack = list(closure)
            while stack:
                index = stack.pop()
                for v in self.operands[index]:
                    i = self.producer.get(v)
                    if i is not None and i not in closure and i in self._without_place:
                        closure.add(i)
                        stack.append(i)
            self._closures[roots] = sorted(closure)
        return self._closures[roots]

    def source(self, v: jc.Var, reader: int, stage: int) -> ValueKey:
        """The value that equation `reader` means by operand `v`."""
        i = self.producer.get(v)
        if reader in self.placement.deferred and reader != i:
            return (v, "sum")
        if i is None:
            return (v, None)
        if i in self.placement.deferred:
            return (v, "sum")
        if self._is_alias_equation(i):
            alias: Any = self.eqns[i].invars[0]
            return (alias, "sum")
        return floating_key(v, stage) if self._floating(i) else (v, None)

    def interface(self, key: tuple[int, int, int]) -> tuple[list[ValueKey], list[ValueKey]]:
        """Return the values that a task reads, and those that it makes for others, in order of appearance."""
        _, _, stage = key
        steps = self.equations(key)
        made = dict.fromkeys(k for i in steps for k in self._made(i, stage))
        consts = set(self.phases.step.jaxpr.jaxpr.constvars)
        reads = dict.fromkeys(
            k
            for i in steps
            for v in self.operands[i]
            if v not in consts and (k := self.source(v, i, stage)) not in made
        )
        roots = set(self.roots[key])
        results = [k for i in steps if i in roots for k in self._made(i, stage) if self._read_outside(k, key)]
        return list(reads), results

    def _made(self, index: int, stage: int) -> list[ValueKey]:
        outs = self.eqns[index].outvars
        if index in self.placement.deferred:
            return [(v, "sum") for v in outs]
        return [floating_key(v, stage) if self._floating(index) else (v, None) for v in outs]

    def _read_outside(self, value: ValueKey, key: tuple[int, int, int]) -> bool:
        if value in self._results or value in self._read_by_microbatches:
            return True
        return any(reader != key for reader in self._readers.get(value, ()))

    @cached_property
    def _results(self) -> frozenset[ValueKey]:
        return frozenset(value for value, _ in self.outputs.values())

    @cached_property
    def _readers(self) -> Mapping[ValueKey, Sequence[tuple[int, int, int]]]:
        """For every value the tasks that read it."""
        readers: dict[ValueKey, list[tuple[int, int, int]]] = {}
        for key in self.roots:
            for value in self._reads_of(key):
                readers.setdefault(value, []).append(key)
        return readers

    def _reads_of(self, key: tuple[int, int, int]) -> frozenset[ValueKey]:
        """Return the values that a task's equations read."""
        steps = self.equations(key)
        return frozenset(self.source(v, i, key[2]) for i in steps for v in self.operands[i])

    @cached_property
    def _read_by_microbatches(self) -> frozenset[ValueKey]:
        read: set[ValueKey] = set()
        for (_, stage, _), values in self.reads.items():
            for v in values:
                producer = self.producer.get(v)
                floating = producer is not None and self._floating(producer)
                read.add(floating_key(v, stage) if floating else (v, None))
        return frozenset(read)

    def program(
        self,
        stage: int,
        steps: Sequence[int],
        reads: Sequence[ValueKey],
        results: Sequence[ValueKey],
    ) -> jc.ClosedJaxpr:
        """The task as a jaxpr from `reads` to `results`."""

        copies: dict[ValueKey, jc.Var] = {}

        def copy(key: ValueKey) -> jc.Var:
            v, tag = key
            return v if tag is None else copies.setdefault(key, jc.value_of_type(v.aval))

        eqns = [
            self.eqns[i].replace(
                invars=[
                    a if isinstance(a, jc.Literal) else copy(self.source(a, i, stage)) for a in self.eqns[i].invars
                ],
                outvars=[copy(key) for key in self._made(i, stage)],
            )
            for i in steps
        ]
        return jc.part_of(self.phases.step.jaxpr, eqns, [copy(key) for key in reads], [copy(key) for key in results])
