"""A loaded step that raises at the first value that is not finite, and names the line that makes it.

    run the step  ->  look at its results  ->  if one is not finite: run it again, and look at every equation

Arguments are kept for that, so that a state is there twice until its step has ended. A result is not at fault for what
it was before: a state that holds an infinity (the best loss so far, at the start) may keep it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.compiler.analysis.finite_values import NOT_A_NUMBER, WatchedProgram, watched
from autopar.errors import NonFiniteValue
from autopar.ir.program import Program
from autopar.runtime.interfaces import LoadedProgram
from autopar.runtime.timeline import InstructionTime
from autopar.runtime.unfinished import UnfinishedTask

_WORDS = ("finite", "infinite", "not a number (NaN)")


@dataclass(frozen=True, kw_only=True)
class FiniteGuard:
    """A loaded program whose results are looked at. `loaded` keeps its arguments (`keeping_arguments`)."""

    loaded: LoadedProgram
    program: Program
    """The program as planned."""
    input_names: Sequence[str]
    output_names: Sequence[str]
    state_outputs: Mapping[int, int]
    """Output number -> number of the input that it replaces."""
    kinds: Callable[[Sequence[Any]], list[int]]
    """Returns the kinds of arrays as the program takes and gives them: see `runtime.finite`."""
    load: Callable[[WatchedProgram], Callable[[Sequence[Any]], list[Any]]]
    """Loads the program that reports."""

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Carry out one step. Raises `NonFiniteValue`; the arguments are still there then."""
        results = self.loaded(leaves)
        self._check(leaves, results)
        return results

    def timed(self, leaves: Sequence[Any]) -> tuple[list[Any], list[InstructionTime]]:
        """The same, waiting for every instruction, and when each ran."""
        results, times = self.loaded.timed(leaves)
        self._check(leaves, results)
        return results, times

    def wait(self, arrays: Sequence[Any]) -> None:
        """Wait for results of the last step."""
        self.loaded.wait(arrays)

    def unfinished(self) -> UnfinishedTask | None:
        """Return the first instruction here of the last step that has not ended."""
        return self.loaded.unfinished()

    def _check(self, leaves: Sequence[Any], results: Sequence[Any]) -> None:
        after = self.kinds(results)
        if not any(after):
            return
        before = self.kinds(leaves)
        at_fault = [
            output
            for output, kind in enumerate(after)
            if kind > (before[self.state_outputs[output]] if output in self.state_outputs else 0)
        ]
        if at_fault:
            raise NonFiniteValue(self._message(leaves, before, at_fault, after))

    def _message(
        self, leaves: Sequence[Any], before: Sequence[int], at_fault: Sequence[int], after: Sequence[int]
    ) -> str:
        worst = max(at_fault, key=lambda output: after[output])
        replaced = self.state_outputs.get(worst)
        name = f"result {self.output_names[worst]}".strip() if replaced is None else f"new {self.input_names[replaced]}"
        found = f"After a step of {self.program.name} the {name} is {_WORDS[after[worst]]}"
        todo = "Look at this line and at the batch of this step; the arguments are still there."
        given = [self.input_names[i] for i, kind in enumerate(before) if kind == NOT_A_NUMBER]
        if given:
            return f"{found}: its argument {given[0]} was so before. Look at where that comes from."
        reporting = watched(self.program)
        first = reporting.first_values([np.asarray(row) for row in self.load(reporting)(leaves)])
        if first:
            earlier = "".join(f" Infinite before that: {value}." for value in first[1:])
            return f"{found}. The first such value: {first[0]}.{earlier} {todo}"
        infinite = [self.input_names[i] for i, kind in enumerate(before) if kind]
        because = f": its argument {infinite[0]} was infinite" if infinite else ", and was finite when it ran again"
        return f"{found}{because}. {todo}"
