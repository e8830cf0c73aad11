"""Find the phase of every equation of a microbatched step: forward or backward of each microbatch, or once per step.

    MicrobatchedStep -> Phases

The step's jaxpr describes one microbatch; an `accumulate` equation completes a value over all of them. So an equation
that depends on the microbatch, other than through an `accumulate`, runs per microbatch, and what depends on completed
values runs once: that is the update. Per microbatch, an equation is

    forward    made by differentiation's forward pass (name stack `jvp(...)`), or reading only such values
    backward   made by transposition (`transpose(jvp(...))`), or reading such values
    unplaced   of either, but reading no activation: casts of parameters, masks, dropout draws. It is computed on
               whichever stage needs it.

A *round* is one sweep of all microbatches, forward and backward through the stages. A step has several if it takes a
second gradient with what the first one updated (a GAN), or if a forward pass reads what a backward pass of the same
example made: adversarial training, a gradient penalty, MAML. A model that is evaluated on such a value without being
differentiated is a forward pass too: it begins with a product of that value and a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import primitives
from autopar.compiler.microbatch.accumulate import accumulate_p, accumulation_kind
from autopar.compiler.microbatch.split import MicrobatchedStep


class Phase(StrEnum):
    """The part of a step in which an equation runs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UNPLACED = "unplaced"
    ACCUMULATE = "accumulate"
    STEP = "step"


# Primitives whose work or randomness one does not want to repeat in the backward task.
_COSTLY = (
    primitives.DRAWS | primitives.PRODUCTS | primitives.NESTED | primitives.CUMULATIVE | primitives.FACTORIZATIONS
    | primitives.ATTENTION | primitives.FOREIGN | {"fft", "pure_callback", "sort"}
)  # fmt: skip
_COSTLY_TO_REPEAT = _COSTLY - primitives.DRAWS

