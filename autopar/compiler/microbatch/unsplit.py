"""A step that is not split: the whole batch is its one microbatch.

    normalised jaxpr -> MicrobatchedStep with num_microbatches = 1

The border between what runs per microbatch and what runs once is where values leave the differentiated part of the
program: a value made by `jvp` or `transpose` equations and read outside of them is completed there, by an `accumulate`
of one part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.evaluate import evaluate_jaxpr
from autopar.compiler.microbatch.accumulate import accumulate
from autopar.compiler.microbatch.split import MicrobatchedStep, StepInput


def whole_batch(closed: jc.ClosedJaxpr, *, batch_inputs: Sequence[int]) -> MicrobatchedStep:
    """The step with every value that leaves the differentiated part completed at once."""
    avals = [v.aval for v in closed.jaxpr.invars]

    kinds = ["microbatch" if i in batch_inputs else "whole" for i in range(len(closed.jaxpr.invars))]
    return MicrobatchedStep(
        jaxpr=jc.trace(lambda *args: _Completion(closed, batch_inputs).run(args), avals),
        inputs=tuple(StepInput(kind=kind, leaf=i) for i, kind in enumerate(kinds)),
        num_microbatches=1,
    )


class _Completion:
    """One evaluation of the step that completes values on their way out."""

    def __init__(self, closed: jc.ClosedJaxpr, batch_inputs: Sequence[int]) -> None:
        self.jaxpr, self.consts = jc.open_jaxpr(closed)
        self.completed: dict[jc.Var, Any] = {}
        self.differentiated: dict[jc.Var, str] = {}
        self.of_batch = {self.jaxpr.invars[i] for i in batch_inputs}  # depends on the batch, before any completion
        self.late: set[jc.Var] = set()  # depends on a completed value

    def run(self, args: Sequence[Any]) -> list[Any]:
        results = evaluate_jaxpr(self.jaxpr, self.consts, args, self._equation)
        return [self._complete(a, value) for a, value in zip(self.jaxpr.outvars, results, strict=True)]

    def _equation(self, _: int, eqn: jc.JaxprEqn, values: list[Any]) -> list[Any]:
        operands, phase = jc.operands(eqn), jc.ad_phase(eqn)
        outside = phase is None
        late = any(v in self.late or self._leaves(v, phase) for v in operands)
        values = [
            self._complete(a, value) if self._leaves(a, phase) or (outside and late) else value
            for a, value in zip(eqn.invars, values, strict=True)
        ]
        if phase is not None:
            self.differentiated.update((v, phase) for v in eqn.outvars)
        if outside and late:
            self.late.update(eqn.outvars)
        elif any(v in self.of_batch for v in operands):
            self.of_batch.update(eqn.outvars)
        return jc.bind_equation(eqn, values)

    def _leaves(self, atom: Any, phase: str | None) -> bool:
        """Return whether a value leaves the gradient that made it: read outside, or by a later forward pass."""
        made = self.differentiated.get(atom) if isinstance(atom, jc.Var) else None
        return made is not None and (phase is None or (made == "backward" and phase == "forward"))

    def _complete(self, atom: Any, value: Any) -> Any:
        """The value, completed once if it is one of the gradient or of the batch."""
        if isinstance(atom, jc.Literal) or (atom not in self.differentiated and atom not in self.of_batch):
            return value
        if atom not in self.completed:
            self.completed[atom] = accumulate(value, kind="sum", num_microbatches=1)
        return self.completed[atom]
