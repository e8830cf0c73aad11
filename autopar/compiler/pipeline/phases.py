"""Say of every equation of a microbatched step when it runs: for each microbatch, forward or backward, or once.

    MicrobatchedStep -> Regions

The step's jaxpr describes one microbatch; an `accumulate` equation completes a value over all of them. So an equation
that depends on the microbatch, other than through an `accumulate`, runs per microbatch, and what depends on completed
values runs once: that is the update. Per microbatch, an equation is

    forward   made by differentiation's forward pass (name stack `jvp(...)`), or reading only such values
    backward  made by transposition (`transpose(jvp(...))`), or reading such values
    free      of either, but reading no activation: casts of parameters, masks, dropout draws. It has no place of its
              own and is computed on whichever stage needs it.

A *round* is one sweep of all microbatches; a step that takes a second gradient with what the first one updated (a GAN)
has two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.microbatch.accumulate import accumulate_p
from autopar.compiler.microbatch.split import MicrobatchedStep


class Region(StrEnum):
    """When an equation runs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    FREE = "free"
    ACCUMULATE = "accumulate"
    STEP = "step"


# Primitives whose work or randomness one does not want to repeat in the backward task.
_RANDOM = {"random_bits", "random_gamma", "rng_bit_generator", "threefry2x32"}
_COSTLY = _RANDOM | {
    "dot_general", "ragged_dot_general", "conv_general_dilated", "scan", "while", "cond", "sort", "cumsum",
    "cumlogsumexp",
    "fft", "cholesky", "eigh", "svd", "qr",
    "triangular_solve", "pure_callback", "custom_call", "ffi_call", "remat2", "checkpoint",
}  # fmt: skip

SMALL = 16
"""Inputs of at most this many elements (counters, keys, learning rates) have no home: every stage that reads one gets
a copy.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Regions:
    """Per equation of `step.jaxpr`: its regions (a free one may be of the step too) and the round it runs in."""

    step: MicrobatchedStep
    kinds: tuple[frozenset[Region], ...]
    rounds: tuple[int, ...]
    """Micro equations: their round. Step equations: the round that they wait for (0: none, they may run at the start).
    """
    costly: frozenset[jc.Var]
    """Results of free equations that the backward pass keeps rather than computes again."""
    homeless: frozenset[jc.Var]
    """Values derived from small inputs and literals only: recomputed where needed, never sent."""

    @property
    def equations(self) -> list[jc.JaxprEqn]:
        """The equations of the step, by index."""
        return self.step.jaxpr.jaxpr.eqns

    @property
    def num_rounds(self) -> int:
        """Sweeps of all microbatches in one step."""
        micro = (Region.FORWARD, Region.BACKWARD)
        return 1 + max((r for k, r in zip(self.kinds, self.rounds, strict=True) if k.intersection(micro)), default=0)


def is_small(aval: Any) -> bool:
    """A scalar, a PRNG key, a counter: cheaper to copy than to own."""
    return int(np.prod(aval.shape)) <= SMALL and (
        not aval.shape or jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) or aval.dtype == np.uint32
    )


@dataclass
class _Facts:
    """What is known of each value while sweeping forward through the step."""

    ready: dict[jc.Var, int]
    micro: set[jc.Var]  # depends on the microbatch, not through an accumulate
    batch_whole: set[jc.Var]  # depends on a batch input as a whole
    homeless: set[jc.Var]
    noise: set[jc.Var]  # random draws, and what derives from nothing else
    activation: set[jc.Var]
    parameter: set[jc.Var]  # depends on an input that has a home
    after_backward: set[jc.Var]


def find_regions(step: MicrobatchedStep) -> Regions:
    """Classify every equation of the step."""
    jaxpr = step.jaxpr.jaxpr
    facts = _initial_facts(step)
    rounds = [_sweep(eqn, facts) for eqn in jaxpr.eqns]
    kinds = _kinds(jaxpr, facts, rounds)
    return Regions(
        step=step,
        kinds=tuple(kinds),
        rounds=tuple(rounds),
        costly=_costly(jaxpr.eqns, kinds, facts),
        homeless=frozenset(facts.homeless),
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
        elif is_small(var.aval):
            facts.homeless.add(var)
        else:
            facts.parameter.add(var)
    facts.homeless.update(jaxpr.constvars)
    return facts


def _sweep(eqn: jc.JaxprEqn, facts: _Facts) -> int:
    """Derive the facts of the equation's results; return its round."""
    operands = jc.operands(eqn)
    ready = max((facts.ready.get(v, 0) for v in operands), default=0)
    outs = eqn.outvars
    if eqn.primitive is accumulate_p:
        facts.ready.update((v, ready + 1) for v in outs)
        return ready
    facts.ready.update((v, ready) for v in outs)
    parameter = any(v in facts.parameter for v in operands)
    noise = any(v in facts.noise for v in operands) or eqn.primitive.name in _RANDOM
    # A generator's noise enters the model as a batch does, also where it does not depend on the microbatch.
    enters = noise and jc.ad_phase(eqn) is not None and (parameter or ready > 0)
    micro = enters or any(v in facts.micro for v in operands)
    if micro:
        facts.micro.update(outs)
    if parameter:
        facts.parameter.update(outs)
    if any(v in facts.batch_whole for v in operands):
        facts.batch_whole.update(outs)
    # Operands that are not homeless: completed values, activations, parameters.
    if all(v in facts.homeless for v in operands):
        facts.homeless.update(outs)
        if noise:
            facts.noise.update(outs)
    if micro and (
        parameter
        or any(v in facts.activation or facts.ready.get(v, 0) for v in operands)
        or eqn.primitive.name in _COSTLY - _RANDOM
    ):
        facts.activation.update(outs)
    if jc.ad_phase(eqn) == "backward" or (
        jc.ad_phase(eqn) is None and any(v in facts.after_backward for v in operands)
    ):
        facts.after_backward.update(outs)
    return ready