_SCALAR_ELEMENTS = 16
"""Inputs of at most this many elements (counters, keys, learning rates) have no owner: every stage that reads one gets
a copy.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Phases:
    """The phases of every equation of `step.jaxpr`, and the round that it runs in."""

    step: MicrobatchedStep
    of: tuple[frozenset[Phase], ...]
    """The phases by equation. An unplaced equation may also be of the step."""
    rounds: tuple[int, ...]
    """The round of each equation; if it runs once, the round that it waits for (0: none, it may run at the start).
    """
    costly: frozenset[jc.Var]
    """Results of unplaced equations that the backward pass keeps rather than computes again."""
    replicated_scalars: frozenset[jc.Var]
    """Values derived from small inputs and literals only: recomputed where needed, never sent."""

    @property
    def equations(self) -> list[jc.JaxprEqn]:
        """The equations of the step, by index."""
        return self.step.jaxpr.jaxpr.eqns

    @cached_property
    def operands(self) -> list[list[jc.Var]]:
        """The variables that each equation reads."""
        return [jc.operands(eqn) for eqn in self.equations]

    @cached_property
    def producer(self) -> Mapping[jc.Var, int]:
        """The equation that makes each variable."""
        return {v: i for i, eqn in enumerate(self.equations) for v in eqn.outvars}

    @cached_property
    def consumers(self) -> Mapping[jc.Var, Sequence[int]]:
        """The equations that read each variable."""
        consumers: dict[jc.Var, list[int]] = {}
        for i, read in enumerate(self.operands):
            for v in read:
                consumers.setdefault(v, []).append(i)
        return consumers

    @cached_property
    def num_rounds(self) -> int:
        """Sweeps of all microbatches in one step."""
        per_microbatch = (Phase.FORWARD, Phase.BACKWARD)
        return 1 + max((r for own, r in zip(self.of, self.rounds) if own.intersection(per_microbatch)), default=0)


def is_replicated_scalar(aval: Any) -> bool:
    """True for an input (a scalar, a PRNG key, a counter) that is cheaper to copy than to own."""
    return _size(aval) <= _SCALAR_ELEMENTS and (
        not aval.shape or jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) or aval.dtype == np.uint32
    )


def parameter_sources(phases: Phases) -> dict[jc.Var, frozenset[jc.Var]]:
    """Return the parameters that values derive from without the microbatch: themselves, their casts and reshapes.

    A scalar made of a parameter (a penalty on it) is not followed: whoever reads it does not use the parameter.
    """
    jaxpr = phases.step.jaxpr.jaxpr
    inputs = zip(jaxpr.invars, phases.step.inputs, strict=True)
    sources_of = {
        v: frozenset([v]) for v, spec in inputs if spec.kind == "whole" and v not in phases.replicated_scalars
    }
    for eqn, own in zip(phases.equations, phases.of, strict=True):
        if Phase.UNPLACED in own:
            sources = frozenset(p for v in jc.operands(eqn) for p in sources_of.get(v, ()))
            sources_of.update((v, sources) for v in eqn.outvars if _size(v.aval) > 1)
        elif not own & {Phase.FORWARD, Phase.BACKWARD}:
            sources_of.update((v, frozenset([v])) for v in eqn.outvars if v not in phases.replicated_scalars)
    return sources_of


@dataclass
class _Facts:
    """The facts known of each value while sweeping forward through the step."""

    ready: dict[jc.Var, int]
    micro: set[jc.Var]  # depends on the microbatch, not through an accumulate
    batch_whole: set[jc.Var]  # depends on a batch input as a whole, or on the rows of all microbatches
    replicated_scalars: set[jc.Var]
    noise: set[jc.Var]  # random draws, and what derives from nothing else
    activation: set[jc.Var]
    parameter: set[jc.Var]  # depends on an input that has an owner
    backward: set[jc.Var]  # made by the backward pass of its round


def find_phases(step: MicrobatchedStep) -> Phases:
    """Classify every equation of the step."""
    jaxpr = step.jaxpr.jaxpr
    facts = _initial_facts(step)
    swept = [_sweep(eqn, facts) for eqn in jaxpr.eqns]
    rounds = [round_number for round_number, _ in swept]
    phases = _phases_of(jaxpr, facts, swept)
    return Phases(
        step=step,
        of=tuple(phases),
        rounds=tuple(rounds),
        costly=_costly(jaxpr.eqns, phases, facts),
        replicated_scalars=frozenset(facts.replicated_scalars),
    )


def _initial_facts(step: MicrobatchedStep) -> _Facts:
    jaxpr = step.jaxpr.jaxpr
    facts = _Facts({}, set(), set(), set(), set(), set(), set(), set())
    batch_leaves = {spec.leaf for spec in step.inputs if spec.kind == "microbatch"}
    for var, spec in zip(jaxpr.invars, step.inputs, strict=True):
        if spec.kind in ("microbatch", "index"):
            facts.micro.add(var)
        elif spec.leaf in batch_leaves:
            facts.batch_whole.add(var)
        elif is_replicated_scalar(var.aval):
            facts.replicated_scalars.add(var)
        else:
            facts.parameter.add(var)
    facts.replicated_scalars.update(jaxpr.constvars)
    return facts


def _sweep(eqn: jc.JaxprEqn, facts: _Facts) -> tuple[int, bool]:
    """Derive the facts of the equation's results; return its round, and whether it is of the backward pass."""
    operands = jc.operands(eqn)
    ready = max((facts.ready.get(v, 0) for v in operands), default=0)
    outs = eqn.outvars
    if eqn.primitive is accumulate_p:
        facts.ready.update((v, ready + 1) for v in outs)
        if accumulation_kind(eqn) == "concatenate":
            facts.batch_whole.update(outs)
        return ready, False
    parameter = not facts.parameter.isdisjoint(operands)
    small = facts.replicated_scalars.issuperset(operands)
    noise = not facts.noise.isdisjoint(operands) or (small and eqn.primitive.name in primitives.DRAWS)
    # A generator's noise enters the model as a batch does, also where it does not depend on the microbatch.
    enters = noise and jc.ad_phase(eqn) is not None and (parameter or ready > 0)
    micro = enters or not facts.micro.isdisjoint(operands)
    if micro:
        facts.micro.update(outs)
    if parameter:
        facts.parameter.update(outs)
    if not facts.batch_whole.isdisjoint(operands):
        facts.batch_whole.update(outs)
    # Other operands are completed values, activations or parameters.
    if small:
        facts.replicated_scalars.update(outs)
        if noise:
            facts.noise.update(outs)
    if micro and (
        parameter
        or any(v in facts.activation or facts.ready.get(v, 0) for v in operands)
        or eqn.primitive.name in _COSTLY_TO_REPEAT
    ):
        facts.activation.update(outs)
    late = {v for v in operands if v in facts.backward and v in facts.micro and facts.ready.get(v, 0) == ready}
    if late and _goes_forward(eqn, facts, late):
        ready, late = ready + 1, set()
    backward = jc.ad_phase(eqn) == "backward" or bool(late)
    facts.ready.update((v, ready) for v in outs)
    if backward:
        facts.backward.update(outs)
    return ready, backward


