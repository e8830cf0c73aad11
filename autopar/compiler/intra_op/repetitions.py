"""Find the collectives that a program does although their result was there before: a compiler may merge the two.

    LocalBlock  ->  flags for every action

A plan repeats on purpose what would take memory until it is needed again: parameters are gathered once more for the
backward pass, and a remat region does once more what the forward pass did. By value numbering, two collectives are the
same if they do the same with the same operand, remat regions being read as part of what is around them. What a loop
does in each of its rounds is the same as nothing outside of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.compiler.intra_op.local_program import Action, Enter, Evaluate, LocalBlock, Reshard, Value
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.equation_keys import equation_key
from autopar.compiler.resharding.steps import Step, collective_kind

LOOPS = ("scan", "while", "cond")


def repeated_collectives(block: LocalBlock) -> Mapping[Action, tuple[bool, ...]]:
    """For every action that communicates whether its collectives, in their order, were done before."""
    numbering = _Numbering(merges=_has_regions(block))
    numbering.read(block, [numbering.new() for _ in block.inputs])
    return numbering.repeated


def _has_regions(block: LocalBlock) -> bool:
    entered = [action for action in block.actions if isinstance(action, Enter)]
    return any(each.eqn.primitive.name not in LOOPS or any(map(_has_regions, each.bodies)) for each in entered)


@dataclass(kw_only=True, eq=False)
class _Numbering:
    merges: bool
    """Whether equal equations get equal numbers. Outside of remat regions there are no two."""
    numbers: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    repeated: dict[Action, tuple[bool, ...]] = field(default_factory=dict[Action, tuple[bool, ...]])
    fresh: Iterator[int] = field(default_factory=itertools.count)

    def new(self) -> int:
        """The number of what equals nothing else."""
        return next(self.fresh)

    def read(self, block: LocalBlock, inputs: Sequence[int]) -> list[int]:
        """The numbers of the block's outputs, given those of its inputs."""
        values = dict(zip(block.inputs, inputs, strict=True))

        def number(value: Value | jc.Literal) -> int:
            if isinstance(value, jc.Literal):
                return self._number_of(("literal", str(value.aval), repr(value.val)))[0]
            if value not in values:  # a constant of the jaxpr
                values[value] = self.new()
            return values[value]

        for action in block.actions:
            match action:
                case Reshard(operand=operand, result=result, steps=steps):
                    values[result] = self._reshard(action, number(operand), steps)
                case Evaluate(operands=operands, results=results):
                    values.update(zip(results, self._evaluate(action, [number(v) for v in operands]), strict=True))
                case Enter(operands=operands, results=results):
                    values.update(zip(results, self._enter(action, [number(v) for v in operands]), strict=True))
        return [number(value) for value in block.outputs]

    def _number_of(self, key: Hashable) -> tuple[int, bool]:
        """The number of what `key` says, and whether it was there before."""
        known = key in self.numbers
        if not known:
            self.numbers[key] = self.new()
        return self.numbers[key], known

    def _reshard(self, action: Action, operand: int, steps: Sequence[Step]) -> int:
        flags: list[bool] = []
        for step in steps:
            operand, known = self._number_of((operand, step))
            if collective_kind(step) is not None:
                flags.append(known)
        self.repeated[action] = tuple(flags)
        return operand

    def _evaluate(self, action: Evaluate, operands: Sequence[int]) -> list[int]:
        known = False
        if self.merges and not action.eqn.effects:
            first, known = self._number_of((equation_key(action.eqn), action.strategy, tuple(operands)))
            numbers = [self._number_of((first, place))[0] for place in range(len(action.results))]
        else:
            numbers = [self.new() for _ in action.results]
        self.repeated[action] = (known,) if action.strategy.combined else ()
        return numbers

    def _enter(self, action: Enter, operands: Sequence[int]) -> list[int]:
        if action.eqn.primitive.name not in LOOPS:
            (body,) = action.bodies
            return self.read(body, operands)
        for body in action.bodies:
            inside = _Numbering(merges=self.merges, repeated=self.repeated)
            inside.read(body, [inside.new() for _ in body.inputs])
        return [self.new() for _ in action.results]
