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
from autopar.compiler.microbatch.accumulate import accumulate
from autopar.compiler.microbatch.split import MicrobatchedStep, StepInput


def whole_batch(closed: jc.ClosedJaxpr, *, batch_inputs: Sequence[int]) -> MicrobatchedStep:
    """The step with every value that leaves the differentiated part completed at once."""
    kinds = ["microbatch" if i in batch_inputs else "whole" for i in range(len(closed.jaxpr.invars))]
    return MicrobatchedStep(
        jaxpr=_Completion(closed, batch_inputs).run(),
        inputs=tuple(StepInput(kind=kind, leaf=i) for i, kind in enumerate(kinds)),
        num_microbatches=1,
    )


class _Completion:
    """The equations of the step, of which some read values that are completed on their way out."""

    def __init__(self, closed: jc.ClosedJaxpr, batch_inputs: Sequence[int]) -> None:
        self.closed, self.jaxpr = closed, jc.open_jaxpr(closed)[0]
        self.eqns: list[jc.JaxprEqn] = []
        self.completed: dict[jc.Var, jc.Var] = {}
        self.differentiated: dict[jc.Var, str] = {}
        self.of_batch = {self.jaxpr.invars[i] for i in batch_inputs}  # depends on the batch, before any completion
        self.late: set[jc.Var] = set()  # depends on a completed value
        self.accumulations: dict[Any, jc.JaxprEqn] = {}  # by type, one that completes a value of it

    def run(self) -> jc.ClosedJaxpr:
        for eqn in self.jaxpr.eqns:
            self._add(eqn)
        results = [self._complete(atom) for atom in self.jaxpr.outvars]
        return jc.with_results(jc.with_equations(self.closed, self.eqns), results)

    def _add(self, eqn: jc.JaxprEqn) -> None:
        operands, phase = jc.operands(eqn), jc.ad_phase(eqn)
        outside = phase is None
        late = any(v in self.late or self._leaves(v, phase) for v in operands)
        given = [
            self._complete(atom) if self._leaves(atom, phase) or (outside and late) else atom for atom in eqn.invars
        ]
        if phase is not None:
            self.differentiated.update((v, phase) for v in eqn.outvars)
        if outside and late:
            self.late.update(eqn.outvars)
        elif any(v in self.of_batch for v in operands):
            self.of_batch.update(eqn.outvars)
        changed = any(atom is not old for atom, old in zip(given, eqn.invars, strict=True))
        self.eqns.append(eqn.replace(invars=given) if changed else eqn)

    def _leaves(self, atom: Any, phase: str | None) -> bool:
        """Return whether a value leaves the gradient that made it: read outside, or by a later forward pass."""
        made = self.differentiated.get(atom) if isinstance(atom, jc.Var) else None
        return made is not None and (phase is None or (made == "backward" and phase == "forward"))

    def _complete(self, atom: Any) -> Any:
        """The value, completed once if it is one of the gradient or of the batch."""
        if isinstance(atom, jc.Literal) or (atom not in self.differentiated and atom not in self.of_batch):
            return atom
        if atom not in self.completed:
            self.completed[atom] = jc.value_of_type(atom.aval)
            one = self.accumulations.get(atom.aval) or self.accumulations.setdefault(
                atom.aval, _accumulation(atom.aval)
            )
            self.eqns.append(one.replace(invars=[atom], outvars=[self.completed[atom]]))
        return self.completed[atom]


def _accumulation(aval: Any) -> jc.JaxprEqn:
    """Return an equation that completes a value of a type."""
    (eqn,) = jc.trace(lambda value: accumulate(value, kind="sum", num_microbatches=1), [aval]).jaxpr.eqns
    return eqn