def _goes_forward(eqn: jc.JaxprEqn, facts: _Facts, late: set[jc.Var]) -> bool:
    """Tell if an equation that reads these values of the backward pass begins another forward pass.

    What is computed from them alone, such as the norm of a gradient, does not go anywhere.
    """
    others = [v for v in jc.operands(eqn) if v not in late]
    parameters = [v for v in others if v in facts.parameter and v not in facts.micro]
    if jc.ad_phase(eqn) == "forward":
        return bool(parameters) or any(v in facts.micro for v in others)
    return jc.ad_phase(eqn) is None and bool(parameters) and eqn.primitive.name in primitives.PRODUCTS


def _phases_of(jaxpr: jc.Jaxpr, facts: _Facts, swept: list[tuple[int, bool]]) -> list[frozenset[Phase]]:
    """Sweep backwards through the step, collecting what the microbatches need and what the rest of the step needs."""
    needed_by_micro: set[jc.Var] = set()
    needed_by_step = {v for v in jaxpr.outvars if isinstance(v, jc.Var)}
    phases: list[frozenset[Phase]] = []
    for eqn, (ready, backward) in zip(reversed(jaxpr.eqns), reversed(swept), strict=True):
        operands = jc.operands(eqn)
        own: set[Phase] = set()
        if eqn.primitive is accumulate_p:
            own = {Phase.ACCUMULATE}
        elif any(v in facts.micro for v in eqn.outvars or operands):
            own = {_microbatch_phase(eqn, facts, backward)}
        else:
            for_micro = not needed_by_micro.isdisjoint(eqn.outvars)
            if for_micro and _may_repeat(eqn, facts, ready):
                own.add(Phase.UNPLACED)
            elif for_micro or eqn.effects:
                own.add(Phase.STEP)
            if not needed_by_step.isdisjoint(eqn.outvars):
                own.add(Phase.STEP)
        if own & {Phase.ACCUMULATE, Phase.FORWARD, Phase.BACKWARD, Phase.UNPLACED}:
            needed_by_micro.update(operands)
        if Phase.STEP in own:
            needed_by_step.update(operands)
        phases.append(frozenset(own))
    return phases[::-1]


def _microbatch_phase(eqn: jc.JaxprEqn, facts: _Facts, backward: bool) -> Phase:
    if not any(v in facts.activation for v in eqn.outvars) and not eqn.effects:
        return Phase.UNPLACED
    return Phase.BACKWARD if backward else Phase.FORWARD


def _may_repeat(eqn: jc.JaxprEqn, facts: _Facts, ready: int) -> bool:
    """Tell if an equation that does not depend on the microbatch is computed along with each of them.

    What the user wrote inside of the differentiated function is (a cast of the parameters costs little and keeps no
    copy alive), and so is what derives from counters and keys; the rest is computed once, before the round.
    """
    if any(v in facts.batch_whole for v in jc.operands(eqn)):
        return False
    return jc.ad_phase(eqn) is not None or (ready == 0 and all(v in facts.replicated_scalars for v in eqn.outvars))


def _costly(eqns: list[jc.JaxprEqn], phases: list[frozenset[Phase]], facts: _Facts) -> frozenset[jc.Var]:
    costly: set[jc.Var] = set()
    for eqn, own in zip(eqns, phases, strict=True):
        if Phase.UNPLACED in own and (
            eqn.primitive.name in _COSTLY
            or any(v in costly for v in jc.operands(eqn))
            or any(v in facts.micro for v in eqn.outvars)
        ):
            costly.update(eqn.outvars)
    return frozenset(costly)


def _size(aval: Any) -> int:
    return int(np.prod(aval.shape))
