"""A step that is not split: the whole batch is its one microbatch.

    normalised jaxpr -> MicrobatchedStep with num_microbatches = 1

The border between what runs per microbatch and what runs once is where values leave the differentiated part of the
program: a value made by `jvp` or `transpose` equations and read outside of them is completed there, by an `accumulate`
of one part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.compiler import jax_compat as jc
from autopar.compiler.batch_accumulate import accumulate
from autopar.compiler.microbatch import MicrobatchedStep, StepInput


def whole_batch(closed: jc.ClosedJaxpr, *, batch_inputs: Sequence[int]) -> MicrobatchedStep:
    """The step with every value that leaves the differentiated part completed at once."""
    jaxpr = closed.jaxpr
    num_inputs = len(jaxpr.invars)
    avals = [v.aval for v in jaxpr.invars]

    def run(*args: Any) -> list[Any]:
        whole = dict(zip((jaxpr.invars[i] for i in batch_inputs), args[num_inputs:], strict=True))
        return _Completion(closed, args[:num_inputs], whole).run()

    traced = jc.trace(run, [*avals, *(avals[i] for i in batch_inputs)])
    batch = set(batch_inputs)
    inputs = [StepInput(kind="microbatch" if i in batch else "whole", leaf=i) for i in range(num_inputs)]
    inputs += [StepInput(kind="whole", leaf=i) for i in batch_inputs]
    kept = [True] * num_inputs + [v in _used(traced.jaxpr) for v in traced.jaxpr.invars[num_inputs:]]
    return MicrobatchedStep(
        jaxpr=jc.with_inputs(traced, [i for i, keep in enumerate(kept) if keep]),
        inputs=tuple(spec for spec, keep in zip(inputs, kept, strict=True) if keep),
        num_microbatches=1,
    )


def _used(jaxpr: jc.Jaxpr) -> set[jc.Var]:
    read = {v for eqn in jaxpr.eqns for v in eqn.invars if isinstance(v, jc.Var)}
    return read | {v for v in jaxpr.outvars if isinstance(v, jc.Var)}


class _Completion:
    """One evaluation of the step that completes values on their way out."""

    def __init__(self, closed: jc.ClosedJaxpr, args: Sequence[Any], whole: dict[jc.Var, Any]) -> None:
        self.jaxpr = closed.jaxpr
        self.env: dict[jc.Var, Any] = dict(zip(self.jaxpr.invars, args, strict=True))
        self.env.update(zip(self.jaxpr.constvars, closed.consts, strict=True))
        self.completed = dict(whole)  # a batch input read by the update is read as a whole
        self.differentiated: dict[jc.Var, str] = {}
        self.of_batch = set(whole)  # depends on the batch, before any completion
        self.late: set[jc.Var] = set()  # depends on a completed value

    def run(self) -> list[Any]:
        for eqn in self.jaxpr.eqns:
            operands = [v for v in eqn.invars if isinstance(v, jc.Var)]
            phase = jc.ad_phase(eqn)
            outside = phase is None
            late = any(v in self.late or self._leaves(v, phase) for v in operands)
            values = [self._read(a, complete=self._leaves(a, phase) or (outside and late)) for a in eqn.invars]
            self.env.update(zip(eqn.outvars, jc.bind_equation(eqn, values), strict=True))
            if phase is not None:
                self.differentiated.update((v, phase) for v in eqn.outvars)
            if outside and late:
                self.late.update(eqn.outvars)
            elif any(v in self.of_batch for v in operands):
                self.of_batch.update(eqn.outvars)
        return [self._read(a, complete=True) for a in self.jaxpr.outvars]

    def _leaves(self, atom: Any, phase: str | None) -> bool:
        """Whether a value leaves the gradient that made it: read outside, or by the forward pass of a next one."""
        made = self.differentiated.get(atom) if isinstance(atom, jc.Var) else None
        return made is not None and (phase is None or (made == "backward" and phase == "forward"))

    def _read(self, atom: Any, *, complete: bool) -> Any:
        if isinstance(atom, jc.Literal):
            return atom.val
        if not complete or (atom not in self.differentiated and atom not in self.of_batch):
            return self.env[atom]
        if atom not in self.completed:
            self.completed[atom] = accumulate(self.env[atom], kind="sum", num_microbatches=1)
        return self.completed[atom]