def _kinds(jaxpr: jc.Jaxpr, facts: _Facts, rounds: list[int]) -> list[frozenset[Region]]:
    """Backwards through the step: what the microbatches need, and what the rest of the step needs."""
    needed_by_micro: set[jc.Var] = set()
    needed_by_step = {v for v in jaxpr.outvars if isinstance(v, jc.Var)}
    kinds: list[frozenset[Region]] = []
    for eqn, ready in zip(reversed(jaxpr.eqns), reversed(rounds), strict=True):
        operands = jc.operands(eqn)
        found: set[Region] = set()
        if eqn.primitive is accumulate_p:
            found = {Region.ACCUMULATE}
        elif any(v in facts.micro for v in eqn.outvars or operands):
            found = {_micro_kind(eqn, facts)}
        else:
            for_micro = any(v in needed_by_micro for v in eqn.outvars)
            if for_micro and _may_repeat(eqn, facts, ready):
                found.add(Region.FREE)
            elif for_micro or eqn.effects:
                found.add(Region.STEP)
            if any(v in needed_by_step for v in eqn.outvars):
                found.add(Region.STEP)
        if found & {Region.ACCUMULATE, Region.FORWARD, Region.BACKWARD, Region.FREE}:
            needed_by_micro.update(operands)
        if Region.STEP in found:
            needed_by_step.update(operands)
        kinds.append(frozenset(found))
    return kinds[::-1]


def _micro_kind(eqn: jc.JaxprEqn, facts: _Facts) -> Region:
    if not any(v in facts.activation for v in eqn.outvars) and not eqn.effects:
        return Region.FREE
    if jc.ad_phase(eqn) == "forward":
        return Region.FORWARD
    # A callback may have no results: it is as late as what it reads.
    late = any(v in facts.after_backward for v in eqn.outvars or jc.operands(eqn))
    return Region.BACKWARD if late or jc.ad_phase(eqn) == "backward" else Region.FORWARD


def _may_repeat(eqn: jc.JaxprEqn, facts: _Facts, ready: int) -> bool:
    """Whether an equation that does not depend on the microbatch is computed along with each of them.

    What the user wrote inside of the differentiated function is (a cast of the parameters costs little and keeps no
    copy alive), and so is what derives from counters and keys; the rest is computed once, before the round.
    """
    if any(v in facts.batch_whole for v in jc.operands(eqn)):
        return False
    return jc.ad_phase(eqn) is not None or (ready == 0 and all(v in facts.homeless for v in eqn.outvars))


def _costly(eqns: list[jc.JaxprEqn], kinds: list[frozenset[Region]], facts: _Facts) -> frozenset[jc.Var]:
    costly: set[jc.Var] = set()
    for eqn, kind in zip(eqns, kinds, strict=True):
        if Region.FREE in kind and (
            eqn.primitive.name in _COSTLY
            or any(v in costly for v in jc.operands(eqn))
            or any(v in facts.micro for v in eqn.outvars)
        ):
            costly.update(eqn.outvars)
    return frozenset(costly)
